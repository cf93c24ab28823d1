from __future__ import annotations

import json
from itertools import pairwise

import pytest

from unit.control.seam import H100_PROFILE

FEW = ("--requests", 30, "--output-tokens", 20, "--prompt-tokens", 30)
ROOFLINE = ("--gpu", "H100", *FEW)


def test_compares_policies(dynaspec, tmp_path):
    options = ("--policies", "constant:2,confidence:0.5,oracle", "--repeats", 2, "--arrivals", "poisson:40")
    files = ("--output-json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    result = dynaspec("simulate", *ROOFLINE, *options, *files)
    assert result.code == 0, result.err
    assert "llama-3.1-8b on 1 × H100, llama-3.2-1b drafting: 60 requests, poisson:40" in result.out
    document = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert list(document["policies"]) == ["plain", "constant:2", "confidence:0.5", "oracle"]
    for name, figures in document["policies"].items():
        assert name in result.out
        assert figures["requests"] == 60
        assert len(figures["tokens_per_second_by_seed"]) == 2
    assert document["options"]["gpu"] == "H100"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_figures(dynaspec, tmp_path):
    outs = [dynaspec("simulate", *ROOFLINE, "--policies", "constant:2", "--seed", seed).out for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]


def test_a_saved_trace_and_profile_come_back(dynaspec, tmp_path):
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "profile.json"
    first = dynaspec("simulate", *ROOFLINE, "--policies", "plain", "--save-trace", trace, "--save-profile", profile)
    assert first.code == 0, first.err
    result = dynaspec("simulate", "--profile", profile, "--trace", trace, "--policies", "constant:1,goodput")
    assert result.code == 0, result.err
    assert "profile.json: 30 requests" in result.out


def test_measured_passes(dynaspec, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"target": [[1, 0.01], [64, 0.02]], "drafter": [[1, 0.001]]}))
    result = dynaspec("simulate", "--costs", costs, *FEW, "--policies", "oracle:cost", "--parallel-heads")
    assert result.code == 0, result.err


def test_a_fleet(dynaspec):
    result = dynaspec("simulate", *ROOFLINE, "--nodes", 4, "--arrivals", "burst:50:5", "--policies", "constant:1")
    assert result.code == 0, result.err
    assert "4 nodes" in result.out


def lengths(out):
    ranges = [tuple(map(int, line.split())) for line in out.splitlines()]
    assert ranges[0][0] == 1
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    return {batch: k for low, high, k in ranges for batch in range(low, high + 1)}


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [(0.3, (1, 1, 1, 0, 0)), (0.5, (2, 2, 1, 0, 0)), (0.7, (4, 4, 2, 2, 0)), (0.9, (5, 5, 5, 5, 4))],
)
def test_the_published_schedule(dynaspec, acceptance, expected):
    result = dynaspec("simulate", "--profile", H100_PROFILE, "--show-schedule", "--acceptance", acceptance)
    assert result.code == 0, result.err
    assert tuple(lengths(result.out)[batch] for batch in (1, 17, 64, 128, 256)) == expected


def test_a_schedule_for_hardware_at_hand_or_not(dynaspec):
    result = dynaspec("simulate", *ROOFLINE, "--show-schedule", "--max-num-seqs", 100)
    assert result.code == 0, result.err
    assert set(lengths(result.out)) == set(range(1, 101))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (FEW, "no cost model was given; expected one of --gpu, --profile and --costs"),
        ((*ROOFLINE, "--profile", "x.json"), "x.json"),
        (("--gpu", "abacus"), "the GPU 'abacus' is not known; expected one of A100"),
        (("--gpu", "H100", "--target", "gpt-9"), "the model 'gpt-9' is not known"),
        (("--gpu", "L4", "--target", "llama-3.1-70b"), "expected more GPUs, larger ones or a smaller model"),
        ((*ROOFLINE, "--policies", "magic"), "the policy 'magic' is not known; expected plain, auto"),
        ((*ROOFLINE, "--arrivals", "poisson"), "the arrivals are 'poisson'; expected poisson:RATE"),
        ((*ROOFLINE, "--acceptance", "1.5"), "--acceptance is '1.5'; expected numbers from 0 to 1, not 1.5"),
        ((*ROOFLINE, "--acceptance", "high"), "--acceptance is 'high'"),
        ((*ROOFLINE, "--auc", "0.2"), "auc is 0.2; expected a number from 0.5 to 0.999"),
        ((*ROOFLINE, "--router", "magic"), "--router is 'magic'"),
        ((*ROOFLINE, "--trace", "nowhere.jsonl"), "the trace 'nowhere.jsonl' cannot be read"),
        ((*ROOFLINE, "--trace", "t.jsonl", "--acceptance", "0.5"), "one or the other"),
        ((*ROOFLINE, "--nodes", 2, "--arrivals", "closed:3"), "a closed loop runs on one node only"),
        ((*ROOFLINE, "--plot", "/nowhere/plot.png"), "the folder '/nowhere' is not there"),
        (("--profile", "/nowhere.json", "--show-schedule"), "'/nowhere.json' cannot be read"),
        (("--gpu", "H100", "--show-schedule", "--acceptance", "0.5,0.9"), "expected one number for a schedule"),
    ],
)
def test_wrong_input_is_one_line(dynaspec, options, said):
    result = dynaspec("simulate", *options)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def test_both_kinds_of_costs(dynaspec):
    result = dynaspec("simulate", "--gpu", "H100", "--profile", H100_PROFILE)
    assert result.code == 2
    assert "--gpu and --profile were given; expected one of" in result.err
