"""Matrix products on CPU: rows by a weight matrix held in float32, bfloat16, int8 or int4, summed in float32.

The matrix [out, in] is packed once into panels, see ``tiles``. Few rows cost little more than it takes to read the
weights, so fewer bytes are less time.

With float32 arithmetic (``FLOAT32``) every output is one running sum over the inputs in their order, in whichever tile
its row lies: the bits of a row depend on nothing but that row. A bfloat16 weight widens exactly as it is loaded.

With bfloat16 arithmetic inputs are rounded to bfloat16 first. ``ROUNDED`` then does what ``FLOAT32`` does. ``DOT`` uses
AVX512_BF16's dot product, which adds two inputs in a row: the same sums, so the same bits, except that it takes numbers
below 2⁻¹²⁶ for 0. ``TILES`` uses AMX, see ``amx``, whose sums have an order of their own. ``best_arithmetic`` names the
processor's fastest. It is never chosen by the number of rows.

Quantised weights have an arithmetic of their own, see ``quantised``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from dynaspec.compiled import copy_row, njit

from . import amx, quantised
from .simd import HAS_AVX512, HAS_DOT, LANES, dot_of_pairs, round_to_bfloat, same, to_pairs
from .team import together
from .tiles import (
    FLOATS,
    GROUP,
    I32,
    I64,
    INTS,
    PANEL,
    ROW_WORK,
    TEAM_WORK,
    Floats,
    Tile,
    Words,
    load,
    load_halves,
    panel_kernel,
    splat,
)

FLOAT, BFLOAT, PAIRS, INT8, INT4 = range(5)
"""How weights are held, see ``pack`` and ``integer_blocks``."""
FLOAT32, ROUNDED, DOT, TILES = range(4)
"""How those that are not quantised are multiplied, see the module."""
_TILE_ROWS = 14 if HAS_AVX512 else 6
"""Rows worked on at a time, at most: 28 sums in registers, two weights and an input: all that there are. In a quarter
of the room 6 sums, a weight and an input."""
_HIGH, _SIXTEEN = same(0xFFFF0000), same(16)


def best_arithmetic() -> int:
    """The fastest kind of bfloat16 arithmetic that this processor has."""
    if amx.available():
        return TILES
    return DOT if HAS_DOT else ROUNDED


def _float_sums(tile: Tile, panel: Any, depth: Any) -> None:
    tile.steps(depth, lambda n: tile.add(n, tile.load(panel, tile.builder.mul(n, I64(PANEL)), FLOATS)))


def _bfloat_sums(tile: Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder

    def step(n: Any) -> None:
        words = load(builder, panel, builder.mul(n, I64(LANES)), INTS)
        widened = [builder.and_(words, _HIGH) if half else builder.shl(words, _SIXTEEN) for half in tile.halves]
        tile.add(n, [builder.bitcast(one, FLOATS) for one in widened])

    tile.steps(depth, step)


def _dot_sums(tile: Tile, panel: Any, depth: Any) -> None:
    """Two inputs, which are a word, a step."""
    builder = tile.builder

    def step(n: Any) -> None:
        words = tile.load(panel, builder.mul(n, I64(PANEL)), INTS)
        for row, slots in zip(tile.x, tile.sums, strict=True):
            value = splat(builder, builder.load(builder.gep(row, [n])), INTS)
            for slot, word in zip(slots, words, strict=True):
                builder.store(dot_of_pairs(builder, builder.load(slot), word, value), slot)

    tile.steps(builder.lshr(builder.add(depth, I64(1)), I64(1)), step)


_float_panel = panel_kernel(_float_sums, 4 * PANEL, _TILE_ROWS, ahead=128)
_bfloat_panel = panel_kernel(_bfloat_sums, 4 * LANES, _TILE_ROWS, ahead=128)
_dot_panel = (
    panel_kernel(_dot_sums, 4 * PANEL, _TILE_ROWS, ahead=24, inputs=2, words=True) if HAS_DOT else _bfloat_panel
)


@intrinsic
def _round_sixteen(typingctx: Any, source: Any, target: Any) -> Any:
    """16 float32 at an address → the same, rounded to bfloat16, at another."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at = (builder.inttoptr(at, I32.as_pointer()) for at in args)
        word = round_to_bfloat(builder, load(builder, from_at, I64(0), FLOATS))
        builder.store(word, builder.bitcast(to_at, INTS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _pair_thirty_two(typingctx: Any, source: Any, target: Any) -> Any:
    """32 float32 at an address → 16 words of two, rounded to bfloat16, at another: see ``pack``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at = (builder.inttoptr(at, I32.as_pointer()) for at in args)
        first, last = (round_to_bfloat(builder, value) for value in load_halves(builder, from_at, I64(0), FLOATS))
        word = to_pairs(builder, first, last)
        builder.store(word, builder.bitcast(to_at, INTS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit("i8(i8, i8)", cache=True, nogil=True)
def panel_words(depth: int, form: int) -> int:
    """32-bit words of a panel of weights held in a form."""
    groups = (depth + GROUP - 1) // GROUP
    if form == FLOAT:
        return depth * PANEL
    if form == BFLOAT:
        return depth * LANES
    if form == INT4:
        return groups * quantised.INT4_WORDS
    return groups * (quantised.INT8_WORDS if form == INT8 else GROUP // 2 * PANEL)


@njit("void(i8, i8, f4[:, ::1], f4[:, ::1])", cache=True, nogil=True)
def _round_share(thread: int, threads: int, x: Floats, out: Floats) -> None:
    """One thread's rows of x [rows, in], rounded to bfloat16, into ``out`` [rows, in rounded up to 32], or as pairs
    into half of it, [rows, in rounded up to 32 / 2]."""
    rows, depth = x.shape
    width = (depth + GROUP - 1) // GROUP * GROUP
    last = np.empty(GROUP, np.float32)
    sources, targets = x.ctypes.data, out.ctypes.data
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        source, target = sources + row * depth * 4, targets + row * out.shape[1] * 4
        for at in range(0, width, GROUP):
            here = source + at * 4
            if at + GROUP > depth:
                last[:] = 0.0
                copy_row(x[row, at:], last)
                here = last.ctypes.data
            if out.shape[1] == width:
                _round_sixteen(here, target + at * 4)
                _round_sixteen(here + LANES * 4, target + (at + LANES) * 4)
            else:
                _pair_thirty_two(here, target + at * 2)


@njit("void(i8, i8, f4[:, ::1], i8, u4[::1], i8, i8, f4[::1], f4[:, ::1])", cache=True, nogil=True, allocates=False)
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
    for number in range(panels * thread // threads, panels * (thread + 1) // threads):
        panel = weights.ctypes.data + number * words * 4
        column = number * PANEL * 4
        offset, target = bias.ctypes.data + column, out.ctypes.data + column
        if form == INT8:
            quantised.int8_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == INT4:
            quantised.int4_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif arithmetic == TILES:
            amx.panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif arithmetic == DOT:
            _dot_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        elif form == BFLOAT:
            _bfloat_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
        else:
            _float_panel(inputs, rows, stride, depth, panel, offset, target, out.shape[1])
    if arithmetic == TILES:
        amx.release()


@njit("void(f4[:, ::1], u4[::1], i8, i8, f4[::1], f4[:, ::1], i8)", cache=True, nogil=True)
def multiply(x: Floats, weights: Words, form: int, arithmetic: int, bias: Floats, out: Floats, threads: int) -> None:
    """out = x · weightᵀ + bias.

    Args:
        x: [rows, in].
        weights: what ``pack``, ``pack_int8`` or ``pack_int4`` made of the weight [out, in].
        form: how it is held; of weights that are not quantised, ``PAIRS`` with ``DOT`` and ``TILES``, the others with
            the rest.
        arithmetic: of weights that are not quantised; ``TILES`` and ``DOT`` only where the processor has them.
        bias: [out rounded up to 32].
        out: [rows, out rounded up to 32].
        threads: of the team, at most.
    """
    rows, depth = x.shape
    few = threads == 1 or rows * depth < ROW_WORK
    inputs = x
    if form in (INT8, INT4):
        inputs = np.empty((rows, quantised.x_width(depth, form == INT8)), np.float32)
        if few:
            quantised.quantise_share(0, 1, x, form == INT8, inputs)
        else:
            together(quantised.quantise_share, threads, (x, form == INT8, inputs))
    elif arithmetic != FLOAT32:
        width = (depth + GROUP - 1) // GROUP * GROUP
        inputs = np.empty((rows, width if arithmetic == ROUNDED else width // 2), np.float32)
        if few:
            _round_share(0, 1, x, inputs)
        else:
            together(_round_share, threads, (x, inputs))
    if threads == 1 or rows * out.shape[1] * depth < TEAM_WORK:
        _share(0, 1, inputs, depth, weights, form, arithmetic, bias, out)
    else:
        together(_share, threads, (inputs, depth, weights, form, arithmetic, bias, out))


_AT_ONCE = 1 << 18
"""Words that are packed at a time: memory for copies of a whole matrix takes longer to get than to fill."""


def pack(weight: Floats, arithmetic: int = FLOAT32) -> tuple[Words, int]:
    """Panels of a weight [out, in], which is not rounded: for all arithmetic but ``FLOAT32`` it is to be bfloat16.

    Returns:
        [panels, words of one] and the form. ``FLOAT``: [panels, in, 32], float32 as words. ``BFLOAT``, if that loses
        nothing: [panels, in, 16], where the low half of a word is output i of the panel, the high half output i + 16.
        ``PAIRS``: [panels, in / 2, 32], where the high half of a word is the first of two inputs, the low half the
        second, with zeros up to a multiple of 32 inputs.
    """
    words = np.ascontiguousarray(weight).view(np.uint32)
    panels, width = -(-len(words) // PANEL), words.shape[1]
    step = max(1, _AT_ONCE // (PANEL * width))
    parts = {first: words[first * PANEL : (first + step) * PANEL] for first in range(0, panels, step)}
    if arithmetic in (DOT, TILES):
        form, depth, lanes = PAIRS, -(-width // GROUP) * GROUP // 2, PANEL
    elif any((part & 0xFFFF).any() for part in parts.values()):
        form, depth, lanes = FLOAT, width, PANEL
    else:
        form, depth, lanes = BFLOAT, width, LANES
    packed = np.empty((panels, depth, lanes), np.uint32)
    for first, part in parts.items():
        target = packed[first : first + step].transpose(0, 2, 1)
        missing = -len(part) % PANEL  # in the last panel
        whole = np.concatenate([part, np.zeros((missing, width), np.uint32)]) if missing else part
        outputs = whole.reshape(-1, PANEL, width)
        if form == FLOAT:
            target[:] = outputs
        elif form == BFLOAT:
            target[:] = outputs[:, :LANES] >> 16 | outputs[:, LANES:]
        else:
            target[:, :, width // 2 :] = 0
            target[:, :, : -(-width // 2)] = outputs[:, :, ::2]
            target[:, :, : width // 2] |= outputs[:, :, 1::2] >> 16
    return packed.reshape(panels, -1), form
