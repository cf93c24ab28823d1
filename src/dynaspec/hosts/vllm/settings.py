"""dynaspec's settings within vLLM's configuration, of its scheduler and of its drafter.

They are a part of vLLM's ``additional_config``. vLLM's own ``speculative_config`` beside it says which of its methods
drafts, and the longest draft.

On a GPU vLLM captures CUDA graphs for those draft lengths that ``num_speculative_tokens_per_batch_size`` names, its own
table of batch sizes; steps of other lengths run without. Here the table serves as the list of lengths alone: which of
them a step has is for the controller to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits, ProposerTraits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import ALIASES, canonical, spelled_out
from dynaspec.control.planner import MAX_DRAFT_TOKENS
from dynaspec.observe.decision_log import header_of

KEY = "dynaspec"
"""Of ``additional_config``, and of a request's ``extra_args``."""
LOG_KEY = "decision_log"
_EVERY_UP_TO = 8
_LONGER = (10, 12, 16, 20, 24, 32, 48, 64)
"""Beyond 8 a length more or less matters little, while each costs graphs and their memory."""
Table = list[tuple[int, int, int]]
"""vLLM's ``num_speculative_tokens_per_batch_size``: (first batch size, last one, draft length)."""


class _Method(NamedTuple):
    """How one of vLLM's methods drafts. vLLM's second model runner drafts otherwise in some: ``_v2``."""

    passes: Literal["none", "one", "per_token"]
    """Of a model, for a draft; none: it is looked up."""
    varies: bool = False
    """Every step may have a draft length of its own."""
    varies_v2: bool = False
    shortens_v2: bool = False
    """Shorter drafts take fewer passes. In the first runner they do where they vary."""


_METHODS: Mapping[str, _Method] = {
    "ngram": _Method("none", varies=True),
    "ngram_gpu": _Method("none"),
    "suffix": _Method("none"),
    "draft_model": _Method("per_token", varies=True, varies_v2=True),
    "eagle": _Method("per_token", varies=True, varies_v2=True, shortens_v2=True),
    "eagle3": _Method("per_token", varies=True, varies_v2=True, shortens_v2=True),
    "mtp": _Method("per_token", varies=True, varies_v2=True, shortens_v2=True),
    "dflash": _Method("one", varies=True),
    "dspark": _Method("one"),
    "medusa": _Method("one"),
    "mlp_speculator": _Method("one"),
    "custom_class": _Method("one"),
}
_VLLMS = frozenset(
    {
        *("method", "model", "revision", "max_model_len", "dtype", "quantization", "draft_sample_method"),
        *("prompt_lookup_max", "prompt_lookup_min"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
    }
)
"""Keys that say who drafts, or how drafts are tested: vLLM's own ``speculative_config`` has them."""


def told_in(additional_config: Any) -> Any:
    """What is said to dynaspec; None = nothing."""
    return additional_config.get(KEY) if isinstance(additional_config, Mapping) else None


def _keys_and_log(told: Any) -> tuple[dict[str, Any], Path | None]:
    """What is said, by keys with underscores, and the decision log's path.

    Raises:
        ConfigError: it is no mapping, or the path is none.
    """
    if told is not None and not isinstance(told, Mapping):
        raise ConfigError(f"additional_config has {KEY} = {told!r}; expected a mapping")
    keys = {spelled_out(key): value for key, value in (told or {}).items()}
    path = keys.pop(LOG_KEY, None)
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigError(f"{LOG_KEY} is {path!r}; expected the path of a file")
    return keys, None if path is None else Path(path)


def k_menu(longest: int) -> tuple[int, ...]:
    """Draft lengths from 0 to ``longest`` that are worth graphs of their own, ascending, ``longest`` among them."""
    if longest < 0:
        raise ConfigError(f"the longest draft is {longest}; expected no less than 0")
    dense = range(min(longest, _EVERY_UP_TO) + 1)
    return tuple(sorted({*dense, *(k for k in _LONGER if k < longest), longest}))


def table_of(menu: Iterable[int]) -> Table:
    """A table that names every length of ``menu``, the longest for the smallest batch."""
    return [(size, size, k) for size, k in enumerate(sorted(menu, reverse=True), 1)]


def menu_of(table: Iterable[Sequence[int]] | None, longest: int) -> tuple[int, ...]:
    """The lengths that ``table`` names, ascending, with 0 and ``longest``; without a table every length up to that."""
    if not table:
        return tuple(range(longest + 1))
    return tuple(sorted({0, longest, *(min(longest, k) for _, _, k in table)}))


@dataclass(frozen=True, slots=True)
class Drafter:
    """The drafter that vLLM runs."""

    traits: ProposerTraits
    varies: bool
    """Every step may have a draft length of its own; else all have the longest, and only rows can be saved."""

    @property
    def kind(self) -> Literal["ngram", "draft_model"]:
        """Which of the methods that ``control`` knows has the same configuration keys."""
        return "draft_model" if self.runs_model else "ngram"

    @property
    def runs_model(self) -> bool:
        return self.traits.passes_per_draft != "none"

    def rows_per_pass(self, k: int, rows: int, requests: int) -> tuple[int, ...]:
        """Rows of each drafter pass in a step.

        vLLM's drafters keep up with every step: the first pass has the target's rows, even at k = 0.

        Args:
            rows: of the target's pass.
        """
        if not self.runs_model or not rows:
            return ()
        return (rows, *(requests,) * (k - 1)) if self.traits.passes_per_draft == "per_token" else (rows,)


def drafter_of(method: str, *, parallel: bool = False, runner_v2: bool = False, alike: bool = False) -> Drafter:
    """
    Args:
        method: as in vLLM's ``speculative_config``.
        parallel: ``parallel_drafting``: all tokens in one pass.
        runner_v2: vLLM's second model runner, whose draft models make the longest draft and hide its end.
        alike: every step must draft the same length, whatever the method.

    Raises:
        ConfigError: a method that drafts nothing, or is not known.
    """
    known = _METHODS.get(method)
    if known is None:
        names = ", ".join(map(repr, _METHODS))
        raise ConfigError(f"method is {method!r}, which dynaspec's scheduler does not know; expected one of {names}")
    varies = not alike and (known.varies_v2 if runner_v2 else known.varies)
    shortens = not alike and (known.shortens_v2 if runner_v2 else known.varies)
    # Passes that run at any length are one that is always paid, however many they are.
    passes = "one" if known.passes == "per_token" and (parallel or not shortens) else known.passes
    traits = ProposerTraits(method, passes_per_draft=passes, has_confidence=False, idle_pass=passes != "none")
    return Drafter(traits, varies)


def limits_for(drafter: Drafter, menu: Sequence[int], *, asynchronous: bool, alike: bool = False) -> Limits:
    """What vLLM can carry out.

    Args:
        alike: see ``Settings``.
    """
    return Limits(
        draft_lens=tuple(menu),
        proposers=(drafter.traits,),
        ragged=True,
        can_stop=False,
        can_trim=not asynchronous and not alike,
        can_gate=False,
        plan_lag=2 if asynchronous else 1,
    )


@dataclass(frozen=True, slots=True)
class VllmSpeculation:
    """What is read of vLLM's configuration."""

    method: str
    longest: int
    """``num_speculative_tokens``: the longest draft that vLLM makes room for."""
    model: str | None = None
    """The drafter's checkpoint."""
    target: str = ""
    """The target's."""
    lookup: tuple[int, int] | None = None
    """``prompt_lookup_min``, ``prompt_lookup_max``."""
    table: tuple[tuple[int, int, int], ...] = ()
    """``num_speculative_tokens_per_batch_size``: the lengths that vLLM has graphs for, see ``menu``."""
    parallel: bool = False
    """All tokens of a draft come from one pass."""
    runner_v2: bool = False
    on_cpu: bool = False
    asynchronous: bool = False
    ranks: int = 1
    """Data-parallel engines."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """A complete, consistent configuration of the scheduler."""

    config: SpeculativeConfig
    """The policy. Its method is the one that ``control`` knows for drafters of this kind (``Drafter.kind``)."""
    drafter: Drafter
    host: VllmSpeculation
    menu: tuple[int, ...]
    """Draft lengths that a request may have, ascending from 0."""
    fixed: str | None
    """Why every step drafts the longest length; None = steps have lengths of their own."""
    alike: bool
    """All requests of a step verify as many tokens, see ``step_tracker``."""
    decision_log: Path | None
    policy: str
    """The name of what decides how much is drafted, here or in dynaspec's drafter."""

    @classmethod
    def read(cls, given: Any, host: VllmSpeculation, environ: Mapping[str, str]) -> Settings:
        """
        Args:
            given: ``additional_config["dynaspec"]``; None = nothing, which means policy ``auto``.
            environ: environment variables, which decide what is left open.

        Raises:
            ConfigError: an unknown key, a value out of range, keys that contradict each other or vLLM's.
        """
        if host.model == DRAFTER:
            return cls._beside_own(given, host, environ)
        told, log = _keys_and_log(given)
        if log is not None and host.ranks > 1:
            log = log.with_name(f"{log.stem}.{host.rank}{log.suffix}")
        _check_keys(told)
        drafter = drafter_of(host.method, parallel=host.parallel, runner_v2=host.runner_v2, alike=host.ranks > 1)
        config = _within(host.longest, {**told, **_drafting(told, drafter, host)}, environ)
        fixed = _why_fixed(drafter, host)
        menu = menu_of(None if fixed else host.table, host.longest)
        alike = host.on_cpu and drafter.runs_model and fixed is None
        return cls(config, drafter, host, menu, fixed, alike, log, config.policy)

    @classmethod
    def _beside_own(cls, given: Any, host: VllmSpeculation, environ: Mapping[str, str]) -> Settings:
        """dynaspec's drafter decides how much it drafts, and keeps the log: here drafts are cut where a request wants
        less, or where the model ends.

        Raises:
            ConfigError: see ``DrafterSettings.read``.
        """
        own = DrafterSettings.read(given, host.longest, environ, ranks=host.ranks)
        whole = SpeculativeConfig(method="ngram", policy="constant", num_speculative_tokens=host.longest)
        drafter = Drafter(ProposerTraits("dynaspec", passes_per_draft="none", has_confidence=False), varies=False)
        return cls(whole, drafter, host, menu_of(None, host.longest), None, False, None, own.config.policy)

    @property
    def limits(self) -> Limits:
        """What vLLM can carry out as it is configured."""
        return limits_for(self.drafter, self.menu, asynchronous=self.host.asynchronous, alike=self.alike)

    @property
    def header(self) -> dict[str, Any]:
        """For the decision log: what a replay builds the same controller from."""
        return header_of(self.host.target, self.config, host="vllm", method=self.host.method)


def _within(longest: int, values: Mapping[str, Any], environ: Mapping[str, str]) -> SpeculativeConfig:
    """
    Args:
        longest: vLLM's ``num_speculative_tokens``.

    Raises:
        ConfigError: values out of range, or drafts longer than vLLM makes room for.
    """
    if not 1 <= longest <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"vLLM's num_speculative_tokens is {longest}; expected an integer from 1 to {MAX_DRAFT_TOKENS}"
        )
    config = SpeculativeConfig.parse(values, environ)
    if config is None or config.num_speculative_tokens > longest:
        found = None if config is None else config.num_speculative_tokens
        raise ConfigError(
            f"num_speculative_tokens is {found} but vLLM's speculative_config says {longest}; expected no more "
            "than that, as vLLM makes room for no more"
        )
    return config


def _check_keys(told: Mapping[str, Any]) -> None:
    for key in told:
        if ALIASES.get(key, key) in _VLLMS:
            raise ConfigError(
                f"{key} is among dynaspec's settings; expected it in vLLM's speculative_config, which says who drafts"
            )


def _drafting(told: Mapping[str, Any], drafter: Drafter, host: VllmSpeculation) -> dict[str, Any]:
    """The keys that vLLM holds, as ``control`` has them."""
    values: dict[str, Any] = {"method": drafter.kind}
    if drafter.runs_model:
        values["model"] = host.model or host.target
        values["prompt_lookup_max"] = 0  # vLLM has one drafter
    elif host.lookup is not None:
        values["prompt_lookup_min"], values["prompt_lookup_max"] = host.lookup
    if not any(ALIASES.get(key, key) == "num_speculative_tokens" for key in told):
        values["num_speculative_tokens"] = host.longest
    return values


def _why_fixed(drafter: Drafter, host: VllmSpeculation) -> str | None:
    if host.ranks > 1:
        return f"data_parallel_size is {host.ranks} and its ranks must draft alike"
    return None if drafter.varies else f"vLLM's method {host.method!r} always drafts the longest length"


DRAFTER = "dynaspec.hosts.vllm.Drafter"
"""What vLLM imports as its ``custom_class``."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """A complete, consistent configuration of the drafter."""

    config: SpeculativeConfig
    longest: int
    """vLLM's ``num_speculative_tokens``: the longest draft that it makes room for."""
    decision_log: Path | None

    @classmethod
    def read(
        cls, given: Any, longest: int, environ: Mapping[str, str], *, workers: int = 1, ranks: int = 1
    ) -> DrafterSettings:
        """
        Args:
            given: ``additional_config["dynaspec"]``: a ``speculative_config`` as the embedded engine has it, and
                ``decision_log``.
            longest: vLLM's ``num_speculative_tokens``.
            environ: environment variables, which decide what is left open.
            workers: of one engine; ranks: data-parallel engines.

        Raises:
            ConfigError: a value out of range, keys that contradict each other, or what vLLM cannot carry out.
        """
        if workers > 1 or ranks > 1:
            raise ConfigError(
                f"vLLM runs {workers * ranks} workers; expected one for dynaspec's drafter: leave drafting to vLLM "
                "(drafter_backend 'vllm')"
            )
        told, log = _keys_and_log(given)
        named = canonical(told, SpeculativeConfig.model_fields)
        _check(named)
        config = _within(longest, {"num_speculative_tokens": longest} | named, environ)
        return cls(config, longest, log)


def _check(named: Mapping[str, Any]) -> None:
    if named.get("draft_sample_method") == "probabilistic":
        raise ConfigError(
            "draft_sample_method is 'probabilistic'; expected 'greedy', as vLLM takes the tokens of others' drafters "
            "for certain"
        )
    if named.get("rejection_sample_method", "standard") != "standard":
        raise ConfigError(
            f"rejection_sample_method is {named['rejection_sample_method']!r} among dynaspec's settings; expected it "
            f"in vLLM's speculative_config, which says how drafts are tested, and not under {KEY!r}"
        )
