"""What vLLM's scripts pass to ``serve``: other names, what holds here anyway, and what is refused by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynaspec.contract.errors import ConfigError


class Renamed(NamedTuple):
    """An option under another name."""

    name: str
    is_flag: bool = False
    negated: bool = False


class Foreign(NamedTuple):
    """An option that this server does not have."""

    harmless: tuple[object, ...]
    """Values that ask for what happens anyway."""
    why: str

    @property
    def is_flag(self) -> bool:
        return any(isinstance(value, bool) for value in self.harmless)


RENAMED: Mapping[str, Renamed] = {
    "disable_fastapi_docs": Renamed("disable_docs", is_flag=True),
    "disable_log_requests": Renamed("log_requests", is_flag=True, negated=True),
    "disable_log_stats": Renamed("log_stats", is_flag=True, negated=True),
    "disable_uvicorn_access_log": Renamed("access_log", is_flag=True, negated=True),
    "enable_log_requests": Renamed("log_requests", is_flag=True),
    "kv_cache_memory_bytes": Renamed("kv_cache_memory"),
    "shutdown_timeout": Renamed("drain_timeout_s"),
    "speculative_model": Renamed("draft_model"),
}

_ONE_DEVICE = "this engine runs on one device; --backend vllm runs on several"
_NO_ADAPTERS = "adapters are not available in this version"

FOREIGN: Mapping[str, Foreign] = {
    "api_server_count": Foreign((1,), "one process answers all requests"),
    "block_size": Foreign((16,), "KV blocks have 16 tokens"),
    "chat_template_content_format": Foreign(("auto",), "templates say what they can take"),
    "compilation_config": Foreign((), "models are not compiled"),
    "config_format": Foreign(("auto", "hf"), "checkpoints are Hugging Face's"),
    "cpu_offload_gb": Foreign((0,), "weights stay on their device"),
    "data_parallel_size": Foreign((1,), _ONE_DEVICE),
    "disable_custom_all_reduce": Foreign((True, False), _ONE_DEVICE),
    "disable_frontend_multiprocessing": Foreign((True,), "server and engine share a process"),
    "distributed_executor_backend": Foreign(("uni",), _ONE_DEVICE),
    "download_dir": Foreign((), "checkpoints go where HF_HOME says"),
    "enable_auto_tool_choice": Foreign((True,), "calls of tools are always found"),
    "enable_chunked_prefill": Foreign((True,), "long prompts are always read in chunks"),
    "enable_expert_parallel": Foreign((False,), _ONE_DEVICE),
    "enable_lora": Foreign((False,), _NO_ADAPTERS),
    "enable_prompt_tokens_details": Foreign((True,), "usage always has them"),
    "enable_request_id_headers": Foreign((True,), "answers always carry X-Request-Id"),
    "enforce_eager": Foreign((True, False), "there is nothing to be compiled"),
    "generation_config": Foreign(("vllm",), "defaults of sampling are the API's, not the checkpoint's"),
    "gpu_memory_utilization": Foreign((), "the KV cache's size is --kv-cache-memory"),
    "guided_decoding_backend": Foreign(("auto", "guidance"), "grammars are llguidance's"),
    "hf_overrides": Foreign((), "a checkpoint's configuration is taken as it is"),
    "kv_cache_dtype": Foreign(("auto",), "the KV cache has the model's dtype"),
    "limit_mm_per_prompt": Foreign((), "models of text alone are served"),
    "load_format": Foreign(("auto", "safetensors", "gguf"), "weights are read as they are: safetensors or GGUF"),
    "lora_modules": Foreign((), _NO_ADAPTERS),
    "max_seq_len_to_capture": Foreign((), "there is nothing to be captured"),
    "middleware": Foreign((), "the application is fixed"),
    "num_scheduler_steps": Foreign((1,), "every step is scheduled"),
    "pipeline_parallel_size": Foreign((1,), _ONE_DEVICE),
    "preemption_mode": Foreign(("recompute",), "preempted requests are recomputed"),
    "reasoning_parser": Foreign((), "reasoning is not told apart from the answer"),
    "response_role": Foreign(("assistant",), "answers are the assistant's"),
    "runner": Foreign(("auto", "generate"), "models that generate are served"),
    "scheduling_policy": Foreign(("fcfs",), "requests are served in order of arrival"),
    "ssl_cert_reqs": Foreign((0,), "--ssl-ca-certs alone makes clients show a certificate"),
    "swap_space": Foreign((0,), "preempted requests are recomputed, not swapped"),
    "task": Foreign(("auto", "generate"), "models that generate are served"),
    "tokenizer_mode": Foreign(("auto",), "the tokenizer is Hugging Face's fast one"),
    "tool_call_parser": Foreign(("hermes",), "calls are read as Hermes and Qwen write them"),
    "uds": Foreign((), "the server listens on --host and --port"),
}

_SHORT = {"-tp": "--tensor-parallel-size"}
_SEVERAL = "--served-model-name"
"""vLLM takes several names after one such flag."""


def translate(name: str, value: object) -> tuple[str, object] | None:
    """An option under the name that it has here; None if it asks for what happens anyway.

    Args:
        name: with underscores.

    Raises:
        ConfigError: it asks for what this server does not do.
    """
    if name in RENAMED:
        renamed = RENAMED[name]
        return renamed.name, not _is_true(value) if renamed.negated else value
    if name not in FOREIGN:
        return name, value
    refuse(name, value, FOREIGN[name])
    return None


def refuse(name: str, value: object, foreign: Foreign) -> None:
    """
    Raises:
        ConfigError: the value asks for what does not happen anyway.
    """
    if str(value).lower() in [str(harmless).lower() for harmless in foreign.harmless]:
        return
    given = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    if value is False:
        given = "--no-" + name.replace("_", "-")
    allowed = " or ".join(str(harmless) for harmless in foreign.harmless if not isinstance(harmless, bool))
    instead = f"{allowed}, or nothing" if allowed else "it left out"
    raise ConfigError(f"{given} is not available; expected {instead}: {foreign.why}")


def translate_arguments(args: Sequence[str]) -> list[str]:
    """Arguments as ``serve`` has them: ``--speculative_config`` with dashes, vLLM's names as ours.

    Raises:
        ConfigError: see ``translate``.
    """
    result: list[str] = []
    rest = deque(_SHORT.get(arg, arg) for arg in args)
    while rest:
        arg = rest.popleft()
        if arg == "--":
            return [*result, arg, *rest]
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            flag = "--" + flag[2:].replace("_", "-")
            result += _translated_flag(flag, value if equals else None, rest)
        else:
            result.append(arg)
    return result


def _translated_flag(flag: str, value: str | None, rest: deque[str]) -> list[str]:
    """What stands for one flag; takes its value from the arguments after it, if it has one there."""
    name = flag[2:].replace("-", "_")
    positive = name.removeprefix("no_")
    if flag == _SEVERAL and value is None:
        return [part for one in _values(rest) for part in (flag, one)] or [flag]
    if _is_flag(positive) and value is None:
        return _as_flags(translate(positive, name == positive))
    if name not in RENAMED and name not in FOREIGN:
        return [flag if value is None else f"{flag}={value}"]
    if value is None:
        value = rest.popleft() if rest else ""
    translated = translate(name, value)
    return [] if translated is None else [f"--{translated[0].replace('_', '-')}={translated[1]}"]


def _is_flag(name: str) -> bool:
    known = RENAMED.get(name) or FOREIGN.get(name)
    return known is not None and known.is_flag


def _as_flags(translated: tuple[str, object] | None) -> list[str]:
    if translated is None:
        return []
    name, value = translated
    return [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]


def _values(rest: deque[str]) -> list[str]:
    """Takes the arguments up to the next flag."""
    values = []
    while rest and not rest[0].startswith("-"):
        values.append(rest.popleft())
    return values


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")
