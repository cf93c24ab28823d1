"""Engines for tests: with a proposer, controller or clock of the test's own, with few KV blocks, and the plain one to
compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dynaspec import LLM, AsyncLLM, SamplingParams
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.step import Controller, Limits
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.engine.build import build_engine
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.loader import load_model

_LAST_STATE_ALONE = ("medusa", "mlp_speculator")
"""Methods whose heads keep no KV, and read one hidden state."""


@contextmanager
def open_llm(
    model: str,
    *,
    proposer: Proposer | None = None,
    controller: Callable[[Limits], Controller] | None = None,
    ticking: bool = False,
    load: Callable[..., Model] = load_model,
    **options: Any,
) -> Iterator[LLM]:
    """An ``LLM``; its KV books are checked at the end.

    Args:
        proposer: drafts instead of the configured one.
        controller: decides instead of the configured one.
        ticking: steps are timed by a clock that only counts how often it is read: drafting and verifying take equally
            long whatever they do, so that speculation always pays and every run decides alike.
        load: reads the target and a draft model, see ``build_engine``.
    """
    with ExitStack() as patches:
        patches.enter_context(_built_with(proposer=proposer, load=load))
        if controller is not None:
            build = _ignoring_costs(controller)
            patches.enter_context(mock.patch("dynaspec.engine.build.build_controller", build))
        if ticking:
            ticks = count()
            clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: 1e-3 * next(ticks))
            patches.enter_context(mock.patch("dynaspec.engine.build.time", clock))
            # A pass at start-up is read once, as a whole draft is in a step: costs are learnt from the steps instead.
            patches.enter_context(mock.patch("dynaspec.engine.build.measure_costs", return_value=PassCosts()))
        llm = LLM(model, **options)
    try:
        yield llm
        llm.verify_integrity()
    finally:
        llm.close()


def _ignoring_costs(controller: Callable[[Limits], Controller]) -> Callable[..., Controller]:
    return lambda config, limits, **rest: controller(limits)


@contextmanager
def open_async_llm(model: str, *, proposer: Proposer | None = None, **options: Any) -> Iterator[AsyncLLM]:
    """The same for ``AsyncLLM``."""
    with _built_with(proposer=proposer):
        llm = AsyncLLM(model, **options)
    try:
        yield llm
    finally:
        llm.close()


def _built_with(**options: Any) -> AbstractContextManager[Any]:
    """Engines are built so in this block, see ``build_engine``."""
    return mock.patch("dynaspec.api.llm.build_engine", partial(build_engine, **options))


def kv_bytes(blocks: int, *models: str, method: str | None = None) -> int:
    """``kv_cache_memory`` for this many blocks shared by these checkpoints, which may be heads of the first.

    Args:
        method: of the heads; None = what their config.json says.
    """
    target = load_model(models[0])
    total = target.kv_bytes_per_block
    for model in models[1:]:
        drafting = method or checkpoint_method(model)
        state = BLOCK_SIZE * target.config.hidden_size * target.dtype.itemsize
        if drafting in _LAST_STATE_ALONE:
            total += state
        elif drafting != "draft_model":
            head = load_head(drafting, model, target)
            total += head.kv_bytes_per_block + len(head.settings.states) * state
        else:
            total += load_model(model).kv_bytes_per_block
    return blocks * total


class PlainDecoding:
    """The reference: one request at a time, no speculation, no prefix cache. Remembers what it has decoded."""

    def __init__(self, model: str, *, load: Callable[..., Model] = load_model, **options: Any) -> None:
        with _built_with(load=load):
            self.llm = LLM(model, max_num_seqs=1, enable_prefix_caching=False, **options)
        self._known: dict[tuple[str, str], RequestOutput] = {}

    def outputs(self, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        return [self._output(prompt, one) for prompt, one in zip(prompts, params, strict=True)]

    def texts(self, outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
        """Prompts with each of their continuations, as token ids."""
        return [(*output.prompt_token_ids, *one.token_ids) for output in outputs for one in output.outputs]

    def _output(self, prompt: str, params: SamplingParams) -> RequestOutput:
        key = (prompt, repr(params))
        if key not in self._known:
            (self._known[key],) = self.llm.generate([prompt], params)
        return self._known[key]


def visible(output: RequestOutput) -> dict[str, Any]:
    """All of an output that a caller may rely on; times and counts left out."""
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": output.prompt_logprobs,
        "finished": output.finished,
        "outputs": [_completion(completion) for completion in output.outputs],
    }


def assert_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Bit for bit: tokens, text, reasons and log-probabilities."""
    assert [visible(output) for output in found] == [visible(output) for output in expected]


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    names = (
        *("index", "token_ids", "text", "finish_reason", "stop_reason"),
        *("cumulative_logprob", "logprobs"),
    )
    return {name: getattr(completion, name) for name in names}
