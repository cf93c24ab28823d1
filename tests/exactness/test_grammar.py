"""Structured outputs under speculation: the same text as plain decoding's, or the same law; and the form asked for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dynaspec import LLM, SamplingParams, StructuredOutputsParams
from dynaspec.contract.outputs import CompletionOutput
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import Limits, StepOutcome
from dynaspec.sampling.draw import draw
from dynaspec.sampling.grammar import Grammar, GrammarCompiler
from dynaspec.sampling.grammar_state import GrammarState, LaneGrammars
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from exactness.toy import ABSURD, PLAUSIBLE, PROMPT, REQUESTS, Decoder, World, decode_plainly, p_value
from support.checkpoints import EOS, VOCAB, Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.letters import letters_grammar
from support.proposers import ScriptedProposer
from support.workloads import MODES, PROMPTS
from unit.sampling.oracle import probabilities, process_row

# --- the samplers, in a world of five letters -------------------------------------------------------------------------

FOLLOWERS = {0: {1, 2}, 1: {0, 2}, 2: {0, 1, 3}, 3: {0, 4}}
"""After the first letter of a pair, those that may be its second."""
PAIRS = StructuredOutputsParams(regex="(a[bc]|b[ac]|c[abd]|d[ae])*")


@dataclass(frozen=True)
class PairWorld(World):
    """Texts are made of allowed pairs of letters."""

    def _distribution(self, params: SamplingParams, output: list[int]) -> list[float]:
        allowed = FOLLOWERS[output[-1]] if len(output) % 2 else set(FOLLOWERS)
        logits = self.target[[*PROMPT, *output][-1]]
        masked = [float(x) if i in allowed else -np.inf for i, x in enumerate(logits)]
        return probabilities(process_row(masked, params, prompt=PROMPT, output=output))


@pytest.fixture(scope="module")
def pairs() -> Grammar:
    return letters_grammar(PAIRS)


class DrawsAnything(Decoder):
    """The drafter knows no grammar: its drafts are the most probable tokens, or drawn from all."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        tokens, places = np.zeros((lanes.size, self.depth), np.int64), np.arange(lanes.size)
        q, last = [], self.newest[lanes]
        for depth in range(self.depth):
            logits = self.world.drafter_logits(last)
            if self.world.deterministic_drafts:
                tokens[:, depth] = logits.argmax(-1).numpy()
            else:
                rows = Rows(lanes, places, np.full_like(lanes, depth), tokens)
                tokens[:, depth], row = draw(logits, rows, self.state, Purpose.DRAFT)
                q.append(row)
            last = tokens[:, depth]
        drawn = q and q[0] is not None
        return Drafts(tokens, np.full(lanes.size, self.depth), q=torch.stack(q, 1) if drawn else None)


class StopsAtRefused(DrawsAnything):
    """As the engine does: what lies behind a refused token is not verified."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        return self.state.grammars.testable(np.arange(len(drafts.lens)), drafts.tokens, drafts.lens)


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 2, "temperature": 0.7},
    "top_p and penalties": {"top_p": 0.8, "presence_penalty": 0.7, "repetition_penalty": 1.3},
}
DECODERS = (Decoder, DrawsAnything, StopsAtRefused)
PART = (0, 2)
"""Letters that a drafter knows which does not know all; after some there is none of them."""


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("name", "depth"), [("plain", 1), ("top_k", 3), ("top_p and penalties", 2)])
def test_rejection_sampling_has_the_law_within_the_grammar(
    name: str, decoder: type[Decoder], deterministic: bool, depth: int, pairs: Grammar
) -> None:
    world = PairWorld.random(5 + depth, params=PARAMS[name], deterministic_drafts=deterministic, grammar=pairs)
    assert p_value(decoder(world, REQUESTS, depth)) > PLAUSIBLE


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", PARAMS)
def test_it_has_with_a_drafter_that_knows_a_part(
    name: str, decoder: type[Decoder], deterministic: bool, pairs: Grammar
) -> None:
    """The grammar may leave only letters that it does not know."""
    world = PairWorld.random(9, params=PARAMS[name], deterministic_drafts=deterministic, grammar=pairs, known=PART)
    assert p_value(decoder(world, REQUESTS, 2)) > PLAUSIBLE


@pytest.mark.parametrize("known", [None, PART], ids=["all known", "a part known"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled drafts", "deterministic drafts"])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("params", [{"seed": 0}, {"temperature": 0.0}], ids=["seeded", "greedy"])
def test_seeded_and_greedy_letters_are_those_of_plain_decoding(
    params: dict[str, Any],
    decoder: type[Decoder],
    deterministic: bool,
    known: tuple[int, ...] | None,
    pairs: Grammar,
) -> None:
    world = PairWorld.random(
        3, spread=2.0, params=params, deterministic_drafts=deterministic, grammar=pairs, known=known
    )
    plain = decode_plainly(world, 100, 9)
    for depth in (1, 4):
        np.testing.assert_array_equal(decoder(world, 100, depth).run(9), plain)


class CutsBeforeRefused(DrawsAnything):
    """Takes a drawn token that the grammar refuses for one that was never drafted."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        lens = np.zeros_like(drafts.lens)
        for lane, tokens in enumerate(drafts.tokens.tolist()):
            state = self.state.grammars._states[lane]
            while lens[lane] < self.depth and not state.refuses(tokens[: lens[lane]], tokens[lens[lane]]):
                lens[lane] += 1
        return lens


class MasksItsQAfterwards(DrawsAnything):
    """Draws from all tokens, and says that it has drawn from those that the grammar allows."""

    def draft(self, lanes: np.ndarray) -> Drafts:
        drafts = super().draft(lanes)
        assert drafts.q is not None
        for depth in range(self.depth):
            rows = Rows(lanes, lanes, np.full_like(lanes, depth), drafts.tokens)
            drafts.q[:, depth] = self.state.process(drafts.q[:, depth].log(), rows).softmax(-1)
        return drafts


class MasksTheFirstRowOnly(Decoder):
    """Every row has the mask of the committed output."""

    def verify(self, *args: Any) -> Any:
        honest = LaneGrammars.bits

        def bits(self: LaneGrammars, rows: Rows, index: np.ndarray) -> np.ndarray:
            return honest(self, Rows(rows.lanes, rows.request, rows.depth * 0, rows.drafts), index)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LaneGrammars, "bits", bits)
            return super().verify(*args)


@pytest.mark.parametrize("known", [None, (0, 2, 3)], ids=["all known", "a part known"])
@pytest.mark.parametrize("faulty", [CutsBeforeRefused, MasksItsQAfterwards, MasksTheFirstRowOnly])
def test_the_check_catches(faulty: type[Decoder], known: tuple[int, ...] | None, pairs: Grammar) -> None:
    world = PairWorld.random(2, grammar=pairs, known=known)
    assert p_value(DrawsAnything(world, REQUESTS, 2)) > PLAUSIBLE
    assert p_value(faulty(world, REQUESTS, 2)) < ABSURD


# --- the law of whole engines -----------------------------------------------------------------------------------------

LAW_PROMPT = "ab, ac, ba, ca, cd, da, ab, ca, cd, ac, ba, "
DEPTH = 3
TEMPERATURE = 2.0
SAMPLES = 3000


def next_allowed(grammar: Grammar, prefix: Sequence[int]) -> list[int]:
    """Tokens that may follow, by a state of their own for every prefix."""
    state = GrammarState(grammar, [EOS], min_tokens=0)
    state.commit(prefix)
    allowed = state.allowed(())
    return [token for token in range(VOCAB) if allowed.has(token)]


@pytest.fixture(scope="module")
def law(plain: PlainDecoding) -> dict[tuple[int, ...], float]:
    """Probability of every beginning of ``DEPTH`` tokens, or fewer where the text may end sooner."""
    tokenizer = plain.llm.tokenizer
    prompt = tuple(tokenizer.encode(LAW_PROMPT))
    grammar = GrammarCompiler(tokenizer.to_json, VOCAB, [EOS]).compile(PAIRS)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(DEPTH):
        open_ends = [tokens for tokens in law if len(tokens) == depth and EOS not in tokens]
        greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
        for tokens, output in zip(
            open_ends, plain.llm.generate([prompt + tokens for tokens in open_ends], greedy), strict=True
        ):
            (entries,) = output.outputs[0].logprobs or ()
            allowed = next_allowed(grammar, tokens)
            weights = np.exp([entries[token].logprob / TEMPERATURE for token in allowed])
            probability = law.pop(tokens)
            shares = zip(allowed, weights / weights.sum(), strict=True)
            law |= {(*tokens, token): probability * float(share) for token, share in shares}
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert sum(probability * SAMPLES >= 8 for probability in law.values()) > 20, "too peaked to tell much"
    return law


def law_p_value(llm: LLM, law: dict[tuple[int, ...], float]) -> float:
    params = SamplingParams(
        n=1000, temperature=TEMPERATURE, max_tokens=DEPTH + 3, structured_outputs=PAIRS, detokenize=False
    )
    outputs = llm.generate([LAW_PROMPT] * (SAMPLES // 1000), params)
    seen = Counter(tuple(c.token_ids[:DEPTH]) for output in outputs for c in output.outputs)
    if set(seen) - set(law):
        return 0.0
    common = [tokens for tokens, probability in law.items() if probability * SAMPLES >= 8]
    found = [seen[tokens] for tokens in common]
    expected = [law[tokens] * SAMPLES for tokens in common]
    found.append(SAMPLES - sum(found))
    expected.append(SAMPLES - sum(expected))
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True) if e > 0)
    return float(chi2.sf(statistic, len(common)))


def speculation(kind: str, drafter: str) -> dict[str, Any]:
    """Drafting by a draft model or a head, or beside it, or by lookup alone."""
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    if kind == "ngram":
        return lookup | {"method": "ngram", "policy": "constant", "num_speculative_tokens": 3}
    if kind == "suffix":
        return {"method": "suffix", "policy": "constant", "num_speculative_tokens": 3}
    config: dict[str, Any] = {"model": drafter, "num_speculative_tokens": 4}
    if kind in ("auto", "varying"):
        return config | lookup | {"policy": "auto"}
    if kind == "gated":
        return config | {"policy": "elastic", "draft_length_options": [1, 2, 4], "kv_write_gating_threshold": 0.5}
    if kind == "stopping":
        return config | {"draft_confidence_threshold": 0.3, "signal": "token_prob"}
    return config | {"policy": "constant", "draft_sample_method": kind}


KINDS_OF_LAW = (("probabilistic", "async"), ("greedy", "serial"), ("stopping", "serial"), ("varying", "async"))


@pytest.mark.parametrize(("kind", "scheduling"), KINDS_OF_LAW)
def test_unseeded_output_follows_the_law_within_the_grammar(
    kind: str, scheduling: str, drafter: str, tiny: Pair, law: dict[tuple[int, ...], float]
) -> None:
    check_law(kind, scheduling, drafter, tiny, law)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_unseeded_output_with_lookup_follows_it_too(kind: str, tiny: Pair, law: dict[tuple[int, ...], float]) -> None:
    check_law(kind, "serial", tiny.drafter, tiny, law)


def check_law(kind: str, scheduling: str, drafter: str, tiny: Pair, law: dict[tuple[int, ...], float]) -> None:
    with open_llm(
        tiny.target,
        controller=VaryingController if kind == "varying" else None,
        speculative_config=speculation(kind, drafter),
        max_model_len=96,
        max_num_seqs=250,
        async_scheduling=scheduling == "async",
    ) as llm:
        assert law_p_value(llm, law) > 1e-4
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0


def test_masks_of_the_first_row_alone_are_seen(
    drafter: str, tiny: Pair, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail."""
    honest = LaneGrammars.bits

    def bits(self: LaneGrammars, rows: Rows, index: np.ndarray) -> np.ndarray:
        return honest(self, Rows(rows.lanes, rows.request, rows.depth * 0, rows.drafts), index)

    monkeypatch.setattr(LaneGrammars, "bits", bits)
    with open_llm(
        tiny.target, speculative_config=speculation("probabilistic", drafter), max_model_len=96, max_num_seqs=250
    ) as llm:
        assert law_p_value(llm, law) < 1e-8


# --- greedy and seeded output of whole engines ------------------------------------------------------------------------

KINDS = ("probabilistic", "greedy", "auto", "varying", "gated", "stopping")


def mixed_params() -> list[SamplingParams]:
    """Every other request has a form."""
    others = ("greedy", "truncated", "edited", "several")
    return [MODES["formed" if i % 2 else others[i // 2]](i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_plain_decoding(
    kind: str, crowded: bool, drafter: str, tiny: Pair, plain: PlainDecoding
) -> None:
    check_output(kind, crowded, drafter, tiny, plain)


@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
@pytest.mark.parametrize("kind", ["ngram", "scripted"])
def test_output_without_a_model_is_too(kind: str, crowded: bool, tiny: Pair, plain: PlainDecoding) -> None:
    check_output(kind, crowded, tiny.drafter, tiny, plain)


def check_output(kind: str, crowded: bool, drafter: str, tiny: Pair, plain: PlainDecoding) -> None:
    """``crowded``: preemption, chunked prefill, asynchronous scheduling."""
    params = mixed_params()
    expected = plain.outputs(PROMPTS, params)
    scripted = ScriptedProposer(plain.texts(expected), VOCAB) if kind == "scripted" else None
    config = speculation("probabilistic" if kind == "scripted" else kind, drafter)
    models = [tiny.target] if kind == "ngram" else [tiny.target, drafter]
    with open_llm(
        tiny.target,
        proposer=scripted,
        controller=VaryingController if kind == "varying" else None,
        ticking=kind == "auto",
        speculative_config=config,
        max_num_seqs=8,
        max_num_batched_tokens=16 if crowded else 1024,
        async_scheduling=crowded,
        kv_cache_memory=kv_bytes(9, *models) if crowded else None,
    ) as llm:
        assert_same(llm.generate(PROMPTS, params), expected)
        stats = llm.stats()
    assert stats.proposer_faults == 0
    assert stats.accepted > 0
    assert (stats.preemptions > 0) == crowded


class Watching(VaryingController):
    """Notes how runs of drafts ended."""

    ended: Counter[str]

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        Watching.ended = Counter()

    def observe(self, outcome: StepOutcome) -> None:
        Watching.ended.update(outcome.ended)
        for verified, accepted, ended in zip(outcome.verified, outcome.accepted, outcome.ended, strict=True):
            assert ended != "invalid" or verified == accepted + 1  # nothing behind it was verified


def test_drafts_that_the_grammar_refuses_are_told_from_others(tiny: Pair, plain: PlainDecoding) -> None:
    params = mixed_params()
    expected = plain.outputs(PROMPTS, params)
    proposer = ScriptedProposer(plain.texts(expected), VOCAB, right=0.6)
    with open_llm(
        tiny.target,
        proposer=proposer,
        controller=Watching,
        speculative_config=speculation("probabilistic", tiny.drafter),
    ) as llm:
        assert_same(llm.generate(PROMPTS, params), expected)
    assert {"invalid", "rejected", "all_accepted"} <= set(Watching.ended)


# --- the form itself, and where it ends -------------------------------------------------------------------------------


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "pet": {"enum": ["dog", "fox"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "pet", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    known = set(value) == {"name", "pet", "age"} and value["pet"] in ("dog", "fox")
    return known and len(value["name"]) <= 5 and 0 <= value["age"] <= 120


THOUSANDS = [f"{i * 7919 % 9973:04d} {'abc'[i % 3]}" for i in range(9000)]

BOUNDED: dict[str, tuple[StructuredOutputsParams, Callable[[str], Any]]] = {
    "schema": (StructuredOutputsParams(json=PERSON, whitespace_pattern=" ?"), is_person),
    "schema without whitespace": (
        StructuredOutputsParams(json=json.dumps(PERSON), disable_any_whitespace=True),
        lambda text: is_person(text) and not re.search(r"[:,] ", text.replace(json.loads(text)["name"], "")),
    ),
    "regex": (StructuredOutputsParams(regex=r"([a-z]{2,4} ){1,3}end"), re.compile(r"([a-z]{2,4} ){1,3}end").fullmatch),
    "choice": (StructuredOutputsParams(choice=["yes", 'no "x"', "été 🙂"]), ("yes", 'no "x"', "été 🙂").__contains__),
    "thousands of choices": (StructuredOutputsParams(choice=THOUSANDS), THOUSANDS.__contains__),
    "Lark": (
        StructuredOutputsParams(grammar='start: NAME ("+" NAME)~1..4 ";"\nNAME: /[a-c]{1,3}/'),
        re.compile(r"[a-c]{1,3}(\+[a-c]{1,3}){1,4};").fullmatch,
    ),
    "GBNF": (
        StructuredOutputsParams(grammar='root ::= item ("," item)? "."\nitem ::= [x-z] [0-9]'),
        re.compile(r"[x-z][0-9](,[x-z][0-9])?\.").fullmatch,
    ),
}


@pytest.mark.parametrize("kind", ["probabilistic", "ngram", "suffix", "auto", "head"])
def test_what_stops_has_the_form_asked_for(kind: str, tiny: Pair, head: str) -> None:
    asked = [name for name in BOUNDED for _ in range(4)]
    params = [
        SamplingParams(structured_outputs=BOUNDED[name][0], max_tokens=120, temperature=0.5 * (i % 4), top_p=0.95)
        for i, name in enumerate(asked)
    ]
    config = speculation("probabilistic", head) if kind == "head" else speculation(kind, tiny.drafter)
    with open_llm(tiny.target, speculative_config=config, max_num_seqs=8) as llm:
        outputs = [output.outputs[0] for output in llm.generate([PROMPTS[5]] * len(params), params)]
    for name, completion in zip(asked, outputs, strict=True):
        assert completion.finish_reason == "stop"
        assert BOUNDED[name][1](completion.text), (name, completion.text)
        assert completion.token_ids[-1] == EOS


DIGITS = tuple(range(16, 26))
"""Tokens of the digits in a byte-level vocabulary whose first token is special."""
THREE = StructuredOutputsParams(regex="[0-9]{3}")
ENDS: dict[str, tuple[dict[str, Any], tuple[int, str, Any]]] = {
    "end of sequence": ({"structured_outputs": THREE}, (4, "stop", None)),
    "in spite of ignore_eos": ({"structured_outputs": THREE, "ignore_eos": True}, (4, "stop", None)),
    "in spite of min_tokens": ({"structured_outputs": THREE, "min_tokens": 9}, (4, "stop", None)),
    "min_tokens as long as there is more": (
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]*"), "min_tokens": 12, "logit_bias": {EOS: 100}},
        (13, "stop", None),
    ),
    "no room": ({"structured_outputs": THREE, "max_tokens": 2}, (2, "length", None)),
    "stop string": (
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]{2},[0-9]{9}"), "stop": ","},
        (3, "stop", ","),
    ),
    "stop token where the form may end": (
        {"structured_outputs": THREE, "stop_token_ids": [70], "logit_bias": {70: 100}},
        (4, "stop", 70),
    ),
    "complete, and the end is not allowed": (
        {"structured_outputs": THREE, "allowed_token_ids": DIGITS},
        (3, "stop", None),
    ),
    "incomplete, and nothing is allowed": (
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]{3}x"), "allowed_token_ids": DIGITS},
        (3, "error", "structured_outputs and the request's other rules leave no token; expected at least one"),
    ),
    "nothing from the first, and no output has the form": (
        {"structured_outputs": StructuredOutputsParams(regex="(x[0-9])?"), "allowed_token_ids": DIGITS},
        (0, "stop", None),
    ),
    "without a grammar": (
        {"allowed_token_ids": DIGITS[:1], "bad_words": ["00"]},
        (1, "error", "allowed_token_ids and bad_words leave no token; expected at least one everywhere"),
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["plain", "probabilistic", "ngram", "suffix", "scripted", "head"])
def test_how_a_form_ends(kind: str, temperature: float, tiny: Pair, head: str, plain: PlainDecoding) -> None:
    """All of them side by side, beside requests without any form, which go on."""
    assert [plain.llm.tokenizer.decode([token]) for token in DIGITS] == list("0123456789")
    unseeded = [SamplingParams(**{"max_tokens": 30, "temperature": temperature} | given) for given, _ in ENDS.values()]
    params = [*unseeded, *(MODES["greedy"](i) for i in range(3))]
    prompts = [PROMPTS[3]] * len(unseeded) + list(PROMPTS[:3])
    free = plain.outputs(PROMPTS[:3], params[-3:])
    scripted = ScriptedProposer(plain.texts(free), VOCAB) if kind == "scripted" else None
    way, drafter = (
        (kind, tiny.drafter)
        if kind in ("ngram", "suffix")
        else ("probabilistic", head if kind == "head" else tiny.drafter)
    )
    config = None if kind == "plain" else speculation(way, drafter)
    with open_llm(tiny.target, proposer=scripted, speculative_config=config, async_scheduling=temperature > 0) as llm:
        outputs = llm.generate(prompts, params)
    assert_same(outputs[-3:], free)
    found = {name: outcome(output.outputs[0]) for name, output in zip(ENDS, outputs[:-3], strict=True)}
    assert found == {name: expected for name, (_, expected) in ENDS.items()}


def outcome(completion: CompletionOutput) -> tuple[int, str | None, Any]:
    return len(completion.token_ids), completion.finish_reason, completion.stop_reason
