"""What products on CPU have in common: panels of a weight matrix, and tiles of sums over one of them.

A weight [out, in] is kept in panels of 32 outputs, so that a pass streams through memory in order. A panel is worked on
in tiles of some rows by 32 outputs, or by 16 where registers are few, whose sums stay in registers. Every row of a tile
is summed alike, so its bits do not depend on which tile it lies in.

``panel_kernel`` emits all of this but the sums themselves, which are what kinds of weights differ in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import HAS_AVX512, LANES, same

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PANEL = 2 * LANES
GROUP = 32
"""Inputs that share a scale where numbers are quantised, and to whose multiples rows of them are filled up."""
Halves = Sequence[int]
BOTH: Halves = (0, 1)
Vectors = Sequence[Any]
"""16 numbers of one half of a panel each, or of both."""
PARTS: Sequence[Halves] = (BOTH,) if HAS_AVX512 else ((0,), (1,))
"""Halves of a panel whose sums are in registers at the same time."""
TEAM_WORK = 1 << 16
"""Multiplications from which more threads than one are faster."""
ROW_WORK = 1 << 15
"""Numbers to round, to gate, to norm or to rotate from which more threads than one are faster."""
_LINE = 64
"""Bytes of a cache line."""

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT32 = ir.FloatType()
FLOATS = ir.VectorType(FLOAT32, LANES)
INTS = ir.VectorType(I32, LANES)


def load(builder: Any, base: Any, offset: Any, vector: Any) -> Any:
    """The vector that begins ``offset`` elements behind a pointer."""
    value = builder.load(builder.bitcast(builder.gep(base, [offset]), vector.as_pointer()))
    value.align = 4
    return value


def load_halves(builder: Any, base: Any, offset: Any, vector: Any, halves: Halves = BOTH) -> Vectors:
    """Vectors of words in a row: of the panel's first 16 outputs, of its last 16, or of both."""
    return [load(builder, base, builder.add(offset, I64(half * LANES)), vector) for half in halves]


def splat(builder: Any, scalar: Any, vector: Any = FLOATS) -> Any:
    """A vector of one number."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, same(0))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def _keep_rolled(branch: Any) -> None:
    """Marks a loop, by the branch back to its start: two turns of it at once need more registers than there are."""
    module = branch.module
    rolled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.MDValue(module, [], str(len(module.metadata)))
    loop.operands = (loop, rolled)  # a loop's name is a node that has itself as its first operand
    branch.set_metadata("llvm.loop", loop)


class Tile:
    """Emits the sums of some rows over one panel, see ``panel_kernel``."""

    def __init__(
        self,
        builder: Any,
        rows: int,
        x: Any,
        stride: Any,
        out: Any,
        out_stride: Any,
        halves: Halves,
        fetched: tuple[Any, Any, int],
    ) -> None:
        """
        Args:
            halves: those of the panel that are summed.
            x: the rows' inputs, ``stride`` words apart.
            out: where their sums go, ``out_stride`` numbers apart.
            fetched: address that is fetched when a panel's first words are loaded, bytes that it moves on with each
                step, and how many times two lines are fetched from there.
        """
        self.builder = builder
        self.halves = halves
        self._fetched, self._pace, self._lines = fetched
        self.x = [builder.gep(x, [builder.mul(stride, I64(row))]) for row in range(rows)]
        """Pointer to each row's inputs."""
        self._out = [builder.gep(out, [builder.mul(out_stride, I64(row))]) for row in range(rows)]
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in halves] for _ in range(rows)]
        """Of each row, and of each of the halves, where its sums are."""

    def load(self, base: Any, offset: Any, vector: Any) -> Vectors:
        """Its halves of the panel's words from ``offset`` on."""
        return load_halves(self.builder, base, offset, vector, self.halves)

    def fill(self, values: Vectors) -> None:
        """Every row's sums become these."""
        for slots in self.sums:
            for slot, value in zip(slots, values, strict=True):
                self.builder.store(value, slot)

    def put(self) -> None:
        """Writes the sums to memory."""
        for out, slots in zip(self._out, self.sums, strict=True):
            for half, slot in zip(self.halves, slots, strict=True):
                to = self.builder.bitcast(self.builder.gep(out, [I64(half * LANES)]), FLOATS.as_pointer())
                self.builder.store(self.builder.load(slot), to).align = 4

    def steps(self, count: Any, step: Callable[[Any], None]) -> None:
        """A loop of ``count`` steps through the panel; ``step`` emits the n-th."""
        builder = self.builder
        fetch_type = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
        with cgutils.for_range(builder, count) as loop:
            soon = builder.gep(self._fetched, [builder.mul(loop.index, self._pace)])
            for line in range(self._lines):
                at = builder.gep(soon, [I64(_LINE * line)])  # the processor fetches lines by twos
                builder.call(fetch, [at, I32(0), I32(2), I32(1)])  # to the second cache
            step(loop.index)
            latch = builder.block
        _keep_rolled(latch.terminator)

    def add(self, index: Any, weights: Vectors) -> None:
        """Adds input ``index`` times its weights."""
        builder = self.builder
        for x_row, slots in zip(self.x, self.sums, strict=True):
            value = splat(builder, builder.load(builder.gep(x_row, [index])))
            for slot, weight in zip(slots, weights, strict=True):
                builder.store(fma(builder, value, weight, builder.load(slot)), slot)


def panel_kernel(
    emit: Callable[[Tile, Any, Any], None],
    size: int,
    most_rows: int,
    ahead: int,
    inputs: int = 1,
    words: bool = False,
    parts: Sequence[Halves] = PARTS,
) -> Any:
    """A product with one panel, (x, rows, stride, in, panel, bias, out, out stride) → nothing.

    All but the numbers are addresses: x [rows, in] with its rows ``stride`` words apart, bias [32], out [rows, 32] with
    its rows ``out stride`` apart.

    Args:
        emit: the sums of a tile over a panel, given the tile, a pointer to the panel's words and in.
        size: bytes of a panel's step.
        most_rows: worked on at a time.
        ahead: steps that weights are fetched ahead of their use where there is one tile: 8 rows would wait for memory.
            Where there are more, each fetches its share of the next panel: the first one alone would wait for all of
            it, and memory for the others.
        inputs: that a step takes.
        words: x has words of another kind than float32.
        parts: of a panel, worked on one after the other.
    """

    @intrinsic
    def kernel(
        typingctx: Any, x: Any, rows: Any, x_stride: Any, depth: Any, panel: Any, bias: Any, out: Any, stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_, rows_, x_stride_, depth_, panel_, bias_, out_, stride_ = args
            x_at = builder.inttoptr(x_, (I32 if words else FLOAT32).as_pointer())
            bias_at, out_at = (builder.inttoptr(at, FLOAT32.as_pointer()) for at in (bias_, out_))
            panel_at = builder.inttoptr(panel_, I32.as_pointer())
            steps = builder.udiv(builder.add(depth_, I64(inputs - 1)), I64(inputs))

            def tile(count: int, halves: Halves, row: Any, start: Any, pace: Any) -> None:
                fetched = builder.gep(builder.bitcast(panel_at, I8.as_pointer()), [start])
                x_tile = builder.gep(x_at, [builder.mul(row, x_stride_)])
                out_tile = builder.gep(out_at, [builder.mul(row, stride_)])
                lines = -(-size // (len(parts) * _LINE))
                sums = Tile(builder, count, x_tile, x_stride_, out_tile, stride_, halves, (fetched, pace, lines))
                sums.fill(sums.load(bias_at, I64(0), FLOATS))
                emit(sums, panel_at, depth_)
                sums.put()

            # As few tiles as possible, of sizes that differ by one at most: first the larger ones.
            tiles = builder.udiv(builder.add(rows_, I64(most_rows - 1)), I64(most_rows))
            with builder.if_then(builder.icmp_signed(">", tiles, I64(0))):
                small = builder.udiv(rows_, tiles)
                larger = builder.urem(rows_, tiles)
                turns = builder.mul(tiles, I64(len(parts)))
                pace = builder.udiv(I64(size), turns)
                alone = builder.icmp_signed("==", turns, I64(1))
                whole = builder.mul(steps, I64(size))
                first = builder.select(alone, I64(ahead * size), whole)
                share = builder.mul(steps, pace)
                for part, halves in enumerate(parts):
                    with cgutils.for_range(builder, tiles) as loop:
                        number = loop.index
                        is_larger = builder.icmp_signed("<", number, larger)
                        rows_here = builder.add(small, builder.zext(is_larger, I64))
                        row = builder.add(builder.mul(number, small), builder.select(is_larger, number, larger))
                        turn = builder.add(builder.mul(tiles, I64(part)), number)
                        fetch = builder.add(first, builder.mul(turn, share))
                        for rows_of_tile in range(1, most_rows + 1):
                            with builder.if_then(builder.icmp_signed("==", rows_here, I64(rows_of_tile))):
                                tile(rows_of_tile, halves, row, fetch, pace)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 8), generate

    return kernel
