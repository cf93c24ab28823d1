"""vLLM's engines with the demo models, in this process: one for each way of drafting, under any policy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when vLLM is imported.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import llvmlite.binding.ffi
import pytest
from vllm import LLM

from dynaspec.hosts.vllm.settings import DRAFTER
from hosts.vllm.engines import DRAFTERS, LONGEST, MODELS, SCHEDULER, Driven, OwnDriven, engine_options
from hosts.vllm.requests import Outputs, mixed, tokens_of


@pytest.fixture(scope="session", autouse=True)
def _llvmlite_has_no_dict() -> Iterator[None]:
    """vLLM 0.32 looks, when it loads a model on a CPU, through all that any module holds, and stumbles over llvmlite's
    library, which makes a function of every name, ``__dict__`` too. Here numba is there before the second engine.
    """
    library = llvmlite.binding.ffi._lib_wrapper
    find = library.__getattr__

    def found(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = found
    yield
    library.__getattr__ = find


@pytest.fixture(scope="session")
def plain() -> Iterator[Outputs]:
    """What vLLM's own scheduler makes of the mixed requests, without speculation."""
    llm = LLM(**engine_options())
    yield tokens_of(llm.generate(*mixed(llm.get_tokenizer()), use_tqdm=False))
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session", params=list(DRAFTERS))
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """An engine whose drafts dynaspec decides about."""
    options: dict[str, Any] = {"speculative_config": DRAFTERS[request.param], "scheduler_cls": SCHEDULER}
    llm = LLM(**engine_options(), **options)
    folder: Path = tmp_path_factory.mktemp(request.param)
    yield Driven(request.param, llm, folder)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDriven]:
    """An engine whose worker runs dynaspec's drafter."""
    options: dict[str, Any] = {
        "speculative_config": {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": LONGEST},
        "additional_config": {"dynaspec": {"method": "draft_model", "model": str(MODELS / "draft")}},
        "scheduler_cls": SCHEDULER,
    }
    llm = LLM(**engine_options(), **options)
    yield OwnDriven(llm, tmp_path_factory.mktemp("own"))
    llm.llm_engine.engine_core.shutdown()
