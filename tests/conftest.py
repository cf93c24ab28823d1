"""Checkpoints and the plain engine that tests compare with, made once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import pytest
import torch

from support.checkpoints import Pair, save_pair
from support.decoder_heads import LAYOUTS, FittedHead, save_fitted
from support.engines import PlainDecoding
from support.state_heads import LAYOUTS as STATE_LAYOUTS
from support.state_heads import FittedHeads
from support.state_heads import save_fitted as save_fitted_state_heads
from support.workloads import PROMPTS


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The shapes are far too small for more; and runs are alike on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random Llama, and a drafter that agrees with it now and then."""
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def fitted_head(tiny: Pair, plain: PlainDecoding, tmp_path_factory: pytest.TempPathFactory) -> FittedHead:
    """An EAGLE-3 head of the tiny target that agrees with it now and then."""
    prompts = [plain.llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    return save_fitted(tmp_path_factory.mktemp("head"), tiny.target, prompts)


@pytest.fixture(scope="session")
def head(fitted_head: FittedHead) -> str:
    """Its folder."""
    return fitted_head.path


@pytest.fixture(scope="session")
def fitted_state_heads(
    tiny: Pair, plain: PlainDecoding, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, FittedHeads]:
    """By method, heads without KV that agree with the tiny target now and then. Medusa's do not know every token."""
    prompts = [plain.llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    chosen = [
        layout for layout in STATE_LAYOUTS if layout.name in ("vllm, some tokens", "accelerator, prefixed, scaled")
    ]
    folder = tmp_path_factory.mktemp("state_heads")
    return {
        layout.method: save_fitted_state_heads(folder / layout.method, tiny.target, prompts, layout)
        for layout in chosen
    }


@pytest.fixture(scope="session")
def fitted_heads(
    fitted_head: FittedHead, tiny: Pair, plain: PlainDecoding, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, FittedHead]:
    """Heads of the tiny target that agree with it now and then, by method."""
    prompts = [plain.llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    layouts = {layout.name: layout for layout in LAYOUTS}
    found = {"eagle3": fitted_head}
    for name in ("eagle", "speculators, mtp"):
        layout = layouts[name]
        found[layout.method] = save_fitted(tmp_path_factory.mktemp("head"), tiny.target, prompts, layout)
    return found


@pytest.fixture(scope="session")
def plain(tiny: Pair) -> Iterator[PlainDecoding]:
    """Plain decoding with the tiny target."""
    reference = PlainDecoding(tiny.target)
    yield reference
    reference.llm.close()
