"""Matrix products on CPU: rows by a weight matrix held in float32, bfloat16, int8 or int4, summed in float32.

The matrix [out, in] is packed once into panels of 32 outputs so that a pass streams through memory in order. Few rows
cost little more than it takes to read the weights, so fewer bytes are less time.

With float32 arithmetic (``FLOAT32``) every output is one running sum over the inputs in their order, in whichever tile
its row lies: the bits of a row depend on nothing but that row. A bfloat16 weight widens exactly as it is loaded, and
so does an int8 weight, times its scale: 8 and 11 bits make a product of no more than float32 has. So the sums are, bit
for bit, those of the widened matrix in float32.

int4 weights have a scale and a minimum for each group of 32 inputs. Σ x · number of a group is one running sum from 0
on; the output gets this times the scale, then Σ x times the minimum. So a weight takes one instruction less than if it
was widened, and instructions are what binds a single row.

With bfloat16 arithmetic inputs are rounded to bfloat16 first, and quantised weights are too. ``ROUNDED`` then does what
``FLOAT32`` does. ``DOT`` uses AVX512_BF16's dot product, which adds two inputs in a row: the same sums, so the same
bits, except that it takes numbers below 2⁻¹²⁶ for 0. ``TILES`` uses AMX, see ``amx``, whose sums have an order of their
own. ``best_arithmetic`` names the processor's fastest. It is never chosen by the number of rows.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynaspec.compiled import njit

from . import amx
from .simd import HAS_AVX512, LANES
from .team import together

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PANEL = 2 * LANES
GROUP = 32
"""Inputs that share a scale where weights are int8."""
FLOAT, BFLOAT, PAIRS, INT8, INT4 = range(5)
"""How weights are held, see ``pack``, ``int8`` and ``int4``."""
FLOAT32, ROUNDED, DOT, TILES = range(4)
"""How they are multiplied, see the module."""
GROUP_WORDS = (2 * PANEL + GROUP * PANEL) // 4
"""32-bit words of a panel's group of int8 weights: a float16 scale for each output, then the weights of each input."""
NIBBLES = 8
"""int4 weights of a word: those of so many inputs in a row, the first in the lowest bits."""
INT4_WORDS = (2 * 2 * PANEL) // 4 + GROUP // NIBBLES * PANEL
"""32-bit words of a panel's group of int4 weights: float16 scales, then float16 minimums of the outputs, then for each
8 inputs a word an output."""
Halves = Sequence[int]
BOTH: Halves = (0, 1)
Vectors = Sequence[Any]
"""16 numbers of one half of a panel each, or of both."""
_PARTS: Sequence[Halves] = (BOTH,) if HAS_AVX512 else ((0,), (1,))
"""Halves of a panel whose sums are in registers at the same time."""
_TILE_ROWS = 14 if HAS_AVX512 else 6
"""Rows worked on at a time, at most: 28 sums in registers, two weights and an input: all that there are. In a quarter
of the room 6 sums, a weight and an input."""
_INT4_TILE_ROWS = 13 if HAS_AVX512 else 5
"""The same where room is taken by the words that numbers come from."""
_AHEAD = 128
"""Inputs that weights are fetched ahead of their use where there is one tile; without it 8 rows wait for memory. Where
there are more, each fetches its share of the next panel: the first one alone would wait for all of it, and memory for
the others."""
_LINE = 64
"""Bytes of a cache line."""
_TEAM_WORK = 1 << 16
"""Multiplications from which more threads than one are faster."""
_ROUND_WORK = 1 << 15
"""Inputs to round from which more threads than one are faster."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_VEC = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(_I8, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_HIGH = ir.Constant(_INTS, [0xFFFF0000] * LANES)
_FOUR = ir.Constant(_INTS, [4] * LANES)
_SIXTEEN = ir.Constant(_INTS, [16] * LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _has_dot() -> bool:
    return platform.machine() == "x86_64" and bool(llvm.get_host_cpu_features().get("avx512bf16"))


def best_arithmetic() -> int:
    """The fastest kind of bfloat16 arithmetic that this processor has."""
    if amx.available():
        return TILES
    return DOT if _has_dot() else ROUNDED


def _load(builder: Any, base: Any, offset: Any, vector: Any) -> Any:
    value = builder.load(builder.bitcast(builder.gep(base, [offset]), vector.as_pointer()))
    value.align = 4
    return value


def _halves(builder: Any, base: Any, offset: Any, vector: Any, halves: Halves = BOTH) -> Vectors:
    """Vectors of words in a row: of the panel's first 16 outputs, of its last 16, or of both."""
    return [_load(builder, base, builder.add(offset, _I64(half * LANES)), vector) for half in halves]


def _int8_weights(builder: Any, base: Any, offset: Any, scales: Vectors, halves: Halves = BOTH) -> Vectors:
    whole = [_load(builder, base, builder.add(offset, _I64(half * LANES // 4)), _BYTES) for half in halves]
    numbers = [builder.sitofp(builder.sext(one, _INTS), _VEC) for one in whole]
    return [builder.fmul(number, scale) for number, scale in zip(numbers, scales, strict=True)]


def _scales(builder: Any, base: Any, offset: Any, halves: Halves = BOTH) -> Vectors:
    stored = [_load(builder, base, builder.add(offset, _I64(half * LANES // 2)), _HALVES) for half in halves]
    return [builder.fpext(one, _VEC) for one in stored]


def _splat(builder: Any, scalar: Any, vector: Any = _VEC) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))


def _keep_rolled(branch: Any) -> None:
    """Marks a loop, by the branch back to its start: two turns of it at once need more registers than there are."""
    module = branch.module
    rolled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.MDValue(module, [], str(len(module.metadata)))
    loop.operands = (loop, rolled)  # a loop's name is a node that has itself as its first operand
    branch.set_metadata("llvm.loop", loop)


def _int4_numbers(builder: Any, words: Any) -> Any:
    """Those in the lowest 4 bits of words, as float32."""
    if HAS_AVX512:  # a look-up heeds no more than 4 bits of an index, so it is all in one instruction
        kind = ir.FunctionType(_VEC, [_VEC, _INTS])
        look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return builder.call(look_up, [ir.Constant(_VEC, [float(number) for number in range(16)]), words])
    return builder.sitofp(builder.and_(words, ir.Constant(_INTS, [15] * LANES)), _VEC)


class _Tile:
    """Emits the sums of some rows over one panel, see ``_panel_kernel``."""

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
        self._x = [builder.gep(x, [builder.mul(stride, _I64(row))]) for row in range(rows)]
        self._out = [builder.gep(out, [builder.mul(out_stride, _I64(row))]) for row in range(rows)]
        self._sums = [[cgutils.alloca_once(builder, _VEC) for _ in halves] for _ in range(rows)]
        self._fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")

    def load(self, base: Any, offset: Any, vector: Any) -> Vectors:
        """Its halves of the panel's words from ``offset`` on."""
        return _halves(self.builder, base, offset, vector, self.halves)

    def fill(self, values: Vectors) -> None:
        """Every row's sums become these."""
        for slots in self._sums:
            for slot, value in zip(slots, values, strict=True):
                self.builder.store(value, slot)

    def put(self) -> None:
        """Writes the sums to memory."""
        for out, slots in zip(self._out, self._sums, strict=True):
            for half, slot in zip(self.halves, slots, strict=True):
                to = self.builder.bitcast(self.builder.gep(out, [_I64(half * LANES)]), _VEC.as_pointer())
                self.builder.store(self.builder.load(slot), to).align = 4

    def put_onto(self, scales: Vectors) -> None:
        """The sums times ``scales``, plus what is in memory, become the sums."""
        for out, slots in zip(self._out, self._sums, strict=True):
            before = self.load(out, _I64(0), _VEC)
            for slot, scale, value in zip(slots, scales, before, strict=True):
                self.builder.store(self.builder.call(self._fma, [self.builder.load(slot), scale, value]), slot)

    def steps(self, start: Any, count: Any, step: Callable[[Any, Any], None]) -> None:
        """A loop of ``count`` steps; ``step`` emits the n-th, which is the ``start`` + n-th of the panel."""
        builder = self.builder
        fetch_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
        with cgutils.for_range(builder, count) as loop:
            index = builder.add(start, loop.index)
            soon = builder.gep(self._fetched, [builder.mul(index, self._pace)])
            for line in range(self._lines):
                at = builder.gep(soon, [_I64(2 * _LINE * line)])  # the processor fetches lines by twos
                builder.call(fetch, [at, _I32(0), _I32(2), _I32(1)])  # to the second cache
            step(loop.index, index)
            latch = builder.block
        _keep_rolled(latch.terminator)

    def add(self, index: Any, weights: Vectors) -> None:
        """Adds input ``index`` times its weights."""
        builder = self.builder
        for x_row, slots in zip(self._x, self._sums, strict=True):
            value = _splat(builder, builder.load(builder.gep(x_row, [index])))
            for slot, weight in zip(slots, weights, strict=True):
                builder.store(builder.call(self._fma, [value, weight, builder.load(slot)]), slot)

    def add_pairs(self, index: Any, words: Vectors) -> None:
        """Adds two inputs, whose words are the ``index``-th of the rows, times their weights."""
        builder = self.builder
        name, kinds = "llvm.x86.avx512bf16.dpbf16ps.512", [_VEC, _PAIRS, _PAIRS]
        dot = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, kinds), name)
        for x_row, slots in zip(self._x, self._sums, strict=True):
            value = _splat(builder, builder.load(builder.gep(x_row, [index])), _INTS)
            for slot, word in zip(slots, words, strict=True):
                pairs = [builder.bitcast(word, _PAIRS), builder.bitcast(value, _PAIRS)]
                builder.store(builder.call(dot, [builder.load(slot), *pairs]), slot)


def _float_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    tile.steps(_I64(0), depth, lambda _, n: tile.add(n, tile.load(panel, tile.builder.mul(n, _I64(PANEL)), _VEC)))


def _bfloat_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder

    def step(_: Any, n: Any) -> None:
        words = _load(builder, panel, builder.mul(n, _I64(LANES)), _INTS)
        widened = [builder.and_(words, _HIGH) if half else builder.shl(words, _SIXTEEN) for half in tile.halves]
        tile.add(n, [builder.bitcast(one, _VEC) for one in widened])

    tile.steps(_I64(0), depth, step)


def _dot_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder

    def pair(_: Any, n: Any) -> None:
        tile.add_pairs(n, tile.load(panel, builder.mul(n, _I64(PANEL)), _INTS))

    tile.steps(_I64(0), builder.lshr(builder.add(depth, _I64(1)), _I64(1)), pair)


def _int8_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder
    groups = builder.udiv(builder.add(depth, _I64(GROUP - 1)), _I64(GROUP))
    with cgutils.for_range(builder, groups) as group:
        at = builder.mul(group.index, _I64(GROUP_WORDS))
        scales = _scales(builder, panel, at, tile.halves)
        weights_at = builder.add(at, _I64(2 * PANEL // 4))
        start = builder.mul(group.index, _I64(GROUP))
        left = builder.sub(depth, start)
        count = builder.select(builder.icmp_signed("<", left, _I64(GROUP)), left, _I64(GROUP))

        def step(number: Any, index: Any) -> None:
            offset = builder.add(weights_at, builder.mul(number, _I64(PANEL // 4)))
            tile.add(index, _int8_weights(builder, panel, offset, scales, tile.halves))

        tile.steps(start, count, step)


def _int4_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    """Sums wait in memory while registers have a group's Σ x · number, which is then multiplied by the scales. Σ x,
    which stands behind the inputs, is multiplied by the minimums."""
    builder = tile.builder
    groups = builder.udiv(builder.add(depth, _I64(GROUP - 1)), _I64(GROUP))
    zeros, steps = ir.Constant(_VEC, [0.0] * LANES), GROUP // NIBBLES
    with cgutils.for_range(builder, groups) as group:
        at = builder.mul(group.index, _I64(INT4_WORDS))
        weights_at = builder.add(at, _I64(PANEL))
        tile.put()
        tile.fill([zeros for _ in tile.halves])

        def step(number: Any, index: Any) -> None:
            words = tile.load(panel, builder.add(weights_at, builder.mul(number, _I64(PANEL))), _INTS)
            left = [cgutils.alloca_once(builder, _INTS) for _ in words]
            for slot, word in zip(left, words, strict=True):
                builder.store(word, slot)
            with cgutils.for_range(builder, _I64(NIBBLES)) as place:
                numbers = [_int4_numbers(builder, builder.load(slot)) for slot in left]
                tile.add(builder.add(builder.mul(index, _I64(NIBBLES)), place.index), numbers)
                for slot in left:
                    builder.store(builder.lshr(builder.load(slot), _FOUR), slot)
                latch = builder.block
            _keep_rolled(latch.terminator)

        tile.steps(builder.mul(group.index, _I64(steps)), _I64(steps), step)
        tile.put_onto(_scales(builder, panel, at, tile.halves))
        sums_at = builder.add(builder.mul(groups, _I64(GROUP)), group.index)
        tile.add(sums_at, _scales(builder, panel, builder.add(at, _I64(LANES)), tile.halves))


def _panel_kernel(
    emit: Callable[[_Tile, Any, Any], None],
    size: int,
    inputs: int = 1,
    pairs: bool = False,
    most_rows: int = _TILE_ROWS,
    parts: Sequence[Halves] = _PARTS,
) -> Any:
    """A product with one panel, (x, rows, stride, in, panel, bias, out, out stride) → nothing.

    All but the numbers are addresses: x [rows, in] with its rows ``stride`` words apart, bias [32], out [rows, 32] with
    its rows ``out stride`` apart.

    Args:
        size: bytes of a panel's step.
        inputs: that a step takes.
        pairs: x has words of two bfloat16; else of float32.
        most_rows: worked on at a time.
        parts: of a panel, worked on one after the other.
    """

    @intrinsic
    def kernel(
        typingctx: Any, x: Any, rows: Any, x_stride: Any, depth: Any, panel: Any, bias: Any, out: Any, stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x_, rows_, x_stride_, depth_, panel_, bias_, out_, stride_ = args
            x_at = builder.inttoptr(x_, (_I32 if pairs else _FLOAT).as_pointer())
            bias_at, out_at = (builder.inttoptr(at, _FLOAT.as_pointer()) for at in (bias_, out_))
            panel_at = builder.inttoptr(panel_, _I32.as_pointer())
            steps = builder.udiv(builder.add(depth_, _I64(inputs - 1)), _I64(inputs))

            def tile(count: int, halves: Halves, row: Any, ahead: Any, pace: Any) -> None:
                fetched = builder.gep(builder.bitcast(panel_at, _I8.as_pointer()), [ahead])
                x_tile = builder.gep(x_at, [builder.mul(row, x_stride_)])
                out_tile = builder.gep(out_at, [builder.mul(row, stride_)])
                lines = -(-size // (2 * _LINE))
                sums = _Tile(builder, count, x_tile, x_stride_, out_tile, stride_, halves, (fetched, pace, lines))
                sums.fill(sums.load(bias_at, _I64(0), _VEC))
                emit(sums, panel_at, depth_)
                sums.put()

            # As few tiles as possible, of sizes that differ by one at most: first the larger ones.
            tiles = builder.udiv(builder.add(rows_, _I64(most_rows - 1)), _I64(most_rows))
            with builder.if_then(builder.icmp_signed(">", tiles, _I64(0))):
                small = builder.udiv(rows_, tiles)
                larger = builder.urem(rows_, tiles)
                turns = builder.mul(tiles, _I64(len(parts)))
                pace = builder.udiv(_I64(size), turns)
                alone = builder.icmp_signed("==", turns, _I64(1))
                whole = builder.mul(steps, _I64(size))
                ahead = builder.select(alone, _I64(_AHEAD // inputs * size), whole)
                share = builder.mul(steps, pace)
                for part, halves in enumerate(parts):
                    with cgutils.for_range(builder, tiles) as loop:
                        number = loop.index
                        is_larger = builder.icmp_signed("<", number, larger)
                        rows_here = builder.add(small, builder.zext(is_larger, _I64))
                        row = builder.add(builder.mul(number, small), builder.select(is_larger, number, larger))
                        turn = builder.add(builder.mul(tiles, _I64(part)), number)
                        fetch = builder.add(ahead, builder.mul(turn, share))
                        for rows_of_tile in range(1, most_rows + 1):
                            with builder.if_then(builder.icmp_signed("==", rows_here, _I64(rows_of_tile))):
                                tile(rows_of_tile, halves, row, fetch, pace)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 8), generate

    return kernel


_float_panel = _panel_kernel(_float_sums, 4 * PANEL)
_bfloat_panel = _panel_kernel(_bfloat_sums, 4 * LANES)
_int8_panel = _panel_kernel(_int8_sums, 4 * GROUP_WORDS // GROUP)
_int4_panel = _panel_kernel(_int4_sums, 4 * INT4_WORDS * NIBBLES // GROUP, inputs=NIBBLES, most_rows=_INT4_TILE_ROWS)
_dot_panel = _panel_kernel(_dot_sums, 4 * PANEL, inputs=2, pairs=True) if _has_dot() else _bfloat_panel


def _as_bfloat(builder: Any, value: Any) -> Any:
    """Words whose high half is a vector of float32 rounded to bfloat16, to nearest, ties to even; the low half is 0.

    What is undefined stays so.
    """
    bits = builder.bitcast(value, _INTS)
    one = ir.Constant(_INTS, [1] * LANES)
    odd = builder.and_(builder.lshr(bits, _SIXTEEN), one)
    rounded = builder.add(builder.add(bits, ir.Constant(_INTS, [0x7FFF] * LANES)), odd)
    undefined = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, ir.Constant(_INTS, [0x00400000] * LANES))
    return builder.and_(builder.select(undefined, quiet, rounded), _HIGH)


@intrinsic
def _round_sixteen(typingctx: Any, source: Any, target: Any) -> Any:
    """16 float32 at an address → the same, rounded to bfloat16, at another."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at = (builder.inttoptr(at, _I32.as_pointer()) for at in args)
        word = _as_bfloat(builder, _load(builder, from_at, _I64(0), _VEC))
        builder.store(word, builder.bitcast(to_at, _INTS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _pair_thirty_two(typingctx: Any, source: Any, target: Any) -> Any:
    """32 float32 at an address → 16 words of two, rounded to bfloat16, at another: see ``pack``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at = (builder.inttoptr(at, _I32.as_pointer()) for at in args)
        first, last = (_as_bfloat(builder, value) for value in _halves(builder, from_at, _I64(0), _VEC))
        even, odd = (
            builder.shuffle_vector(first, last, ir.Constant(_INTS, list(range(start, 2 * LANES, 2))))
            for start in (0, 1)
        )
        word = builder.or_(even, builder.lshr(odd, _SIXTEEN))
        builder.store(word, builder.bitcast(to_at, _INTS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _two_int8(builder: Any, group: Any, number: Any) -> Sequence[Vectors]:
    """Weights of the ``number``-th two inputs of a panel's group."""
    scales = _scales(builder, group, _I64(0))
    at = builder.add(_I64(2 * PANEL // 4), builder.mul(number, _I64(2 * PANEL // 4)))
    return [_int8_weights(builder, group, builder.add(at, _I64(n * PANEL // 4)), scales) for n in range(2)]


def _eight_int4(builder: Any, group: Any, number: Any) -> Sequence[Vectors]:
    """Weights of the ``number``-th eight inputs of a panel's group: each rounded to float32 once."""
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
    words = _halves(builder, group, builder.add(_I64(PANEL), builder.mul(number, _I64(PANEL))), _INTS)
    scales, minimums = (_scales(builder, group, _I64(at)) for at in (0, LANES))

    def weights(place: int, half: int) -> Any:
        shifted = builder.lshr(words[half], ir.Constant(_INTS, [4 * place] * LANES))
        return builder.call(fma, [_int4_numbers(builder, shifted), scales[half], minimums[half]])

    return [[weights(place, half) for half in BOTH] for place in range(NIBBLES)]


def _widened(some: Callable[[Any, Any, Any], Sequence[Vectors]], inputs: int, pairs: bool, rounded: bool = True) -> Any:
    """A group of a panel of quantised weights → the same as it is in ``PAIRS``, or in ``FLOAT``.

    Both are addresses. Numbers are ``rounded`` to bfloat16, which those in ``PAIRS`` have to be.

    Args:
        some: emits the weights of so many ``inputs`` in a row.
    """

    @intrinsic
    def widen(typingctx: Any, group: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            from_at, to_at = (builder.inttoptr(at, _I32.as_pointer()) for at in args)
            with cgutils.for_range(builder, _I64(GROUP // inputs)) as loop:
                words = some(builder, from_at, loop.index)
                if rounded:
                    words = [[_as_bfloat(builder, value) for value in one] for one in words]
                if pairs:
                    words = [
                        [builder.or_(one, builder.lshr(other, _SIXTEEN)) for one, other in zip(*both, strict=True)]
                        for both in zip(words[::2], words[1::2], strict=True)
                    ]
                to = builder.gep(to_at, [builder.mul(loop.index, _I64(len(words) * PANEL))])
                for number, word in enumerate(word for one in words for word in one):
                    place = builder.gep(to, [_I64(number * LANES)])
                    builder.store(word, builder.bitcast(place, word.type.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return widen


_int8_to_pairs, _int8_to_floats = (_widened(_two_int8, 2, pairs) for pairs in (True, False))
_int8_exactly = _widened(_two_int8, 2, pairs=False, rounded=False)
_int4_to_pairs, _int4_to_floats = (_widened(_eight_int4, NIBBLES, pairs) for pairs in (True, False))


@njit("i8(i8, i8)", cache=True, nogil=True)
def panel_words(depth: int, form: int) -> int:
    """32-bit words of a panel of weights held in a form."""
    groups = (depth + GROUP - 1) // GROUP
    if form == FLOAT:
        return depth * PANEL
    if form == BFLOAT:
        return depth * LANES
    if form == INT4:
        return groups * INT4_WORDS
    return groups * (GROUP_WORDS if form == INT8 else GROUP // 2 * PANEL)


@njit("void(i8, i8, f4[:, ::1], f4[:, ::1])", cache=True, nogil=True)
def _round_share(thread: int, threads: int, x: Floats, out: Floats) -> None:
    """One thread's rows of x [rows, in], rounded to bfloat16, into ``out`` [rows, in rounded up to 32], or as pairs
    into half of it, [rows, in rounded up to 32 / 2]."""
    rows, depth = x.shape
    width = (depth + GROUP - 1) // GROUP * GROUP
    last = np.empty(GROUP, np.float32)
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        source, target = x.ctypes.data + row * depth * 4, out.ctypes.data + row * out.shape[1] * 4
        for at in range(0, width, GROUP):
            here = source + at * 4
            if at + GROUP > depth:
                last[:] = 0.0
                last[: depth - at] = x[row, at:]
                here = last.ctypes.data
            if out.shape[1] == width:
                _round_sixteen(here, target + at * 4)
                _round_sixteen(here + LANES * 4, target + (at + LANES) * 4)
            else:
                _pair_thirty_two(here, target + at * 2)


@intrinsic
def _sum_thirty_two(typingctx: Any, source: Any, target: Any) -> Any:
    """The sum of 32 float32 at an address → another: the first half is added to the second one until one is left."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at = (builder.inttoptr(at, _FLOAT.as_pointer()) for at in args)
        low, high = _halves(builder, builder.bitcast(from_at, _I32.as_pointer()), _I64(0), _VEC)
        total, lanes = builder.fadd(low, high), LANES
        while lanes > 1:
            lanes //= 2
            chosen = ir.VectorType(_I32, lanes)
            parts = [
                builder.shuffle_vector(total, total, ir.Constant(chosen, list(range(first, first + lanes))))
                for first in (0, lanes)
            ]
            total = builder.fadd(*parts)
        builder.store(builder.extract_element(total, _I32(0)), to_at)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit("void(i8, i8, f4[:, ::1], f4[:, ::1])", cache=True, nogil=True)
def _sum_share(thread: int, threads: int, x: Floats, out: Floats) -> None:
    """One thread's rows of x [rows, in] into ``out`` [rows, in rounded up to 32 + groups]: as they are, then the sum of
    each group of 32."""
    rows, depth = x.shape
    groups = (depth + GROUP - 1) // GROUP
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        out[row, :depth] = x[row]
        out[row, depth : groups * GROUP] = 0.0
        at = out.ctypes.data + row * out.shape[1] * 4
        for group in range(groups):
            _sum_thirty_two(at + group * GROUP * 4, at + (groups * GROUP + group) * 4)


@njit("void(i8, i8, f4[:, ::1], i8, u4[::1], i8, i8, f4[::1], f4[:, ::1])", cache=True, nogil=True)
def _share(
    thread: int,
    threads: int,
    x: Floats,
    depth: int,
    weights: Words,
    form: int,
    arithmetic: int,
    bias: Floats,
    out: Floats,
) -> None:
    """One thread's panels of a product; x has been rounded for the arithmetic."""
    rows, stride = x.shape
    panels, words = out.shape[1] // PANEL, panel_words(depth, form)
    inputs = x.ctypes.data
    groups, group_words = (depth + GROUP - 1) // GROUP, GROUP * PANEL // (2 if arithmetic in (DOT, TILES) else 1)
    # For float32 arithmetic tiles widen int8 themselves, so that memory is read meanwhile, unless there are many.
    is_wide = form in (INT8, INT4) if arithmetic != FLOAT32 else form == INT8 and rows > 2 * _TILE_ROWS
    wide = np.empty(groups * group_words if is_wide else 0, np.uint32)
    for number in range(panels * thread // threads, panels * (thread + 1) // threads):
        panel = weights.ctypes.data + number * words * 4
        column = number * PANEL * 4
        offset, target = bias.ctypes.data + column, out.ctypes.data + column
        if wide.size:
            for group in range(groups):
                to = wide.ctypes.data + group * group_words * 4
                if form == INT8:
                    source = panel + group * GROUP_WORDS * 4
                    if arithmetic == FLOAT32:
                        _int8_exactly(source, to)
                    elif arithmetic == ROUNDED:
                        _int8_to_floats(source, to)
                    else:
                        _int8_to_pairs(source, to)
                else:
                    source = panel + group * INT4_WORDS * 4
                    if arithmetic == ROUNDED:
                        _int4_to_floats(source, to)
                    else:
                        _int4_to_pairs(source, to)
            panel = wide.ctypes.data
        if arithmetic == TILES:
            amx.panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif arithmetic == DOT:
            _dot_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == FLOAT or wide.size:
            _float_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == BFLOAT:
            _bfloat_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == INT4:
            _int4_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        else:
            _int8_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
    if arithmetic == TILES:
        amx.release()


@njit("void(f4[:, ::1], u4[::1], i8, i8, f4[::1], f4[:, ::1], i8)", cache=True, nogil=True)
def multiply(x: Floats, weights: Words, form: int, arithmetic: int, bias: Floats, out: Floats, threads: int) -> None:
    """out = x · weightᵀ + bias.

    Args:
        x: [rows, in].
        weights: what ``pack``, ``int8.pack`` or ``int4.pack`` made of the weight [out, in].
        form: how it is held; ``PAIRS``, ``INT8`` or ``INT4`` with ``DOT`` and ``TILES``, all but ``PAIRS`` with the
            rest.
        arithmetic: ``TILES`` and ``DOT`` only where the processor has them.
        bias: [out rounded up to 32].
        out: [rows, out rounded up to 32].
        threads: of the team, at most.
    """
    rows, depth = x.shape
    inputs = x
    if arithmetic != FLOAT32:
        width = (depth + GROUP - 1) // GROUP * GROUP
        inputs = np.empty((rows, width if arithmetic == ROUNDED else width // 2), np.float32)
        if threads == 1 or rows * depth < _ROUND_WORK:
            _round_share(0, 1, x, inputs)
        else:
            together(_round_share, threads, (x, inputs))
    elif form == INT4:
        groups = (depth + GROUP - 1) // GROUP
        inputs = np.empty((rows, groups * GROUP + groups), np.float32)
        if threads == 1 or rows * depth < _ROUND_WORK:
            _sum_share(0, 1, x, inputs)
        else:
            together(_sum_share, threads, (x, inputs))
    if threads == 1 or rows * out.shape[1] * depth < _TEAM_WORK:
        _share(0, 1, inputs, depth, weights, form, arithmetic, bias, out)
    else:
        together(_share, threads, (inputs, depth, weights, form, arithmetic, bias, out))


def pack(weight: Floats, arithmetic: int = FLOAT32) -> tuple[Words, int]:
    """Panels of a weight [out, in], which is not rounded: for all arithmetic but ``FLOAT32`` it is to be bfloat16.

    Returns:
        [panels, words of one] and the form. ``FLOAT``: [panels, in, 32], float32 as words. ``BFLOAT``, if that loses
        nothing: [panels, in, 16], where the low half of a word is output i of the panel, the high half output i + 16.
        ``PAIRS``: [panels, in / 2, 32], where the high half of a word is the first of two inputs, the low half the
        second, with zeros up to a multiple of 32 inputs.
    """
    padded = -(-weight.shape[0] // PANEL) * PANEL
    words = np.zeros((padded, weight.shape[1]), np.uint32)
    words[: weight.shape[0]] = np.ascontiguousarray(weight).view(np.uint32)
    panels, form = words.reshape(-1, PANEL, weight.shape[1]), FLOAT
    if arithmetic in (DOT, TILES):
        whole = np.zeros((len(panels), PANEL, -(-weight.shape[1] // GROUP) * GROUP), np.uint32)
        whole[:, :, : weight.shape[1]] = panels
        panels, form = whole[:, :, ::2] | whole[:, :, 1::2] >> 16, PAIRS
    elif not (words & 0xFFFF).any():
        panels, form = panels[:, :LANES] >> 16 | panels[:, LANES:], BFLOAT
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(len(panels), -1), form
