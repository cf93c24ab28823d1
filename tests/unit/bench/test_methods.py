from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from dynaspec.bench import methods
from dynaspec.bench import methods as report
from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.decoders import DecodingHost
from dynaspec.bench.methods import find_ways
from dynaspec.bench.offline import run_comparison, speedups_by_category
from dynaspec.bench.plots import plot_categories
from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.contract.methods import METHODS, Method
from dynaspec.contract.outputs import RequestMetrics
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import ProposerTraits
from dynaspec.control.policies.short_names import PLAIN, PolicySpec, spec_of

from .fakes import FakeDecoder

PARAMS = SamplingParams(temperature=0, max_tokens=6)
ALONE = [
    name for name, method in METHODS.items() if method.key is None and (method.checkpoint is None or method.in_target)
]
SPECS = [PolicySpec(PLAIN, None), spec_of("ngram", {"method": "ngram"}), spec_of("auto", {"method": "ngram"})]
TRAINED = [name for name in METHODS if name not in ALONE]


@pytest.fixture
def head(tmp_path):
    """An EAGLE-3 head's folder, as far as its config.json says."""
    return _checkpoint(tmp_path / "head", {"architectures": ["LlamaForCausalLMEagle3"]})


@pytest.fixture
def small(tmp_path):
    return _checkpoint(tmp_path / "small", {"architectures": ["LlamaForCausalLM"]})


def _checkpoint(folder, config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def given(found):
    return {way.name: way.given for way in found.ways}


def test_every_method_of_the_registry_takes_part_or_is_named():
    found = find_ways("target", [])
    assert found.ways[0].name == PLAIN
    assert {name for name in given(found) if name in METHODS} == set(ALONE)
    assert list(found.left_out) == TRAINED
    for name in TRAINED:
        assert (METHODS[name].key or METHODS[name].checkpoint) in found.left_out[name]
    assert all(way.spec.config is not None for way in found.ways[1:])


def test_a_checkpoint_drafts_by_its_method_and_under_auto(head):
    found = find_ways("target", [head])
    assert given(found)["eagle3"] == {"method": "eagle3", "policy": "constant", "model": head}
    assert given(found)["auto"] == {"method": "eagle3", "policy": "auto", "model": head}
    assert "eagle3" not in found.left_out
    [auto] = [way for way in found.ways if way.name == "auto"]
    assert auto.spec.config.hybrid_lookup


def test_several_checkpoints_each_have_an_auto(head, small):
    found = find_ways("target", [head, small])
    autos = {name: way["model"] for name, way in given(found).items() if name.startswith("auto") and "model" in way}
    assert autos == {
        f"auto {name}{also}": path
        for name, path in (("small", small), ("head", head))
        for also in ("", " with suffixes")
    }
    assert given(found)["draft_model"]["model"] == small


def test_what_may_be_in_the_target_is_tried(head, monkeypatch):
    new = Method("own", "a part of the target", ProposerTraits("own"), checkpoint="a checkpoint", in_target=True)
    monkeypatch.setattr(methods, "METHODS", {**METHODS, "own": new})
    found = find_ways("target", [head])
    assert given(found)["own"] == {"method": "own", "policy": "constant"}
    assert given(found)["auto own"] == {"method": "own", "policy": "auto"}
    assert given(found)["auto"]["model"] == head


def test_left_out_for_one_reason():
    found = replace(session(), left_out={"own": "there is none", "auto own": "there is none", "head": "no file"})
    assert report.remarks(found) == ["left out: own, auto own: there is none", "left out: head: no file"]


def test_two_of_one_method_are_told_apart(head, tmp_path):
    other = _checkpoint(tmp_path / "other", {"draft_vocab_size": 8})
    twin = _checkpoint(tmp_path / "deeper" / "head", {"draft_vocab_size": 8})
    assert {"eagle3 head", "eagle3 other"} <= given(find_ways("target", [head, other])).keys()
    assert {f"eagle3 {head}", f"eagle3 {twin}"} <= given(find_ways("target", [head, twin])).keys()


def test_what_comes_along_gives_way_to_what_is_given(head, tmp_path):
    other = _checkpoint(tmp_path / "other", {"draft_vocab_size": 8})
    assert given(find_ways("target", [], known=[head]))["eagle3"]["model"] == head
    assert given(find_ways("target", [other], known=[head]))["eagle3"]["model"] == other
    assert list(given(find_ways("target", [], known=[head], asked="ngram"))) == [PLAIN, "ngram"]


def test_a_drafter_that_names_its_target_stands_for_both(tmp_path):
    config = {"speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "the-target"}}}
    own = _checkpoint(tmp_path / "own", config | {"speculators_model_type": "eagle3"})
    found = find_ways(own, [])
    assert found.model == "the-target"
    assert given(found)["eagle3"]["model"] == own


def test_asked_for(head):
    found = find_ways("target", [head], asked="ngram, eagle3:constant:2,plain,auto", length=3)
    assert list(given(found))[:4] == [PLAIN, "ngram", "eagle3:constant:2", "auto"]
    assert given(found)["ngram"]["num_speculative_tokens"] == 3
    assert given(found)["eagle3:constant:2"]["num_speculative_tokens"] == 2
    assert found.left_out == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("magic", "--methods has 'magic'; expected some of plain, "),
        ("ngram,ngram", "'ngram' twice"),
        ("plain", "--methods is 'plain'; expected"),
        (" , ", "expected"),
        ("eagle3", "'eagle3' needs an EAGLE-3 head's checkpoint, which is not given; expected --speculative-model"),
        ("ngram:magic", "'ngram:magic' is not known"),
    ],
)
def test_what_cannot_be_asked_for(asked, message):
    with pytest.raises(ConfigError, match=message):
        find_ways("target", [], asked=asked)


def test_checkpoints_that_nothing_uses(head):
    with pytest.raises(ConfigError, match="for the method 'eagle3', but --methods has neither that nor 'auto'"):
        find_ways("target", [head], asked="ngram")
    with pytest.raises(ConfigError, match="is given twice"):
        find_ways("target", [head, head])


class Timed(FakeDecoder):
    """One whose requests take so many seconds each."""

    tokenizer = None
    max_model_len = 64

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self._seconds = seconds

    def generate(self, prompts, sampling_params, /):
        return [self._timed(output, i) for i, output in enumerate(super().generate(prompts, sampling_params))]

    def _timed(self, output, i):
        [completion] = output.outputs
        metrics = replace(completion.metrics, scheduled_s=1.0, finished_s=1.0 + self._seconds * (i + 1))
        return replace(output, outputs=(replace(completion, metrics=metrics),))

    def close(self):
        pass


class Words:
    """A tokenizer."""

    def encode(self, text, special_tokens=True):
        return [len(text)]


def session(*, refused=(), seconds=2.0, kinds=0):
    """Plain decoding in 4 seconds a request and the others in fewer; some cannot be opened."""

    def opened(spec):
        if spec.name in refused:
            raise CheckpointError(f"{spec.name} is for another target")
        decoder = Timed(4.0 if spec.config is None else seconds)
        decoder.tokenizer = Words()
        return decoder

    prompts = [BenchPrompt("a", "code"), BenchPrompt("bb", "maths"), BenchPrompt("ccc", "code")]
    prompts += [BenchPrompt("d", f"kind {i}") for i in range(kinds)]
    host = DecodingHost(opened, alternating=True)
    return run_comparison(host, SPECS, prompts, PARAMS, 2, lambda message: None, leave_out=True)


def test_speedups_by_category():
    found = session()
    assert found.speedups["ngram"] == {"code": pytest.approx(2.0), "maths": pytest.approx(2.0)}
    assert found.speedups[PLAIN] == {"code": 1.0, "maths": 1.0}
    document = found.document({})
    assert document["results"][1]["speedup_by_category"] == found.speedups["ngram"]


def test_no_speedups_where_requests_have_no_times():
    found = session()
    untimed = [
        replace(result, runs=tuple(replace(run, outputs=_untimed(run.outputs)) for run in result.runs))
        for result in found.results
    ]
    assert speedups_by_category(untimed, found.workload) == {result.name: {} for result in untimed}


def _untimed(outputs):
    return tuple(replace(output, outputs=(replace(output.outputs[0], metrics=RequestMetrics()),)) for output in outputs)


def test_what_cannot_be_opened_is_named():
    found = session(refused=("auto",))
    assert found.left_out == {"auto": "auto is for another target"}
    assert "left out: auto: auto is for another target" in report.remarks(found)
    assert [result.name for result in found.results] == [PLAIN, "ngram"]


def test_nothing_left_to_compare():
    with pytest.raises(ConfigError, match=r"nothing is left to compare with plain decoding .*for another target"):
        session(refused=("ngram", "auto"))


def test_plain_decoding_is_never_left_out():
    with pytest.raises(CheckpointError):
        session(refused=(PLAIN,))


def shown(table):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_tables(tmp_path):
    found = session()
    text = shown(report.methods_table(found.results, "title"))
    assert "identical" in text
    assert text.count("yes") == len(found.results)
    [line] = [line for line in shown(report.categories_table(found)).splitlines() if "maths" in line]
    assert line.count("2.00×") == len(found.results) - 1
    plot_categories(found, tmp_path / "methods.png", "target", "title")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_categories(found, tmp_path / "none" / "methods.png", "target", "title")


def test_figures_of_counts():
    counts = replace(session().results[1].counts, verified=6, draft_s=1.0, step_s=4.0)
    assert report.target_rows(counts) == 1 + 6 / counts.request_steps
    assert report.drafting_share(counts) == 0.25


def test_a_drafter_that_fails_is_named():
    found = session()
    plain, ngram, _ = found.results
    failed = tuple(replace(run, counts=replace(run.counts, proposer_faults=2)) for run in ngram.runs)
    broken = replace(found, results=(plain, replace(ngram, runs=failed)))
    assert report.remarks(broken) == ["the drafter of ngram failed 4 times; it went on plainly"]


def test_options_are_spec_configs():
    assert spec_of("x", {"method": "ngram", "policy": "constant"}).config.num_speculative_tokens == 5
    with pytest.raises(ConfigError, match="the policy 'x': "):
        spec_of("x", {"method": "ngram", "model": "y"})


def test_a_picture_of_many_kinds_has_several_lines(tmp_path):
    few, many = session(), session(kinds=30)
    for name, found in (("few", few), ("many", many)):
        plot_categories(found, tmp_path / f"{name}.png", "target", "title")
    assert _height(tmp_path / "many.png") > 1.5 * _height(tmp_path / "few.png")


def _height(png):
    return int.from_bytes(png.read_bytes()[20:24])


def test_a_title_says_how_much_and_how():
    options = {"num_prompts": 3, "max_tokens": 8, "temperature": 0.0, "rounds": 1, "engine": {"max_num_seqs": 1}}
    assert report.title_of(options) == "3 prompts, up to 8 tokens each, greedy, one request at a time, 1 round"
    options |= {"prompts_in_file": 9, "temperature": 0.5, "rounds": 2, "engine": {"max_num_seqs": 4}}
    assert (
        report.title_of(options) == "3 of 9 prompts, up to 8 tokens each, temperature 0.5, 4 requests at once, 2 rounds"
    )
