"""Everything that can be set about an engine. Each field is at once option, validation and documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dynaspec.contract.errors import ConfigError
from dynaspec.control.checkpoint import own_target
from dynaspec.control.config import SpeculativeConfig


class EngineConfig(BaseModel):
    """Configuration of one engine; frozen. Names are vLLM's where vLLM has the option."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str = Field(min_length=1, description="Checkpoint folder, GGUF file or hub id of the target model.")
    tokenizer: str | None = Field(None, description="Folder, GGUF file or hub id of a tokenizer; default: the model's.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub checkpoint.")
    trust_remote_code: bool = Field(False, description="Allow code that comes with a checkpoint to run.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Computation type, also as half, float or a torch.dtype; auto = float32 on CPU, the checkpoint's "
        "on CUDA.",
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="int8 or int4 = the weights of target and drafter are quantised when they are loaded, in groups of "
        "32 with a scale each (CPU, float32 or bfloat16).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = CUDA where there is one, else CPU.")
    seed: int = Field(0, ge=0, description="Seed of the random numbers of requests that bring none.")
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of a request; default: the model's.")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most requests that run at once.")
    max_num_batched_tokens: int = Field(1024, ge=16, description="Most rows in one target pass.")
    kv_cache_memory: int | None = Field(
        None,
        ge=1,
        description="Bytes of KV cache for target and drafter together; default: what max_num_seqs requests of full "
        "length need, but at most a quarter of the memory available (CPU) or 90 % of what is free (CUDA).",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What keys and values of target and drafter are kept in; bfloat16 is half of float32's memory. "
        "auto = the model's dtype; on CPU bfloat16 with dtype bfloat16 or quantization, else float32.",
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV of prompts that begin alike.")
    async_scheduling: bool = Field(False, description="Schedule each step while the one before is running.")
    stream_interval_s: float = Field(
        0.02,
        ge=0,
        allow_inf_nan=False,
        description="Least seconds between two pieces of a streamed answer, but for its first and last; 0 = a piece "
        "a step. For AsyncLLM and servers.",
    )
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="Where requests get the sampling that they leave out: auto = the checkpoint's "
        "generation_config.json, vllm = neutral values, or a folder with such a file.",
    )
    override_generation_config: Mapping[str, Any] | None = Field(
        None, description='Such values themselves, over those of the file: {"temperature": 0.5}, as JSON.'
    )
    decision_log: str | None = Field(None, min_length=1, description="Write every decision to this file, JSON lines.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs a model is split over; 1 is what this engine has.")
    speculative_config: SpeculativeConfig | None = Field(None, description="How to speculate; None = plain decoding.")

    @classmethod
    def build(cls, environ: Mapping[str, str] | None = None, **options: Any) -> EngineConfig:
        """From keyword arguments; ``speculative_config`` may be a dict, JSON text or an object. A drafter's checkpoint
        that names its target may be given as ``model`` alone.

        Args:
            environ: environment variables, which decide what ``speculative_config`` leaves open.

        Raises:
            ConfigError: an unknown option or a value out of its range.
        """
        own = own_target(options.get("model"))
        given = options.get("speculative_config")
        if own is not None:
            options["model"] = own.target
            given = SpeculativeConfig.given(given, own.speculation)
        options["speculative_config"] = SpeculativeConfig.parse(given, environ)
        try:
            return cls(**options)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                raise ConfigError(f"unknown option {name!r}; expected one of {known}") from None
            if first["type"] == "value_error":
                message = str(first["ctx"]["error"])
                raise ConfigError(f"{name}: {message}" if name else message) from None
            raise ConfigError(f"{name}: {first['msg']} (given: {first.get('input')!r})") from None

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: object) -> object:
        """vLLM's and PyTorch's other names: ``half``, ``torch.bfloat16``."""
        name = str(value).removeprefix("torch.")
        return _DTYPES.get(name, name)

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("override_generation_config", mode="before")
    @classmethod
    def _object(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError(f"{value!r} is not JSON; expected an object") from None
        return value

    @field_validator("quantization", mode="before")
    @classmethod
    def _known_quantization(cls, value: object) -> object:
        if value not in (None, "int8", "int4"):
            raise ValueError(
                f"{value!r} is not available; expected 'int8' or 'int4', to which weights are quantised here, or none"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but this engine runs on one device; "
                'expected 1, or backend="vllm", which splits models over GPUs'
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} but max_num_seqs is {self.max_num_seqs}; "
                "expected at least one row for each request"
            )
        return self


_DTYPES = {"half": "float16", "float": "float32"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """``512M``, ``4GiB``, ``1.5g`` or plain bytes → bytes.

    Raises:
        ValueError: not a size.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size; expected bytes or a number with K, M, G or T") from None
