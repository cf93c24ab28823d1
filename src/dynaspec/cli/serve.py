"""``dynaspec serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from dynaspec.cli import options as o
from dynaspec.cli.console import announce, note
from dynaspec.cli.demo import DEMO_NAME, with_demo_model
from dynaspec.cli.vllm_backend import backend_of, serve_on_vllm
from dynaspec.cli.vllm_flags import read_config_file, translate_arguments
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import configure_logging

_ENGINE = frozenset(EngineConfig.model_fields) - {"model", "speculative_config"}
_SERVER = frozenset(ServerConfig.model_fields)

_HELP = ("-h", "--help")
_ON_VLLM = "dynaspec.on_vllm"
"""Key of a context's ``meta``: vLLM reads the arguments."""
_Built = TypeVar("_Built")


class ServeCommand(TyperCommand):
    """Takes what vLLM's scripts pass; with ``--backend vllm`` vLLM's own parser takes it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not any(word in args for word in _HELP) and backend_of(args) == "vllm":
            ctx.meta[_ON_VLLM] = True
            ctx.args = list(args)
            return []
        return super().parse_args(ctx, translate_arguments(args))

    def invoke(self, ctx: Any) -> Any:
        if _ON_VLLM not in ctx.meta:
            return super().invoke(ctx)
        return serve_on_vllm(ctx.args)


@o.with_fields(ServerConfig, "Server")
@o.with_fields(EngineConfig, "Engine", only=_ENGINE)
@o.with_options(o.SPECULATION)
def serve(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint folder, GGUF file or hub id of the target.")
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="The same as the argument.")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Serve the demonstration's chat model, and its head, as 'demo'.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of options under their long names; options given here win over it.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="dynaspec, or vllm: vLLM's server, with dynaspec deciding how much is drafted; takes vLLM's flags too "
            "(--backend vllm --help=all shows them). Default: dynaspec."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's endpoints, until Ctrl-C or SIGTERM."""
    given = o.given(model=_one_model(checkpoint, model), **options)
    in_file = (
        {} if config is None else read_config_file(config, {*o.SPECULATION, *_ENGINE, *_SERVER, "model", "backend"})
    )
    chosen = _with_demo(in_file | given) if demo else in_file | given
    engine, server = _configure(chosen, _Source(config, in_file.keys() - given.keys()))
    if server.log_format == "text":
        note(f"loading {engine.model}")
    configure_logging(server)
    from dynaspec.server.run import run  # brings torch, and on a machine's first start compiles: the log says so

    raise typer.Exit(run(engine, server, partial(announce, engine)))


@dataclass(frozen=True, slots=True)
class _Source:
    """Which options come from a file, for errors to say so."""

    file: Path | None
    names: Collection[str]

    def told(self, build: Callable[[], _Built], about: Collection[str] = ()) -> _Built:
        """What ``build`` returns; its errors name the file if they begin with one of its options.

        Args:
            about: options that errors are about whatever they begin with.
        """
        try:
            return build()
        except ConfigError as error:
            from_file = all(name in self.names for name in about) if about else _first_word(error) in self.names
            raise ConfigError(f"{self.file}: {error}" if from_file else str(error)) from None


def _configure(options: Mapping[str, Any], source: _Source) -> tuple[EngineConfig, ServerConfig]:
    """
    Raises:
        ConfigError: no model, or a value that cannot work.
    """
    if "model" not in options:
        raise ConfigError("no model was given; expected 'dynaspec serve MODEL', a key 'model' in --config, or --demo")
    speculative = o.among(options, o.SPECULATION)
    speculation = source.told(lambda: o.speculation(**speculative), about=tuple(speculative))
    engine = source.told(
        lambda: EngineConfig.build(
            os.environ, model=options["model"], speculative_config=speculation, **o.among(options, _ENGINE)
        )
    )
    return engine, source.told(lambda: ServerConfig.build(os.environ, **o.among(options, _SERVER)))


def _one_model(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"the model is {argument!r} and --model is {option!r}; expected one of the two")
    return argument if option is None else option


def _with_demo(options: Mapping[str, Any]) -> dict[str, Any]:
    if "model" in options:
        raise ConfigError(f"--demo was given together with the model {options['model']!r}; expected one or the other")
    return {"served_model_name": [DEMO_NAME]} | with_demo_model(options)


def _first_word(error: ConfigError) -> str:
    return str(error).partition(":")[0].partition(" ")[0]
