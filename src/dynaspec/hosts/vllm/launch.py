"""dynaspec's arguments as vLLM's: the same options start a model here, on one GPU under vLLM, or on many.

vLLM itself is looked at only where it is installed, so that a configuration can be translated, and refused, without it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.control.registry import build_controller

from .driver import limits_for
from .launch_drafter import Place, own_drafting, take_backend
from .launch_speculation import Speculation, divide
from .menu import Table, k_menu, table_of
from .methods import drafter_of
from .settings import Settings, VllmSpeculation
from .told import KEY, LOG_KEY

SCHEDULER = "dynaspec.hosts.vllm.Scheduler"
"""What vLLM imports as its scheduler."""

SPECULATION_OPTIONS: Mapping[str, str] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's options that stand for keys of ``speculative_config``."""

_RENAMED: Mapping[str, str] = {"kv_cache_memory": "kv_cache_memory_bytes"}
_ABOUT = (
    *(LOG_KEY, "additional_config", "scheduler_cls"),
    *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"),
)
"""Options that ``speculation_arguments`` must know."""
_MOVED = _ABOUT[:3]
"""Those of them that it returns."""


def require_vllm() -> None:
    """
    Raises:
        ConfigError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError("backend is 'vllm', which is not installed; expected it to be: pip install vllm")


def engine_arguments(
    model: str, speculative_config: Any, options: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for what ``dynaspec.LLM`` was called with.

    Args:
        speculative_config: see ``launch_speculation.divide``; None = vLLM's own scheduler, without speculation.
        options: dynaspec's, under dynaspec's names, and any of vLLM's; values of the latter are vLLM's to check.
        environ: environment variables, which decide what ``speculative_config`` leaves open.

    Raises:
        ConfigError: an option that vLLM does not have, or a speculation that it cannot carry out.
    """
    passed = _translated({name: options[name] for name in options if name not in (*_MOVED, *SPECULATION_OPTIONS)})
    _check_names(passed)
    about = {name: options[name] for name in _ABOUT if options.get(name) is not None}
    speculation = speculation_arguments(_with_options(speculative_config, options), environ, **about)
    return {"model": model, **passed, **speculation}


def speculation_arguments(
    speculative_config: Any,
    environ: Mapping[str, str],
    *,
    decision_log: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    scheduler_cls: object = None,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> dict[str, Any]:
    """The engine arguments by which vLLM speculates as dynaspec says, if it speculates.

    Args:
        speculative_config: see ``launch_speculation.divide``; ``drafter_backend`` in it says who runs the drafter.
        additional_config: what else vLLM's plugins are told.
        scheduler_cls: another scheduler, for plain decoding only.

    Raises:
        ConfigError: a speculation that vLLM cannot carry out, or settings for a scheduler that is not there.
    """
    given, backend = take_backend(speculative_config)
    place = Place(_on_cpu(), data_parallel_size * tensor_parallel_size * pipeline_parallel_size)
    vllms = _field_names("vllm.config", "SpeculativeConfig")
    own = own_drafting(given, backend, environ, place, vllms)
    speculation = divide(given, environ, vllms) if own is None else Speculation(own.drafting, own.told)
    if speculation is None:
        if decision_log is not None:
            raise ConfigError(
                f"decision_log is {decision_log!r} but nothing speculates; expected a speculative_config too, as under "
                "vLLM only dynaspec's scheduler keeps such a log"
            )
        others = {"additional_config": additional_config, "scheduler_cls": scheduler_cls}
        return {name: value for name, value in others.items() if value is not None}
    if scheduler_cls not in (None, SCHEDULER):
        raise ConfigError(f"scheduler_cls is {scheduler_cls!r}; expected none, as dynaspec's decides how much to draft")
    if KEY in (additional_config or {}):
        raise ConfigError(
            f"additional_config has the key {KEY!r}; expected what it holds in speculative_config, which says the same"
        )
    settings = dict(speculation.policy) | ({} if decision_log is None else {LOG_KEY: decision_log})
    table = None
    if own is None:
        table = _table(speculation, data_parallel_size)
        _check_settings(settings, speculation, table, data_parallel_size, environ)
    lengths = {} if table is None else {"num_speculative_tokens_per_batch_size": table}
    return {
        "speculative_config": {**speculation.drafting, **lengths},
        "scheduler_cls": SCHEDULER,
        "additional_config": {**(additional_config or {}), KEY: settings},
    }


def _table(speculation: Speculation, ranks: int) -> Table | None:
    """The lengths that vLLM is to have graphs for; None where all drafts have the longest."""
    longest = _longest(speculation)
    if longest is None or ranks > 1 or not drafter_of(_method(speculation)).varies:
        return None
    menu = sorted({*k_menu(longest), *(k for k in speculation.lengths if k <= longest)})
    return table_of(
        menu, len(menu)
    )  # all of them, even where fewer requests can run: the controller is to have the choice


def _check_settings(
    settings: Mapping[str, Any],
    speculation: Speculation,
    table: Table | None,
    ranks: int,
    environ: Mapping[str, str],
) -> None:
    """Refuses here what the scheduler would refuse in a process of its own, after the model has been loaded.

    Raises:
        ConfigError: see ``Settings.read`` and ``build_controller``.
    """
    longest = _longest(speculation)
    if longest is not None:
        host = VllmSpeculation(_method(speculation), longest, model="drafter", table=tuple(table or ()), ranks=ranks)
        told = Settings.read(settings, host, environ)
        build_controller(told.config, limits_for(told.drafter, told.menu, asynchronous=False))


def _longest(speculation: Speculation) -> int | None:
    """None: the draft model's checkpoint says it."""
    return speculation.drafting.get("num_speculative_tokens")


def _method(speculation: Speculation) -> str:
    """vLLM's name of it; without one vLLM looks at the checkpoint, and most are models like the target."""
    method = str(speculation.drafting.get("method", "draft_model"))
    return "mtp" if method.endswith("_mtp") else method


def _translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ConfigError: a value that the embedded engine has and vLLM has not.
    """
    passed = {_RENAMED.get(name, name): value for name, value in options.items()}
    device = passed.pop("device", "auto")
    if device != "auto":
        raise ConfigError(f"device is {device!r}; expected 'auto', as vLLM runs on the platform that it was built for")
    return passed


def _with_options(speculative_config: Any, options: Mapping[str, Any]) -> Any:
    single = {key: options[name] for name, key in SPECULATION_OPTIONS.items() if options.get(name) is not None}
    if not single:
        return speculative_config
    if speculative_config is not None:
        named = next(name for name in SPECULATION_OPTIONS if options.get(name) is not None)
        raise ConfigError(f"{named} was given together with speculative_config; expected one or the other")
    return single


def _check_names(options: Collection[str]) -> None:
    known = _field_names("vllm", "EngineArgs")
    for name in options if known else ():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "expected one of dynaspec's, or of vLLM's EngineArgs"
            raise ConfigError(f"unknown option {name!r} for vLLM; {hint}")


def _on_cpu() -> bool:
    """Whether vLLM is there and was built for CPUs."""
    if find_spec("vllm") is None:
        return False
    from importlib import import_module

    return bool(import_module("vllm.platforms").current_platform.is_cpu())


def _field_names(module: str, cls: str) -> frozenset[str]:
    """The fields of one of vLLM's configurations; empty without vLLM."""
    if find_spec("vllm") is None:
        return frozenset()
    from importlib import import_module

    return frozenset(field.name for field in dataclasses.fields(getattr(import_module(module), cls)))
