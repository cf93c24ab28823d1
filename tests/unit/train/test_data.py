from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.data import Mixture, Pool, RowSampler, TokenSet, token_set
from dynaspec.train.tokenizer import END_OF_TEXT_ID


def test_every_document_ends_with_end_of_text(tokens, documents, tokenizer):
    assert tokens.documents == len(documents)
    for i, document in enumerate(documents):
        ids = tokens.document(i)
        assert ids[-1] == END_OF_TEXT_ID
        assert tokenizer.decode(ids[:-1].tolist()) == document.text


def test_stored_tokens_come_back(tokens, tmp_path):
    tokens.save(tmp_path / "t.npz")
    again = TokenSet.load(tmp_path / "t.npz")
    assert np.array_equal(again.tokens, tokens.tokens)
    assert np.array_equal(again.starts, tokens.starts)
    with pytest.raises(ConfigError, match=r"tokens: .*none\.npz.* does not exist"):
        TokenSet.load(tmp_path / "none.npz")


def test_an_epoch_shows_every_token_once():
    numbers = token_set([np.arange(i * 7, i * 7 + 7, dtype=np.uint16) for i in range(10)])
    sampler = RowSampler(numbers, seq_len=5, seed=3)
    rows = sampler.batch(0, sampler.rows_per_epoch)
    seen = rows[:, :-1].flatten().tolist()
    assert len(set(seen)) == len(seen) == sampler.rows_per_epoch * 5


def test_rows_depend_on_seed_and_number_alone(tokens):
    a, b = RowSampler(tokens, 16, seed=1), RowSampler(tokens, 16, seed=1)
    late = b.batch(a.rows_per_epoch + 2, 3)
    first = a.batch(0, a.rows_per_epoch + 5)
    assert torch.equal(first[-3:], late)
    assert torch.equal(b.batch(0, 4), first[:4])
    assert not torch.equal(RowSampler(tokens, 16, seed=2).batch(0, 4), first[:4])
    assert not torch.equal(first[:4], first[a.rows_per_epoch : a.rows_per_epoch + 4])


def test_too_long_rows_are_refused(tokens):
    with pytest.raises(ConfigError, match="seq_len: got 100000, expected fewer than"):
        RowSampler(tokens, 100_000, seed=0)


def test_mixture_draws_both_in_order(tokens):
    main, other = RowSampler(tokens, 16, seed=1), RowSampler(tokens, 16, seed=2)
    mixed = Mixture(main, other, 0.25)
    batch = mixed.batch(8, 4)
    assert torch.equal(batch[:3], main.batch(6, 3))
    assert torch.equal(batch[3:], other.batch(2, 1))
    assert torch.equal(Mixture(main, other, 0.0).batch(4, 4), main.batch(4, 4))
    with pytest.raises(ConfigError, match="share: got 2, expected 0 to 1"):
        Mixture(main, other, 2)


def test_a_pool_repeats_its_rows_in_new_orders(tokens):
    sampler = RowSampler(tokens, 16, seed=1)
    pool = Pool(sampler, 5, seed=2)
    expected = sorted(sampler.batch(0, 5).tolist())
    epochs = [pool.batch(first, 5).tolist() for first in (0, 5, 10)]
    assert [sorted(rows) for rows in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    across = pool.batch(3, 7).tolist()
    assert across == [*epochs[0][3:], *epochs[1]]
    with pytest.raises(ConfigError, match="rows: got 0, expected at least 1"):
        Pool(sampler, 0, seed=0)
