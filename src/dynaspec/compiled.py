"""How functions are compiled to machine code, with types that survive it, and where that is kept.

numba keeps what it compiles beside the sources, in ``NUMBA_CACHE_DIR`` or in the user's cache folder, and compiles a
function anew where its own file has changed. Here it does so too where a file has changed whose functions or constants
the function uses: a caller contains the code of those that it calls. So an upgrade, or an edit, needs no clean-up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator, UserProvidedCacheLocator
from numba.core.caching import UserWideCacheLocator as _UserWide

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]


def njit(*signatures: Any, cache: bool = False, **options: Any) -> Any:
    """``numba.njit`` with dynaspec's cache.

    Args:
        signatures: compiled for, or loaded, at once, and for no others. None: as calls come. A function that has them
            stands apart: others call it, where else they contain all its code, which LLVM optimises anew for each.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)
        if cache:
            compiled._cache = _Cache(function)
        for signature in signatures:
            compiled.compile(signature)
        if signatures:
            compiled.disable_compile()
            for result in compiled.overloads.values():
                _set_apart(compiled.targetctx, result)
        return compiled

    return decorate


def apart(result: Any) -> Any:
    """How compiled code declares a function that stands apart; there is nothing to link.

    Args:
        result: numba's, of one of its signatures.

    Returns:
        numba's description of the function, under a name that is the same in each process.
    """
    described = copy(result.fndesc)
    version = sha256(f"{stamp(described.modname)}{described.argtypes}".encode()).hexdigest()
    described.mangled_name = f"{described.modname}.{described.qualname}.{version}"
    return described


def _set_apart(context: Any, result: Any) -> None:
    """Has compiled code call what is compiled, by its name."""
    described = apart(result)
    llvm.add_symbol(described.mangled_name, result.library.get_pointer_to_function(result.fndesc.llvm_func_name))
    context.remove_user_function(result.entry_point)
    context.insert_user_function(result.entry_point, described)


def kernel(function: F) -> F:
    """A function called from Python: releases the GIL, is kept on disk, and never reorders float arithmetic."""
    return cast(F, njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """A function called from kernels only, small enough to become part of their loops."""
    return cast(F, njit(inline="always", error_model="numpy")(function))


def subroutine(function: F) -> F:
    """A function called from kernels only."""
    return cast(F, njit(error_model="numpy")(function))


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
    _locator_classes = (_UserProvided, _InTree, _UserWideFolder)


class _Cache(FunctionCache):  # type: ignore[misc]
    """A function's results, valid for the sources that ``stamp`` was made of."""

    _impl_class = _Kept

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = stamp(function.__module__)


@cache
def stamp(module: str) -> str:
    """Digest of a module's text and of what it has from others: their compiled functions, and constants.

    To be asked behind the module's imports.
    """
    found, digest = sys.modules[module], sha256()
    digest.update(Path(str(found.__file__)).read_bytes())
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
    if isinstance(value, type):
        return repr(value._fields) if issubclass(value, tuple) and hasattr(value, "_fields") else None
    if isinstance(value, ModuleType):
        compiled = value.__name__.startswith(_PACKAGE) and any(_is_compiled(other) for other in vars(value).values())
        return stamp(value.__name__) if compiled else None
    if _is_compiled(value) and value.__module__ != module and value.__module__.startswith(_PACKAGE):
        return stamp(value.__module__)
    return None


def _is_compiled(value: Any) -> bool:
    """Made by ``njit`` or ``numba.extending.intrinsic``."""
    return type(value).__module__.startswith("numba.") and isinstance(getattr(value, "__module__", None), str)
