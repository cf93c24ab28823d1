"""How functions are compiled to machine code, with types that survive it, and where that is kept.

numba keeps what it compiles beside the sources, in ``NUMBA_CACHE_DIR`` or in the user's cache folder, and compiles a
function anew where its own file has changed. Here it does so too where a file has changed whose functions or constants
the function uses: a caller contains the code of those that it calls. So an upgrade, or an edit, needs no clean-up.

Code that a caller contains is optimised again in each of its callers, and theirs. So large functions stand apart: their
callers refer to them by a symbol, as programs do to those of a library, and have them loaded before themselves.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numpy as np
from numba import types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
)
from numba.core.caching import UserWideCacheLocator as _UserWide

from dynaspec.compile_worker import compile_worker

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]
_SAY_EVERY_S = 5.0
"""How often the log says what is being compiled, at most."""
_WARN_AT = 10
"""Functions after which it is a first start, which takes a minute or two: one line of the log is then a warning, which
Python shows unless it is told otherwise."""


def njit(*signatures: Any, cache: bool = False, apart: bool = False, allocates: bool = True, **options: Any) -> Any:
    """``numba.njit`` with dynaspec's cache.

    Args:
        signatures: compiled for, or loaded, at once, and for no others. None: as calls come.
        apart: see the module; so is what has signatures. For functions of a module, which do much in a call.
        allocates: whether the function, or one that it calls, makes arrays. If not, it counts no references to those
            that it works on, which its caller keeps: numba counts at every view of an array, by an atomic operation for
            which threads that share the array wait.
    """
    if not allocates:
        options["_nrt"] = False  # numba's name for its runtime, which allocates and counts

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)
        compiled.get_call_template = partial(_whatever_number, compiled)
        if cache:
            compiled._cache = _Cache(function)
        if signatures or apart:
            compiled.add_overload = partial(_add_apart, compiled)
        for signature in signatures:
            compiled.compile(signature)
        if signatures:
            compiled.disable_compile()
        return compiled

    return decorate


def _whatever_number(compiled: Any, arguments: Any, named: Any) -> Any:
    """``get_call_template`` of numba's dispatchers, which compiles a function anew for every constant that it is called
    with."""
    named = {name: types.unliteral(type_) for name, type_ in dict(named).items()}
    return type(compiled).get_call_template(compiled, tuple(map(types.unliteral, arguments)), named)


def compile_for(compiled: Any, signature: Any) -> None:
    """Compiles, or loads, a signature, of a function too that was compiled for others at once and takes no more."""
    takes_more = compiled._can_compile
    compiled.disable_compile(False)
    compiled.compile(signature)
    compiled.disable_compile(not takes_more)


_apart: dict[str, Any] = {}
"""numba's results by their symbols, for as long as the process lives: their addresses are in other code."""
_symbols: dict[Any, str] = {}
"""Of the entry points of those results."""


def declare(context: Any, module: Any, result: Any) -> Any:
    """A compiled function as code calls it that is being compiled.

    Args:
        context: numba's target context.
        module: LLVM's, which the code is in.
        result: numba's, of one of the function's signatures.
    """
    symbol = _symbols.get(result.entry_point)
    if symbol is not None:
        return context.declare_function(module, _under(symbol, result))
    context.active_code_library.add_linking_library(result.library)
    return context.declare_function(module, result.fndesc)


def _under(symbol: str, result: Any) -> Any:
    """numba's description of a function, with another name."""
    described = copy(result.fndesc)
    described.mangled_name = symbol
    return described


def _symbol(module: str, function: str, arguments: tuple[Any, ...]) -> str:
    """The same in all processes, and another one for other sources: the code of these may be in the cache, too."""
    return f"{module}.{function}.{sha256(f'{stamp(module)}{arguments}'.encode()).hexdigest()}"


def _add_apart(compiled: Any, result: Any) -> None:
    """``add_overload`` of numba's dispatchers, which have registered the function as one to link by then."""
    described, context = result.fndesc, compiled.targetctx
    symbol = _symbol(described.modname, described.qualname, result.signature.args)
    if symbol not in _apart:
        llvm.add_symbol(symbol, result.library.get_pointer_to_function(described.llvm_func_name))
        _apart[symbol] = result
    _symbols[result.entry_point] = symbol
    context.remove_user_function(result.entry_point)
    context.insert_user_function(result.entry_point, _under(symbol, result))
    type(compiled).add_overload(compiled, result)


def kernel(function: F) -> F:
    """A function called from Python: releases the GIL, is kept on disk, and never reorders float arithmetic. It stands
    apart where kernels call it."""
    return cast(F, njit(nogil=True, cache=True, apart=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """A function called from kernels only, small enough to become part of their loops."""
    return cast(F, njit(inline="always", error_model="numpy")(function))


def subroutine(function: F) -> F:
    """A function called from kernels only."""
    return cast(F, njit(error_model="numpy")(function))


@subroutine
def copy_row(source: Any, target: Any) -> None:
    """A row into another of its length, for kernels. numba's assignment of arrays brings along the text of its errors,
    which takes longer to compile than most kernels."""
    for i in range(source.size):
        target[i] = source[i]


@subroutine
def rows_at(states: Any, places: Any) -> Any:
    """[r, width] rows of ``states`` [R, width], float32; for kernels."""
    rows = np.empty((places.size, states.shape[1]), np.float32)
    for i in range(places.size):
        copy_row(states[places[i]], rows[i])
    return rows


class _InTree(InTreeCacheLocator):  # type: ignore[misc]
    """Beside the sources. The folder is made, as are the others', when there is something to keep."""

    @classmethod
    def from_function(cls, function: Any, path: str) -> Any:
        folder = Path(path).parent
        return cls(function, path) if os.access(folder, os.W_OK) else None


class _UserProvided(UserProvidedCacheLocator):  # type: ignore[misc]
    @classmethod
    def from_function(cls, function: Any, path: str) -> Any:
        return cls(function, path) if numba.config.CACHE_DIR else None


class _UserWideFolder(_UserWide):  # type: ignore[misc]
    @classmethod
    def from_function(cls, function: Any, path: str) -> Any:
        return cls(function, path)


class _Kept(CompileResultCacheImpl):  # type: ignore[misc]
    """Results on disk, each with what it refers to: module, name and arguments of the function by its symbol."""

    _locator_classes = (_UserProvided, _InTree, _UserWideFolder)

    def reduce(self, result: Any) -> Any:
        symbols = [function.name for function in result.library._final_module.functions if function.is_declaration]
        found = [(symbol, _apart[symbol]) for symbol in symbols if symbol in _apart]
        called = {symbol: (one.fndesc.modname, one.fndesc.qualname, one.signature.args) for symbol, one in found}
        return called, super().reduce(result)

    def rebuild(self, context: Any, kept: Any) -> Any:
        """None where something that it refers to has changed: the function is compiled then."""
        called, result = kept
        for symbol, (module, name, arguments) in called.items():
            if symbol in _apart:
                continue
            if symbol != _symbol(module, name, arguments):
                return None
            compile_for(getattr(sys.modules[module], name), arguments)
        return super().rebuild(context, result)


class ResultFiles(IndexDataCacheFile):  # type: ignore[misc]
    """A function's results on disk, each named after what it is for.

    numba numbers them: two processes that kept two results at the same moment could give both the same number, and one
    would then be loaded as the other. Here an entry may only be lost, and is compiled again.
    """

    def __init__(self, folder: str, name: str, stamp: str) -> None:
        super().__init__(folder, name, stamp)
        # Compared before the rest is read, which may name types that other sources had and these have not.
        self._version = f"{numba.__version__} {stamp}"

    def save(self, key: Any, data: Any) -> None:
        overloads = self._load_index()
        overloads[key] = name = self._data_name(int(sha256(repr(key).encode()).hexdigest()[:12], 16))
        self._save_data(name, data)
        self._save_index(overloads)


class _Cache(FunctionCache):  # type: ignore[misc]
    """A function's results, valid for the sources that ``stamp`` was made of."""

    _impl_class = _Kept

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file = ResultFiles(self._cache_path, self._impl.filename_base, stamp(function.__module__))

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = super().load_overload(signature, context)
        if found is None:  # numba compiles it next
            _progress.say(f"{self._py_func.__module__}.{self._py_func.__qualname__}", self.cache_path)
        return found


class _Progress:
    """Says in the log that functions are being compiled, which takes a minute or more where none are kept."""

    def __init__(self) -> None:
        self._functions, self._said_s = 0, -math.inf

    def say(self, function: str, folder: str) -> None:
        """To be called before each."""
        compile_worker.start()
        self._functions += 1
        now_s = time.monotonic()
        warned = self._functions == _WARN_AT
        if warned or now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            logger.log(
                logging.WARNING if warned else logging.INFO,
                "compiling %s, once on this machine, to be kept in %s; functions so far: %d",
                function,
                folder,
                self._functions,
            )


_progress = _Progress()


@cache
def stamp(module: str) -> str:
    """Digest of a module's text and of what it has from others: their compiled functions, and constants. This module's
    text is part of all.

    To be asked behind the module's imports.
    """
    found, digest = sys.modules[module], sha256()
    for file in (found.__file__, __file__):
        digest.update(Path(str(file)).read_bytes())
    for name, value in sorted(vars(found).items()):
        used = None if name.startswith("__") else _used(module, value)
        if used is not None:
            digest.update(f"{name}={used};".encode())
    return digest.hexdigest()


def _used(module: str, value: Any) -> str | None:
    """What a kernel of ``module`` could take from a global variable; None: nothing that its text does not say."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return repr([_used(module, item) for item in value])
    origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if isinstance(origin, str) and origin != module and origin.startswith(_PACKAGE):
        return stamp(origin)
    return None
