from __future__ import annotations

import json
import sys

import pytest
import typer

from dynaspec.cli import profile as command
from dynaspec.cli.console import print_error
from dynaspec.cli.options import SpacedValues, spread
from dynaspec.contract.errors import DynaspecError
from dynaspec.contract.methods import METHODS
from dynaspec.control.keys import either
from dynaspec.control.policies.short_names import parse_policy
from dynaspec.control.profile import Profile
from dynaspec.observe.decision_log import read_header


@pytest.fixture
def profile(pair, tmp_path, capsys, monkeypatch):
    """Runs the command on the tiny pair; (exit code, stdout, stderr)."""
    app = typer.Typer()
    app.command(cls=SpacedValues)(command.profile)

    def run(*arguments: object) -> tuple[int, str, str]:
        options = ["--result-dir", tmp_path, "--model-dir", pair.target, *arguments]
        monkeypatch.setattr(sys, "argv", ["profile", *map(str, options)])
        code = 0
        try:
            app()
        except SystemExit as exit_:
            code = exit_.code or 0
        except DynaspecError as error:
            print_error(str(error))
            code = 2
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def quick(pair):
    lists = ("--batch-size-list", 1, 3, "--num-speculative-tokens-list", "1,2")
    return ("--draft-dir", pair.drafter, *lists, "--num-batches", 1)


def test_writes_what_goodput_reads(profile, quick, tmp_path):
    code, out, err = profile(*quick, "--top-k", -1)
    assert code == 0, err
    path = tmp_path / "tp-1_temp-0.0_top_p-1.0_top_k--1" / "demo" / "dynamic_speculative_config.json"
    found = Profile.load(path)
    assert {batch: list(row) for batch, row in found.batch_stats.items()} == {1: [0, 1, 2], 3: [0, 1, 2]}
    assert found.max_num_speculative_tokens == 2
    assert found.is_online is False
    assert set(json.loads(path.read_text())) == {
        *("batch_stats", "acceptance_rate_per_pos", "max_num_speculative_tokens", "is_online")
    }
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "best k" in out
    assert parse_policy(f"goodput:{path}", "draft").config.longest_draft == 2


def test_goes_on_where_it_was(profile, quick, tmp_path):
    profile(*quick)
    (path,) = tmp_path.rglob("dynamic_speculative_config.json")
    first = path.read_bytes()
    path.unlink()
    code, _, err = profile(*quick)
    assert code == 0
    assert "7 earlier measurements are used again" in err
    assert path.read_bytes() == first
    code, _, err = profile(*quick[:-1], 2)
    assert "7 earlier measurements" in err
    _, _, err = profile(*quick, "--no-oversample")
    assert "made with other checkpoints or options" in err


def test_lookup_and_sampling(profile, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "one two three one two"}\n{"question": "1 2 3 4 1 2"}\n')
    code, _, err = profile(
        *("--method", "ngram", "--batch-size-list", "2", "--num-speculative-tokens-list", 2, "--num-batches", 1),
        *("--dataset-path", data, "--dataset-name", "gsm8k", "--temp", 0.7, "--top-p", 0.9, "--top-k", 5),
        "--no-oversample",
    )
    assert code == 0, err
    found = Profile.load(tmp_path / "tp-1_temp-0.7_top_p-0.9_top_k-5" / "data" / "dynamic_speculative_config.json")
    assert list(found.batch_stats) == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no --draft-dir"),
        (("--method", "dflash"), f"--method is 'dflash'; expected {either(tuple(METHODS))}"),
        (("--method", "ngram", "--draft-dir", "d"), "expected no drafter"),
        (("--method", "ngram", "--batch-size-list", "few"), "--batch-size-list is 'few'; expected integers"),
        (("--method", "ngram", "--batch-size-list", "0"), "batch sizes are [0]"),
        (("--method", "ngram", "--tp", "2"), "tensor_parallel_size is 2"),
        (("--method", "ngram", "--dataset-name", "gsm8k"), "has no path"),
        (("--method", "ngram", "--dataset-name", "mine", "--dataset-path", "x.jsonl"), "expected spec_bench"),
        (("--method", "ngram", "--dataset-path", "/nowhere.jsonl"), "cannot be read"),
        (("--method", "ngram", "--no-oversample", "--batch-size-list", "13"), "there are 12 prompts"),
    ],
)
def test_bad_input(profile, arguments, message):
    code, _, err = profile(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["--batch-size-list", "1", "4", "16", "--tp", "1"],
            ["--batch-size-list", "1", "--batch-size-list", "4", "--batch-size-list", "16", "--tp", "1"],
        ),
        (["--batch-size-list", "1,4", "--temp", "0"], ["--batch-size-list", "1,4", "--temp", "0"]),
        (
            ["--num-speculative-tokens-list", "1", "3", "--batch-size-list", "8"],
            ["--num-speculative-tokens-list", "1", "--num-speculative-tokens-list", "3", "--batch-size-list", "8"],
        ),
        (["--tp", "1", "2"], ["--tp", "1", "2"]),
    ],
)
def test_spaced_lists(given, expected):
    assert spread(given) == expected


def test_on_transformers(profile, pair, tmp_path):
    code, out, err = profile(
        *("--backend", "transformers", "--draft-dir", pair.drafter),
        *("--num-speculative-tokens-list", 2, "--num-batches", 1),
    )
    assert code == 0, err
    path = tmp_path / "tp-1_temp-0.0_top_p-1.0_top_k--1" / "demo" / "dynamic_speculative_config.json"
    found = Profile.load(path)
    assert {batch: list(row) for batch, row in found.batch_stats.items()} == {1: [0, 2]}
    assert 0 < found.acceptance_rate_per_pos[1] <= found.acceptance_rate_per_pos[0] < 1
    assert "best k" in out
    logs = [path.with_name(f"decisions-{k}.jsonl") for k in (0, 2)]
    assert [read_header(log).fields["host"] for log in logs] == ["transformers"] * 2


def test_without_matplotlib(profile, quick, monkeypatch):
    monkeypatch.setattr("dynaspec.bench.profile_session.find_spec", lambda name: None)
    code, out, err = profile(*quick)
    assert code == 0, err
    assert "there is no picture, as matplotlib is not installed here" in err
    assert "Picture" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "sglang"), "--backend is 'sglang'; expected dynaspec, vllm or transformers"),
        (("--backend", "vllm"), "'vllm', which is not installed"),
        (
            ("--engine-options", "{"),
            "--engine-options is '{', which is not JSON (Expecting property name enclosed in double quotes); "
            "expected a JSON object",
        ),
        (("--engine-options", '{"a": 1}'), "--engine-options is given but --backend is 'dynaspec'"),
        (("--backend", "transformers", "--batch-size-list", "1,3"), "expected --batch-size-list 1"),
        (("--backend", "transformers", "--tp", 2), "--tp is 2; expected 1"),
    ],
)
def test_bad_input_about_other_engines(profile, quick, arguments, message):
    code, _, err = profile(*quick[:2], *arguments)
    assert code == 2
    assert message in err
