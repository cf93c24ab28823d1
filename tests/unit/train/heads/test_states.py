"""States that are read from shards, and those that are made for every batch."""

from __future__ import annotations

from pathlib import Path

import torch

from dynaspec.train.heads.basis import FrozenTarget, make_basis
from dynaspec.train.heads.conversations import Conversation, append_conversations
from dynaspec.train.heads.shape import DraftVocabulary, shape_for
from dynaspec.train.heads.states import Cache, StatesOnDemand, StatesPlace, shard_path, write_shard
from support.checkpoints import FAMILIES, VOCAB, random_model, save


def test_states_made_on_demand_are_those_of_the_shards(tmp_path: Path) -> None:
    model = random_model(*FAMILIES["llama"], seed=0)
    save(model, tmp_path)
    target = FrozenTarget(str(tmp_path), torch.float32, torch.device("cpu"))
    drawn = torch.Generator().manual_seed(1)
    conversations = [
        Conversation(
            tuple(torch.randint(1, VOCAB, (prompt,), generator=drawn).tolist()),
            tuple(torch.randint(1, VOCAB, (answer,), generator=drawn).tolist()),
            "",
            0.0,
        )
        for prompt, answer in ((5, 9), (17, 3), (2, 12))
    ]
    vocabulary = DraftVocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    shape = shape_for(model.config.to_dict(), len(vocabulary.ids), (0, 1))
    basis = make_basis(target, conversations, shape, vocabulary)
    write_shard(shard_path(tmp_path, 0), conversations, target, (0, 1), vocabulary, basis.scale)
    refs = [(0, 2), (0, 0), (0, 1)]
    place = StatesPlace(tmp_path)
    append_conversations(place.conversations, conversations)
    on_demand = StatesOnDemand(place, target, basis, longest=128)
    stored, live = Cache(tmp_path).batch(refs), on_demand.batch(refs)
    for name in ("next_tokens", "positions", "chain_rows", "room", "labels"):
        assert torch.equal(getattr(stored, name), getattr(live, name))
    assert (stored.row_spans, stored.chain_spans) == (live.row_spans, live.chain_spans)
    torch.testing.assert_close(live.aux.float(), stored.aux.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(live.last.float(), stored.last.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(live.mass, stored.mass, rtol=1e-4, atol=1e-5)


def test_what_comes_meanwhile_is_a_shard_and_what_is_held_out_is_in_none(tmp_path: Path) -> None:
    model = random_model(*FAMILIES["llama"], seed=0)
    save(model, tmp_path)
    target = FrozenTarget(str(tmp_path), torch.float32, torch.device("cpu"))
    texts = [Conversation((1, 2, k), (4, 5, 6, 7), "", 0.0) for k in range(3, 9)]
    long = Conversation((1,) * 40, (2, 3, 4), "", 0.0)
    vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
    basis = make_basis(target, texts, shape_for(model.config.to_dict(), VOCAB, (0, 1)), vocabulary)
    place = StatesPlace(tmp_path)
    append_conversations(place.conversations, [*texts[:3], long])
    append_conversations(tmp_path / "held-out.jsonl", texts[1:2])
    states = StatesOnDemand(place, target, basis, longest=32)
    assert [len(shard) for shard in states.shards] == [2]
    assert states.refresh() == 1  # nothing is new
    append_conversations(place.conversations, texts[3:])
    assert states.refresh() == 2
    assert [len(shard) for shard in states.shards] == [2, 3]
    assert states.batch([(1, 0)]).next_tokens.tolist() == [2, 6, 4, 5, 6, 7]
