"""Products of bfloat16 on AMX, Intel's matrix unit: 16 rows by 16 outputs over 32 inputs in one instruction.

The unit's sums, as Intel's manual defines TDPBF16PS (and as it computes them): over 32 inputs at a time it adds up the
products of even and those of odd ones apart, each in order and from 0 on, adds these two sums and then adds that to
the output. It takes numbers below 2⁻¹²⁶ for 0. How many rows a tile has makes no difference to a row.

Linux gives the unit's registers to a process that asks for them; threads that it starts later have them, too.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynaspec.compiled import njit

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call, ARCH_REQ_XCOMP_PERM and the number of the tiles' state."""
_ROWS = 16
"""Of a tile, at most."""
_BYTES = 64
"""Of a tile's row."""

_I8, _I32, _I64, _VOID = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.VoidType()
_POINTER = _I8.as_pointer()
_SUMS, _INPUTS, _WEIGHTS = 0, 4, 6
"""The first of the tiles that hold: two times two tiles of outputs, two of inputs, two of weights."""
_AHEAD = 4
"""Steps of 32 inputs that weights are fetched ahead of their use."""


@cache
def _exists() -> bool:
    """Whether the processor has the unit: what is compiled depends on that, as compiled code is kept by processor."""
    features = llvm.get_host_cpu_features() if platform.machine() == "x86_64" else {}
    return bool(features.get("amx-tile") and features.get("amx-bf16"))


@cache
def available() -> bool:
    """Whether this process may use the unit; asks for it."""
    if sys.platform != "linux" or not _exists():
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)
    return refused == 0


def _configurations() -> Any:
    """[32, 64] bytes: what LDTILECFG reads for 1 … 32 rows."""
    found = np.zeros((2 * _ROWS, 64), np.uint8)
    for rows, one in enumerate(found, 1):
        one[0] = 1
        one[16:32].view(np.uint16)[:] = _BYTES
        one[48:56] = _ROWS
        for half, count in enumerate((min(rows, _ROWS), max(1, rows - _ROWS))):
            one[48 + _SUMS + 2 * half : 48 + _SUMS + 2 * half + 2] = count
            one[48 + _INPUTS + half] = count
    return found


_CONFIGURATIONS = _configurations()


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(_VOID, [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _at(builder: Any, address: Any, offset: Any = None) -> Any:
    return builder.inttoptr(address if offset is None else builder.add(address, offset), _POINTER)


def _sums(
    builder: Any, halves: int, x: Any, stride: Any, groups: Any, panel: Any, bias: Any, out: Any, to: Any
) -> None:
    """Up to 16 rows, twice where ``halves`` is 2, over a panel of 32 outputs."""
    fetch_type = ir.FunctionType(_VOID, [_POINTER, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch.p0")
    tiles = [(half, side, _I8(_SUMS + 2 * half + side)) for half in range(halves) for side in range(2)]
    for _, side, tile in tiles:
        _call(builder, "tileloadd64", tile, _at(builder, bias, _I64(side * _BYTES)), _I64(0))
    with cgutils.for_range(builder, groups) as loop:
        group = builder.add(panel, builder.mul(loop.index, _I64(2 * _ROWS * _BYTES)))
        for line in range(2 * _ROWS):
            soon = _at(builder, group, _I64((_AHEAD * 2 * _ROWS + line) * _BYTES))
            builder.call(fetch, [soon, _I32(0), _I32(2), _I32(1)])
        for side in range(2):
            at = _at(builder, group, _I64(side * _BYTES))
            _call(builder, "tileloadd64", _I8(_WEIGHTS + side), at, _I64(2 * _BYTES))
        inputs = builder.add(x, builder.mul(loop.index, _I64(_BYTES)))
        for half in range(halves):
            at = _at(builder, inputs, builder.mul(stride, _I64(_ROWS * half)))
            _call(builder, "tileloadd64", _I8(_INPUTS + half), at, stride)
        for half, side, tile in tiles:
            _call(builder, "tdpbf16ps", tile, _I8(_INPUTS + half), _I8(_WEIGHTS + side))
    for half, side, tile in tiles:
        at = builder.add(builder.mul(to, _I64(_ROWS * half)), _I64(side * _BYTES))
        _call(builder, "tilestored64", tile, _at(builder, out, at), to)


@intrinsic
def _configure(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _exists():
            _call(builder, "ldtilecfg", _at(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def release(typingctx: Any) -> Any:
    """Puts the unit's registers back: what is not in use need not be kept when threads take turns."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _exists():
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _kernel(halves: int) -> Any:
    @intrinsic
    def kernel(
        typingctx: Any, x: Any, stride: Any, groups: Any, panel: Any, bias: Any, out: Any, out_stride: Any
    ) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            if _exists():
                _sums(builder, halves, *args)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 7), generate

    return kernel


_one, _two = _kernel(1), _kernel(2)


@njit("void(i8, i8, i8, i8, i8, i8, i8, i8)", cache=True, nogil=True)
def panel(x: int, rows: int, stride: int, depth: int, weights: int, bias: int, out: int, out_stride: int) -> None:
    """A product with one panel of 32 outputs, as ``tiles.panel_kernel`` says; without the unit it does nothing.

    Args:
        x: [rows, in rounded up to 32] bfloat16 in pairs; rows are ``stride`` words apart.
        weights: [in rounded up to 32 / 2, 32] words of two bfloat16, see ``gemm.pack``.
    """
    configured, row, groups = 0, 0, (depth + 31) // 32
    while row < rows:
        count = min(2 * _ROWS, rows - row)
        if count != configured:
            _configure(_CONFIGURATIONS.ctypes.data + (count - 1) * 64)
            configured = count
        inputs, target = x + row * stride * 4, out + row * out_stride * 4
        if count <= _ROWS:
            _one(inputs, stride * 4, groups, weights, bias, target, out_stride * 4)
        else:
            _two(inputs, stride * 4, groups, weights, bias, target, out_stride * 4)
        row += count
