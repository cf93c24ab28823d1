"""dynaspec: exact speculative decoding whose draft length is decided at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynaspec.contract.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DynaspecError,
    IntegrityError,
    RequestError,
)
from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from dynaspec.inputs import TextPrompt, TokensPrompt
from dynaspec.observe.counts import SpecCounts
from dynaspec.version import __version__

if TYPE_CHECKING:
    from dynaspec.api import LLM, AsyncLLM
    from dynaspec.api.options import AsyncEngineArgs, EngineArgs
    from dynaspec.control.config import SpeculativeConfig
    from dynaspec.engine.config import EngineConfig

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DynaspecError",
    "EngineArgs",
    "EngineConfig",
    "IntegrityError",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpecCounts",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_LAZY = {
    "LLM": "dynaspec.api",
    "AsyncLLM": "dynaspec.api",
    "EngineArgs": "dynaspec.api.options",
    "AsyncEngineArgs": "dynaspec.api.options",
    "EngineConfig": "dynaspec.engine.config",
    "SpeculativeConfig": "dynaspec.control.config",
}


def __getattr__(name: str) -> Any:
    """Imports what needs torch only when it is used, so that ``--help`` and the simulator start at once."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
