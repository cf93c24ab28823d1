"""What engines of these tests are built with, and one that takes on any policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.scheduler_adapter import SchedulerAdapter, build_adapter
from dynaspec.observe.decision_log import ObserveCall, PlanCall, read_calls, read_header
from dynaspec.simulate.recorded import ReplayResult, replay

MODELS = Path(__file__).resolve().parents[2] / "models"
SCHEDULER = "dynaspec.hosts.vllm.Scheduler"
MAX_MODEL_LEN = 256
LONGEST = 5
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": str(MODELS / "draft"), "num_speculative_tokens": LONGEST},
    "ngram": {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": LONGEST,
    },
}


def engine_options() -> dict[str, Any]:
    """So little KV that requests are preempted."""
    return {
        "model": str(MODELS / "target"),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "block_size": 32,
        "num_gpu_blocks_override": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


@dataclass
class Recorded:
    """What a run's decision log holds."""

    path: Path

    @property
    def plans(self) -> list[PlanCall]:
        return [call for call in read_calls(self.path) if isinstance(call, PlanCall)]

    @property
    def outcomes(self) -> list[Any]:
        return [call.outcome for call in read_calls(self.path) if isinstance(call, ObserveCall)]

    @property
    def lengths(self) -> list[int]:
        """Draft length of each step."""
        return [max(call.plan.depth) for call in self.plans]

    def replayed(self) -> ReplayResult:
        """Put to a controller built from nothing but the log."""
        config = SpeculativeConfig.parse(read_header(self.path).fields["speculative_config"])
        return replay(self.path, build_controller(config, self.plans[0].view.limits))


class Driven:
    """An engine; its scheduler gets another adapter for every policy, as loading models again would take minutes."""

    def __init__(self, method: str, llm: Any, folder: Path) -> None:
        self.method = method
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._folder = folder
        self._runs = 0

    def under(self, **settings: Any) -> SchedulerAdapter:
        """A new adapter; ``settings`` are dynaspec's."""
        config = self.scheduler.vllm_config
        config.additional_config = {"dynaspec": settings}
        self.scheduler._adapter = build_adapter(config, time.perf_counter)
        return self.scheduler._adapter

    def generate(self, prompts: Any, params: Any, **settings: Any) -> tuple[list[tuple[int, ...]], Recorded]:
        """Generates under a policy; the tokens, and the decisions."""
        self._runs += 1
        log = self._folder / f"{self._runs}.jsonl"
        adapter = self.under(**settings, decision_log=str(log))
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        adapter.close()
        return [tuple(output.outputs[0].token_ids) for output in outputs], Recorded(log)


class OwnDriven(Driven):
    """The same with dynaspec's drafter in the worker, which is built anew for every policy; it keeps the log."""

    def __init__(self, llm: Any, folder: Path) -> None:
        super().__init__("custom_class", llm, folder)
        self.drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter

    def under(self, **settings: Any) -> SchedulerAdapter:
        model = {} if "method" in settings else {"method": "draft_model", "model": str(MODELS / "draft")}
        adapter = super().under(**model, **settings)
        self.drafter.load_model(None)
        return adapter
