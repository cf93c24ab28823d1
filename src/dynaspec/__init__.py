"""dynaspec: exact speculative decoding whose draft length is decided at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from dynaspec.api import LLM, AsyncLLM
    from dynaspec.control.config import SpeculativeConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
]

_LAZY = {"LLM": "dynaspec.api", "AsyncLLM": "dynaspec.api", "SpeculativeConfig": "dynaspec.control.config"}


def __getattr__(name: str) -> Any:
    """Imports what needs torch only when it is used, so that ``--help`` and the simulator start at once."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
