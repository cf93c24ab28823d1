"""A profile from checkpoints to files, with the drafters that measure it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, Offers, Proposer, ProposerNeeds, TargetStep
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import ProposerTraits, SpecPlan
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.keys import either
from dynaspec.control.policies.short_names import PolicySpec
from dynaspec.control.profile import Profile
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts import check_backend
from dynaspec.result_output import Tell, make_folder

from .datasets import Dataset, FittedPrompts, fit, spread
from .decoders import open_engine
from .profiling import Cells, Grid, check_prompts, measure, prompt_room

_FILLER = 1
"""Token that fills drafts up."""
FILE = "dynamic_speculative_config.json"
MEASUREMENTS = "measurements.jsonl"
_PROMPTS = 64
"""Most prompts that are used, at even distances from the data set, beyond what the largest batch needs."""
_LONGEST_PROMPT = 512
"""Tokens; longer prompts are cut from the left, so that a run takes minutes at most."""
_SEED = 0
Remark = Callable[[str], None]
"""Told what a user should know."""


class Wrapped:
    """Passes everything on to another proposer."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.traits: ProposerTraits = inner.traits
        self.needs: ProposerNeeds = inner.needs

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return self.inner.lag(batch)

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return self.inner.peek(batch)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        return self.inner.propose(batch, plan)

    def advance(self, step: TargetStep) -> None:
        self.inner.advance(step)

    def commit(self, text: NewText) -> None:
        self.inner.commit(text)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self.inner.admit(lane, cached_blocks, cache_salt)

    def evict(self, lane: int) -> None:
        self.inner.evict(lane)


class Padded(Wrapped):
    """Drafts as many tokens as were granted: what a lookup does not find is filled with a token.

    So the time of a step with drafts of k tokens can be measured where the text offers none.
    """

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = self.inner.propose(batch, plan)
        lens = np.array(plan.depth, dtype=np.int64)
        places = np.arange(int(lens.max(initial=0)))
        tokens = np.full((lens.size, places.size), _FILLER, dtype=np.int64)
        width = min(drafts.tokens.shape[1], places.size)
        found = places[:width] < drafts.lens[:, None]
        tokens[:, :width] = np.where(found, drafts.tokens[:, :width], _FILLER)
        tokens[places >= lens[:, None]] = 0
        no_exit = np.zeros(lens.size, np.bool_)
        return replace(
            drafts, tokens=tokens, lens=lens, confidence=None, signal=None, repeat_bonus=None, early_exit=no_exit
        )


@dataclass(frozen=True, slots=True)
class ProfileSettings:
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
    backend: str = "dynaspec"
    """The engine that is measured."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of that engine; for vLLM."""

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if self.options and self.backend != "vllm":
            raise ConfigError(f"--engine-options is given but --backend is {self.backend!r}; expected none, or vllm")

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
    picture: Path | None
    """None: there is nothing here to draw with."""


def run_profile(settings: ProfileSettings, grid: Grid, progress: Tell, remark: Remark) -> ProfileSession:
    """Measures what has not been measured, and writes profile and picture.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, seed=_SEED, detokenize=False
    )
    speculation = _speculation(settings, grid.longest)
    make_folder(settings.folder)
    if settings.backend == "dynaspec":
        profile = _on_dynaspec(settings, speculation, grid, params, progress, remark)
    else:
        profile = _on_host(settings, grid, params, progress, remark)
    path = settings.folder / FILE
    try:
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be written: {error.strerror}") from None
    return ProfileSession(profile, path, _picture(settings, profile, path.with_suffix(".png"), remark))


def _on_dynaspec(
    settings: ProfileSettings,
    speculation: SpeculativeConfig,
    grid: Grid,
    params: SamplingParams,
    progress: Tell,
    remark: Remark,
) -> Profile:
    progress("loading", 0, 1)
    engine = open_engine(
        settings.model,
        PolicySpec("profile", speculation),
        wrap=Padded if METHODS[settings.method].checkpoint is None else None,
        max_num_seqs=grid.batch_sizes[-1],
        max_num_batched_tokens=_step_tokens(grid),
        tensor_parallel_size=settings.tensor_parallel,
    )
    try:
        progress("loading", 1, 1)
        fitted = _prompts(settings, grid, engine.tokenizer, prompt_room(engine.max_model_len, grid), remark)
        cells = Cells(settings.folder / MEASUREMENTS, _made_with(settings))
        if cells.stale:
            remark("note: earlier measurements were made with other checkpoints or options, and are made anew")
        elif len(cells):
            remark(f"note: {len(cells)} earlier measurements are used again")
        return measure(engine, grid, fitted.token_ids, params, cells, progress, oversample=settings.oversample)
    finally:
        engine.close()


def _on_host(settings: ProfileSettings, grid: Grid, params: SamplingParams, progress: Tell, remark: Remark) -> Profile:
    from . import profile_hosts as hosts

    check_prompts(grid, len(settings.dataset.prompts), oversample=settings.oversample)

    def fitted(tokenizer: Tokenizer, room: int) -> FittedPrompts:
        return _prompts(settings, grid, tokenizer, room, remark)

    if settings.backend == "transformers":
        if settings.tensor_parallel > 1:
            raise ConfigError(f"--tp is {settings.tensor_parallel}; expected 1 with --backend transformers")
        pair = (settings.model, settings.drafter)
        return hosts.on_transformers(*pair, grid, params, settings.folder, fitted, progress).profile(grid)
    speculation = {"method": settings.method, "model": settings.drafter}
    options = {
        "max_num_seqs": grid.batch_sizes[-1],
        "max_num_batched_tokens": _step_tokens(grid),
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": False,
        **settings.options,
    }
    told = {name: value for name, value in speculation.items() if value is not None}
    return hosts.on_vllm(settings.model, told, grid, params, options, settings.folder, fitted, progress).profile(grid)


def _prompts(settings: ProfileSettings, grid: Grid, tokenizer: Tokenizer, room: int, remark: Remark) -> FittedPrompts:
    prompts = spread(settings.dataset.prompts, max(_PROMPTS, grid.batch_sizes[-1]))
    fitted = fit(prompts, tokenizer, min(room, _LONGEST_PROMPT))
    if fitted.cut:
        remark(f"note: {fitted.cut} of {len(prompts)} prompts were long and lost their beginning")
    return fitted


def _step_tokens(grid: Grid) -> int:
    return max(1024, grid.batch_sizes[-1] * (grid.longest + 1))


def _picture(settings: ProfileSettings, profile: Profile, path: Path, remark: Remark) -> Path | None:
    if find_spec("matplotlib") is None:
        remark("note: there is no picture, as matplotlib is not installed here")
        return None
    from .plots import plot_profile

    drafter = METHODS[settings.method].what if settings.drafter is None else Path(settings.drafter).name
    host = "" if settings.backend == "dynaspec" else f", {settings.backend}"
    plot_profile(profile, path, f"{Path(settings.model).name} with {drafter}, on {settings.dataset.label}{host}")
    return path


def _speculation(settings: ProfileSettings, longest: int) -> SpeculativeConfig:
    """Always the longest draft; a request may ask for a shorter one.

    Raises:
        ConfigError: an unknown method, or a draft model missing or too many.
    """
    method = settings.method
    if method not in METHODS:
        raise ConfigError(f"--method is {method!r}; expected {either(tuple(METHODS))}")
    needed = METHODS[method].checkpoint
    if needed is not None and settings.drafter is None:
        raise ConfigError(f"--method is {method} but there is no --draft-dir; expected {needed}")
    if needed is None and settings.drafter is not None:
        raise ConfigError(f"--draft-dir is {settings.drafter!r} but --method is {method}; expected no drafter")
    # The grid decodes its prompts again and again, and what was answered before would always be right.
    own_text = {"suffix_decoding_max_cached_requests": 0} if method == "suffix" else {}
    return SpeculativeConfig(
        method=method, model=settings.drafter, policy="constant", num_speculative_tokens=longest, **own_text
    )


def _made_with(settings: ProfileSettings) -> dict[str, Any]:
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
    """The path of a folder or file with sizes and times of its weights; a hub's name as it is."""
    path = Path(name)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    return {"name": os.fspath(name), "files": [[f.name, f.stat().st_size, int(f.stat().st_mtime)] for f in files]}
