"""Runs compiled code on several threads at once: PyTorch's own OpenMP team.

A decoding step has dozens of kernels of some ten microseconds. Waking a thread costs more than that, so the threads
must be those that PyTorch's operators keep warm, and no second set may compete with them for the cores.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_PAUSE_HARD = 2
"""``omp_pause_hard`` of OpenMP 5.0: threads may be ended too."""
_PARALLEL, _NUMBER = "GOMP_parallel", "omp_get_thread_num"
_POINTER, _I32, _I64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def _runtime() -> ctypes.CDLL | None:
    """PyTorch's library, through which GNU's OpenMP runtime is found that it uses itself, if it is GNU's: others in the
    process may have brought copies of their own."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        runtime = ctypes.CDLL(str(library))
    except OSError:
        return None
    return runtime if hasattr(runtime, _PARALLEL) else None


@ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _alone(function: Any, data: int, threads: int, flags: int) -> None:
    function(data)


@ctypes.CFUNCTYPE(ctypes.c_int)
def _first() -> int:
    return 0


def _register() -> bool:
    """Makes the team's functions known to compiled code; whether there is a team."""
    runtime = _runtime()
    functions = (_alone, _first) if runtime is None else (getattr(runtime, name) for name in (_PARALLEL, _NUMBER))
    for name, function in zip((_PARALLEL, _NUMBER), functions, strict=True):
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return runtime is not None


_available = _register()
_pause = getattr(_runtime(), "omp_pause_resource_all", None)


def dissolve() -> None:
    """Ends the team that the calling thread has gathered; its next product gathers another.

    Every thread that computes has a team of its own, and as soon as all teams together have more members than there are
    cores, none of them spins any more: each product then waits for threads to be woken, and a step takes up to half as
    long again. So who has built an engine that another thread will step must not keep a team.
    """
    if _pause is not None:
        _pause(_PAUSE_HARD)


def team_size(threads: int) -> int:
    """How many threads of ``threads`` can run compiled code together."""
    if threads > 1 and not _available:
        logger.warning("PyTorch here does not use GNU OpenMP: model passes run on one thread")
    return threads if _available else 1


@intrinsic(prefer_literal=False)
def together(typingctx: Any, function: Any, threads: Any, args: Any) -> Any:
    """Calls ``function(i, threads, *args)`` for i = 0 … threads − 1, each on its own thread, and waits for all.

    The function is one of numba's that returns nothing and raises nothing; args is a tuple.
    """
    inner_types = (types.intp, types.intp, *args.types)
    inner_sig = function.get_call_type(typingctx, inner_types, {})

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        compiled = function.dispatcher.get_compile_result(inner_sig)
        context.active_code_library.add_linking_library(compiled.library)
        fields = [values[1], *cgutils.unpack_tuple(builder, values[2])]
        share = _outlined(context, builder, compiled, [field.type for field in fields])
        task = cgutils.alloca_once(builder, ir.LiteralStructType([field.type for field in fields]))
        for place, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, task, 0, place))
        start_type = ir.FunctionType(ir.VoidType(), [share.type, _POINTER, _I32, _I32])
        start = cgutils.get_or_insert_function(builder.module, start_type, _PARALLEL)
        count = builder.trunc(values[1], _I32)
        builder.call(start, [share, builder.bitcast(task, _POINTER), count, _I32(0)])
        return context.get_dummy_value()

    return types.void(function, types.intp, args), generate


def _outlined(context: Any, builder: Any, compiled: Any, fields: list[Any]) -> Any:
    """A C function of one pointer that calls the compiled one with its thread's number and what the pointer shows."""
    module = builder.module
    function = ir.Function(
        module,
        ir.FunctionType(ir.VoidType(), [_POINTER]),
        module.get_unique_name(f"share_{compiled.fndesc.unique_name}"),
    )
    function.linkage = "internal"
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    task = inner.load(inner.bitcast(function.args[0], ir.LiteralStructType(fields).as_pointer()))
    number_of = cgutils.get_or_insert_function(module, ir.FunctionType(_I32, []), _NUMBER)
    number = inner.sext(inner.call(number_of, []), _I64)
    arguments = [number, *(inner.extract_value(task, place) for place in range(len(fields)))]
    callee = context.declare_function(module, compiled.fndesc)
    signature = compiled.signature
    context.call_conv.call_function(inner, callee, signature.return_type, signature.args, arguments)
    inner.ret_void()
    return function
