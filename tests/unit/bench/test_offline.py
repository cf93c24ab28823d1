from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from dynaspec.bench.offline import Workload, as_json, as_table, compare, make_folder, write_json
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams

from .fakes import FakeDecoder

PARAMS = SamplingParams(temperature=0, max_tokens=6)


def workload(rounds: int = 2) -> Workload:
    return Workload(((1, 2), (7,), (4,)), ("code", "maths", "code"), PARAMS, rounds)


def test_rounds_alternate():
    said = []
    decoders = {"plain": FakeDecoder(), "constant:4": FakeDecoder(2)}
    compare(decoders, workload(3), said.append)
    assert said == [
        *("plain: warm-up", "constant:4: warm-up"),
        *("plain: round 1 of 3", "constant:4: round 1 of 3"),
        *("constant:4: round 2 of 3", "plain: round 2 of 3"),
        *("plain: round 3 of 3", "constant:4: round 3 of 3"),
    ]
    assert [decoder.calls for decoder in decoders.values()] == [4, 4]


@pytest.mark.parametrize("wrong", [1, 2])
def test_one_differing_output_in_any_round_is_seen(wrong):
    decoders = {"plain": FakeDecoder(), "good": FakeDecoder(2), "bad": FakeDecoder(2, wrong=wrong)}
    plain, good, bad = compare(decoders, workload(), lambda message: None)
    assert plain.identical
    assert good.identical
    assert not bad.identical
    assert bad.different == 1
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(as_table([plain, good, bad], "title"))
    text = console.export_text()
    assert "NO (1)" in text
    assert text.count("yes") == 2


def test_plain_decoding_must_agree_with_itself():
    plain = compare({"plain": FakeDecoder(wrong=2)}, workload(), lambda message: None)[0]
    assert not plain.identical


def test_json():
    (_, result) = compare({"plain": FakeDecoder(), "k": FakeDecoder(2)}, workload(), lambda message: None)
    document = json.loads(json.dumps(as_json(result, workload())))
    assert document["policy"] == "k"
    assert document["output_tokens"] == 18
    assert document["identical"] is True
    assert document["different_outputs"] == 0
    assert len(document["tokens_per_second_rounds"]) == len(document["seconds_rounds"]) == 2
    assert document["counts"]["mean_acceptance_length"] == 2.0  # of one round
    assert document["counts"]["draft_tokens"] == 4
    assert document["by_category"]["code"] == {
        "continuations": 2,
        "output_tokens": 12,
        "steps": 8,
        "drafted": 8,
        "accepted": 4,
        "tokens_per_step": 1.5,
    }


def test_plain_is_needed():
    with pytest.raises(ConfigError, match="expected plain"):
        compare({"constant:4": FakeDecoder()}, workload(), lambda message: None)


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created"):
        make_folder(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "none" / "out.json", {})
