from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.engine import Engine
from unit.engine.engines import TOKENIZER, make


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | options)


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs = defaultdict(list)
    while engine.unfinished:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.verify_integrity()
    engine.close()
    return outputs


@pytest.mark.parametrize("overlapped", [False, True])
def test_output_kinds(overlapped: bool) -> None:
    engine, _ = make(overlapped=overlapped)
    for kind in RequestOutputKind:
        engine.add(kind.name, "some prompt", params(output_kind=kind))
    outputs = drain(engine)
    [final] = outputs["FINAL_ONLY"]
    assert final.finished
    assert len(final.outputs[0].token_ids) == 12
    cumulative = [output.outputs[0] for output in outputs["CUMULATIVE"]]
    assert cumulative[-1].token_ids == final.outputs[0].token_ids
    assert cumulative[-1].text == final.outputs[0].text == TOKENIZER.decode(final.outputs[0].token_ids)
    assert [len(c.token_ids) for c in cumulative] == sorted({len(c.token_ids) for c in cumulative})
    deltas = [output.outputs[0] for output in outputs["DELTA"]]
    assert [token for delta in deltas for token in delta.token_ids] == final.outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == final.outputs[0].text
    assert [output.finished for output in outputs["DELTA"]] == [False] * (len(deltas) - 1) + [True]


@pytest.mark.parametrize("overlapped", [False, True])
def test_continuations_of_one_prompt_end_together(overlapped: bool) -> None:
    engine, _ = make(overlapped=overlapped, max_seqs=2)
    engine.add("r", "some prompt", params(n=3, temperature=1.0, seed=3))
    outputs = drain(engine)["r"]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len({tuple(completion.token_ids) for completion in outputs[-1].outputs}) == 3


def test_an_abort_returns_what_there_is() -> None:
    engine, rig = make(overlapped=True)
    engine.add("a", "some prompt", params())
    engine.add("b", "another prompt", params())
    engine.step()
    engine.step()
    output = engine.abort("a")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert 0 < len(output.outputs[0].token_ids) < 12
    assert engine.abort("a") is None
    outputs = drain(engine)
    assert set(outputs) == {"b"}
    assert rig.tables.pool.free_count == rig.num_blocks


def test_ids_are_taken_until_the_end() -> None:
    engine, _ = make()
    engine.add("a", "some prompt", params())
    with pytest.raises(RequestError, match="already running"):
        engine.add("a", "another", params())
    while engine.unfinished:
        engine.step()
    engine.add("a", "another", params())


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine, rig = make(num_blocks=2)
    with pytest.raises(RequestError, match="KV cache holds 32"):
        engine.add("a", "x" * 30, params(n=2, temperature=1.0))
    assert (engine.unfinished, rig.scheduler.unfinished) == (False, False)
    engine.add("a", "x" * 20, params())
    assert drain(engine)["a"][-1].finished


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("lengths", [(0,), (5, 3, 0)])
def test_logprobs_are_those_of_the_raw_logits(overlapped: bool, lengths: tuple[int, ...]) -> None:
    engine, rig = make(overlapped=overlapped, lengths=lengths, max_rows=16, num_blocks=8)
    options = {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.5}
    for name in "abc":
        engine.add(name, f"{name} prompt of more than a block of tokens", params(**options))
    for outputs in drain(engine).values():
        output = outputs[-1]
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
        assert len(entries) == len(text)
        assert entries[0] is None
        for p in range(1, len(text)):
            hidden = rig.target._hash(*(torch.tensor(x).numpy() for x in (text[:p], range(p))))[-1:]
            raw = rig.target.logits(torch.tensor(hidden.astype("float32"))[:, None]).log_softmax(-1)[0]
            entry = entries[p]
            assert entry is not None
            assert entry[text[p]].logprob == pytest.approx(float(raw[text[p]]), abs=1e-5)
            assert entry[text[p]].rank == 1 + int((raw > raw[text[p]]).sum())
            best = int(raw.argmax())
            assert entry[best].rank == 1


def test_preemptions_are_counted() -> None:
    engine, rig = make(num_blocks=4)
    for name in "abcd":
        engine.add(name, f"{name} prompt", params(max_tokens=30))
    outputs = drain(engine)
    assert rig.scheduler.preemptions > 0
    assert engine.stats().preemptions == rig.scheduler.preemptions
    assert sum(o[-1].outputs[0].metrics.preemptions for o in outputs.values()) == rig.scheduler.preemptions


def test_closing_aborts_what_is_running() -> None:
    engine, rig = make(overlapped=True)
    engine.add("a", "some prompt", params())
    engine.step()
    engine.close()
    assert not engine.unfinished
    assert rig.tables.pool.free_count == rig.num_blocks
