"""Products of int8 and int4 weights: inputs become int8, too, and integers are multiplied, as llama.cpp does it.

A row's inputs get a scale for each 32 of them, the largest magnitude / 127, and are rounded to nearest, ties to even.
Σ input · number of a group is exact in int32, however a processor adds it up. A group then adds to an output, in the
order of the groups, each operation rounded to float32 once:

* int8: fma(Σ input · number · the weights' scale, the inputs' scale, output)
* int4, whose numbers are 0 … 15 above a minimum: fma(fma(Σ input, minimum, Σ input · number · the weights' scale), the
  inputs' scale, output)

So the bits of a row depend on nothing but that row, and are the same on every processor. Where there are VNNI's dot
products of four bytes, which want one factor without a sign, they are used. Elsewhere products of bytes are summed by
twos in 16 bits, which hold those of a whole group if one factor has few bits: an int4 weight has; an input that meets
int8 weights is split into two digits, see ``DIGITS``.

``integer_blocks`` makes the weights: in NumPy, as that is once for a model, and compiling takes longer.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynaspec.compiled import copy_row, njit

from .simd import HAS_AVX512, LANES, same
from .tiles import (
    FLOATS,
    GROUP,
    I32,
    I64,
    INTS,
    PANEL,
    Floats,
    Tile,
    Vectors,
    fma,
    load,
    load_halves,
    panel_kernel,
    splat,
)

QUAD = 4
"""Numbers of a word."""
QUADS = GROUP // QUAD
"""Words of a group of inputs."""
LARGEST = 127
"""An int8 input's magnitude, at most."""
OFFSET = 128
"""int8 weights are kept as bytes without a sign: this much more than they are."""
INT8_WORDS = (2 * PANEL + GROUP * PANEL) // 4
"""32-bit words of a panel's group of int8 weights: a float16 scale for each output, then for each 4 inputs a word an
output."""
INT4_WORDS = (2 * 2 * PANEL) // 4 + GROUP // 2 * PANEL // 4
"""32-bit words of a panel's group of int4 weights: float16 scales, then float16 minimums of the outputs, then for each
8 inputs a word an output: the low halves of its bytes are the first 4, the high ones the others."""
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_BYTES, _SHORTS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I16, 2 * LANES)
_SATURATING_ADD = "llvm.sadd.sat.v32i16"
_HALVES = ir.VectorType(ir.HalfType(), LANES)


def _vnni() -> int:
    """Bytes of the registers that VNNI's dot product works on here; 0 = there is none."""
    features = llvm.get_host_cpu_features() if platform.machine() == "x86_64" else {}
    if HAS_AVX512 and features.get("avx512vnni"):
        return 64
    return 32 if features.get("avxvnni") else 0


def _byte_products() -> int:
    """Bytes of the registers that products of bytes, summed by twos, work on here; 0 = there are none."""
    features = llvm.get_host_cpu_features() if platform.machine() == "x86_64" else {}
    if HAS_AVX512 and features.get("avx512bw"):
        return 64
    return 32 if features.get("avx2") else 0


_VNNI = _vnni()
_BYTE_PRODUCTS = _byte_products()
DIGITS = 1 if _VNNI else 2
"""Parts of an input that meets int8 weights. Two are its digits to the base of 16, each within ±8: so the products of a
group, in each of 16 words two sums of 16, are 16 · 8 · 255 at most."""
TILE_ROWS = ((4, 3), (6, 6))
"""Rows worked on at a time, at most, without AVX-512's registers and with them, of one digit and of two. What is in
registers: their integers, two weights and their like; of one digit with AVX-512's also their sums, which were stored
and loaded with every group otherwise."""


def _call(builder: Any, name: str, result: Any, args: Vectors, size: int) -> Any:
    """An instruction for registers of ``size`` bytes on vectors of 64, a register at a time.

    Args:
        result: the kind of what it gives, 64 bytes as well.
    """

    def part(vector: Any, number: int) -> Any:
        lanes = vector.type.count * size // 64
        chosen = ir.Constant(ir.VectorType(I32, lanes), list(range(number * lanes, (number + 1) * lanes)))
        return builder.shuffle_vector(vector, vector, chosen)

    kind = ir.VectorType(result.element, result.count * size // 64)
    parts = [[part(one, number) for one in args] if size < 64 else args for number in range(64 // size)]
    function = ir.FunctionType(kind, [one.type for one in parts[0]])
    instruction = cgutils.get_or_insert_function(builder.module, function, name)
    found = [builder.call(instruction, some) for some in parts]
    if len(found) == 1:
        return found[0]
    return builder.shuffle_vector(*found, ir.Constant(ir.VectorType(I32, result.count), list(range(result.count))))


def _dot(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """``total`` plus, in each of the 16 words, the sum of four bytes of ``weights``, which have no sign, times four
    inputs."""
    return _call(builder, f"llvm.x86.avx512.vpdpbusd.{8 * _VNNI}", INTS, [total, weights, inputs], _VNNI)


def _by_twos(builder: Any, products: Any) -> Any:
    """The sums of each two neighbours."""
    half = products.type.count // 2
    chosen = [ir.Constant(ir.VectorType(I32, half), list(range(start, 2 * half, 2))) for start in (0, 1)]
    return builder.add(*(builder.shuffle_vector(products, products, some) for some in chosen))


def _add_byte_products(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """``total``, 32 numbers of 16 bits, plus for each two bytes of ``weights``, without a sign, times two inputs."""
    weights, inputs = (builder.bitcast(one, _BYTES) for one in (weights, inputs))
    if _BYTE_PRODUCTS:
        name = {64: "llvm.x86.avx512.pmaddubs.w.512", 32: "llvm.x86.avx2.pmadd.ub.sw"}[_BYTE_PRODUCTS]
        products = _call(builder, name, _SHORTS, [weights, inputs], _BYTE_PRODUCTS)
    else:
        wide = ir.VectorType(_I16, _BYTES.count)
        products = _by_twos(builder, builder.mul(builder.zext(weights, wide), builder.sext(inputs, wide)))
    # No sum is too large. But LLVM leaves additions that saturate in their order, which needs the fewest registers.
    add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_SHORTS, [_SHORTS] * 2), _SATURATING_ADD)
    return builder.call(add, [total, products])


def _words_of(builder: Any, shorts: Any, factor: int) -> Any:
    """In each of 16 words the sum of its two numbers of 16 bits, times a factor."""
    factors = same(factor, _SHORTS)
    if _BYTE_PRODUCTS:
        name = {64: "llvm.x86.avx512.pmaddw.d.512", 32: "llvm.x86.avx2.pmadd.wd"}[_BYTE_PRODUCTS]
        return _call(builder, name, INTS, [shorts, factors], _BYTE_PRODUCTS)
    wide = ir.VectorType(I32, _SHORTS.count)
    return _by_twos(builder, builder.mul(*(builder.sext(one, wide) for one in (shorts, factors))))


def _scales(tile: Tile, panel: Any, at: Any) -> Vectors:
    """float16, of the tile's halves, from a word of the panel on."""
    builder = tile.builder
    stored = [load(builder, panel, builder.add(at, I64(half * LANES // 2)), _HALVES) for half in tile.halves]
    return [builder.fpext(one, FLOATS) for one in stored]


def _of_group(tile: Tile, groups: Any, group: Any, behind: int, kind: Any, digits: int = 1) -> Vectors:
    """A word of each row's group, on all lanes: its scale, or what ``_quantise_thirty_two`` puts behind those."""
    builder = tile.builder
    at = builder.add(builder.mul(groups, I64(digits * QUADS + behind)), group)
    words = [builder.load(builder.gep(row, [at])) for row in tile.x]
    return [splat(builder, builder.bitcast(word, kind.element), kind) for word in words]


def _add_products(tile: Tile, totals: list[list[Any]], group: Any, numbers: Iterator[Vectors], digits: int = 1) -> None:
    """Adds to the ``totals`` of each row its inputs of a group times their weights.

    Args:
        numbers: the weights of four inputs at a time, as bytes.
        digits: of an input.
    """
    builder = tile.builder
    sums = [[[same(0, _SHORTS)] * digits for _ in tile.halves] for _ in tile.x]
    for quad, weights in enumerate(numbers):
        at = builder.add(builder.mul(group, I64(digits * QUADS)), I64(quad))
        for row, whole, parts in zip(tile.x, totals, sums, strict=True):
            for digit in range(digits):
                word = builder.load(builder.gep(row, [builder.add(at, I64(digit * QUADS))]))
                inputs = splat(builder, word, INTS)
                for half, weight in enumerate(weights):
                    if _VNNI:
                        whole[half] = _dot(builder, whole[half], weight, inputs)
                    else:
                        parts[half][digit] = _add_byte_products(builder, parts[half][digit], weight, inputs)
    if _VNNI:
        return
    for whole, parts in zip(totals, sums, strict=True):
        for half, shorts in enumerate(parts):
            for digit, some in enumerate(shorts):
                whole[half] = builder.add(whole[half], _words_of(builder, some, 16**digit))


def _add_group(tile: Tile, rows: list[list[Any]], scales: Vectors) -> None:
    """Adds each row's numbers of a group, times the row's scale."""
    builder = tile.builder
    for slots, values, scale in zip(tile.sums, rows, scales, strict=True):
        for slot, value in zip(slots, values, strict=True):
            builder.store(fma(builder, value, scale, builder.load(slot)), slot)


def int8_sums(tile: Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder
    groups = builder.udiv(builder.add(depth, I64(GROUP - 1)), I64(GROUP))

    def step(group: Any) -> None:
        at = builder.mul(group, I64(INT8_WORDS))
        words_at = (builder.add(at, I64(PANEL // 2 + quad * PANEL)) for quad in range(QUADS))
        totals = [[offset for _ in tile.halves] for offset in _of_group(tile, groups, group, 1, INTS, DIGITS)]
        _add_products(tile, totals, group, (tile.load(panel, here, INTS) for here in words_at), DIGITS)
        scales = _scales(tile, panel, at)
        found = [
            [builder.fmul(builder.sitofp(total, FLOATS), scale) for total, scale in zip(sums, scales, strict=True)]
            for sums in totals
        ]
        _add_group(tile, found, _of_group(tile, groups, group, 0, FLOATS, DIGITS))

    tile.steps(groups, step)


def int4_sums(tile: Tile, panel: Any, depth: Any) -> None:
    builder = tile.builder
    groups = builder.udiv(builder.add(depth, I64(GROUP - 1)), I64(GROUP))

    def numbers(at: Any) -> Iterator[Vectors]:
        for two in range(QUADS // 2):
            words = tile.load(panel, builder.add(at, I64(PANEL + two * PANEL)), INTS)
            for which in range(2):
                shifted = [builder.lshr(word, same(4)) for word in words] if which else words
                yield [builder.and_(word, same(0x0F0F0F0F)) for word in shifted]

    def step(group: Any) -> None:
        at = builder.mul(group, I64(INT4_WORDS))
        totals = [[same(0) for _ in tile.halves] for _ in tile.x]
        _add_products(tile, totals, group, numbers(at))
        scales, minimums = _scales(tile, panel, at), _scales(tile, panel, builder.add(at, I64(PANEL // 2)))
        found = [
            [
                fma(builder, whole, minimum, builder.fmul(builder.sitofp(total, FLOATS), scale))
                for total, scale, minimum in zip(sums, scales, minimums, strict=True)
            ]
            for sums, whole in zip(totals, _of_group(tile, groups, group, 1, FLOATS), strict=True)
        ]
        _add_group(tile, found, _of_group(tile, groups, group, 0, FLOATS))

    tile.steps(groups, step)


int8_panel = panel_kernel(
    int8_sums, 4 * INT8_WORDS, TILE_ROWS[HAS_AVX512][DIGITS - 1], ahead=6, inputs=GROUP, words=True
)
int4_panel = panel_kernel(int4_sums, 4 * INT4_WORDS, TILE_ROWS[HAS_AVX512][0], ahead=6, inputs=GROUP, words=True)


def _reduce(builder: Any, name: str, vector: Any) -> Any:
    kind = ir.FunctionType(vector.type.element, [vector.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}")
    return builder.call(function, [vector])


@intrinsic
def _quantise_thirty_two(typingctx: Any, source: Any, target: Any, scale: Any, behind: Any, signed: Any) -> Any:
    """32 float32 at an address → their integers, their scale and what their sum adds, each at an address of its own.

    That is −128 Σ input as int32 for weights that are kept 128 larger than they are (``signed``), else Σ input as
    float32. Where an input is infinite or undefined, the scale is, too, and with it all that is made of the group.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at, scale_at, behind_at = (builder.inttoptr(at, I32.as_pointer()) for at in args[:4])
        values = load_halves(builder, from_at, I64(0), FLOATS)
        # As bits, magnitudes have the order of their numbers, with what is undefined behind them.
        sizes = [builder.and_(builder.bitcast(value, INTS), same(0x7FFFFFFF)) for value in values]
        larger = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
        most = builder.bitcast(_reduce(builder, "umax.v16i32", larger), FLOATS.element)
        limit = ir.Constant(FLOATS.element, float(LARGEST))
        builder.store(builder.bitcast(builder.fdiv(most, limit), I32), scale_at)
        inverse = splat(builder, builder.fdiv(limit, most))
        round_kind = ir.FunctionType(FLOATS, [FLOATS])
        nearest = cgutils.get_or_insert_function(builder.module, round_kind, "llvm.rint.v16f32")
        limits = [ir.Constant(FLOATS, [sign * float(LARGEST)] * LANES) for sign in (-1, 1)]
        zeros = ir.Constant(FLOATS, [0.0] * LANES)
        integers = []
        for value in values:
            near = builder.call(nearest, [builder.fmul(value, inverse)])
            # Out of bounds, or undefined, where all are 0 or nearly, or where one is infinite or undefined.
            holds = builder.and_(
                builder.fcmp_ordered(">=", near, limits[0]), builder.fcmp_ordered("<=", near, limits[1])
            )
            integers.append(builder.fptosi(builder.select(holds, near, zeros), INTS))
        both = builder.shuffle_vector(*integers, ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES))))
        wide, narrow = both.type, ir.VectorType(_I8, both.type.count)

        def put(numbers: Any, words: int) -> None:
            to = builder.bitcast(builder.gep(to_at, [I64(words)]), narrow.as_pointer())
            builder.store(builder.trunc(numbers, narrow), to).align = 4

        put(both, 0)
        if DIGITS == 2:
            with builder.if_then(args[4]):
                high = builder.ashr(builder.add(both, same(8, wide)), same(4, wide))
                put(builder.sub(both, builder.shl(high, same(4, wide))), 0)
                put(high, QUADS)
        total = _reduce(builder, "add.v16i32", builder.add(*integers))
        offset = builder.mul(total, I32(-OFFSET))
        whole = builder.bitcast(builder.sitofp(total, FLOATS.element), I32)
        builder.store(builder.select(args[4], offset, whole), behind_at)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4, types.boolean), generate


@njit("void(i8, i8, f4[:, ::1], b1, f4[:, ::1])", cache=True, nogil=True)
def quantise_share(thread: int, threads: int, x: Floats, signed: bool, out: Floats) -> None:
    """One thread's rows of x [rows, in] as integers: into ``out`` [rows, ``x_width`` of in], words of all groups, then
    the groups' scales, then what their sums add, see ``_quantise_thirty_two``."""
    rows, depth = x.shape
    groups = (depth + GROUP - 1) // GROUP
    words = (DIGITS if signed else 1) * QUADS
    last = np.empty(GROUP, np.float32)
    sources, targets = x.ctypes.data, out.ctypes.data
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        source, target = sources + row * depth * 4, targets + row * out.shape[1] * 4
        scales = target + groups * words * 4
        for group in range(groups):
            here = source + group * GROUP * 4
            if (group + 1) * GROUP > depth:
                last[:] = 0.0
                copy_row(x[row, group * GROUP :], last)
                here = last.ctypes.data
            to = target + group * words * 4
            _quantise_thirty_two(here, to, scales + group * 4, scales + (groups + group) * 4, signed)


@njit("i8(i8, b1)", cache=True, nogil=True)
def x_width(depth: int, signed: bool) -> int:
    """Words of a row of inputs as ``quantise_share`` leaves it."""
    return (depth + GROUP - 1) // GROUP * ((DIGITS if signed else 1) * QUADS + 2)
