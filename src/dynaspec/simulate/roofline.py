"""Step times from first principles: a pass takes as long as its bytes or its arithmetic, whichever is slower.

The roofline of Williams, Waterman and Patterson (2009), once for the matrix products and once for attention, which
run one after the other; plus the all-reduces of tensor parallelism and fixed costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.contract.errors import ConfigError

from .costs import StepLoad, StepTime

_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Rows at which an engine would time passes at its start."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, as its data sheet has it."""

    name: str
    tflops: float
    """Dense bfloat16 matrix products, 10¹² floating-point operations a second, without sparsity."""
    bandwidth: float
    """Of its memory, 10⁹ bytes a second."""
    memory: float
    """10⁹ bytes."""
    link: float
    """To the other GPUs of a node, in one direction, 10⁹ bytes a second."""
    link_latency_us: float
    """Of one small all-reduce among them; an assumption: 8 µs over NVLink or Infinity Fabric, 30 µs over PCIe."""


GPUS: Mapping[str, Gpu] = {
    gpu.name.lower(): gpu
    for gpu in (
        # NVIDIA A100 data sheet (80GB SXM): 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s both ways.
        Gpu("A100", 312, 2039, 80, 300, 8),
        # NVIDIA H100 data sheet (SXM): 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways.
        Gpu("H100", 989.4, 3350, 80, 450, 8),
        # NVIDIA H200 data sheet (SXM): as H100, with 141 GB at 4.8 TB/s.
        Gpu("H200", 989.4, 4800, 141, 450, 8),
        # NVIDIA HGX B200 data sheet: 36 PFLOPS bf16 with sparsity, 1.44 TB at 62 TB/s for 8; NVLink 1.8 TB/s both ways.
        Gpu("B200", 2250, 7700, 180, 900, 8),
        # NVIDIA L40S data sheet: 362 TFLOPS bf16, 864 GB/s, PCIe 4.0 ×16 64 GB/s both ways.
        Gpu("L40S", 362, 864, 48, 32, 30),
        # NVIDIA L4 data sheet: 242 TFLOPS bf16 with sparsity, 300 GB/s, PCIe 4.0 ×16.
        Gpu("L4", 121, 300, 24, 32, 30),
        # NVIDIA Ada architecture white paper: 165.2 TFLOPS bf16 with fp32 accumulation, 1,008 GB/s, PCIe 4.0 ×16.
        Gpu("RTX4090", 165.2, 1008, 24, 32, 30),
        # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS bf16, 5.3 TB/s, seven links of 128 GB/s both ways.
        Gpu("MI300X", 1307.4, 5300, 192, 448, 8),
        # AMD Instinct MI325X data sheet: as MI300X, with 256 GB at 6 TB/s.
        Gpu("MI325X", 1307.4, 6000, 256, 448, 8),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder, as far as its speed depends on it."""

    name: str
    billions: float
    """Parameters, 10⁹, embeddings included."""
    layers: int
    hidden: int
    kv_bytes: int
    """Of one token's KV over all layers."""
    attention_flops: int
    """For one row to attend to one KV entry, over all layers."""
    active_billions: float | None = None
    """Parameters that one token uses; None = all of them."""
    experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = 2.0
    """A parameter: 2 = bfloat16, 1 = fp8."""
    kv_shards: bool = True
    """KV heads are spread over the GPUs of a tensor-parallel group; false: every GPU keeps them all (MLA)."""

    @property
    def size(self) -> float:
        """Bytes of all weights."""
        return self.billions * 1e9 * self.weight_bytes

    @property
    def flops(self) -> float:
        """Of one row, but attention: two for each parameter that it uses."""
        return 2e9 * (self.active_billions or self.billions)

    def read(self, rows: int) -> float:
        """Bytes of weights that a pass over ``rows`` reads: of experts only those that some row was sent to.

        Rows are taken to choose experts independently and evenly: a share 1 − (1 − chosen/experts)^rows is hit.
        """
        if not self.experts or self.active_billions is None:
            return self.size
        share = self.experts_per_token / self.experts
        in_experts = (self.billions - self.active_billions) / (1 - share)
        hit = 1 - (1 - share) ** rows
        return ((self.billions - in_experts) + in_experts * hit) * 1e9 * self.weight_bytes


def _grouped(
    name: str, billions: float, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **fields: object
) -> ModelShape:
    """Grouped-query attention, bfloat16 KV: keys and values of every KV head, one product for each query head."""
    return ModelShape(
        name,
        billions,
        layers,
        hidden,
        kv_bytes=2 * 2 * layers * kv_heads * head_dim,
        attention_flops=4 * layers * heads * head_dim,
        **fields,  # type: ignore[arg-type]
    )


MODELS: Mapping[str, ModelShape] = {
    model.name: model
    for model in (
        # The config.json that each model was published with, and its parameter count.
        _grouped("llama-3.2-1b", 1.236, 16, 2048, 32, 8, 64),
        _grouped("llama-3.2-3b", 3.213, 28, 3072, 24, 8, 128),
        _grouped("llama-3.1-8b", 8.030, 32, 4096, 32, 8, 128),
        _grouped("llama-3.1-70b", 70.55, 80, 8192, 64, 8, 128),
        _grouped("llama-3.1-405b", 405.9, 126, 16384, 128, 8, 128),
        _grouped("qwen3-0.6b", 0.596, 28, 1024, 16, 8, 128),
        _grouped("qwen3-1.7b", 1.721, 28, 2048, 16, 8, 128),
        _grouped("qwen3-8b", 8.191, 36, 4096, 32, 8, 128),
        _grouped("qwen3-32b", 32.76, 64, 5120, 64, 8, 128),
        _grouped(
            "qwen3-235b-a22b", 235.1, 94, 4096, 64, 4, 128, active_billions=22.1, experts=128, experts_per_token=8
        ),
        # EAGLE (Li et al., 2401.15077): what a pass reads, a decoder layer of the target's shape, the projection of
        # features and token to it, and the target's output head.
        _grouped("eagle-llama-3.1-8b", 0.776, 1, 4096, 32, 8, 128),
        _grouped("eagle-llama-3.1-70b", 2.04, 1, 8192, 64, 8, 128),
        # DeepSeek-V3 technical report (2412.19437): fp8 weights, MLA with a latent of 512 + 64 and 128 heads.
        ModelShape(
            "deepseek-v3",
            671.0,
            61,
            7168,
            kv_bytes=61 * (512 + 64) * 2,
            attention_flops=2 * 61 * 128 * (576 + 512),
            active_billions=37.0,
            experts=256,
            experts_per_token=8,
            weight_bytes=1.0,
            kv_shards=False,
        ),
    )
}


def find_gpu(name: str) -> Gpu:
    """
    Raises:
        ConfigError: no such GPU.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"the GPU {name!r} is not known; expected one of {', '.join(g.name for g in GPUS.values())}")
    return gpu


def find_model(name: str) -> ModelShape:
    """
    Raises:
        ConfigError: no such model.
    """
    model = MODELS.get(name.lower())
    if model is None:
        raise ConfigError(f"the model {name!r} is not known; expected one of {', '.join(MODELS)}")
    return model


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
