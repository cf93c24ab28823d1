"""Step times from first principles: a pass takes as long as its bytes or its arithmetic, whichever is slower.

The roofline of Williams, Waterman and Patterson (2009), once for the matrix products and once for attention, which
run one after the other; plus the all-reduces of tensor parallelism and fixed costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.contract.errors import ConfigError

from .costs import StepTime
from .hardware import Gpu, ModelShape
from .load import StepLoad

_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Rows at which an engine would time passes at its start."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How far software gets, and what it adds. Assumptions, all in one place; a measured profile replaces them."""

    compute: float = 0.65
    """Of the peak, in large matrix products."""
    bandwidth: float = 0.80
    """Of the peak, in reading weights and KV."""
    layer_s: float = 5e-6
    """Gaps between the kernels of a layer, with graphs."""
    step_s: float = 1e-3
    """Scheduling, sampling and output, once a step."""
    draft_pass_s: float = 2e-4
    """Sampling and input preparation, once a drafter pass."""
    memory: float = 0.9
    """Of a GPU's memory for weights and KV."""


class RooflineCosts:
    """A target on ``gpus`` GPUs with tensor parallelism, a drafter on ``draft_gpus`` of them.

    Args:
        drafter: None: lookup, which costs nothing.
        draft_gpus: 1 avoids the all-reduces that dominate a small drafter; each GPU of the node then runs a copy.

    Raises:
        ConfigError: the models do not fit into the memory.
    """

    def __init__(
        self,
        target: ModelShape,
        drafter: ModelShape | None,
        gpu: Gpu,
        *,
        gpus: int = 1,
        draft_gpus: int = 1,
        efficiency: Efficiency | None = None,
    ) -> None:
        if not 1 <= draft_gpus <= gpus:
            raise ConfigError(f"the drafter has {draft_gpus} GPUs and the target {gpus}; expected 1 to {gpus}")
        self._target = target
        self._drafter = drafter
        self._gpu = gpu
        self._gpus = gpus
        self._draft_gpus = draft_gpus
        self._efficiency = efficiency or Efficiency()
        self.name = f"{target.name} on {gpus} × {gpu.name}" + (f", {drafter.name} drafting" if drafter else "")
        self.kv_tokens: int | None = self._kv_tokens()

    def time(self, load: StepLoad) -> StepTime:
        work = load.work
        rows = work.verify_rows + work.prefill_rows
        verify_s = self._pass_s(self._target, self._gpus, rows, load.context, work.kv_tokens)
        return StepTime(draft_s=self._draft_s(load), verify_s=verify_s, other_s=self._efficiency.step_s)

    def pass_costs(self) -> PassCosts:
        """Curves without context, as a start-up measurement has them."""
        drafter: Curve = ()
        if self._drafter is not None:
            fixed = self._efficiency.draft_pass_s
            model, gpus = self._drafter, self._draft_gpus
            drafter = tuple((rows, fixed + self._pass_s(model, gpus, rows, rows, rows)) for rows in _PROBES)
        target = tuple((rows, self._pass_s(self._target, self._gpus, rows, rows, rows)) for rows in _PROBES)
        return PassCosts(target=target, drafters=(drafter,))

    def _draft_s(self, load: StepLoad) -> float:
        if self._drafter is None:
            return 0.0
        return sum(
            self._efficiency.draft_pass_s + self._pass_s(self._drafter, self._draft_gpus, rows, context, context)
            for rows, context in zip(load.work.rows_per_pass, load.draft_context, strict=True)
        )

    def _pass_s(self, model: ModelShape, gpus: int, rows: int, context: int, kv_tokens: int) -> float:
        """
        Args:
            context: KV entries read, each request's once.
            kv_tokens: Σ over rows of the KV entries attended to.
        """
        flops_s = gpus * self._gpu.tflops * 1e12 * self._efficiency.compute
        bytes_s = gpus * self._gpu.bandwidth * 1e9 * self._efficiency.bandwidth
        kv_bytes = context * model.kv_bytes * (1 if model.kv_shards else gpus)
        products = max(model.read(rows) / bytes_s, rows * model.flops / flops_s)
        attention = max(kv_bytes / bytes_s, kv_tokens * model.attention_flops / flops_s)
        return products + attention + self._all_reduce_s(model, gpus, rows) + model.layers * self._efficiency.layer_s

    def _all_reduce_s(self, model: ModelShape, gpus: int, rows: int) -> float:
        """Two all-reduces a layer over bfloat16 activations, each a ring's 2(g − 1)/g of the bytes and a latency."""
        if gpus == 1:
            return 0.0
        moved = 2 * (gpus - 1) / gpus * rows * model.hidden * 2
        return 2 * model.layers * (self._gpu.link_latency_us * 1e-6 + moved / (self._gpu.link * 1e9))

    def _kv_tokens(self) -> int:
        usable = self._gpu.memory * 1e9 * self._efficiency.memory
        weights, token = self._target.size / self._gpus, self._on_each(self._target, self._gpus)
        if self._drafter is not None:
            weights += self._drafter.size / self._draft_gpus
            token += self._on_each(self._drafter, self._draft_gpus)
        if weights >= usable:
            raise ConfigError(
                f"the weights take {weights / 1e9:.0f} GB on each of {self._gpus} × {self._gpu.name}, of which "
                f"{usable / 1e9:.0f} GB are usable; expected more GPUs, larger ones or a smaller model"
            )
        return int((usable - weights) / token)

    @staticmethod
    def _on_each(model: ModelShape, gpus: int) -> float:
        """Bytes of a token's KV on each GPU."""
        return model.kv_bytes / (gpus if model.kv_shards else 1)
