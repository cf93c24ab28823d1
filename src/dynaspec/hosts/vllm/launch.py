"""dynaspec's arguments as vLLM's: the same options start a model here, on one GPU under vLLM, or on many.

``speculative_config`` is divided between vLLM, which drafts, and the scheduler, which says how much; or dynaspec's own
drafter drafts in vLLM's worker (``drafting``). vLLM itself is looked at only where it is installed, so that a
configuration can be translated, and refused, without it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, OF_TOKENS, WITH_MODEL
from dynaspec.control.config import SpeculativeConfig, as_mapping
from dynaspec.control.keys import (
    ALIASES,
    SPECULATION_OPTIONS,
    SUFFIX_KEYS,
    SUFFIX_ONLY_HERE,
    canonical,
    spelled_out,
)
from dynaspec.control.resolve import (
    DEFAULT_CAP,
    DEFAULT_HYBRID_LOOKUP,
    SCHEDULE_KEY,
    WIDTH_KEY,
    fill_in,
    infer_method,
    infer_policy,
    tree_key,
)

from .settings import (
    DRAFTER,
    KEY,
    LOG_KEY,
    DrafterSettings,
    Settings,
    Table,
    VllmSpeculation,
    drafter_of,
    k_menu,
    table_of,
)

POLICY_KEYS = frozenset(
    {
        "policy",
        "num_speculative_tokens_per_batch_size",
        "dynamic_config_path",
        "draft_length_options",
        "kv_write_gating_threshold",
        "disable_by_batch_size",
        "draft_confidence_threshold",
        "draft_confidence_scope",
        "signal",
        SCHEDULE_KEY,
    }
)
"""Keys that say how much to draft."""

VLLM_KEYS = frozenset(
    {
        "attention_backend",
        "code_revision",
        "disable_eagle_block_drop",
        "disable_padded_drafter_batch",
        "draft_load_config",
        "draft_tensor_parallel_size",
        "dspark_draft_topk",
        "enable_adaptive_verification",
        "enforce_eager",
        "index_share_for_mtp_iteration",
        "kv_cache_dtype",
        "moe_backend",
        "parallel_drafting",
        "use_local_argmax_reduction",
    }
)
"""Keys that only vLLM honours. Where it is installed, whatever else it knows passes too."""

KEYS = frozenset({*SpeculativeConfig.model_fields, SCHEDULE_KEY})
_OWN_VOCABULARY = ("use_heterogeneous_vocab", "assistant_lookbehind", "target_lookbehind")
_LOOKUP = frozenset(("prompt_lookup_max", "prompt_lookup_min"))
BACKEND_KEY = "drafter_backend"
"""Of ``speculative_config``, for this host alone."""
BACKENDS = ("auto", "dynaspec", "vllm")
_TESTING = ("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length")
"""Keys that say how drafts are tested, which is vLLM's whoever drafts."""
SCHEDULER = "dynaspec.hosts.vllm.Scheduler"
"""What vLLM imports as its scheduler."""
_RENAMED: Mapping[str, str] = {"kv_cache_memory": "kv_cache_memory_bytes"}
_ABOUT = (
    *(LOG_KEY, "additional_config", "scheduler_cls"),
    *("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"),
)
"""Options that ``speculation_arguments`` must know."""
_MOVED = _ABOUT[:3]
"""The part of ``_ABOUT`` that ``speculation_arguments`` returns."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """One ``speculative_config``, divided."""

    drafting: Mapping[str, Any]
    """vLLM's ``speculative_config``: who drafts, and the longest draft."""
    policy: Mapping[str, Any]
    """What dynaspec is told in ``additional_config``: its scheduler, or its own drafter, the whole of it."""

    @property
    def longest(self) -> int | None:
        """The longest draft; None: the draft model's checkpoint says it."""
        return self.drafting.get("num_speculative_tokens")

    @property
    def method(self) -> str:
        """vLLM's name of it; without one vLLM looks at the checkpoint, and most are models like the target."""
        method = str(self.drafting.get("method", "draft_model"))
        return "mtp" if method.endswith("_mtp") else method

    @property
    def lengths(self) -> frozenset[int]:
        """Draft lengths that the policy names."""
        ranges = self.policy.get("num_speculative_tokens_per_batch_size") or ()
        return frozenset((*(k for _, _, k in ranges), *(self.policy.get("draft_length_options") or ())))


def divide(value: Any, environ: Mapping[str, str], vllms: Collection[str] = ()) -> Speculation | None:
    """
    Args:
        value: mapping, JSON text or ``SpeculativeConfig``; None = no speculation. A mapping leaves what it does not
            name to vLLM, but for the length; an object says everything.
        environ: environment variables, which decide what the value leaves open.
        vllms: the keys of vLLM's own ``speculative_config``, where it is installed.

    Raises:
        ConfigError: an unknown key, a value out of range, or keys that contradict each other.
    """
    if value is None:
        return None
    named, passed, method = _read(value, environ, vllms)
    if named.get("quantization") is not None:
        raise ConfigError(
            f"quantization is {named['quantization']!r}, which vLLM's drafters do not have; expected one of vLLM's "
            "own, or drafter_backend 'dynaspec' on a CPU"
        )
    if method in OF_TOKENS:
        return _own_method(named, passed)
    return _divided(named, passed, policy=infer_policy(named))


def _read(value: Any, environ: Mapping[str, str], vllms: Collection[str]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What dynaspec reads, what only vLLM does, and the method.

    Raises:
        ConfigError: see ``keys_of``, ``canonical`` and ``check_method``; or drafts are to be trees.
    """
    given, passed = split(keys_of(value), vllms)
    named = fill_in(canonical(given, KEYS), environ)
    method = infer_method(named)
    check_method(method, named)
    if (tree := tree_key(named)) is not None:
        raise ConfigError(
            f"{tree} is {named[tree]!r}, but vLLM verifies chains only; expected no {tree}, or dynaspec's own engine"
        )
    named.pop(WIDTH_KEY, None)  # 1: chains
    return named, passed, method


def check_method(method: Any, named: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a method, or a way of it, that drafts inside of dynaspec's own engine only.
    """
    for name in _OWN_VOCABULARY:
        if named.get(name, False) is not False:
            raise ConfigError(
                f"{name} is {named[name]!r}, which vLLM does not have; expected use_heterogeneous_vocab true, or "
                "dynaspec's own engine"
            )
    known = METHODS.get(method) if isinstance(method, str) else None
    if known is not None and known.in_target and not known.reads_target:
        raise ConfigError(f"method is {method!r}, which vLLM does not have; expected dynaspec's own engine, or another")


def keys_of(value: Any) -> Mapping[str, Any]:
    """What a ``speculative_config`` says, as keys: a mapping, JSON text or ``SpeculativeConfig``.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, SpeculativeConfig):
        by_itself = _LOOKUP if value.hybrid_lookup and value.lookup == DEFAULT_HYBRID_LOOKUP else frozenset()
        return {name: getattr(value, name) for name in value.model_fields_set - by_itself}
    return as_mapping(value)


def split(given: Mapping[str, Any], vllms: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What dynaspec reads, as it is spelled; what only vLLM does, under vLLM's names.

    Args:
        vllms: see ``divide``.
    """
    only_vllms = VLLM_KEYS.union(vllms)
    read: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for spelling, value in given.items():
        alias = spelled_out(spelling)
        name = ALIASES.get(alias, alias)
        if (name in only_vllms and name not in KEYS) or _is_vllms(name, value):
            passed[name] = value
        else:
            read[spelling] = value
    return read, {name: value for name, value in passed.items() if value is not None}


def _is_vllms(name: str, value: Any) -> bool:
    """Whether only vLLM has this value of a key that dynaspec has too."""
    if name == "use_heterogeneous_vocab":
        return value is True
    return name == "quantization" and value not in ("int8", "int4")


def _own_method(named: Mapping[str, Any], passed: Mapping[str, Any]) -> Speculation:
    """A method that the embedded engine has too: its keys are checked, and lengths decided, as there."""
    config = SpeculativeConfig(**named)
    if config.hybrid_lookup and (asked := [name for name in (*sorted(_LOOKUP), *SUFFIX_KEYS) if name in named]):
        raise ConfigError(
            f"{asked[0]} is {named[asked[0]]} but method is 'draft_model'; expected one or the other, as vLLM has one "
            "drafter"
        )
    if config.dtype != "auto":
        raise ConfigError(f"dtype is {config.dtype!r}; expected 'auto', as vLLM's drafter has the target's dtype")
    here = ("dtype", *_OWN_VOCABULARY, *SUFFIX_ONLY_HERE)
    told = {name: value for name, value in named.items() if name not in here}
    if config.method == "draft_model":
        told.pop("prompt_lookup_max", None)  # 0: no lookup
    if config.method == "ngram":  # which may be named in a model's place, or not at all
        told.pop("model", None)
        told["method"] = config.method
    longest = longest_of(config)
    start = (
        {} if longest == config.num_speculative_tokens else {"num_speculative_tokens": config.num_speculative_tokens}
    )
    return _divided(told | {"num_speculative_tokens": longest}, passed, policy=config.policy, **start)


def longest_of(config: SpeculativeConfig) -> int:
    """The longest draft that vLLM has to make room for; heuristics would grow far beyond where they start."""
    if config.policy in ("heuristic", "heuristic_transient"):
        return max(DEFAULT_CAP, config.num_speculative_tokens)
    return max(config.longest_draft, config.num_speculative_tokens)


def _divided(named: Mapping[str, Any], passed: Mapping[str, Any], **decided: Any) -> Speculation:
    drafting = {name: value for name, value in named.items() if name not in POLICY_KEYS} | dict(passed)
    told = {name: value for name, value in named.items() if name in POLICY_KEYS - {SCHEDULE_KEY}}
    return Speculation(drafting, told | decided)


def take_backend(value: Any) -> tuple[Any, str]:
    """A ``speculative_config`` without ``drafter_backend``, and what that says.

    Raises:
        ConfigError: it is none of ``BACKENDS``.
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value, "auto"
    given = dict(as_mapping(value))
    spelled = next((key for key in given if spelled_out(key) == BACKEND_KEY), None)
    asked = "auto" if spelled is None else given.pop(spelled)
    if asked not in BACKENDS:
        raise ConfigError(f"{BACKEND_KEY} is {asked!r}; expected one of {', '.join(map(repr, BACKENDS))}")
    return given, asked


def own_drafting(
    value: Any, backend: str, environ: Mapping[str, str], *, on_cpu: bool, workers: int, vllms: Collection[str] = ()
) -> Speculation | None:
    """What vLLM and dynaspec's drafter in it are told; None = vLLM's drafts, by request or as dynaspec's cannot.

    dynaspec's is for one worker. On a CPU its passes take a fraction of what vLLM's take, none in plain decoding; on
    a GPU, where vLLM's run in graphs and ahead of the host, it only drafts if it is asked for.

    Args:
        value: see ``divide``.
        backend: one of ``BACKENDS``.
        on_cpu, workers: where vLLM runs, and of how many workers all its engines are.
        vllms: the keys of vLLM's own ``speculative_config``, where it is installed.

    Raises:
        ConfigError: dynaspec's drafter is asked for and cannot do what the configuration says.
    """
    if value is None or backend == "vllm":
        return None
    named, passed, method = _read(value, environ, vllms)
    testing = {name: passed.pop(name) for name in _TESTING if name in passed}
    # An object has a default there, which is not asked for.
    drawn = named.get("draft_sample_method") == "probabilistic" and not isinstance(value, SpeculativeConfig)
    can = workers == 1 and method in OF_TOKENS and not passed and not drawn
    if backend == "auto" and not (on_cpu and can):
        return None
    if method not in OF_TOKENS or passed:
        found = f"method is {method!r}" if method not in OF_TOKENS else f"{next(iter(passed))} is given"
        raise ConfigError(f"{found} and {BACKEND_KEY} is 'dynaspec'; expected 'vllm', whose drafters alone have that")
    config = SpeculativeConfig(**named)
    whole = config.model_dump(mode="json", exclude_none=True)
    testing |= {name: whole.pop(name) for name in _TESTING if name in whole and name in named}
    told = {name: what for name, what in whole.items() if name not in _TESTING}
    told["draft_sample_method"] = "probabilistic" if drawn else "greedy"
    if config.rejection_sample_method == "synthetic" and config.method in WITH_MODEL:
        told.setdefault("prompt_lookup_max", 0)  # rates are one drafter's
    longest = longest_of(config)
    DrafterSettings.read(told, longest, environ, workers=workers)
    drafting = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": longest, **testing}
    return Speculation(drafting, told)


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
        speculative_config: see ``divide``; None = vLLM's own scheduler, without speculation.
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
        speculative_config: see ``divide``; ``drafter_backend`` in it says who runs the drafter.
        additional_config: what else vLLM's plugins are told.
        scheduler_cls: another scheduler, for plain decoding only.

    Raises:
        ConfigError: a speculation that vLLM cannot carry out, or settings for a scheduler that is not there.
    """
    given, backend = take_backend(speculative_config)
    workers = data_parallel_size * tensor_parallel_size * pipeline_parallel_size
    vllms = _field_names("vllm.config", "SpeculativeConfig")
    own = own_drafting(given, backend, environ, on_cpu=_on_cpu(), workers=workers, vllms=vllms)
    speculation = own or divide(given, environ, vllms)
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
    longest = speculation.longest
    if longest is None or ranks > 1 or not drafter_of(speculation.method).varies:
        return None
    # All lengths, even where fewer requests can run: the controller is to have the choice.
    return table_of({*k_menu(longest), *(k for k in speculation.lengths if k <= longest)})


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
    from dynaspec.control.registry import build_controller  # loads numba, which the command line does without

    longest = speculation.longest
    if longest is not None:
        host = VllmSpeculation(speculation.method, longest, model="drafter", table=tuple(table or ()), ranks=ranks)
        told = Settings.read(settings, host, environ)
        build_controller(told.config, told.limits)


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
    return bool(import_module("vllm.platforms").current_platform.is_cpu())


def _field_names(module: str, cls: str) -> frozenset[str]:
    """The fields of one of vLLM's configurations; empty without vLLM."""
    if find_spec("vllm") is None:
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(getattr(import_module(module), cls)))
