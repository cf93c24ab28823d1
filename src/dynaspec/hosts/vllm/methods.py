"""vLLM's drafting methods, as far as controllers must know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits

LOOKUPS = ("ngram", "ngram_gpu", "suffix")
"""Methods that look drafts up instead of running a model."""
_PER_TOKEN = ("draft_model", "eagle", "eagle3", "mtp")
_AT_ONCE = ("dflash", "dspark", "medusa", "mlp_speculator", "custom_class")
_VARIES_V1 = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "dflash")
_VARIES_V2 = ("draft_model", "eagle", "eagle3", "mtp")
_SHORTENS_V2 = ("eagle", "eagle3", "mtp")


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
    if method in LOOKUPS:
        traits = ProposerTraits(method, passes_per_draft="none", has_confidence=False)
        return Drafter(traits, varies=method == "ngram" and not runner_v2 and not alike)
    if method not in (*_PER_TOKEN, *_AT_ONCE):
        known = ", ".join(repr(name) for name in (*LOOKUPS, *_PER_TOKEN, *_AT_ONCE))
        raise ConfigError(f"method is {method!r}, which dynaspec's scheduler does not know; expected one of {known}")
    shortens = not alike and method in (_SHORTENS_V2 if runner_v2 else _VARIES_V1)
    # Passes that run at any length are one that is always paid, however many they are.
    passes: Literal["one", "per_token"] = "per_token" if method in _PER_TOKEN and shortens and not parallel else "one"
    traits = ProposerTraits(method, passes_per_draft=passes, has_confidence=False, idle_pass=True)
    return Drafter(traits, varies=not alike and method in (_VARIES_V2 if runner_v2 else _VARIES_V1))
