"""Threads for compiled code: every share is done once, whoever does it, and nobody waits for who does none."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from dynaspec.model.kernels.team import team_size, together

Int64 = npt.NDArray[np.int64]

needs_threads = pytest.mark.skipif(team_size(2) < 2, reason="one core, or no futex")


def run(script: str) -> subprocess.CompletedProcess[str]:
    """In a process whose team is its own."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )


@njit("void(i8, i8, i8[::1], i8)", nogil=True)
def _count(share: int, shares: int, done: Int64, amount: int) -> None:
    for _ in range(amount):
        done[share] += 1
    done[-1] = shares


@njit(nogil=True)
def _count_all(done: Int64, amount: int) -> None:
    together(_count, done.size - 1, (done, amount))


@pytest.mark.parametrize("shares", [1, 2, 7, 200])
def test_every_share_is_done_once(shares: int) -> None:
    team_size(2)
    for amount in (1, 1000):
        for _ in range(200):
            done = np.zeros(shares + 1, np.int64)
            _count_all(done, amount)
            assert done.tolist() == [amount] * shares + [shares]


def test_several_callers_at_once() -> None:
    def call(_: int) -> list[int]:
        done = np.zeros(6, np.int64)
        _count_all(done, 300)
        return done.tolist()

    with ThreadPoolExecutor(4) as callers:
        assert all(done == [300] * 5 + [5] for done in callers.map(call, range(2000)))


_libc = ctypes.CDLL(None)
_thread, _sleep = _libc.pthread_self, _libc.usleep
_thread.restype, _thread.argtypes = ctypes.c_size_t, ()
_sleep.restype, _sleep.argtypes = ctypes.c_int, (ctypes.c_uint,)


@njit("void(i8, i8, i8[::1], i8)", nogil=True)
def _note(share: int, shares: int, done_by: Int64, late_us: int) -> None:
    """Two milliseconds for the caller, whose thread stands behind those of the shares."""
    done_by[share] = _thread()
    _sleep(2000 if done_by[share] == done_by[-1] else late_us)


@njit("b1(i8[::1], i8)", nogil=True)
def _is_helped(done_by: Int64, late_us: int) -> bool:
    """Whether a helper has done a share of two; it takes so long."""
    done_by[-1] = _thread()
    together(_note, 2, (done_by, late_us))
    return bool(done_by[0] != done_by[1])


DISPLACED = """
import time
import numpy as np
from dynaspec.model.kernels.team import team_size
from unit.model.test_team import _is_helped
done_by, end = np.zeros(3, np.int64), time.monotonic() + 60
team_size(2)
for _ in range(6):
    while not _is_helped(done_by, 50_000) and time.monotonic() < end:
        pass
alone, began = not _is_helped(done_by, 0), time.monotonic()
while not _is_helped(done_by, 0) and time.monotonic() < end:
    pass
print(alone, 0.1 < time.monotonic() - began, time.monotonic() < end)
"""


@needs_threads
def test_the_only_helper_is_left_out_for_a_while_when_it_is_late() -> None:
    """Its core has other work then. After six times in a row that is a third of a second."""
    assert run(DISPLACED).stdout == "True True True\n"


ABSENT = """
import numpy as np
from dynaspec.model.kernels import team
from unit.model.test_team import _count_all
team._set_helpers(1)  # which nobody has started: it is displaced for good
done = np.zeros(9, np.int64)
_count_all(done, 10)
print(done.tolist())
"""
FORKED = """
import os, sys
import numpy as np
from dynaspec.model.kernels.team import team_size
from unit.model.test_team import _count_all
done = np.zeros(9, np.int64)
team_size(2)
_count_all(done, 10)
child = os.fork()
done[:] = 0
_count_all(done, 10)
team_size(2)
_count_all(done, 10)
if child == 0:
    os._exit(done.tolist() != [20] * 8 + [8])
print(done.tolist() if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else "the child failed")
"""


@needs_threads
@pytest.mark.parametrize(("script", "times"), [(ABSENT, 10), (FORKED, 20)], ids=["not running", "after a fork"])
def test_helpers_that_are_not_there(script: str, times: int) -> None:
    done = run(script)
    assert done.stdout.split("\n")[0] == str([times] * 8 + [8]), done.stderr
