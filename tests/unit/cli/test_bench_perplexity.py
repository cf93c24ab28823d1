from __future__ import annotations

import math

import pytest
import torch

from dynaspec import LLM
from dynaspec.bench.perplexity import measure, parse_forms, windows_of
from dynaspec.contract.errors import ConfigError
from dynaspec.model.loader import load_model
from parity.paging import in_passes

TEXT = "the quick brown fox jumps over the lazy dog and the dog does not mind at all " * 3


def test_it_is_what_the_model_s_logits_say(pair):
    with LLM(str(pair.target)) as llm:
        ids = list(llm.get_tokenizer().encode(TEXT))[:30]
    pieces = [ids[:16], ids[16:]]
    logits = in_passes(load_model(str(pair.target)), pieces, [(len(pieces[0]), len(pieces[1]))])
    lost = [
        torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(piece[1:]), reduction="sum").item()
        for rows, piece in zip(logits, pieces, strict=True)
    ]
    found = measure(str(pair.target), "float32", TEXT, 16, 30)
    assert found.tokens == 28
    assert found.value == pytest.approx(math.exp(sum(lost) / 28), rel=1e-4)


def test_the_table(dynaspec, pair, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    command = ("bench", "perplexity", "--model", pair.target, "--text", path, "--forms")
    rows = rows_of(dynaspec(*command, "auto,int8,int4"))
    assert set(rows) == {"auto", "int8", "int4"}
    assert "+0.00%" in rows["auto"]
    assert rows_of(dynaspec(*command, "auto", "--kv-cache-dtype", "bfloat16"))["auto"] != rows["auto"]


def rows_of(result):
    assert result.code == 0, result.err
    return {line.split("│")[1].strip(): line for line in result.out.splitlines() if line.startswith("│")}


@pytest.mark.parametrize(
    ("forms", "words"), [("int8,int2", "there is no form 'int2'; expected some of auto"), (",", "no form is given")]
)
def test_forms_that_are_none(forms, words):
    with pytest.raises(ConfigError, match=words):
        parse_forms(forms)


def test_a_file_that_is_no_text(dynaspec, pair, tmp_path):
    result = dynaspec("bench", "perplexity", "--model", pair.target, "--text", tmp_path / "gone.txt")
    assert result.code != 0
    assert "gone.txt is not a readable text file" in result.err


def test_windows():
    assert windows_of(range(9), 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows_of(range(9), 4, 6) == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="the text has 1 tokens; expected 2 at least"):
        windows_of([5], 4, 100)
