"""Heads of a decoder layer see in training what they will see at run time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynaspec.train.heads import eagle
from dynaspec.train.heads.eagle import Eagle3Head
from dynaspec.train.heads.head import join
from unit.train.heads.conftest import example
from unit.train.heads.naive import draft_logits

DEPTHS = 4


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("form", [eagle.attend_each, eagle.attend_padded])
def test_every_chain_sees_what_it_will_see_at_run_time(
    head: Eagle3Head, share: float, form: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "attend", form)
    examples = [example(3, 6, seed=1), example(0, 5, seed=2), example(2, 3, seed=3)]
    batch = join(examples)
    weights = {name: p.detach() for name, p in head.named_parameters()}
    embedding = head.get_buffer("embedding")
    seen = 0
    with torch.no_grad():
        for j, depth in enumerate(head.unroll(batch, DEPTHS, share, seed=5)):
            logits = head.lm_head(depth.read)
            for row, chain in enumerate(depth.chains.tolist()):
                which = next(k for k, (b, e) in enumerate(batch.chain_spans) if b <= chain < e)
                one = examples[which]
                start = int(batch.chain_rows[chain]) - batch.row_spans[which][0]
                wanted = draft_logits(weights, head.shape, embedding, one.tokens, one.aux, start, j)
                torch.testing.assert_close(logits[row], wanted, rtol=1e-4, atol=1e-4)
                assert batch.labels[chain + j] == one.tokens[start + 2 + j]
                seen += 1
    assert seen > batch.chains
