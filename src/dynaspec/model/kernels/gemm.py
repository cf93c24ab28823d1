"""Matrix products on CPU: rows by a weight matrix held in float32, bfloat16 or int8, summed in float32.

The matrix [out, in] is packed once into panels of 32 outputs so that a pass streams through memory in order. Few rows
cost little more than it takes to read the weights, so fewer bytes are less time.

With float32 arithmetic (``FLOAT32``) every output is one running sum over the inputs in their order, in whichever tile
its row lies: the bits of a row depend on nothing but that row. A bfloat16 weight widens exactly as it is loaded, and
so does an int8 weight, times its scale: 8 and 11 bits make a product of no more than float32 has. So the sums are, bit
for bit, those of the widened matrix in float32.

With bfloat16 arithmetic inputs are rounded to bfloat16 first, and quantised weights are too. ``ROUNDED`` then does what
``FLOAT32`` does. ``DOT`` uses AVX512_BF16's dot product, which adds two inputs in a row: the same sums, so the same
bits, except that it takes numbers below 2⁻¹²⁶ for 0. ``TILES`` uses AMX, see ``amx``, whose sums have an order of their
own. ``best_arithmetic`` names the processor's fastest. It is never chosen by the number of rows.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
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
from .simd import LANES
from .team import together

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PANEL = 2 * LANES
GROUP = 32
"""Inputs that share a scale where weights are int8."""
FLOAT, BFLOAT, PAIRS, INT8 = range(4)
"""How weights are held, see ``pack`` and ``int8``."""
FLOAT32, ROUNDED, DOT, TILES = range(4)
"""How they are multiplied, see the module."""
GROUP_WORDS = (2 * PANEL + GROUP * PANEL) // 4
"""32-bit words of a panel's group of int8 weights: a float16 scale for each output, then the weights of each input."""
_TILE_ROWS = 14
"""Rows worked on at a time, at most: 28 sums in registers, two weights and an input: all that there are."""
_AHEAD = 128
"""Inputs that weights are fetched ahead of their use where there is one tile; without it 8 rows wait for memory. Where
there are more, each fetches its share of the next panel: the first one alone would wait for all of it, and memory for
the others."""
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


def _two(builder: Any, base: Any, offset: Any, vector: Any) -> tuple[Any, Any]:
    """Two vectors of words in a row: of the panel's first and last 16 outputs."""
    second = builder.add(offset, _I64(LANES))
    return _load(builder, base, offset, vector), _load(builder, base, second, vector)


def _int8_weights(builder: Any, base: Any, offset: Any, scales: tuple[Any, Any]) -> tuple[Any, Any]:
    def widened(half: int) -> Any:
        whole = _load(builder, base, builder.add(offset, _I64(half * LANES // 4)), _BYTES)
        return builder.fmul(builder.sitofp(builder.sext(whole, _INTS), _VEC), scales[half])

    return widened(0), widened(1)


def _scales(builder: Any, base: Any, offset: Any) -> tuple[Any, Any]:
    first, second = (builder.add(offset, _I64(half * LANES // 2)) for half in range(2))
    low, high = (_load(builder, base, at, _HALVES) for at in (first, second))
    return builder.fpext(low, _VEC), builder.fpext(high, _VEC)


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


class _Tile:
    """Emits the sums of some rows over one panel, see ``_panel_kernel``."""

    def __init__(self, builder: Any, rows: int, x: Any, stride: Any, bias: Any, fetched: tuple[Any, Any]) -> None:
        """
        Args:
            x: the rows' inputs, ``stride`` words apart.
            fetched: address that is fetched when a panel's first words are loaded, and bytes that it moves on with each
                step.
        """
        self.builder = builder
        self._fetched, self._pace = fetched
        self._x = [builder.gep(x, [builder.mul(stride, _I64(row))]) for row in range(rows)]
        self.sums = [[cgutils.alloca_once(builder, _VEC) for _ in range(2)] for _ in range(rows)]
        first = _two(builder, bias, _I64(0), _VEC)
        for slots in self.sums:
            for slot, value in zip(slots, first, strict=True):
                builder.store(value, slot)

    def steps(self, start: Any, count: Any, step: Callable[[Any, Any], None]) -> None:
        """A loop of ``count`` steps; ``step`` emits the n-th, which is the ``start`` + n-th of the panel."""
        builder = self.builder
        fetch_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
        with cgutils.for_range(builder, count) as loop:
            index = builder.add(start, loop.index)
            soon = builder.gep(self._fetched, [builder.mul(index, self._pace)])
            builder.call(fetch, [soon, _I32(0), _I32(2), _I32(1)])  # to the second cache
            step(loop.index, index)
            latch = builder.block
        _keep_rolled(latch.terminator)

    def add(self, index: Any, weights: tuple[Any, Any]) -> None:
        """Adds input ``index`` times its weights."""
        builder = self.builder
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
        for x_row, slots in zip(self._x, self.sums, strict=True):
            value = _splat(builder, builder.load(builder.gep(x_row, [index])))
            for slot, weight in zip(slots, weights, strict=True):
                builder.store(builder.call(fma, [value, weight, builder.load(slot)]), slot)

    def add_pairs(self, index: Any, words: tuple[Any, Any]) -> None:
        """Adds two inputs, whose words are the ``index``-th of the rows, times their weights."""
        builder = self.builder
        name, kinds = "llvm.x86.avx512bf16.dpbf16ps.512", [_VEC, _PAIRS, _PAIRS]
        dot = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VEC, kinds), name)
        for x_row, slots in zip(self._x, self.sums, strict=True):
            value = _splat(builder, builder.load(builder.gep(x_row, [index])), _INTS)
            for slot, word in zip(slots, words, strict=True):
                pairs = [builder.bitcast(word, _PAIRS), builder.bitcast(value, _PAIRS)]
                builder.store(builder.call(dot, [builder.load(slot), *pairs]), slot)


def _float_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    tile.steps(
        _I64(0), depth, lambda _, n: tile.add(n, _two(tile.builder, panel, tile.builder.mul(n, _I64(PANEL)), _VEC))
    )


def _bfloat_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder

    def step(_: Any, n: Any) -> None:
        words = _load(builder, panel, builder.mul(n, _I64(LANES)), _INTS)
        low, high = builder.shl(words, _SIXTEEN), builder.and_(words, _HIGH)
        tile.add(n, (builder.bitcast(low, _VEC), builder.bitcast(high, _VEC)))

    tile.steps(_I64(0), depth, step)


def _dot_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder

    def pair(_: Any, n: Any) -> None:
        tile.add_pairs(n, _two(builder, panel, builder.mul(n, _I64(PANEL)), _INTS))

    tile.steps(_I64(0), builder.lshr(builder.add(depth, _I64(1)), _I64(1)), pair)


def _int8_sums(tile: _Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder
    groups = builder.udiv(builder.add(depth, _I64(GROUP - 1)), _I64(GROUP))
    with cgutils.for_range(builder, groups) as group:
        at = builder.mul(group.index, _I64(GROUP_WORDS))
        scales = _scales(builder, panel, at)
        weights_at = builder.add(at, _I64(2 * PANEL // 4))
        start = builder.mul(group.index, _I64(GROUP))
        left = builder.sub(depth, start)
        count = builder.select(builder.icmp_signed("<", left, _I64(GROUP)), left, _I64(GROUP))

        def step(number: Any, index: Any) -> None:
            offset = builder.add(weights_at, builder.mul(number, _I64(PANEL // 4)))
            tile.add(index, _int8_weights(builder, panel, offset, scales))

        tile.steps(start, count, step)


def _panel_kernel(emit: Callable[[_Tile, Any, Any], None], size: int, pairs: bool = False) -> Any:
    """A product with one panel, (x, rows, stride, in, panel, bias, out, out stride) → nothing.

    All but the numbers are addresses: x [rows, in] with its rows ``stride`` words apart, bias [32], out [rows, 32] with
    its rows ``out stride`` apart.

    Args:
        size: bytes of a panel's step.
        pairs: a step takes two inputs, and x has words of two bfloat16; else it takes one in float32.
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
            steps = builder.lshr(builder.add(depth_, _I64(1)), _I64(1)) if pairs else depth_

            def tile(count: int, row: Any, ahead: Any, pace: Any) -> None:
                fetched = builder.gep(builder.bitcast(panel_at, _I8.as_pointer()), [ahead])
                x_tile = builder.gep(x_at, [builder.mul(row, x_stride_)])
                sums = _Tile(builder, count, x_tile, x_stride_, bias_at, (fetched, pace))
                emit(sums, panel_at, depth_)
                for number, slots in enumerate(sums.sums):
                    for half, slot in enumerate(slots):
                        at = builder.add(builder.mul(stride_, builder.add(row, _I64(number))), _I64(half * LANES))
                        target = builder.bitcast(builder.gep(out_at, [at]), _VEC.as_pointer())
                        builder.store(builder.load(slot), target).align = 4

            # As few tiles as possible, of sizes that differ by one at most: first the larger ones.
            tiles = builder.udiv(builder.add(rows_, _I64(_TILE_ROWS - 1)), _I64(_TILE_ROWS))
            with builder.if_then(builder.icmp_signed(">", tiles, _I64(0))):
                small = builder.udiv(rows_, tiles)
                larger = builder.urem(rows_, tiles)
                pace = builder.udiv(_I64(size), tiles)
                alone = builder.icmp_signed("==", tiles, _I64(1))
                whole = builder.mul(steps, _I64(size))
                ahead = builder.select(alone, _I64((_AHEAD // 2 if pairs else _AHEAD) * size), whole)
                share = builder.mul(steps, pace)
                for rows_of_tile in range(1, _TILE_ROWS + 1):
                    for before, offset, count in (
                        (_I64(0), 1, larger),
                        (larger, 0, builder.sub(tiles, larger)),
                    ):
                        fits = builder.icmp_signed("==", builder.add(small, _I64(offset)), _I64(rows_of_tile))
                        with builder.if_then(fits), cgutils.for_range(builder, count) as loop:
                            number = builder.add(before, loop.index)
                            row = builder.add(builder.mul(number, small), loop.index if offset else before)
                            tile(rows_of_tile, row, builder.add(ahead, builder.mul(number, share)), pace)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 8), generate

    return kernel


_float_panel = _panel_kernel(_float_sums, 4 * PANEL)
_bfloat_panel = _panel_kernel(_bfloat_sums, 4 * LANES)
_int8_panel = _panel_kernel(_int8_sums, 4 * GROUP_WORDS // GROUP)
_dot_panel = _panel_kernel(_dot_sums, 4 * PANEL, pairs=True) if _has_dot() else _bfloat_panel


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
        first, last = (_as_bfloat(builder, value) for value in _two(builder, from_at, _I64(0), _VEC))
        even, odd = (
            builder.shuffle_vector(first, last, ir.Constant(_INTS, list(range(start, 2 * LANES, 2))))
            for start in (0, 1)
        )
        word = builder.or_(even, builder.lshr(odd, _SIXTEEN))
        builder.store(word, builder.bitcast(to_at, _INTS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _widened(pairs: bool) -> Any:
    """A group of a panel of int8 weights → the same as it is in ``PAIRS``, or in ``FLOAT`` rounded to bfloat16.

    Both are addresses.
    """

    @intrinsic
    def widen(typingctx: Any, group: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            from_at, to_at = (builder.inttoptr(at, _I32.as_pointer()) for at in args)
            scales = _scales(builder, from_at, _I64(0))
            with cgutils.for_range(builder, _I64(GROUP // 2)) as loop:
                at = builder.add(_I64(2 * PANEL // 4), builder.mul(loop.index, _I64(2 * PANEL // 4)))
                two = [_int8_weights(builder, from_at, builder.add(at, _I64(n * PANEL // 4)), scales) for n in range(2)]
                first, second = ([_as_bfloat(builder, value) for value in one] for one in two)
                to = builder.gep(to_at, [builder.mul(loop.index, _I64(PANEL if pairs else 2 * PANEL))])
                words = [*first, *second]
                if pairs:
                    shifted = (builder.lshr(word, _SIXTEEN) for word in second)
                    words = [builder.or_(*both) for both in zip(first, shifted, strict=True)]
                for number, word in enumerate(words):
                    place = builder.gep(to, [_I64(number * LANES)])
                    builder.store(word, builder.bitcast(place, _INTS.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return widen


_widen_to_pairs, _widen_to_floats = _widened(True), _widened(False)


@njit("i8(i8, i8)", cache=True, nogil=True)
def panel_words(depth: int, form: int) -> int:
    """32-bit words of a panel of weights held in a form."""
    groups = (depth + GROUP - 1) // GROUP
    if form == FLOAT:
        return depth * PANEL
    if form == BFLOAT:
        return depth * LANES
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
    groups, group_words = (depth + GROUP - 1) // GROUP, GROUP * PANEL // (1 if arithmetic == ROUNDED else 2)
    wide = np.empty(groups * group_words if arithmetic != FLOAT32 and form == INT8 else 0, np.uint32)
    for number in range(panels * thread // threads, panels * (thread + 1) // threads):
        panel = weights.ctypes.data + number * words * 4
        column = number * PANEL * 4
        offset, target = bias.ctypes.data + column, out.ctypes.data + column
        if wide.size:
            for group in range(groups):
                source, to = panel + group * GROUP_WORDS * 4, wide.ctypes.data + group * group_words * 4
                if arithmetic == ROUNDED:
                    _widen_to_floats(source, to)
                else:
                    _widen_to_pairs(source, to)
            panel = wide.ctypes.data
        if arithmetic == TILES:
            amx.panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif arithmetic == DOT:
            _dot_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == FLOAT or wide.size:
            _float_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == BFLOAT:
            _bfloat_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        else:
            _int8_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
    if arithmetic == TILES:
        amx.release()


@njit("void(f4[:, ::1], u4[::1], i8, i8, f4[::1], f4[:, ::1], i8)", cache=True, nogil=True)
def multiply(x: Floats, weights: Words, form: int, arithmetic: int, bias: Floats, out: Floats, threads: int) -> None:
    """out = x · weightᵀ + bias.

    Args:
        x: [rows, in].
        weights: what ``pack`` or ``int8.pack`` made of the weight [out, in].
        form: how it is held; ``PAIRS`` or ``INT8`` with ``DOT`` and ``TILES``, all others with the rest.
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
