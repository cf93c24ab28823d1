"""Matrix products on CPU: float32 rows by a weight matrix held in float32 or bfloat16, summed in float32.

The matrix [out, in] is packed once into panels of 32 outputs, [panels, in, 32], so that a pass streams through memory
in order. Every output is one running sum over the inputs in their order, in whichever tile its row lies: the bits of
a row depend on nothing but that row. A bfloat16 weight widens exactly as it is loaded; few rows cost what it takes to
read the weights, and half the bytes are half the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import LANES
from .team import together

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

PANEL = 2 * LANES
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
    """Emits the sums of ``rows`` rows over one panel whose inputs take ``words`` 32-bit words each.

    Memory is fetched from ``ahead`` words behind the panel's start on, ``pace`` words an input.
    """
    module = builder.module
    weights = _float_weights if words == PANEL else _bfloat_weights
    fma = cgutils.get_or_insert_function(module, ir.FunctionType(_VEC, [_VEC] * 3), "llvm.fma.v16f32")
    fetch_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(module, fetch_type, "llvm.prefetch.p0")
    x_rows = [builder.gep(x, [builder.mul(depth, _I64(row))]) for row in range(rows)]
    sums = [[cgutils.alloca_once(builder, _VEC) for _ in range(2)] for _ in range(rows)]
    first = _float_weights(builder, bias, _I64(0))
    for slots in sums:
        for slot, value in zip(slots, first, strict=True):
            builder.store(value, slot)
    with cgutils.for_range(builder, depth) as loop:
        here = builder.mul(loop.index, _I64(words))
        soon = builder.gep(panel, [builder.add(ahead, builder.mul(loop.index, pace))])
        builder.call(fetch, [builder.bitcast(soon, _I8.as_pointer()), _I32(0), _I32(2), _I32(1)])  # to the second cache
        pair = weights(builder, panel, here)
        for x_row, slots in zip(x_rows, sums, strict=True):
            value = _splat(builder, builder.load(builder.gep(x_row, [loop.index])))
            for slot, weight in zip(slots, pair, strict=True):
                builder.store(builder.call(fma, [value, weight, builder.load(slot)]), slot)
        latch = builder.block
    _keep_rolled(latch.terminator)
    for row, slots in enumerate(sums):
        for half, slot in enumerate(slots):
            at = builder.add(builder.mul(stride, _I64(row)), _I64(half * LANES))
            target = builder.bitcast(builder.gep(out, [at]), _VEC.as_pointer())
            builder.store(builder.load(slot), target).align = 4


def _panel_kernel(words: int) -> Any:
    """A product with one panel, (x, rows, in, panel, bias, out, stride) → nothing.

    x, panel, bias and out are addresses: x [rows, in], panel [in, ``words``], bias [32], out [rows, 32] with its rows
    ``stride`` apart.
    """

    @intrinsic
    def kernel(typingctx: Any, x: Any, rows: Any, depth: Any, panel: Any, bias: Any, out: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            rows_, depth_, stride_ = args[1], args[2], args[6]
            x_at, bias_at, out_at = (builder.inttoptr(args[i], _FLOAT.as_pointer()) for i in (0, 4, 5))
            panel_at = builder.inttoptr(args[3], (_FLOAT if words == PANEL else _I32).as_pointer())

            def tile(size: int, row: Any, ahead: Any, pace: Any) -> None:
                x_tile = builder.gep(x_at, [builder.mul(row, depth_)])
                out_tile = builder.gep(out_at, [builder.mul(row, stride_)])
                _tile(builder, size, words, x_tile, depth_, panel_at, bias_at, out_tile, stride_, ahead, pace)

            # As few tiles as possible, of sizes that differ by one at most: first the larger ones.
            tiles = builder.udiv(builder.add(rows_, _I64(_TILE_ROWS - 1)), _I64(_TILE_ROWS))
            with builder.if_then(builder.icmp_signed(">", tiles, _I64(0))):
                small = builder.udiv(rows_, tiles)
                larger = builder.urem(rows_, tiles)
                pace = builder.udiv(_I64(words), tiles)
                alone = builder.icmp_signed("==", tiles, _I64(1))
                ahead = builder.select(alone, _I64(_AHEAD * words), builder.mul(depth_, _I64(words)))
                share = builder.mul(depth_, pace)
                for size in range(1, _TILE_ROWS + 1):
                    for before, offset, count in (
                        (_I64(0), 1, larger),
                        (larger, 0, builder.sub(tiles, larger)),
                    ):
                        fits = builder.icmp_signed("==", builder.add(small, _I64(offset)), _I64(size))
                        with builder.if_then(fits), cgutils.for_range(builder, count) as loop:
                            number = builder.add(before, loop.index)
                            row = builder.add(builder.mul(number, small), loop.index if offset else before)
                            tile(size, row, builder.add(ahead, builder.mul(number, share)), pace)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 7), generate

    return kernel


_float_panel = _panel_kernel(PANEL)
_bfloat_panel = _panel_kernel(LANES)


@njit("void(i8, i8, f4[:, ::1], u4[:, :, ::1], f4[::1], f4[:, ::1])", cache=True, nogil=True)
def _share(thread: int, threads: int, x: Floats, packed: Words, bias: Floats, out: Floats) -> None:
    """One thread's panels of a product."""
    panels, depth, words = packed.shape
    for number in range(panels * thread // threads, panels * (thread + 1) // threads):
        panel = packed.ctypes.data + number * depth * words * 4
        column = number * PANEL * 4
        inputs, offset, target = x.ctypes.data, bias.ctypes.data + column, out.ctypes.data + column
        if words == PANEL:
            _float_panel(inputs, x.shape[0], depth, panel, offset, target, out.shape[1])
        else:
            _bfloat_panel(inputs, x.shape[0], depth, panel, offset, target, out.shape[1])


@njit("void(f4[:, ::1], u4[:, :, ::1], f4[::1], f4[:, ::1], i8)", cache=True, nogil=True)
def multiply(x: Floats, packed: Words, bias: Floats, out: Floats, threads: int) -> None:
    """out = x · weightᵀ + bias.

    Args:
        x: [rows, in].
        packed: what ``pack`` made of the weight [out, in].
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
