"""Matrix products on CPU: float32 rows by a weight matrix held in float32, bfloat16 or int8, summed in float32.

The matrix [out, in] is packed once into panels of 32 outputs, [panels, in, 32], so that a pass streams through memory
in order. Every output is one running sum over the inputs in their order, in whichever tile its row lies: the bits of
a row depend on nothing but that row. A bfloat16 weight widens exactly as it is loaded, and so does an int8 weight,
times its scale: 8 and 11 bits make a product of no more than float32 has. So the sums are, bit for bit, those of the
widened matrix in float32. Few rows cost little more than it takes to read the weights, so fewer bytes are less time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynaspec.compiled import njit

from .simd import LANES
from .team import together

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PANEL = 2 * LANES
GROUP = 32
"""Inputs that share a scale where weights are int8."""
GROUP_WORDS = (2 * PANEL + GROUP * PANEL) // 4
"""32-bit words of a panel's group: a float16 scale for each output, then the weights of each input."""
_TILE_ROWS = 14
"""Rows worked on at a time, at most: 28 sums in registers, two weights and an input: all that there are."""

_AHEAD = 128
"""Inputs that weights are fetched ahead of their use where there is one tile; without it 8 rows wait for memory. Where
there are more, each fetches its share of the next panel: the first one alone would wait for all of it, and memory for
the others."""
_TEAM_WORK = 1 << 16
"""Multiplications from which more threads than one are faster."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_VEC = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(_I8, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _load(builder: Any, base: Any, offset: Any, vector: Any) -> Any:
    value = builder.load(builder.bitcast(builder.gep(base, [offset]), vector.as_pointer()))
    value.align = 4
    return value


def _float_weights(builder: Any, base: Any, offset: Any) -> tuple[Any, Any]:
    second = builder.add(offset, _I64(LANES))
    return _load(builder, base, offset, _VEC), _load(builder, base, second, _VEC)


def _bfloat_weights(builder: Any, base: Any, offset: Any) -> tuple[Any, Any]:
    words = _load(builder, base, offset, _INTS)
    low = builder.shl(words, ir.Constant(_INTS, [16] * LANES))
    high = builder.and_(words, ir.Constant(_INTS, [0xFFFF0000] * LANES))
    return builder.bitcast(low, _VEC), builder.bitcast(high, _VEC)


def _int8_weights(builder: Any, base: Any, offset: Any, scales: tuple[Any, Any]) -> tuple[Any, Any]:
    def widened(half: int) -> Any:
        whole = _load(builder, base, builder.add(offset, _I64(half * LANES // 4)), _BYTES)
        return builder.fmul(builder.sitofp(builder.sext(whole, _INTS), _VEC), scales[half])

    return widened(0), widened(1)


def _scales(builder: Any, base: Any, offset: Any) -> tuple[Any, Any]:
    first, second = (builder.add(offset, _I64(half * LANES // 2)) for half in range(2))
    low, high = (_load(builder, base, at, _HALVES) for at in (first, second))
    return builder.fpext(low, _VEC), builder.fpext(high, _VEC)


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VEC, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))


def _keep_rolled(branch: Any) -> None:
    """Marks a loop, by the branch back to its start: two turns of it at once need more registers than there are."""
    module = branch.module
    rolled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = ir.MDValue(module, [], str(len(module.metadata)))
    loop.operands = (loop, rolled)  # a loop's name is a node that has itself as its first operand
    branch.set_metadata("llvm.loop", loop)


def _tile(
    builder: Any,
    rows: int,
    words: int,
    x: Any,
    depth: Any,
    panel: Any,
    bias: Any,
    out: Any,
    stride: Any,
    ahead: Any,
    pace: Any,
) -> None:
    """Emits the sums of ``rows`` rows over one panel, see ``_panel_kernel``.

    Memory is fetched from ``ahead`` bytes behind the panel's start on, ``pace`` bytes an input.
    """
    module = builder.module
    fma = cgutils.get_or_insert_function(module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
    fetch_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(module, fetch_type, "llvm.prefetch.p0")
    x_rows = [builder.gep(x, [builder.mul(depth, _I64(row))]) for row in range(rows)]
    sums = [[cgutils.alloca_once(builder, _VEC) for _ in range(2)] for _ in range(rows)]
    first = _float_weights(builder, bias, _I64(0))
    for slots in sums:
        for slot, value in zip(slots, first, strict=True):
            builder.store(value, slot)
    fetched = builder.bitcast(panel, _I8.as_pointer())

    def inputs(start: Any, count: Any, weights: Callable[[Any], tuple[Any, Any]]) -> None:
        """``count`` inputs from ``start`` on; ``weights`` gives those of the n-th."""
        with cgutils.for_range(builder, count) as loop:
            index = builder.add(start, loop.index)
            soon = builder.gep(fetched, [builder.add(ahead, builder.mul(index, pace))])
            builder.call(fetch, [soon, _I32(0), _I32(2), _I32(1)])  # to the second cache
            pair = weights(loop.index)
            for x_row, slots in zip(x_rows, sums, strict=True):
                value = _splat(builder, builder.load(builder.gep(x_row, [index])))
                for slot, weight in zip(slots, pair, strict=True):
                    builder.store(builder.call(fma, [value, weight, builder.load(slot)]), slot)
            latch = builder.block
        _keep_rolled(latch.terminator)

    if words == GROUP_WORDS:
        groups = builder.udiv(builder.add(depth, _I64(GROUP - 1)), _I64(GROUP))
        with cgutils.for_range(builder, groups) as group:
            at = builder.mul(group.index, _I64(GROUP_WORDS))
            scales = _scales(builder, panel, at)
            weights_at = builder.add(at, _I64(2 * PANEL // 4))
            start = builder.mul(group.index, _I64(GROUP))
            left = builder.sub(depth, start)
            count = builder.select(builder.icmp_signed("<", left, _I64(GROUP)), left, _I64(GROUP))

            def of_group(number: Any) -> tuple[Any, Any]:
                offset = builder.add(weights_at, builder.mul(number, _I64(PANEL // 4)))
                return _int8_weights(builder, panel, offset, scales)

            inputs(start, count, of_group)
    else:
        load = _float_weights if words == PANEL else _bfloat_weights
        inputs(_I64(0), depth, lambda number: load(builder, panel, builder.mul(number, _I64(words))))
    for row, slots in enumerate(sums):
        for half, slot in enumerate(slots):
            at = builder.add(builder.mul(stride, _I64(row)), _I64(half * LANES))
            target = builder.bitcast(builder.gep(out, [at]), _VEC.as_pointer())
            builder.store(builder.load(slot), target).align = 4


def _panel_kernel(words: int) -> Any:
    """A product with one panel, (x, rows, in, panel, bias, out, stride) → nothing.

    x, panel, bias and out are addresses: x [rows, in], panel [in, ``words``] or [groups, ``GROUP_WORDS``], bias [32],
    out [rows, 32] with its rows ``stride`` apart.
    """
    size = words * 4 // (GROUP if words == GROUP_WORDS else 1)  # bytes an input

    @intrinsic
    def kernel(typingctx: Any, x: Any, rows: Any, depth: Any, panel: Any, bias: Any, out: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            rows_, depth_, stride_ = args[1], args[2], args[6]
            x_at, bias_at, out_at = (builder.inttoptr(args[i], _FLOAT.as_pointer()) for i in (0, 4, 5))
            panel_at = builder.inttoptr(args[3], (_FLOAT if words == PANEL else _I32).as_pointer())

            def tile(count: int, row: Any, ahead: Any, pace: Any) -> None:
                x_tile = builder.gep(x_at, [builder.mul(row, depth_)])
                out_tile = builder.gep(out_at, [builder.mul(row, stride_)])
                _tile(builder, count, words, x_tile, depth_, panel_at, bias_at, out_tile, stride_, ahead, pace)

            # As few tiles as possible, of sizes that differ by one at most: first the larger ones.
            tiles = builder.udiv(builder.add(rows_, _I64(_TILE_ROWS - 1)), _I64(_TILE_ROWS))
            with builder.if_then(builder.icmp_signed(">", tiles, _I64(0))):
                small = builder.udiv(rows_, tiles)
                larger = builder.urem(rows_, tiles)
                pace = builder.udiv(_I64(size), tiles)
                alone = builder.icmp_signed("==", tiles, _I64(1))
                ahead = builder.select(alone, _I64(_AHEAD * size), builder.mul(depth_, _I64(size)))
                share = builder.mul(depth_, pace)
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

        return types.void(*(types.intp,) * 7), generate

    return kernel


_float_panel = _panel_kernel(PANEL)
_bfloat_panel = _panel_kernel(LANES)
_int8_panel = _panel_kernel(GROUP_WORDS)


@njit("i8(i8, i8)", cache=True, nogil=True)
def steps(depth: int, words: int) -> int:
    """The second dimension of a packed matrix whose third is ``words``: inputs, or groups of them."""
    return (depth + GROUP - 1) // GROUP if words == GROUP_WORDS else depth


@njit("void(i8, i8, f4[:, ::1], u4[:, :, ::1], f4[::1], f4[:, ::1])", cache=True, nogil=True)
def _share(thread: int, threads: int, x: Floats, packed: Words, bias: Floats, out: Floats) -> None:
    """One thread's panels of a product."""
    panels, length, words = packed.shape
    rows, depth = x.shape
    for number in range(panels * thread // threads, panels * (thread + 1) // threads):
        panel = packed.ctypes.data + number * length * words * 4
        column = number * PANEL * 4
        inputs, offset, target = x.ctypes.data, bias.ctypes.data + column, out.ctypes.data + column
        if words == PANEL:
            _float_panel(inputs, rows, depth, panel, offset, target, out.shape[1])
        elif words == LANES:
            _bfloat_panel(inputs, rows, depth, panel, offset, target, out.shape[1])
        else:
            _int8_panel(inputs, rows, depth, panel, offset, target, out.shape[1])


@njit("void(f4[:, ::1], u4[:, :, ::1], f4[::1], f4[:, ::1], i8)", cache=True, nogil=True)
def multiply(x: Floats, packed: Words, bias: Floats, out: Floats, threads: int) -> None:
    """out = x · weightᵀ + bias.

    Args:
        x: [rows, in].
        packed: what ``pack`` or ``int8.pack`` made of the weight [out, in].
        bias: [out rounded up to 32].
        out: [rows, out rounded up to 32].
        threads: of the team, at most.
    """
    if threads == 1 or x.shape[0] * out.shape[1] * x.shape[1] < _TEAM_WORK:
        _share(0, 1, x, packed, bias, out)
    else:
        together(_share, threads, (x, packed, bias, out))


def pack(weight: Floats) -> Words:
    """Panels of a weight [out, in], in bfloat16 if that loses nothing.

    Returns:
        [panels, in, 16] where each word holds two bfloat16 weights (the low half is output i of the panel, the high
        half output i + 16), or [panels, in, 32] float32. As uint32 either way.
    """
    padded = -(-weight.shape[0] // PANEL) * PANEL
    words = np.zeros((padded, weight.shape[1]), np.uint32)
    words[: weight.shape[0]] = np.ascontiguousarray(weight).view(np.uint32)
    panels = words.reshape(-1, PANEL, weight.shape[1])
    if not (words & 0xFFFF).any():
        panels = panels[:, :LANES] >> 16 | panels[:, LANES:]
    return np.ascontiguousarray(panels.transpose(0, 2, 1))
