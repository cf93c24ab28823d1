"""A verdict as settings to paste."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.control.schedule import Range
from dynaspec.hosts.vllm.launch import speculation_arguments

from .verdict import Verdict

BACKENDS = ("dynaspec", "vllm", "transformers")


@dataclass(frozen=True, slots=True)
class Paste:
    """Something to paste, and what it is for."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Names:
    """What stands in the settings."""

    model: str
    drafter: str
    profile: Path | None
    """Warm start of ``auto``."""


def check_backend(backend: str) -> None:
    """
    Raises:
        ConfigError: it is not known.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--backend is {backend!r}; expected dynaspec, vllm or transformers")


def speculative_config(verdict: Verdict, names: Names, longest: int, ranges: Sequence[Range]) -> dict[str, Any] | None:
    """What every backend takes as ``speculative_config``; None = no speculation."""
    match verdict.choice:
        case "plain":
            return None
        case "fixed":
            told: Mapping[str, Any] = {"num_speculative_tokens": verdict.length}
        case "schedule":
            told = {"num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges]}
        case "auto":
            warm = {} if names.profile is None else {"dynamic_config_path": str(names.profile)}
            told = {"num_speculative_tokens": longest, **warm}
    policy = "constant" if verdict.choice == "fixed" else verdict.choice
    return {"model": names.drafter, "policy": policy, **told}


def pastes(backend: str, verdict: Verdict, names: Names, longest: int, ranges: Sequence[Range]) -> list[Paste]:
    """
    Args:
        longest: draft that was measured.
        ranges: the best lengths by batch size, for a vLLM that knows nothing of dynaspec.

    Raises:
        ConfigError: an unknown backend.
    """
    check_backend(backend)
    config = speculative_config(verdict, names, longest, ranges)
    if backend == "transformers":
        return [Paste("Transformers", _generate(config, names))]
    flags = [] if config is None else ["--speculative-config", json.dumps(config)]
    if backend == "dynaspec":
        return [Paste("dynaspec", join(["dynaspec", "serve", names.model, *flags]))]
    found = [Paste("vLLM, started by dynaspec", join(["dynaspec", "serve", names.model, "--backend", "vllm", *flags]))]
    if config is None:
        return [Paste("vLLM", join(["vllm", "serve", names.model]))]
    found.append(Paste("vLLM with dynaspec's scheduler", _vllm(names, speculation_arguments(config, {}))))
    alone = _without_dynaspec(verdict, names, ranges)
    return found if alone is None else [*found, Paste("vLLM without dynaspec", _vllm(names, alone))]


def _without_dynaspec(verdict: Verdict, names: Names, ranges: Sequence[Range]) -> dict[str, Any] | None:
    """A fixed length, or vLLM's own table of lengths by batch size; None where that never drafts."""
    who = {"method": checkpoint_method(names.drafter), "model": names.drafter}
    if verdict.length is not None:
        return {"speculative_config": {**who, "num_speculative_tokens": verdict.length}}
    longest = max(k for _, _, k in ranges)
    if longest == 0:
        return None
    table = {"num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges]}
    return {"speculative_config": {**who, "num_speculative_tokens": longest, **(table if len(ranges) > 1 else {})}}


def _vllm(names: Names, arguments: Mapping[str, Any]) -> str:
    flags = [
        part
        for name, value in arguments.items()
        for part in ("--" + name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value))
    ]
    return join(["vllm", "serve", names.model, *flags])


def _generate(config: Mapping[str, Any] | None, names: Names) -> str:
    if config is None:
        return "model.generate(**inputs)"
    told = {name: value for name, value in config.items() if name != "model"}
    return "\n".join(
        (
            "from dynaspec.hosts.transformers import generate",
            "",
            f"# assistant: {names.drafter}",
            f"generate(model, **inputs, assistant_model=assistant, speculative_config={told!r})",
        )
    )
