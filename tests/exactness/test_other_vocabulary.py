"""Draft models with another vocabulary in whole engines.

Outputs are those of plain decoding, and drafts those of a model that has read the whole text in its own tokens, which
outputs do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dynaspec import SamplingParams
from dynaspec.contract.proposer import DecodeBatch, Ints
from dynaspec.contract.step import Limits
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.loader import load_model
from dynaspec.propose import own_vocabulary
from dynaspec.propose.own_vocabulary import OwnTexts, SharedVocabulary
from dynaspec.propose.watermark import Watermarks
from support.checkpoints import VOCAB, Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.head_passes import rows
from support.vocabularies import save_other_vocabulary
from support.workloads import MODES, PROMPTS
from unit.engine.fakes import ScriptedController

MODELS = Path(__file__).parents[1] / "models"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
QUESTION = "Question: Tom has 3 apples and buys 5 more. How many apples does he have?\nAnswer:"
TEXTS = (
    "def quicksort(items):\n",
    QUESTION,
    "The capital of France is",
    "¿quién? — naïve 日本 🙂 <|endoftext|> 1",
    f"Question: What is 3 + 4?\nAnswer: 7\n{QUESTION}",
)
BOTH = pytest.mark.parametrize("how", [True, "slem"], ids=["tli", "slem"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The repository's draft model with fewer merges, some of them its own."""
    return save_other_vocabulary(tmp_path_factory.mktemp("other"), DRAFT, merges=1500)


@pytest.fixture(scope="module")
def shipped() -> Iterator[PlainDecoding]:
    reference = PlainDecoding(TARGET, max_model_len=256)
    yield reference
    reference.llm.close()


def speculation(model: str, how: bool | str, **options: Any) -> dict[str, Any]:
    config = {"model": model, "use_heterogeneous_vocab": how, "policy": "constant", "num_speculative_tokens": 4}
    return {**config, "prompt_lookup_max": 0, **options}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a draft was made from."""

    target: list[int]
    own: list[int]
    unread: int
    first: int
    """The first drafted token, of the drafter's own."""


@contextmanager
def watch() -> Iterator[list[Seen]]:
    """Collects the drafts of all drafters with a vocabulary of their own in the block."""
    seen: list[Seen] = []
    texts: dict[int, tuple[list[int], int]] = {}
    follow, remember = OwnTexts.follow, OwnTexts.remember

    def follows(self: OwnTexts, batch: DecodeBatch, wanted: Ints, marks: Watermarks) -> Any:
        found, reasons = follow(self, batch, wanted, marks)
        for lane, length in zip(batch.lanes.tolist(), batch.lengths.tolist(), strict=True):
            unread = int(self._lengths[lane] - marks.seen[lane])
            texts[lane] = batch.tokens[lane, :length].tolist(), unread
        return found, reasons

    def remembers(self: OwnTexts, lanes: Ints, drafts: Ints, marks: Watermarks) -> None:
        remember(self, lanes, drafts, marks)
        for lane in lanes.tolist():
            length = int(self._lengths[lane])
            own = self._tokens[lane, : length + 1].tolist()
            seen.append(Seen(texts[lane][0], own[:-1], texts[lane][1], own[-1]))

    with mock.patch.multiple(own_vocabulary.OwnTexts, follow=follows, remember=remembers):
        yield seen


def check(seen: list[Seen], model: str, how: bool | str) -> None:
    """Greedy drafts go on from the target's text in the drafter's own tokens, as its tokenizer gives them."""
    target, own, weights = Tokenizer(TARGET), Tokenizer(model), load_model(model)
    size = weights.config.vocab_size
    columns = SharedVocabulary.of(own.spellings(), target.spellings(), size, 4096).own if how is True else None
    for draft in seen:
        text = target.decode(draft.target, skip_special_tokens=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            assert draft.own == own.encode(text, special_tokens=False)
        blocks = -(-len(draft.own) // BLOCK_SIZE)
        shapes = weights.kv_shapes(blocks)
        kv = Arena.allocate(weights.config.num_layers, shapes, torch.float32, torch.device("cpu")).layers
        logits = weights.logits(weights.forward(rows(draft.own, 0, blocks), kv)[-1:])[0].numpy()
        best = int(np.argmax(logits)) if columns is None else int(columns[np.argmax(logits[columns])])
        assert draft.first == best


def scripted(*lengths: int) -> Callable[[Limits], ScriptedController]:
    return lambda limits: ScriptedController(lengths)


@BOTH
@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_drafts_go_on_from_the_text(how: bool | str, crowded: bool, other: str, shipped: PlainDecoding) -> None:
    """In steps with and without drafts; ``crowded``: preemption, chunked prefill and prefix hits."""
    params = [SamplingParams(temperature=0.0, max_tokens=48 + i, ignore_eos=True) for i in range(len(TEXTS))]
    with (
        watch() as seen,
        open_llm(
            TARGET,
            controller=scripted(3, 4, 0, 1, *([0] * 7), 4),
            speculative_config=speculation(other, how),
            max_model_len=256,
            max_num_batched_tokens=24 if crowded else 1024,
            max_num_seqs=4,
            async_scheduling=crowded,
            kv_cache_memory=kv_bytes(14, TARGET, other) if crowded else None,
        ) as llm,
    ):
        for _ in range(1 + crowded):
            assert_same(llm.generate(TEXTS, params), shipped.outputs(TEXTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0.2 * stats.verified
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == crowded
    assert max(draft.unread for draft in seen) > 8 > min(draft.unread for draft in seen)
    check(seen, other, how)


@BOTH
def test_seeded_output_is_that_of_plain_decoding(how: bool | str, other: str, shipped: PlainDecoding) -> None:
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=32) for i in range(len(TEXTS))]
    with open_llm(TARGET, speculative_config=speculation(other, how), max_model_len=256) as llm:
        assert_same(llm.generate(TEXTS, params), shipped.outputs(TEXTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


def test_auto(other: str, shipped: PlainDecoding) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=32)] * len(TEXTS)
    config = speculation(other, True, policy="auto")
    with open_llm(TARGET, ticking=True, speculative_config=config, max_model_len=256) as llm:
        assert_same(llm.generate(TEXTS, params), shipped.outputs(TEXTS, params))
        assert llm.stats().accepted > 0


def test_a_beginning_that_others_have_left_is_not_read_again(other: str, shipped: PlainDecoding) -> None:
    beginning = "Once upon a time there was a small village at the foot of a mountain, and in it lived an old man. "
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)]
    unread = []
    with watch() as seen, open_llm(TARGET, speculative_config=speculation(other, True), max_model_len=256) as llm:
        for end in ("He was", "His name", "One day"):
            before = len(seen)
            assert_same(llm.generate([beginning + end], params), shipped.outputs([beginning + end], params))
            unread.append(seen[before].unread)
    assert unread[0] > 2 * BLOCK_SIZE
    assert max(unread[1:]) <= unread[0] - BLOCK_SIZE
    check(seen, other, True)


def test_with_the_targets_tokenizer_nothing_changes(tiny: Pair, plain: PlainDecoding) -> None:
    params = [MODES["greedy"](i) for i in range(len(PROMPTS))]
    found = []
    for how in (False, True):
        with watch() as seen, open_llm(tiny.target, speculative_config=speculation(tiny.drafter, how)) as llm:
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
            stats = llm.stats()
        found.append((stats.verified, stats.accepted))
        assert not seen
    assert found[0] == found[1]


def test_a_drafter_that_shares_none_of_the_tokens_allowed(tiny: Pair, tiny_other: str, plain: PlainDecoding) -> None:
    """It drafts any of them, reads them as others, and says nothing that changes the output."""
    allowed = (305, 310, 315, 318)
    own, target = Tokenizer(tiny_other).spellings(), Tokenizer(tiny.target).spellings()
    assert (SharedVocabulary.of(own, target, len(own), VOCAB).own_of[list(allowed)] == -1).all()
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "allowed_token_ids": allowed}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, seed=3, **common),
        SamplingParams(temperature=1.0, **common),
    ]
    with open_llm(tiny.target, speculative_config=speculation(tiny_other, True), max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS[:3], params)
        stats = llm.stats()
    assert_same(outputs[:2], plain.outputs(PROMPTS[:2], params[:2]))
    assert set(outputs[2].outputs[0].token_ids) <= set(allowed)
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


@BOTH
@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_everything_at_random(
    how: bool | str, crowded: bool, tiny: Pair, tiny_other: str, plain: PlainDecoding
) -> None:
    """Lengths, gates, probes, trims, stops, lookup in its place, over texts that are not even valid characters."""
    params = [MODES["mixed"](i) for i in range(len(PROMPTS))]
    with open_llm(
        tiny.target,
        controller=partial(VaryingController, seed=1),
        speculative_config=speculation(tiny_other, how, policy="auto", prompt_lookup_min=1, prompt_lookup_max=3),
        max_num_seqs=8,
        max_num_batched_tokens=16 if crowded else 1024,
        async_scheduling=crowded,
        kv_cache_memory=kv_bytes(9, tiny.target, tiny_other) if crowded else None,
    ) as llm:
        for _ in range(2):
            assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == crowded
