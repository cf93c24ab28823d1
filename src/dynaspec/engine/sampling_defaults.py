"""How requests are sampled that do not say it: as a checkpoint's makers or an operator recommend, or neutrally."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import CheckpointError, ConfigError, RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.model.generation_config import (
    FILE_NAME,
    PARAMETERS,
    GenerationConfig,
    read_generation_config,
    sampling_of,
)
from dynaspec.model.weights import find_checkpoint

from .config import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Without arguments the neutral ones, those of ``SamplingParams``."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams``, valid together."""
    most_tokens: int | None = None
    """Most output tokens of any request that a server takes; None = as many as the model's length allows."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a text, beside the model's own."""

    def params(self) -> SamplingParams:
        """New ones, to be changed at will."""
        return SamplingParams(**self.values)


NEUTRAL = SamplingDefaults()


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """What ``generation_config`` and ``override_generation_config`` ask for.

    As in vLLM, ``max_new_tokens`` of the checkpoint is what requests without a limit get, while that of a folder or an
    override is also the most that requests with one get.

    Raises:
        ConfigError: there is no such folder or file, or the override holds a value out of its range.
        CheckpointError: the file is not readable, or holds a value out of its range.
    """
    own = config.generation_config not in ("auto", "vllm")
    folder = _folder(config)
    found = GenerationConfig() if folder is None else read_generation_config(folder)
    override = _override(config)
    values = {**found.sampling, **override}
    try:
        SamplingParams(**found.sampling)
    except RequestError as error:
        raise CheckpointError(
            f"{folder}/{FILE_NAME}: {error}; generation_config='vllm' does without the file"
        ) from None
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    if values:
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        logger.info("sampling of requests that do not say it: %s (generation_config='vllm': none of a file)", said)
    limiting = values if own else override
    return SamplingDefaults(values, limiting.get("max_tokens"), found.end_tokens if own else ())


def _override(config: EngineConfig) -> dict[str, Any]:
    given = config.override_generation_config or {}
    for name in given.keys() - PARAMETERS.keys():
        logger.warning("override_generation_config: %s is ignored; expected one of %s", name, ", ".join(PARAMETERS))
    return sampling_of(given)


def _folder(config: EngineConfig) -> Path | None:
    """Where the file is looked for; None: nowhere."""
    if config.generation_config == "vllm":
        return None
    if config.generation_config == "auto":
        checkpoint = find_checkpoint(config.model, config.revision)
        return checkpoint if checkpoint.is_dir() else None  # a GGUF file has no such files beside it
    folder = Path(config.generation_config).expanduser()
    if not (folder / FILE_NAME).is_file():
        raise ConfigError(
            f"generation_config is {config.generation_config!r}, a folder without {FILE_NAME}; expected 'auto', 'vllm' "
            "or a folder with that file"
        )
    return folder
