"""vLLM's schedulers without models: real configuration, a small KV cache, and outputs that are made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dynaspec.hosts.vllm import Scheduler
from hosts.vllm.engines import DRAFTERS, SCHEDULER, engine_options

BLOCK = 16


def scheduler(
    *,
    asynchronous: bool,
    blocks: int = 200,
    speculation: dict[str, Any] | None = DRAFTERS["draft_model"],
    change: Callable[[Any], None] | None = None,
    **settings: Any,
) -> Any:
    """dynaspec's scheduler, as vLLM's engine would build it.

    Args:
        change: what this platform would not have, done to vLLM's configuration.
        settings: dynaspec's.
    """
    config = EngineArgs(
        **engine_options(),
        speculative_config=speculation,
        scheduler_cls=SCHEDULER,
        additional_config={"dynaspec": settings},
    ).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    if asynchronous:
        config.device_config.device_type = "cuda"  # on CPUs vLLM always is synchronous
    if change is not None:
        change(config)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def request(name: str, *, prompt: int = 20, tokens: int = 40, **extra: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra or None)
    return Request(name, list(range(1, prompt + 1)), params, None)


class Runner:
    """Accepts drafts at random, and runs as many steps ahead as vLLM would."""

    def __init__(self, scheduler: Any, ahead: int, chance: float = 0.7) -> None:
        self.scheduler = scheduler
        self._ahead = ahead
        self._chance = chance
        self._rng = random.Random(11)
        self._flying: list[tuple[SchedulerOutput, set[str]]] = []
        """Steps, and which of their requests sample: those whose prompt they complete, or that decode."""
        self.scheduled: list[dict[str, int]] = []
        """For each step the drafted tokens in its rows, by request."""
        self.tokens: dict[str, int] = {}
        """Emitted, by request."""

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.scheduled.append({name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()})
        requests = self.scheduler.requests
        samples = {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}
        self._flying.append((output, samples))
        if len(self._flying) > self._ahead:
            self._finish(*self._flying.pop(0))

    def run(self, steps: int = 500) -> None:
        for _ in range(steps):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self._flying:
            self._finish(*self._flying.pop(0))

    def _finish(self, output: SchedulerOutput, samples: set[str]) -> None:
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sampled(output, name) if name in samples else [] for name in ids]
        ran = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        for client in self.scheduler.update_from_output(output, ran).values():
            for out in client.outputs:
                self.tokens[out.request_id] = self.tokens.get(out.request_id, 0) + len(out.new_token_ids)

    def _sampled(self, output: SchedulerOutput, name: str) -> list[int]:
        accepted = 0
        while accepted < len(output.scheduled_spec_decode_tokens.get(name, ())) and self._rng.random() < self._chance:
            accepted += 1
        return [7] * (accepted + 1)
