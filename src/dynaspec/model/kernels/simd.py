"""A 16-lane float32 vector for numba.

LLVM's loop vectoriser runs the body of a loop in vector registers and its tail in scalar ones, with other bits as
the result. Kernels written on explicit vectors do the same operations in the same order for every row, wherever
the row lies, which is what makes logits independent of the rest of a batch. LLVM splits the vector on machines
with narrower registers.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from dynaspec.compiled import njit

LANES = 16
HAS_AVX512 = platform.machine() == "x86_64" and bool(llvm.get_host_cpu_features().get("avx512f"))
"""With it registers hold 32 vectors. Without it they hold 8: there are 16 of half a vector (AVX2), or 32 of a quarter
(NEON)."""
HAS_DOT = platform.machine() == "x86_64" and bool(llvm.get_host_cpu_features().get("avx512bf16"))
"""Whether there are dot products of two bfloat16, see ``multiply_add``."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_VEC = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)


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


class _F32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = _F32x16()


@register_model(_F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VEC)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, vector: Any = _VEC) -> Any:
    """Address ``offset`` elements behind the array's first one, whatever its strides."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())


def _splat(builder: Any, scalar: Any, vector: Any = _VEC) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _first_lanes(builder: Any, count: Any) -> Any:
    """Mask of the first ``count`` lanes."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), _INTS))


def _llvm(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    function = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def same(value: int, kind: Any = _INTS) -> Any:
    """A constant: a number, or a vector of equal ones."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def round_to_bfloat(builder: Any, value: Any) -> Any:
    """A word whose high half is a float32 rounded to bfloat16, to nearest, ties to even, and whose low half is 0; or 16
    of each.

    What is undefined stays so.
    """
    kind = _INTS if value.type == _VEC else _I32
    bits = builder.bitcast(value, kind)
    odd = builder.and_(builder.lshr(bits, same(16, kind)), same(1, kind))
    rounded = builder.add(builder.add(bits, same(0x7FFF, kind)), odd)
    undefined = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, same(0x00400000, kind))
    return builder.and_(builder.select(undefined, quiet, rounded), same(0xFFFF0000, kind))


def to_pairs(builder: Any, first: Any, second: Any) -> Any:
    """16 words of two numbers each, those of ``first`` and then those of ``second``, which are as ``round_to_bfloat``
    leaves them: the high half is the first of the two."""
    even, odd = (
        builder.shuffle_vector(first, second, ir.Constant(_INTS, list(range(start, 2 * LANES, 2)))) for start in (0, 1)
    )
    return builder.or_(even, builder.lshr(odd, same(16)))


def dot_of_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """``total`` plus products of words of two bfloat16, see ``multiply_add``; of 64 bytes, with ``HAS_DOT``."""
    operands = [total, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)]
    return _llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VEC, operands)


def _widened(builder: Any, words: Any, first: bool) -> Any:
    if first:
        return builder.bitcast(builder.and_(words, same(0xFFFF0000)), _VEC)
    return builder.bitcast(builder.shl(words, same(16)), _VEC)


def _is_half(array: Any) -> bool:
    return bool(array.dtype.bitwidth == 16)


def _has_dot(array: Any) -> bool:
    return HAS_DOT and bool(array.dtype == types.uint16)


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:
    """16 consecutive words from ``offset`` on, counted from the array's first element: float32, or two elements each of
    an array of 16 bits."""
    signature = f32x16(array, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(_pointer(context, builder, sig.args[0], *args))
        value.align = 2 if _is_half(sig.args[0]) else 4
        return value

    return signature, generate


@intrinsic
def place_of(typingctx: Any, array: Any, row: Any, column: Any, width: Any) -> Any:
    """Where an element of rows of a ``width`` lies, counted from the first one.

    In an array of 16 bits two rows make one of words, whose high half is of the first row.
    """
    signature = types.intp(array, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, row, column, width = args
        if not _is_half(sig.args[0]):
            return builder.add(builder.mul(row, width), column)
        one = ir.Constant(row.type, 1)
        second = builder.and_(row, one)
        pair = builder.mul(builder.sub(row, second), width)
        within = builder.add(builder.shl(column, one), builder.sub(one, second))
        return builder.add(pair, within)

    return signature, generate


def _row(context: Any, builder: Any, array_type: Any, array: Any, start: Any, row: Any, column: Any, width: Any) -> Any:
    """See ``load_row``."""
    if not _is_half(array_type):
        offset = builder.add(start, builder.add(builder.mul(row, width), column))
        value = builder.load(_pointer(context, builder, array_type, array, offset))
        value.align = 4
        return value
    one = ir.Constant(row.type, 1)
    second = builder.and_(row, one)
    pair = builder.mul(builder.sub(row, second), width)
    offset = builder.add(start, builder.add(pair, builder.shl(column, one)))
    words = builder.load(_pointer(context, builder, array_type, array, offset, _INTS))
    words.align = 2
    shift = _splat(builder, builder.trunc(builder.shl(second, ir.Constant(row.type, 4)), _I32), _INTS)
    return _widened(builder, builder.shl(words, shift), True)


@intrinsic
def load_row(typingctx: Any, array: Any, start: Any, row: Any, column: Any, width: Any) -> Any:
    """16 consecutive elements of a row as float32, of rows that begin at ``start`` and lie as ``place_of`` says."""
    signature = f32x16(array, types.intp, types.intp, types.intp, types.intp)
    return signature, lambda context, builder, sig, args: _row(context, builder, sig.args[0], *args)


@intrinsic
def load_two_rows(typingctx: Any, array: Any, start: Any, row: Any, column: Any, width: Any) -> Any:
    """``load_row`` of a row whose number is even, and of the next."""
    signature = types.UniTuple(f32x16, 2)(array, types.intp, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, start, row, column, width = args
        offset = builder.add(start, builder.mul(row, width))
        if _is_half(sig.args[0]):
            offset = builder.add(offset, builder.shl(column, ir.Constant(column.type, 1)))
            words = builder.load(_pointer(context, builder, sig.args[0], array, offset, _INTS))
            words.align = 2
            return context.make_tuple(
                builder, sig.return_type, [_widened(builder, words, one) for one in (True, False)]
            )
        offset = builder.add(offset, column)
        values = [
            builder.load(_pointer(context, builder, sig.args[0], array, at))
            for at in (offset, builder.add(offset, width))
        ]
        for value in values:
            value.align = 4
        return context.make_tuple(builder, sig.return_type, values)

    return signature, generate


@intrinsic
def load_factors(typingctx: Any, array: Any, start: Any, row: Any, column: Any, width: Any) -> Any:
    """What ``multiply_add`` takes: words of two rows, the first of which has an even number, where the array
    ``has_dot``; else ``load_row``."""
    signature = f32x16(array, types.intp, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _has_dot(sig.args[0]):
            return _row(context, builder, sig.args[0], *args)
        array, start, row, column, width = args
        offset = builder.add(builder.mul(row, width), builder.shl(column, ir.Constant(column.type, 1)))
        words = builder.load(_pointer(context, builder, sig.args[0], array, builder.add(start, offset)))
        words.align = 2
        return words

    return signature, generate


@intrinsic
def rounded_for(typingctx: Any, array: Any, value: Any) -> Any:
    """float32 as an array's elements are: as they are, or rounded to bfloat16 for an array of 16
    bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _is_half(sig.args[0]):
            return args[1]
        return builder.bitcast(round_to_bfloat(builder, args[1]), _VEC)

    return f32x16(array, f32x16), generate


@intrinsic
def pairs(typingctx: Any, first: Any, second: Any) -> Any:
    """Two vectors, rounded to bfloat16, in one: words of two numbers in a row, the high half is the first."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not HAS_DOT:
            return builder.bitcast(to_pairs(builder, *(round_to_bfloat(builder, arg) for arg in args)), _VEC)
        both = _llvm(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [args[1], args[0]])
        words, half = builder.bitcast(both, _INTS), same(16)
        return builder.bitcast(builder.or_(builder.shl(words, half), builder.lshr(words, half)), _VEC)

    return f32x16(f32x16, f32x16), generate


@intrinsic
def multiply_add(typingctx: Any, array: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once, where a or b is of an array.

    Where that ``has_dot``, words of two numbers are multiplied: in each lane the product of the first numbers is added,
    then that of the second ones, each time rounded once. Numbers below 2⁻¹²⁶ are then taken for 0.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _has_dot(sig.args[0]):
            return dot_of_pairs(builder, args[3], args[1], args[2])
        return _llvm(builder, "llvm.fma.v16f32", _VEC, list(args[1:]))

    return f32x16(array, f32x16, f32x16, f32x16), generate


@intrinsic
def has_dot(typingctx: Any, array: Any) -> Any:
    """Whether an array's elements are multiplied two at a time, see ``multiply_add``; a constant.

    bfloat16 in uint16 is where there is ``HAS_DOT``; in int16 it is not, on any processor, which is how tests compare.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(_has_dot(sig.args[0])))

    return types.boolean(array), generate


@intrinsic
def fetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Brings what ``load`` will read into the cache; harmless at any offset."""
    signature = types.void(array, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.bitcast(_pointer(context, builder, sig.args[0], *args), ir.IntType(8).as_pointer())
        name, hint = "llvm.prefetch.p0", [ir.Constant(_I32, n) for n in (0, 2, 1)]
        _llvm(builder, name, ir.VoidType(), [pointer, *hint])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def load_first(typingctx: Any, array: Any, offset: Any, count: Any) -> Any:
    """Like ``load``, but only ``count`` elements; the other lanes are 0."""
    signature = f32x16(array, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, sig.args[0], *args[:2])
        zero = ir.Constant(_VEC, [0.0] * LANES)
        operands = [pointer, ir.Constant(_I32, 4), _first_lanes(builder, args[2]), zero]
        return _llvm(builder, "llvm.masked.load.v16f32.p0", _VEC, operands)

    return signature, generate


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Writes 16 consecutive elements."""
    signature = types.void(array, types.intp, f32x16)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, sig.args[0], *args[:2])).align = 4
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def store_first(typingctx: Any, array: Any, offset: Any, value: Any, count: Any) -> Any:
    """Writes the first ``count`` lanes."""
    signature = types.void(array, types.intp, f32x16, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, sig.args[0], *args[:2])
        operands = [args[2], pointer, ir.Constant(_I32, 4), _first_lanes(builder, args[3])]
        _llvm(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), operands)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def as_element(typingctx: Any, array: Any, value: Any) -> Any:
    """A float32 as an array's element: itself, or bfloat16 in an array of 16 bits, rounded to nearest, ties to even.

    What is undefined stays so.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not _is_half(sig.args[0]):
            return args[1]
        return builder.trunc(builder.lshr(round_to_bfloat(builder, args[1]), same(16, _I32)), ir.IntType(16))

    return array.dtype(array, types.float32), generate


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """All lanes equal to a float32."""
    return f32x16(types.float32), lambda context, builder, sig, args: _splat(builder, args[0])


@intrinsic
def splat_at(typingctx: Any, array: Any, offset: Any) -> Any:
    """All lanes equal to the float32 element at ``offset``, counted from the array's first element."""
    signature = f32x16(array, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])))

    return signature, generate


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _llvm(builder, "llvm.fma.v16f32", _VEC, list(args))

    return f32x16(f32x16, f32x16, f32x16), generate


@intrinsic
def nearest(typingctx: Any, a: Any) -> Any:
    """The nearest integer, ties to even."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _llvm(builder, "llvm.rint.v16f32", _VEC, list(args))

    return f32x16(f32x16), generate


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2 to an integral exponent within −126 … 127, by writing the exponent bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.fptosi(args[0], _INTS)
        biased = builder.add(whole, ir.Constant(_INTS, [127] * LANES))
        return builder.bitcast(builder.shl(biased, ir.Constant(_INTS, [23] * LANES)), _VEC)

    return f32x16(f32x16), generate


@intrinsic
def where_less(typingctx: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """``yes`` in lanes where a < b, otherwise ``no``; NaN is not less."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return f32x16(f32x16, f32x16, f32x16, f32x16), generate


@intrinsic
def lane_sum(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes, in a fixed tree."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(f32x16), generate


@intrinsic
def lane_max(typingctx: Any, a: Any) -> Any:
    """Largest lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def larger(x: Any, y: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        return _fold(builder, args[0], larger)

    return types.float32(f32x16), generate


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        halves = [ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))) for at in (0, width)]
        low, high = (builder.shuffle_vector(vector, vector, half) for half in halves)
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _arithmetic(operation: Callable[..., Any], instruction: str) -> None:
    """Gives the vector one of Python's arithmetic operators."""

    @intrinsic
    def apply(typingctx: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return getattr(builder, instruction)(*args)

        return f32x16(f32x16, f32x16), generate

    @overload(operation)
    def implementation(a: Any, b: Any) -> Any:
        def call(a: Any, b: Any) -> Any:
            return apply(a, b)

        return call if a is f32x16 and b is f32x16 else None


for _operation, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_operation, _instruction)


@njit(cache=True, nogil=True, allocates=False)
def const(x: float) -> Any:
    """All lanes equal to a number, rounded to float32."""
    return splat(np.float32(x))


@njit(cache=True, nogil=True, allocates=False)
def maximum(a: Any, b: Any) -> Any:
    """Lane-wise maximum; b where a is NaN."""
    return where_less(b, a, a, b)
