from __future__ import annotations

import io
import json
import sys

import pytest

PROMPT = "def add(a, b):"
SHORT = ("--temperature", 0, "--max-tokens", 12)


def config(pair, **more):
    return json.dumps({"method": "draft_model", "model": pair.drafter, "num_speculative_tokens": 4} | more)


@pytest.mark.parametrize("sampling", [("--temperature", 0), ("--temperature", 0.8, "--top-k", 20, "--seed", 7)])
def test_stdout_is_the_same_bytes_with_speculation(dynaspec, pair, sampling):
    options = ("generate", "--model", pair.target, *sampling, "--max-tokens", 16, PROMPT)
    plain = dynaspec(*options)
    assert plain.code == 0, plain.err
    assert plain.out.endswith("\n")
    assert len(plain.out) > 8
    threshold = config(pair, draft_confidence_threshold=0.3)
    assert dynaspec(*options, "--speculative-config", threshold).out == plain.out
    assert dynaspec(*options, "--draft-model", pair.drafter, "--num-speculative-tokens", 3).out == plain.out
    assert dynaspec(*options, "--method", "ngram").out == plain.out


def test_stats_go_to_stderr(dynaspec, pair):
    options = ("generate", "--model", pair.target, *SHORT, PROMPT)
    quiet = dynaspec(*options, "--draft-model", pair.drafter)
    loud = dynaspec(*options, "--draft-model", pair.drafter, "--stats")
    assert loud.out == quiet.out
    assert quiet.err == ""
    for name in ("mean acceptance length", "draft acceptance rate", "per position", "target / drafter passes"):
        assert name in loud.err


def test_json_lines(dynaspec, pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["the quick", "and"]}\n{"question": "1 2?", "answer": "3"}\n', "utf-8")
    out = tmp_path / "out.jsonl"
    result = dynaspec(
        *("generate", "--model", pair.target, "--max-tokens", 5, "--seed", 3, "--n", 2, "--ignore-eos"),
        *("--prompt-file", file, "--output", "jsonl", "--output-file", out, "one two"),
    )
    assert (result.code, result.out) == (0, ""), result.err
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [r["prompt"] for r in records] == ["one two", "the quick", "Question: 1 2?\nAnswer:"]
    assert [r["index"] for r in records] == [0, 1, 2]
    for record in records:
        assert [len(o["token_ids"]) for o in record["outputs"]] == [5, 5]
        assert {o["finish_reason"] for o in record["outputs"]} == {"length"}


def test_several_prompts_stand_under_headings_in_order(dynaspec, pair):
    options = ("generate", "--model", pair.target, *SHORT, "--max-num-seqs", 1)
    alone = [dynaspec(*options, prompt).out for prompt in ("the quick", "1 2 3")]
    together = dynaspec(*options, "the quick", "1 2 3")
    assert together.out == f"==> 1 <==\n{alone[0]}==> 2 <==\n{alone[1]}"


def test_stdin_is_one_prompt(dynaspec, pair, monkeypatch):
    options = ("generate", "--model", pair.target, *SHORT)
    expected = dynaspec(*options, PROMPT).out
    for arguments in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
        assert dynaspec(*options, *arguments).out == expected


def test_a_stop_string_ends_the_text(dynaspec, pair):
    options = ("generate", "--model", pair.target, *SHORT, PROMPT)
    text = dynaspec(*options).out.removesuffix("\n")
    stop = text[4:6]
    assert dynaspec(*options, "--stop", stop).out == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative-config", "{method"), "which is not JSON"),
        (("--speculative-config", '{"method":"psychic"}'), "method is 'psychic'"),
        (("--speculative-config", "{}", "--draft-model", "x"), "together with --draft-model; expected one or the"),
        (("--draft-model", "x", "--draft-confidence-threshold", "high"), "is 'high'; expected a number from 0 to 1"),
        (("--num-speculative-tokens", "4"), "neither a method nor a model"),
        (("--temperature", "-1"), "temperature is -1.0; expected"),
        (("--temperature", "0", "--n", "2"), "n is 2 with temperature 0"),
        (("--dtype", "float8"), "dtype"),
        (("--kv-cache-memory", "plenty"), "'plenty' is not a size"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size is 2"),
        (("--output", "xml"), "--output is 'xml'; expected text or jsonl"),
        (("--prompt-file", "/nowhere/prompts.txt"), "cannot be read"),
        (("--output-file", "/nowhere/out.txt"), "cannot be written"),
        (("--prompt", "a b"), "--prompt 'a b' is given; expected the prompt alone, as an argument"),
        (("-", "-"), "'-' is given more than once"),
        (("--draft-model", "/nowhere/draft"), "/nowhere/draft"),
    ],
)
def test_bad_input_is_one_line_and_code_2(dynaspec, pair, arguments, message):
    result = dynaspec("generate", "--model", pair.target, PROMPT, *arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_a_missing_model(dynaspec):
    result = dynaspec("generate", "--model", "/nowhere/target", PROMPT)
    assert result.code == 2
    assert result.err.startswith("error: there is no directory /nowhere/target")


def test_what_is_not_given_is_as_the_checkpoint_recommends(dynaspec, pair, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}', "utf-8")
    options = ("generate", "--model", pair.target, PROMPT)
    recommended = dynaspec(*options, "--generation-config", tmp_path)
    assert recommended.code == 0, recommended.err
    assert recommended.out == dynaspec(*options, "--temperature", 0, "--max-tokens", 5).out
    longer = dynaspec(*options, "--generation-config", tmp_path, "--max-tokens", 12)
    assert longer.out == dynaspec(*options, *SHORT).out


def test_no_prompt_on_a_terminal(dynaspec, pair, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "no prompt was given" in dynaspec("generate", "--model", pair.target).err


def test_the_environment_fills_in_a_threshold(dynaspec, pair, monkeypatch):
    monkeypatch.setenv("DYNASPEC_CONFIDENCE_THRESHOLD", "1.5")
    options = ("generate", "--model", pair.target, *SHORT, PROMPT)
    assert dynaspec(*options).code == 0  # nothing drafts
    assert "DYNASPEC_CONFIDENCE_THRESHOLD is '1.5'" in dynaspec(*options, "--draft-model", pair.drafter).err
