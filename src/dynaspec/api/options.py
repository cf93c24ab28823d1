"""The options of ``LLM`` and ``AsyncLLM``, for editors and type checkers, and checks of arguments that only vLLM uses.

What options mean: ``engine.config`` and ``engine.vllm_options``.
"""

from __future__ import annotations

import logging
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, make_dataclass
from typing import Any, TypedDict

from dynaspec.contract.errors import RequestError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import SPECULATION_OPTIONS
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.vllm_options import FOREIGN, RENAMED, SERVER_ONLY

logger = logging.getLogger(__name__)


Speculation = SpeculativeConfig | Mapping[str, Any] | str
"""How to speculate: an object, a mapping or JSON text."""


class EngineOptions(TypedDict, total=False):
    """Fields of ``EngineConfig`` beside ``model`` and ``speculative_config``; behind them what vLLM scripts pass most.

    All that there are of the latter: ``engine.vllm_options``.
    """

    tokenizer: str | None
    revision: str | None
    trust_remote_code: bool
    dtype: Any
    """``auto``, ``float32``, ``bfloat16``, ``float16``, ``float``, ``half`` or a ``torch.dtype``."""
    quantization: str | None
    device: str
    seed: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_memory: int | str | None
    """Bytes, or a text such as ``4GiB``."""
    kv_cache_dtype: str | None
    enable_prefix_caching: bool | None
    async_scheduling: bool | None
    stream_interval_s: float
    generation_config: str | None
    override_generation_config: Mapping[str, Any] | str | None
    decision_log: str | None
    tensor_parallel_size: int

    block_size: int
    compilation_config: Any
    cpu_offload_gb: float
    disable_log_stats: bool
    distributed_executor_backend: str | None
    enable_chunked_prefill: bool
    enforce_eager: bool
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    limit_mm_per_prompt: Mapping[str, int]
    load_format: str
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None
    swap_space: float


def check_adapters(lora_request: object) -> None:
    """
    Raises:
        RequestError: an adapter is asked for.
    """
    given = lora_request if isinstance(lora_request, Sequence) else [lora_request]
    if any(one is not None for one in given):
        raise RequestError("lora_request is given; expected None, as adapters are not available in this version")


def check_empty(name: str, value: object, why: str) -> None:
    """
    Raises:
        RequestError: something is asked for.
    """
    if value:
        raise RequestError(f"{name} is {value!r}; expected None: {why}")


def note_priority(priority: int | Sequence[int] | None) -> None:
    """Warns where requests are to be served in another order than that of their arrival: no answer depends on it."""
    given = priority if isinstance(priority, Sequence) else [priority]
    if any(one for one in given):
        logger.warning("priority is ignored: requests are served in order of arrival")


_OPTIONS = sorted({*EngineConfig.model_fields, *FOREIGN, *RENAMED, *SERVER_ONLY, *SPECULATION_OPTIONS} - {"model"})
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
