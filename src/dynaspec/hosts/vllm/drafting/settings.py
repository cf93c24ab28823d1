"""What dynaspec's drafter is told: its part of vLLM's ``additional_config``, which says who drafts, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import canonical
from dynaspec.control.planner import MAX_DRAFT_TOKENS
from dynaspec.hosts.vllm.settings import KEY, as_keys, take_log_path

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
        if not 1 <= longest <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"vLLM's num_speculative_tokens is {longest}; expected an integer from 1 to {MAX_DRAFT_TOKENS}"
            )
        told = as_keys(given)
        log = take_log_path(told)
        named = canonical(told, SpeculativeConfig.model_fields)
        _check(named)
        config = SpeculativeConfig.parse({"num_speculative_tokens": longest} | named, environ)
        if config is None or config.num_speculative_tokens > longest:
            found = None if config is None else config.num_speculative_tokens
            raise ConfigError(
                f"num_speculative_tokens is {found} but vLLM's speculative_config says {longest}; expected no more "
                "than that, as vLLM makes room for no more"
            )
        return cls(config, longest, None if log is None else Path(log))

    def header(self, target: str) -> dict[str, Any]:
        """For the decision log: what a replay builds the same controller from, but for the costs."""
        return {
            "model": target,
            "speculative_config": self.config.model_dump(mode="json", exclude_none=True),
            "seed": 0,
            "host": "vllm",
            "method": "custom_class",
        }


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
