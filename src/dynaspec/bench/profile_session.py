"""A profile from checkpoints to files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.profile import Profile

from .cells import Cells
from .datasets import Dataset, fit, spread
from .drafters import Padded
from .engines import open_engine
from .policies import PolicySpec
from .profile_report import plot_profile
from .profiling import Grid, Progress, measure, prompt_room
from .report import make_folder

FILE = "dynamic_speculative_config.json"
MEASUREMENTS = "measurements.jsonl"
_PROMPTS = 64
"""Most prompts that are used, at even distances from the data set, beyond what the largest batch needs."""
_LONGEST_PROMPT = 512
"""Tokens; longer prompts are cut from the left, so that a run takes minutes at most."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a profile is of."""

    method: str
    model: str
    drafter: str | None
    tensor_parallel: int
    temperature: float
    top_p: float
    top_k: int
    dataset: Dataset
    oversample: bool
    result_dir: Path

    @property
    def folder(self) -> Path:
        """Where the results go."""
        sampling = f"temp-{self.temperature}_top_p-{self.top_p}_top_k-{self.top_k}"
        return self.result_dir / f"tp-{self.tensor_parallel}_{sampling}" / self.dataset.label


@dataclass(frozen=True, slots=True)
class ProfileSession:
    """What came out, and where it lies."""

    profile: Profile
    path: Path
    picture: Path


def run_profile(settings: Settings, grid: Grid, progress: Progress, remark: Callable[[str], None]) -> ProfileSession:
    """Measures what has not been measured, and writes profile and picture.

    Args:
        remark: told what a user should know.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, seed=_SEED, detokenize=False
    )
    spec = PolicySpec("profile", _speculation(settings, grid.longest))
    make_folder(settings.folder)
    progress("loading", 0, 1)
    engine = open_engine(
        settings.model,
        spec,
        wrap=Padded if settings.method == "ngram" else None,
        max_num_seqs=grid.batch_sizes[-1],
        max_num_batched_tokens=max(1024, grid.batch_sizes[-1] * (grid.longest + 1)),
        tensor_parallel_size=settings.tensor_parallel,
    )
    try:
        progress("loading", 1, 1)
        prompts = spread(settings.dataset.prompts, max(_PROMPTS, grid.batch_sizes[-1]))
        fitted = fit(prompts, engine.tokenizer, min(prompt_room(engine, grid), _LONGEST_PROMPT))
        if fitted.cut:
            remark(f"note: {fitted.cut} of {len(prompts)} prompts were long and lost their beginning")
        cells = Cells(settings.folder / MEASUREMENTS, _made_with(settings))
        if cells.stale:
            remark("note: earlier measurements were made with other checkpoints or options, and are made anew")
        elif len(cells):
            remark(f"note: {len(cells)} earlier measurements are used again")
        profile = measure(engine, grid, fitted.token_ids, params, cells, progress, oversample=settings.oversample)
    finally:
        engine.close()
    path = settings.folder / FILE
    picture = path.with_suffix(".png")
    try:
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be written: {error.strerror}") from None
    drafter = "n-gram lookup" if settings.drafter is None else Path(settings.drafter).name
    plot_profile(profile, picture, f"{Path(settings.model).name} with {drafter}, on {settings.dataset.label}")
    return ProfileSession(profile, path, picture)


def _speculation(settings: Settings, longest: int) -> SpeculativeConfig:
    """Always the longest draft; a request may ask for a shorter one.

    Raises:
        ConfigError: an unknown method, or a draft model missing or too many.
    """
    if settings.method not in ("draft_model", "ngram"):
        raise ConfigError(f"--method is {settings.method!r}; expected draft_model or ngram")
    if settings.method == "draft_model" and settings.drafter is None:
        raise ConfigError("--method is draft_model but there is no --draft-dir; expected the drafter's checkpoint")
    if settings.method == "ngram" and settings.drafter is not None:
        raise ConfigError(f"--draft-dir is {settings.drafter!r} but --method is ngram; expected no drafter")
    return SpeculativeConfig(
        method=settings.method, model=settings.drafter, policy="constant", num_speculative_tokens=longest
    )


def _made_with(settings: Settings) -> dict[str, Any]:
    """What measurements depend on: another of these makes them worthless."""
    return {
        "method": settings.method,
        "model": _checkpoint(settings.model),
        "drafter": None if settings.drafter is None else _checkpoint(settings.drafter),
        "sampling": [settings.temperature, settings.top_p, settings.top_k],
        "prompts": len(settings.dataset.prompts),
        "oversample": settings.oversample,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": torch.cuda.device_count(),
    }


def _checkpoint(name: str) -> dict[str, Any]:
    """A folder's path with sizes and times of its weights; a hub's name as it is."""
    folder = Path(name)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return {"name": os.fspath(name), "files": [[f.name, f.stat().st_size, int(f.stat().st_mtime)] for f in files]}
