"""``EngineArgs`` and ``AsyncEngineArgs``: vLLM's way to collect an engine's options before there is one."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import asdict, field, fields, make_dataclass
from typing import Any

from dynaspec.engine.config import EngineConfig
from dynaspec.engine.vllm_options import FOREIGN, RENAMED, SERVER_ONLY, SPECULATION

_OPTIONS = sorted({*EngineConfig.model_fields, *FOREIGN, *RENAMED, *SERVER_ONLY, *SPECULATION} - {"model"})
_FLAGS = frozenset(
    {name for name, foreign in {**FOREIGN, **SERVER_ONLY}.items() if foreign.is_flag}
    | {name for name, of in EngineConfig.model_fields.items() if of.annotation is bool}
)


class _Arguments:
    """Options as fields; None = not given. What each means, and which are refused: ``LLM``."""

    def options(self) -> Mapping[str, Any]:
        """Those that were given, as ``LLM`` and ``AsyncLLM`` take them."""
        return {name: value for name, value in asdict(self).items() if value is not None}  # type: ignore[call-overload]

    @classmethod
    def add_cli_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Adds a flag for each option, ``--max-model-len`` for ``max_model_len``; without it the option is None."""
        for name in ("model", *_OPTIONS):
            flags = [f"--{name.replace('_', '-')}"] + ([f"--{name}"] if "_" in name else [])
            if name in _FLAGS:
                parser.add_argument(*flags, dest=name, action=BooleanOptionalAction, default=None, help=SUPPRESS)
            else:
                parser.add_argument(*flags, dest=name, help=SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Any:
        """From what a parser with these flags has read; others are left out."""
        given = vars(args)
        return cls(**{of.name: given[of.name] for of in fields(cls) if of.name in given})  # type: ignore[arg-type]


EngineArgs: Any = make_dataclass(
    "EngineArgs",
    [("model", str), *((name, Any, field(default=None)) for name in _OPTIONS)],
    bases=(_Arguments,),
    namespace={"__module__": __name__, "__doc__": "Options of ``LLM`` and ``AsyncLLM``, by vLLM's names."},
)
AsyncEngineArgs: Any = EngineArgs
"""vLLM has a class of its own for servers."""
