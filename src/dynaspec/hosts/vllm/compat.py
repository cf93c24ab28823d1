"""Is the vLLM that is installed one that scheduler and drafter know? Asked before anything of it is used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from dynaspec.contract.errors import ConfigError

SUPPORTED = ("0.32", "0.33")
"""Versions of vLLM, without their patch level."""
INSTALL = "pip install 'vllm>=0.32,<0.34'"

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
CALLS: Mapping[str, tuple[str, ...]] = {
    f"{_SCHEDULER}.__init__": ("vllm_config", "kv_cache_config"),
    f"{_SCHEDULER}.schedule": (),
    f"{_SCHEDULER}._update_after_schedule": ("scheduler_output",),
    f"{_SCHEDULER}.update_draft_token_ids": ("draft_token_ids",),
    f"{_SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
    f"{_SCHEDULER}.get_request_counts": (),
    f"{_SCHEDULER}.shutdown": (),
    f"{_ASYNC}._update_after_schedule": ("scheduler_output",),
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": ("vllm_config",),
}
"""What is overridden or called, and the parameters it is expected to have."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("num_scheduled_tokens", "scheduled_spec_decode_tokens", "num_spec_tokens_to_schedule"),
        *("num_invalid_spec_tokens", "finished_req_ids", "preempted_req_ids"),
    ),
    "vllm.v1.outputs:DraftTokenIds": ("req_ids", "draft_token_ids"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_id_to_index", "sampled_token_ids"),
    "vllm.v1.metrics.stats:SchedulerStats": ("num_kv_fetch_reqs_by_stage",),
}
"""What is read or set, by the class that has it."""


def check_vllm(load: Callable[[str], ModuleType] = import_module) -> str:
    """
    Args:
        load: imports a module by its name.

    Returns:
        vLLM's version.

    Raises:
        ConfigError: vLLM is missing, of a version that is not known, or without something that is used.
    """
    try:
        version = str(load("vllm").__version__)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(f"vLLM is not installed; expected one of {_versions()}: {INSTALL}") from None
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in SUPPORTED:
        raise ConfigError(f"vLLM is {version}; expected one of {_versions()}: {INSTALL}")
    for place, parameters in CALLS.items():
        has = tuple(inspect.signature(_find(place, version, load)).parameters)
        for name in parameters:
            if name not in has:
                raise _incompatible(version, f"{place} has parameters {has}", f"{name!r} among them")
    for place, names in FIELDS.items():
        cls = _find(place, version, load)
        has = tuple(field.name for field in fields(cls)) if is_dataclass(cls) else tuple(dir(cls))
        for name in names:
            if name not in has:
                raise _incompatible(version, f"{place} has no field {name!r}", "one")
    return version


def _versions() -> str:
    return " and ".join(SUPPORTED)


def _find(place: str, version: str, load: Callable[[str], ModuleType]) -> Any:
    module, _, path = place.partition(":")
    try:
        found: Any = load(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ModuleNotFoundError, AttributeError):
        raise _incompatible(version, f"{place} is not there", "it") from None
    return found


def _incompatible(version: str, found: str, expected: str) -> ConfigError:
    return ConfigError(f"in vLLM {version}, {found}; expected {expected}, as in {_versions()}")
