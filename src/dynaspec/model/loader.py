"""From a checkpoint to a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import CheckpointError, ConfigError

from .attention import attention_backend
from .attention.base import AttentionSpec
from .config import DecoderConfig
from .decoder import Decoder, Model, OpsDecoder, Weights, ops_for
from .families import FAMILIES, Family
from .families.common import UnsupportedVariantError, end_tokens
from .generation_config import read_generation_config
from .linear import Quantization, check_quantization
from .quantised_checkpoints import METHOD, CompressedCheckpoint, is_compressed, quantised_with
from .reader import Reader
from .weights import Checkpoint, TensorSource, find_checkpoint, read_json

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

_READ_AS = {"mimo": "qwen2"}
"""Model types that Transformers does not have, and what it has under another name."""


def load_model(
    path_or_id: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
) -> Model:
    """Loads a decoder-only checkpoint in the Hugging Face layout (config.json, *.safetensors), or a GGUF file.

    Args:
        path_or_id: a directory, a GGUF file or a repository of the Hugging Face hub.
        revision: branch, tag or commit of the repository.
        dtype: ``auto`` is float32 on CPU and the checkpoint's own elsewhere; or float32, bfloat16, float16. On CPU
            bfloat16 is what matrix products round their inputs to, see ``Model.product_dtype``. What a GGUF
            file has quantised is rounded to bfloat16 for ``auto``, otherwise to the dtype that is named.
        device: ``cpu``, ``cuda`` or ``cuda:<n>``.
        max_model_len: longest context that will be run; None = what the checkpoint was made for.
        trust_remote_code: let the checkpoint's own Python code run, for architectures that Transformers lacks.
        quantization: form that the weights of linear layers are brought to, on CPU in float32 or bfloat16; None = they
            stay as they are: those of compressed-tensors in int4 or int8 where these run, dequantised elsewhere.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, quantised or cannot be run.
        ConfigError: an argument that cannot be right.
    """
    target = _device(device)
    directory = find_checkpoint(path_or_id, revision)
    if directory.is_file():
        return _load_gguf(directory, target, dtype, max_model_len, quantization)
    compressed = is_compressed(directory, read_json(directory / "config.json"))
    hf = _read_config(directory, trust_remote_code)
    wanted, products = _dtypes(dtype, target, hf)
    check_quantization(quantization, target, wanted)
    name = _architecture(hf, directory)
    try:
        if name not in FAMILIES:
            raise UnsupportedVariantError("it is not among the supported families")
        config = FAMILIES[name].config(hf, max_model_len)
    except UnsupportedVariantError as reason:
        if compressed:
            raise CheckpointError(
                quantised_with(directory, f"{METHOD} but runs on Transformers' own modelling code ({reason})")
            ) from reason
        if quantization is not None:
            raise ConfigError(
                f"quantization is {quantization!r} but {path_or_id} runs on Transformers' own modelling code "
                f"({reason}); expected none, or a model of a supported family"
            ) from reason
        from .fallback import load_fallback

        logger.warning("%s runs on Transformers' own modelling code, which is slower: %s", name, reason)
        ends = _end_tokens(end_tokens(hf), directory)
        return load_fallback(directory, hf, target, wanted, products, max_model_len, ends, trust_remote_code)
    config = replace(config, eos_token_ids=_end_tokens(config.eos_token_ids, directory))
    checkpoint = CompressedCheckpoint(directory) if compressed else Checkpoint(directory)
    return _load_decoder(checkpoint, FAMILIES[name], config, target, wanted, products, quantization)


def _load_gguf(
    path: Path, device: torch.device, dtype: str, max_model_len: int | None, quantization: Quantization | None
) -> Decoder:
    from .gguf.checkpoint import GgufCheckpoint  # here, as their package takes a quarter of a second to import
    from .gguf.config import config_of
    from .gguf.file import GgufFile

    file = GgufFile(path)
    hf = config_of(file)
    wanted, products = _dtypes(dtype, device, hf)
    check_quantization(quantization, device, wanted)
    family = FAMILIES[_architecture(hf, path)]
    try:
        config = family.config(hf, max_model_len)
    except UnsupportedVariantError as reason:
        raise CheckpointError(
            f"{path} is a {file.architecture} of a kind that is not run from GGUF: {reason}"
        ) from reason
    quantised = torch.bfloat16 if dtype in ("auto", "bfloat16") and quantization is None else wanted
    checkpoint = GgufCheckpoint(file, config.num_layers, config.head_dim, quantised)
    return _load_decoder(checkpoint, family, config, device, wanted, products, quantization)


def _load_decoder(
    checkpoint: TensorSource,
    family: Family,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    quantization: Quantization | None,
) -> Decoder:
    weights = family.weights(Reader(checkpoint, config, device, dtype, quantization, product_dtype), config)
    checkpoint.check_all_taken()
    return assemble(config, weights, device, dtype, product_dtype)


def assemble(
    config: DecoderConfig,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    product_dtype: torch.dtype | None = None,
) -> Decoder:
    """A decoder with the fastest attention, layers and operations for a device and dtype; imports those only.

    Args:
        product_dtype: what the layers of ``weights`` were built for, see ``Model``; None = ``dtype``.
    """
    product_dtype = product_dtype or dtype
    scale = config.attention_scale or config.head_dim**-0.5
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale, config.attention_softcap)
    attention = attention_backend(spec, device, dtype)
    if device.type == "cpu" and dtype == torch.float32:
        from .cpu_decoder import CpuDecoder, compile_decoder  # it compiles its kernels when it is imported

        ends = weights.embedding, weights.head, weights.final_norm, weights.position_embedding
        compiled = compile_decoder(config, weights.layers, spec, *ends)
        return CpuDecoder(config, weights, attention, product_dtype, compiled)
    return OpsDecoder(config, weights, attention, ops_for(device), device, dtype, product_dtype)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; expected cpu, cuda or cuda:<n>") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but PyTorch finds no CUDA device here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; expected cpu, cuda or cuda:<n>")
    return device


def _dtypes(name: str, device: torch.device, hf: Any) -> tuple[torch.dtype, torch.dtype]:
    """``Model.dtype`` and ``Model.product_dtype``."""
    if name == "auto":
        stored = getattr(hf, "dtype", None) or torch.float32
        wanted = torch.float32 if device.type == "cpu" else stored
    elif name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto, float32, bfloat16 or float16")
    else:
        wanted = _DTYPES[name]
    if device.type == "cpu":
        if wanted == torch.float16:
            logger.warning("dtype float16 on CPU uses reference kernels, which are slow; bfloat16 and float32 are fast")
            return wanted, wanted
        return torch.float32, wanted
    return wanted, wanted


def _read_config(directory: Path, trust_remote_code: bool) -> Any:
    """The checkpoint's config as Transformers reads it, which fills in each family's defaults."""
    raw = read_json(directory / "config.json")
    from transformers import AutoConfig  # here, because it takes seconds to import

    try:
        if raw.get("model_type") in _READ_AS:
            own = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
            return AutoConfig.for_model(_READ_AS[raw["model_type"]], **own)
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # Transformers' validation raises nearly anything
        kind = raw.get("model_type", "none")
        raise CheckpointError(
            f"{directory / 'config.json'} (model_type {kind}) is not a config that Transformers can read: {error}"
        ) from error


def _architecture(hf: Any, directory: Path) -> str:
    names: list[str] = getattr(hf, "architectures", None) or []
    if len(names) != 1:
        raise CheckpointError(f"{directory / 'config.json'} names {len(names)} architectures; expected one")
    return names[0]


def _end_tokens(known: tuple[int, ...], directory: Path) -> tuple[int, ...]:
    """The config's end-of-sequence tokens and those that generation_config.json adds."""
    return tuple(dict.fromkeys(known + read_generation_config(directory).end_tokens))
