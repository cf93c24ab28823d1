"""Runs compiled code on several threads at once.

A pass has hundreds of products of some ten to some hundred microseconds, and waking a thread takes as long as a small
one. So threads look for work for a while before they sleep (``_LOOKS``). But who waits for a thread that another
process has displaced must not hold a core meanwhile: it sleeps, and the operating system lets the displaced thread go
on there at once. An OpenMP team does neither one nor the other: its barrier waits for every member, also for one that
had no share of the work.

Work comes in shares that whoever is free takes. A thread that is not running takes none, and nobody waits for it. All
threads of a process share one set of helpers; who finds them taken does all shares alone. What is computed does not
hang on who computes it.

A helper may be displaced in the middle of a share, for some milliseconds. Where it is the only one, callers then do
without it: for 10 ms at first, and for twice as long whenever it is displaced again as soon as it is back. Where there
are more, work is split for all of them, and one less would leave a share to be done when all others are.

The state is memory of 64-bit words, one a cache line, that helpers and callers change by atomic operations only:
``_WORD`` holds the task's number, the next share and their number, so that taking a share and seeing that the task is
still the same are one operation; what the task is may then be read, as it cannot end before the share has.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dynaspec.compiled import declare, njit
from dynaspec.cores import usable_cores

_POINTER, _I32, _I64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
_LINE = 64
"""Bytes of a cache line."""
_WORD, _DONE, _SHARE, _TASK, _BUSY, _HELPERS, _ASLEEP, _WAITING, _UNTIL, _PAUSE = range(0, 10 * _LINE, _LINE)
"""Bytes into the state: see the module; shares done; address of the function and of its arguments; somebody uses the
helpers; how many there are; how many sleep; the caller sleeps; until when callers do without a helper, in nanoseconds;
and for how long they last did, 0 = it has not been displaced."""
_NUMBER, _NEXT = 32, 16
"""Bits of ``_WORD`` from which the task's number and the next share begin; below is how many shares there are."""
_MOST = (1 << _NEXT) - 1
_LOOKS = 4000
"""Pauses that a helper looks for a task before it sleeps, and the caller for the last share: 100 to 200 µs, more than
what lies between two products of a pass."""
_FIRST_PAUSE, _LONGEST_PAUSE = 10_000_000, 320_000_000
"""Nanoseconds that callers do without a helper that was displaced. Trying it again takes what the operating system lets
another process run in one go, some milliseconds; the longest pause makes that a small share."""
_WAIT, _WAKE, _EVERYBODY = 128, 129, 1 << 30
"""Private operations of Linux's futex."""
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())


def _new_state() -> ctypes.c_void_p:
    """Its address. No plain number, which would count as a constant of the kernels: each process has another one."""
    allocate = ctypes.CDLL(None).calloc
    allocate.restype, allocate.argtypes = ctypes.c_size_t, (ctypes.c_size_t, ctypes.c_size_t)
    address = allocate(11, _LINE)  # never freed: helpers look at it until the process has ended
    return ctypes.c_void_p(address + -address % _LINE)


_state = _new_state()
llvm.add_symbol("dynaspec_team", _state.value)


def _of(address: Any, builder: Any, bits: int = 64) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@intrinsic
def _team(typingctx: Any) -> Any:
    """Address of the state."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = "dynaspec_team"
        found = builder.module.globals.get(name)
        if found is None:
            found = ir.GlobalVariable(builder.module, _I64, name)
            found.linkage = "external"
        return builder.ptrtoint(found, _I64)

    return types.int64(), generate


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_of(args[0], builder), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _of(args[0], builder), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> Any:
    """What there is afterwards."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.add(builder.atomic_rmw("add", _of(args[0], builder), args[1], "seq_cst"), args[1])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _replace(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Whether there was what was expected; then there is the value."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = builder.cmpxchg(_of(args[0], builder), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _relax(typingctx: Any) -> Any:
    """Tells the core that it waits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            pause = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        else:
            hint = ir.FunctionType(ir.VoidType(), [_I32])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint"), [_I32(1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _futex(typingctx: Any, address: Any, operation: Any, value: Any) -> Any:
    """Sleeps as long as the 32 bits at an address are ``value``, or wakes who sleeps there."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I64, [_I64] * 7), "syscall")
        builder.call(call, [_I64(_FUTEX or 0), *args, _I64(0), _I64(0), _I64(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _now(typingctx: Any) -> Any:
    """Nanoseconds of the monotonic clock."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I32, _I64.as_pointer()])
        clock = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        seconds, rest = (cgutils.gep_inbounds(builder, time, 0, place) for place in (0, 1))
        builder.call(clock, [_I32(1), seconds])
        return builder.add(builder.mul(builder.load(seconds), _I64(10**9)), builder.load(rest))

    return types.int64(), generate


@intrinsic
def _call(typingctx: Any, share: Any, task: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_POINTER, _I64]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [builder.inttoptr(args[1], _POINTER), args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@njit(nogil=True)
def _take(team: int, word: int) -> bool:
    """Does the next share, if the state is still ``word``."""
    if not _replace(team + _WORD, word, word + (1 << _NEXT)):
        return False
    _call(_load(team + _SHARE), _load(team + _TASK), (word >> _NEXT) & _MOST)
    return True


@njit("void()", cache=True, nogil=True)
def _help() -> None:
    """What a helper does, for ever."""
    team, looks = _team(), 0
    while True:
        word = _load(team + _WORD)
        if (word >> _NEXT) & _MOST < word & _MOST:
            if _take(team, word) and _add(team + _DONE, 1) == word & _MOST and _load(team + _WAITING):
                _futex(team + _DONE, _WAKE, 1)
            looks = 0
        elif looks < _LOOKS:
            looks += 1
            _relax()
        else:
            _add(team + _ASLEEP, 1)
            _futex(team + _WORD + 4, _WAIT, word >> _NUMBER)
            _add(team + _ASLEEP, -1)
            looks = 0


@njit(nogil=True)
def _do_without(team: int, began: int) -> None:
    """The helper has been displaced in a task that ``began`` then: callers do without it for a while, longer if it had
    only just been tried again."""
    pause = _load(team + _PAUSE)
    again = pause and began - _load(team + _UNTIL) < pause
    pause = min(2 * pause, _LONGEST_PAUSE) if again else _FIRST_PAUSE
    _store(team + _PAUSE, pause)
    _store(team + _UNTIL, _now() + pause)


@njit(nogil=True)
def _takes_part(team: int) -> bool:
    """Whether there are helpers, and not a single one that has been displaced a moment ago."""
    helpers = _load(team + _HELPERS)
    return helpers > 1 or (helpers == 1 and (not _load(team + _PAUSE) or _now() >= _load(team + _UNTIL)))


def _run(share: int, task: int, shares: int) -> None:
    """All shares of a task, which have been done when it returns."""
    team = _team()
    if not _takes_part(team) or not _replace(team + _BUSY, 0, 1):
        for number in range(shares):
            _call(share, task, number)
        return
    began = _now()
    _store(team + _SHARE, share)
    _store(team + _TASK, task)
    _store(team + _DONE, 0)
    number = (_load(team + _WORD) >> _NUMBER) + 1 & 0x7FFFFFFF
    _store(team + _WORD, (number << _NUMBER) + shares)
    if _load(team + _ASLEEP):
        _futex(team + _WORD + 4, _WAKE, _EVERYBODY)
    word = _load(team + _WORD)
    while (word >> _NEXT) & _MOST < shares:
        if _take(team, word):
            _add(team + _DONE, 1)
        word = _load(team + _WORD)
    looks, done, awake = 0, _load(team + _DONE), 0
    while done < shares:
        if looks < _LOOKS:
            looks += 1
            _relax()
        else:
            awake = awake or _now() - began
            _store(team + _WAITING, 1)
            _futex(team + _DONE, _WAIT, done)
            _store(team + _WAITING, 0)
        done = _load(team + _DONE)
    if awake and _now() - began > 2 * awake:
        _do_without(team, began)
    _store(team + _BUSY, 0)


_started = 0
_lock = threading.Lock()


def team_size(threads: int) -> int:
    """How many of ``threads`` threads there are for compiled code; starts what is missing.

    No more than the process may use: cores that it is bound to, and the CPU time that a container is limited to.
    """
    global _started
    if _FUTEX is None or sys.platform != "linux":
        return 1
    size = max(1, min(threads, usable_cores()))
    with _lock:
        while _started < size - 1:
            threading.Thread(target=_help, name=f"kernels-{_started + 1}", daemon=True).start()
            _started += 1
        _set_helpers(_started)
    return size


@njit("void(i8)", cache=True, nogil=True)
def _set_helpers(count: int) -> None:
    _store(_team() + _HELPERS, count)


def _forget() -> None:
    """A process that was forked has no helpers; its caller's are the other one's."""
    global _started, _lock
    _started, _lock = 0, threading.Lock()
    ctypes.memset(_state, 0, 10 * _LINE)


os.register_at_fork(after_in_child=_forget)


@intrinsic(prefer_literal=False)
def together(typingctx: Any, function: Any, threads: Any, args: Any) -> Any:
    """Calls ``function(i, threads, *args)`` for i = 0 … threads − 1, on as many threads as are free, and waits for all.

    The function is one of numba's that returns nothing and raises nothing; args is a tuple.
    """
    inner_types = (types.intp, types.intp, *args.types)
    inner_sig = function.get_call_type(typingctx, inner_types, {})

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        compiled = function.dispatcher.get_compile_result(inner_sig)
        fields = [values[1], *cgutils.unpack_tuple(builder, values[2])]
        share = _outlined(context, builder, compiled, [field.type for field in fields])
        task = cgutils.alloca_once(builder, ir.LiteralStructType([field.type for field in fields]))
        for place, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, task, 0, place))
        what = builder.ptrtoint(share, _I64), builder.ptrtoint(task, _I64), values[1]
        context.compile_internal(builder, _run, types.void(types.int64, types.int64, types.int64), what)
        return context.get_dummy_value()

    return types.void(function, types.intp, args), generate


def _outlined(context: Any, builder: Any, compiled: Any, fields: list[Any]) -> Any:
    """A C function of a pointer and a share's number that calls the compiled one with what the pointer shows."""
    module = builder.module
    function = ir.Function(
        module,
        ir.FunctionType(ir.VoidType(), [_POINTER, _I64]),
        module.get_unique_name(f"share_{compiled.fndesc.unique_name}"),
    )
    function.linkage = "internal"
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    task = inner.load(inner.bitcast(function.args[0], ir.LiteralStructType(fields).as_pointer()))
    arguments = [function.args[1], *(inner.extract_value(task, place) for place in range(len(fields)))]
    callee = declare(context, module, compiled)
    signature = compiled.signature
    context.call_conv.call_function(inner, callee, signature.return_type, signature.args, arguments)
    inner.ret_void()
    return function
