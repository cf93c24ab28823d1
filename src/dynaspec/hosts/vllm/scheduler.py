"""vLLM's schedulers with dynaspec's controllers in charge of draft lengths. Needs vLLM.

What is decided here only ever shortens drafts, so that everything else, exactness first, is vLLM's.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.outputs import DraftTokenIds

from dynaspec.contract.errors import ConfigError

from .scheduler_adapter import build_adapter
from .step_tracker import Step

logger = logging.getLogger(__name__)

_Base: Any = object
"""For type checkers: ``Driven`` stands before a scheduler of vLLM's, whose methods it calls."""


class FixedLength:
    """vLLM's table of draft lengths by batch size, with one length for all.

    vLLM asks it in every step; with no table at all it would give new requests made-up drafts. What a step drafts in
    truth is set in its output, when it is known who is in it.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __getitem__(self, batch_size: int) -> int:
        return self._length


class Driven(_Base):  # type: ignore[misc]  # vLLM's class is not known where vLLM is not installed
    """What both schedulers have in common: a step is decided on as soon as it is put together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "dynamic_sd_lookup" not in vars(self):
            raise ConfigError("vLLM's scheduler has no dynamic_sd_lookup; expected one, which sets the draft length")
        self._adapter = build_adapter(self.vllm_config, time.perf_counter)
        self.dynamic_sd_lookup = FixedLength(self._adapter.longest)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._adapter.begin()
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        _, waiting = self.get_request_counts()
        step = self._adapter.schedule(self.requests, waiting, scheduler_output)
        if step is not None:
            scheduler_output.num_spec_tokens_to_schedule = step.k
        super()._update_after_schedule(scheduler_output)
        if step is not None:
            self._grant(step)

    def _grant(self, step: Step) -> None:
        """vLLM has taken note of a step."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        sampled = self._adapter.sampled(scheduler_output, model_runner_output)
        told = super().update_from_output(scheduler_output, model_runner_output)
        self._adapter.commit(scheduler_output, sampled, told, len(self.running))
        return told

    def shutdown(self) -> None:
        self._adapter.close()
        super().shutdown()


class SyncScheduler(Driven, VllmScheduler):  # type: ignore[misc]  # see Driven
    """Drafts come here before they are verified, and are cut then."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        ids = draft_token_ids.req_ids
        kept = self._adapter.keep(ids, draft_token_ids.draft_token_ids)
        super().update_draft_token_ids(DraftTokenIds(ids, kept))
        self._adapter.checked(self.requests, ids)


class AsyncScheduler(Driven, VllmAsyncScheduler):  # type: ignore[misc]  # see Driven
    """Drafts stay with the runner: here placeholders stand for them, and these are cut."""

    def _grant(self, step: Step) -> None:
        granted = dict(step.depths)
        for row in step.rows:
            depth = granted.get(row.id, 0)
            if row.goes_on and depth < step.k:
                # A new list, as vLLM gives the same one to all requests.
                self.requests[row.id].spec_token_ids = [-1] * depth


def build_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler for a configuration; vLLM's own where nothing speculates."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    if vllm_config.speculative_config is None:
        logger.warning("vLLM has no speculative_config: its own scheduler decodes plainly")
        plain = VllmAsyncScheduler if asynchronous else VllmScheduler
        return plain(vllm_config, *args, **kwargs)
    return (AsyncScheduler if asynchronous else SyncScheduler)(vllm_config, *args, **kwargs)
