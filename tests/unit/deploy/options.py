"""deploy/serve.yaml, read as the server reads it."""

from __future__ import annotations

from dynaspec.cli.vllm_flags import read_config_file
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig

from .serve_command import DEPLOY, command


def example() -> dict[str, object]:
    """All options in the file."""
    known = {option.name for option in command("serve").params if option.name is not None}
    return read_config_file(DEPLOY / "serve.yaml", known)


def example_server() -> ServerConfig:
    """Those about the server."""
    return ServerConfig.build(
        {}, **{name: value for name, value in example().items() if name in ServerConfig.model_fields}
    )


def example_engine() -> EngineConfig:
    """Those about the engine."""
    options = example()
    return EngineConfig.build(
        {},
        speculative_config=SpeculativeConfig.parse({"model": options["draft_model"]}),
        **{name: value for name, value in options.items() if name in EngineConfig.model_fields},
    )
