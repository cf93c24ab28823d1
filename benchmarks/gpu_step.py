"""Times decode and verify passes of a target and a drafter against the memory floor.

A pass of few rows is bound by memory: it cannot be faster than reading all weights and the context's KV once. The
floor is those bytes over the bandwidth that a device-to-device copy reaches on the same device. Weights are random
and made on the device, so that no checkpoint is needed; time does not depend on their values.

    python benchmarks/gpu_step.py --out gpu_step.json
    python benchmarks/gpu_step.py --shape tiny --device cpu      # a smoke test
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from dynaspec.model.attention.base import KV, AttentionBackend
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Decoder
from dynaspec.model.families import FAMILIES
from dynaspec.model.loader import assemble
from dynaspec.model.reader import Reader
from dynaspec.result_output import write_json

LLAMA = "LlamaForCausalLM"
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "vocab_size")  # fmt: skip
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "8b": {
        "target": (4096, 32, 32, 8, 128, 14336, 128256),
        "drafter": (2048, 16, 32, 8, 64, 8192, 128256),
    },
    "tiny": {"target": (128, 2, 4, 2, 32, 256, 512), "drafter": (64, 1, 2, 1, 32, 128, 512)},
}
"""``FIELDS`` of target and drafter: Llama 3.1 8B and Llama 3.2 1B, or a size for smoke tests."""
WARM_UP = 5
COPY_BYTES = {"cuda": 2**32, "cpu": 2**26}


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one kind of pass."""

    model: str
    batch: int
    rows: int
    """Rows of each sequence: 1 = decoding, k + 1 = verifying k drafted tokens."""
    mode: str
    """``eager``, or ``graph``: the pass replayed from a CUDA graph, its metadata copied in before."""
    ms: float
    floor_ms: float


class RandomTensors:
    """Stands in for a checkpoint: any tensor that is asked for exists."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def __contains__(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), device=self._device, dtype=self._dtype).normal_(std=0.02)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be timed, and the parts of it that a captured pass needs."""

    name: str
    config: DecoderConfig
    decoder: Decoder
    attention: AttentionBackend
    dtype: torch.dtype

    @staticmethod
    def build(name: str, shape: tuple[int, ...], longest: int, device: torch.device, dtype: torch.dtype) -> Subject:
        fields = dict(zip(FIELDS, shape, strict=True))
        config = FAMILIES[LLAMA].config(LlamaConfig(**fields, max_position_embeddings=longest), None)
        reader = Reader(RandomTensors(device, dtype), config, device, dtype)  # type: ignore[arg-type]
        decoder = assemble(config, FAMILIES[LLAMA].weights(reader, config), device, dtype)
        return Subject(name, config, decoder, decoder.attention, dtype)

    @property
    def weight_bytes(self) -> int:
        """Of the matrices that a pass multiplies with; of the embedding it reads single rows."""
        c = self.config
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        layer = attention + 3 * c.hidden_size * c.intermediate_size
        return (c.num_layers * layer + c.hidden_size * c.vocab_size) * self.dtype.itemsize

    def kv_bytes(self, tokens: int) -> int:
        c = self.config
        return 2 * tokens * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    def caches(self, blocks: int) -> list[KV]:
        """Random KV of every layer."""
        shapes = self.attention.kv_shape(blocks)
        device, dtype = self.decoder.device, self.dtype
        made = (
            [torch.empty(s, device=device, dtype=dtype).normal_() for s in shapes]
            for _ in range(self.config.num_layers)
        )
        return [(k, v) for k, v in made]


def make_batch(batch: int, rows: int, context: int, device: torch.device) -> ForwardBatch:
    """``rows`` rows for each of ``batch`` sequences of ``context`` tokens."""
    width = -(-(context + rows) // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(batch * width).astype(np.int32).reshape(batch, width)
    positions = np.tile(np.arange(context, context + rows, dtype=np.int64), batch)
    sequence = np.repeat(np.arange(batch), rows)
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        tokens=torch.arange(batch * rows, device=device) % 256,
        positions=positions,
        slots=slots,
        query_start=np.arange(0, batch * rows + 1, rows, dtype=np.int32),
        context_lens=np.full(batch, context, dtype=np.int32),
        block_tables=tables,
    )


def median_ms(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of ``run``, by CUDA events where there are any."""
    for _ in range(WARM_UP):
        run()
    return statistics.median(_device_ms(run, repeats) if device.type == "cuda" else _host_ms(run, repeats))


def _host_ms(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _device_ms(run: Callable[[], object], repeats: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for start, end in pairs:
        torch.cuda.synchronize()  # the host's work between two passes counts, as it does in an engine
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def copy_bandwidth(repeats: int, device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy within the device's memory."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (1e-3 * median_ms(lambda: target.copy_(source), repeats, device))


def eager_pass(subject: Subject, batch: ForwardBatch, kv: list[KV]) -> Callable[[], object]:
    return lambda: subject.decoder.logits(subject.decoder.forward(batch, kv))


def graphed_pass(subject: Subject, batch: ForwardBatch, kv: list[KV]) -> Callable[[], object]:
    """The same pass from a CUDA graph; each run plans on the host and uploads, as in an engine."""
    attention: Any = subject.attention
    decoder: Any = subject.decoder
    meta = attention.prepare(batch)

    def run() -> torch.Tensor:
        logits: torch.Tensor = decoder.logits(decoder.run(batch.tokens, meta, kv))
        return logits

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        meta.refill(attention.prepare(batch))
        graph.replay()

    return replay


def time_model(subject: Subject, options: argparse.Namespace, bandwidth: float) -> list[Timing]:
    device = subject.decoder.device
    width = -(-(options.context + max(options.rows)) // BLOCK_SIZE)
    kv = subject.caches(max(options.batch) * width)
    makers = {"eager": eager_pass} | ({"graph": graphed_pass} if device.type == "cuda" else {})
    timings = []
    for batch in options.batch:
        floor = (subject.weight_bytes + subject.kv_bytes(batch * options.context)) / bandwidth
        for rows in options.rows:
            inputs = make_batch(batch, rows, options.context, device)
            for mode, make in makers.items():
                ms = median_ms(make(subject, inputs, kv), options.repeats, device)
                timings.append(Timing(subject.name, batch, rows, mode, ms, 1e3 * floor))
    return timings


def show(timings: Sequence[Timing]) -> None:
    """Prints the table; ``break-even`` is explained at ``break_even``."""
    print("model    batch rows mode         ms  floor ms  of floor  break-even")
    for t in timings:
        even = break_even(t, timings)
        pass_ = f"{t.model:8} {t.batch:5} {t.rows:4} {t.mode:6} {t.ms:8.3f} {t.floor_ms:9.3f}"
        print(f"{pass_} {t.ms / t.floor_ms:8.2f}x  {'' if even is None else f'{even:10.2f}'}")


def break_even(verify: Timing, timings: Sequence[Timing]) -> float | None:
    """Tokens a step must emit for k drafter passes and a verify pass of k + 1 rows to pay; None for other passes."""
    if verify.model != "target" or verify.rows == 1:
        return None
    alike = {t.model: t.ms for t in timings if (t.batch, t.mode, t.rows) == (verify.batch, verify.mode, 1)}
    if len(alike) < 2:
        return None
    return ((verify.rows - 1) * alike["drafter"] + verify.ms) / alike["target"]


def provenance(device: torch.device) -> dict[str, Any]:
    """What the figures were measured with."""
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        import triton

        facts |= {
            "device": torch.cuda.get_device_name(device),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times passes of a target and a drafter against the memory floor.")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="sizes of target and drafter")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:<n> or cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64], help="sequences in a pass")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="rows of each sequence")
    parser.add_argument("--context", type=int, default=1024, help="tokens already in the KV cache")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs, of which the median counts")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                "PyTorch finds no CUDA device here; expected one, or the options --shape tiny --device cpu."
            )
        device = torch.device("cuda", device.index or 0)  # PyTorch wants a number
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = copy_bandwidth(options.repeats, device)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    longest = options.context + max(options.rows)
    timings: list[Timing] = []
    with torch.inference_mode():
        for name, shape in SHAPES[options.shape].items():
            timings += time_model(Subject.build(name, shape, longest, device, dtype), options, bandwidth)
    show(timings)
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        result = {
            "provenance": provenance(device),
            "settings": settings | {"dtype": str(dtype)},
            "copy_bytes_per_s": bandwidth,
            "timings": [asdict(timing) for timing in timings],
        }
        write_json(options.out, result)


if __name__ == "__main__":
    main()
