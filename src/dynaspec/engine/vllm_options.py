"""vLLM's options that this engine has under another name or not at all, for scripts that were written for vLLM.

An option that is not here is either one of ``EngineConfig`` under the same name, or unknown. One that the engine does
not have is taken silently where it asks for what happens anyway. Otherwise it is ignored with a warning where answers
do not depend on it (memory, speed, files), and refused where they do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynaspec.contract.errors import ConfigError
from dynaspec.control.keys import SPECULATION_OPTIONS

logger = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """An option under another name."""

    name: str
    is_flag: bool = False
    negated: bool = False


class Foreign(NamedTuple):
    """An option that there is not here."""

    same: tuple[object, ...]
    """Values that ask for what happens anyway. None and empty lists and objects always do."""
    why: str
    """Why other values are of no effect, or are refused."""
    ignored: bool = False
    """Other values change no answer: they are ignored with a warning. Else they are refused."""

    @property
    def is_flag(self) -> bool:
        return any(isinstance(value, bool) for value in self.same)


def _ignored(why: str, *same: object) -> Foreign:
    return Foreign(same, why, ignored=True)


RENAMED: Mapping[str, Renamed] = {"kv_cache_memory_bytes": Renamed("kv_cache_memory")}
_ONE_DEVICE = "this engine runs on one device; --backend vllm runs on several"
_NO_ADAPTERS = "adapters are not available in this version"
_TEXT_ALONE = "models of text alone are served"
_NOT_COMPILED = "there is nothing to be compiled or captured"
_KV_SIZE = "the KV cache's size is kv_cache_memory"
_OWN_CONFIG = "a checkpoint's configuration is taken as it is"
_ONE_SCHEDULER = "prefill and decoding share max_num_batched_tokens"

FOREIGN: Mapping[str, Foreign] = {
    "additional_config": Foreign((), "it is for plugins, which are not available in this version"),
    "aggregate_engine_logging": _ignored("there is one engine", False),
    "allowed_local_media_path": _ignored(_TEXT_ALONE, ""),
    "allowed_media_domains": _ignored(_TEXT_ALONE),
    "attention_backend": _ignored("the engine has its own attention kernels"),
    "attention_config": _ignored("the engine has its own attention kernels"),
    "block_size": _ignored("KV blocks have 16 tokens", 16),
    "calculate_kv_scales": _ignored("the KV cache has the model's dtype", False),
    "code_revision": Foreign((), "code and weights are of one revision"),
    "collect_detailed_traces": _ignored("the decision log has every step"),
    "compilation_config": _ignored(_NOT_COMPILED),
    "config_format": Foreign(("auto", "hf"), "checkpoints are Hugging Face's"),
    "convert": Foreign(("auto", "none"), "models that generate are served"),
    "cpu_offload_gb": _ignored("weights stay on their device", 0),
    "cpu_offload_params": _ignored("weights stay on their device"),
    "cuda_graph_sizes": _ignored(_NOT_COMPILED),
    "cudagraph_capture_sizes": _ignored(_NOT_COMPILED),
    "cudagraph_metrics": _ignored(_NOT_COMPILED, False),
    "custom_histogram_buckets": _ignored("histograms have fixed buckets"),
    "data_parallel_size": Foreign((1,), _ONE_DEVICE),
    "disable_async_output_proc": _ignored("outputs are made in the step that has their tokens", False),
    "disable_cascade_attn": _ignored("the engine has its own attention kernels", True, False),
    "disable_chunked_mm_input": _ignored(_TEXT_ALONE, True, False),
    "disable_custom_all_reduce": _ignored(_ONE_DEVICE, True, False),
    "disable_hybrid_kv_cache_manager": _ignored("layers share one KV cache", True, False),
    "disable_mm_preprocessor_cache": _ignored(_TEXT_ALONE, True, False),
    "disable_sliding_window": Foreign((False,), "a model's window is part of it"),
    "distributed_executor_backend": _ignored(_ONE_DEVICE, "uni"),
    "download_dir": _ignored("checkpoints go where HF_HOME says"),
    "enable_chunked_prefill": _ignored("long prompts are always read in chunks", True),
    "enable_expert_parallel": Foreign((False,), _ONE_DEVICE),
    "enable_lora": Foreign((False,), _NO_ADAPTERS),
    "enable_mm_embeds": _ignored(_TEXT_ALONE, False),
    "enable_prompt_embeds": Foreign((False,), "prompts are text or token ids"),
    "enable_return_routed_experts": Foreign((False,), "outputs do not say which experts were used"),
    "enable_sleep_mode": _ignored("a model stays in memory until it is closed", False),
    "enforce_eager": _ignored(_NOT_COMPILED, True, False),
    "fully_sharded_loras": _ignored(_NO_ADAPTERS, False),
    "gpu_memory_utilization": _ignored(_KV_SIZE),
    "guided_decoding_backend": _ignored("grammars are llguidance's", "auto", "guidance"),
    "hf_config_path": Foreign((), _OWN_CONFIG),
    "hf_overrides": Foreign((), _OWN_CONFIG),
    "hf_token": _ignored("the hub's token is HF_TOKEN's"),
    "ignore_patterns": _ignored("only the files of the weights are read"),
    "interleave_mm_strings": _ignored(_TEXT_ALONE, False),
    "kernel_config": _ignored("kernels are the engine's own"),
    "kv_cache_metrics": _ignored("the metrics have the cache's use and hits", False),
    "kv_offloading_size": _ignored("the KV cache stays on its device"),
    "kv_transfer_config": Foreign((), "KV is not moved between engines"),
    "language_model_only": _ignored(_TEXT_ALONE, True, False),
    "limit_mm_per_prompt": _ignored(_TEXT_ALONE),
    "load_format": Foreign(("auto", "hf", "safetensors", "gguf"), "weights are read as they are: safetensors or GGUF"),
    "log_level": _ignored("logging is Python's own"),
    "logits_processor_pattern": _ignored("requests cannot bring code"),
    "logits_processors": Foreign((), "code that changes logits is not available in this version"),
    "logprobs_mode": Foreign(("raw_logprobs",), "log-probabilities are those of the model's own distribution"),
    "long_prefill_token_threshold": _ignored(_ONE_SCHEDULER, 0),
    "lora_dtype": _ignored(_NO_ADAPTERS, "auto"),
    "max_context_len_to_capture": _ignored(_NOT_COMPILED),
    "max_cpu_loras": _ignored(_NO_ADAPTERS),
    "max_cudagraph_capture_size": _ignored(_NOT_COMPILED),
    "max_logprobs": _ignored("a request may ask the server for 20 log-probabilities, Python for any number"),
    "max_long_partial_prefills": _ignored(_ONE_SCHEDULER, 1),
    "max_lora_rank": _ignored(_NO_ADAPTERS),
    "max_loras": _ignored(_NO_ADAPTERS, 1),
    "max_num_partial_prefills": _ignored(_ONE_SCHEDULER, 1),
    "max_num_scheduled_tokens": _ignored(_ONE_SCHEDULER),
    "max_parallel_loading_workers": _ignored("weights are mapped, not copied"),
    "max_seq_len_to_capture": _ignored(_NOT_COMPILED),
    "media_io_kwargs": _ignored(_TEXT_ALONE),
    "mm_processor_cache_gb": _ignored(_TEXT_ALONE),
    "mm_processor_kwargs": _ignored(_TEXT_ALONE),
    "model_impl": _ignored("known families have kernels, others run as Transformers has them", "auto", "vllm"),
    "model_loader_extra_config": _ignored("weights are mapped, not copied"),
    "model_weights": Foreign(("",), "weights are the model's"),
    "nnodes": Foreign((1,), _ONE_DEVICE),
    "num_gpu_blocks_override": _ignored(_KV_SIZE),
    "num_scheduler_steps": _ignored("every step is scheduled", 1),
    "offload_group_size": _ignored("weights stay on their device", 0),
    "offload_num_in_group": _ignored("weights stay on their device", 1),
    "offload_params": _ignored("weights stay on their device"),
    "offload_prefetch_step": _ignored("weights stay on their device", 1),
    "optimization_level": _ignored(_NOT_COMPILED),
    "override_pooler_config": Foreign((), "models that generate are served"),
    "performance_mode": _ignored("every step is planned for the requests that there are"),
    "pipeline_parallel_size": Foreign((1,), _ONE_DEVICE),
    "pooler_config": Foreign((), "models that generate are served"),
    "preemption_mode": _ignored("preempted requests are recomputed", "recompute"),
    "prefix_caching_hash_algo": _ignored("the prefix cache compares tokens"),
    "profiler_config": _ignored("dynaspec profile measures a model"),
    "quantization_config": Foreign((), "weights are quantised as quantization says"),
    "quantization_param_path": Foreign((), "the KV cache has the model's dtype"),
    "ray_workers_use_nsight": _ignored(_ONE_DEVICE, False),
    "return_sampling_mask": Foreign((False,), "outputs do not say what sampling has left"),
    "rope_scaling": Foreign((), _OWN_CONFIG),
    "rope_theta": Foreign((), _OWN_CONFIG),
    "runner": Foreign(("auto", "generate"), "models that generate are served"),
    "scheduler_cls": Foreign((), "this engine has one scheduler"),
    "scheduling_policy": _ignored("requests are served in order of arrival", "fcfs"),
    "show_hidden_metrics_for_version": _ignored("no metric is hidden"),
    "skip_mm_profiling": _ignored(_TEXT_ALONE, True, False),
    "skip_tokenizer_init": Foreign((False,), "the engine needs a tokenizer"),
    "stream_interval": _ignored("streams are limited by stream_interval_s, in seconds", 1),
    "structured_outputs_config": _ignored("grammars are llguidance's"),
    "swap_space": _ignored("preempted requests are recomputed, not swapped", 0),
    "task": Foreign(("auto", "generate"), "models that generate are served"),
    "tokenizer_mode": Foreign(("auto", "hf"), "the tokenizer is Hugging Face's fast one"),
    "tokenizer_revision": Foreign((), "tokenizer and weights are of one revision"),
    "use_tqdm_on_load": _ignored("no progress of loading is shown", True, False),
    "use_v2_block_manager": _ignored("there is one block manager", True, False),
    "worker_cls": Foreign((), "the engine has no workers"),
    "worker_extension_cls": Foreign((), "the engine has no workers"),
}
"""Of the engine, for scripts and servers alike."""

SERVER_ONLY: Mapping[str, Foreign] = {
    "disable_log_stats": _ignored("LLM.stats and LLM.get_metrics are always there", True, False),
    "enable_log_requests": _ignored("requests are logged by the server", False),
    "otlp_traces_endpoint": _ignored("traces are the server's"),
    "per_request_spec_decode_metrics": _ignored("outputs have them; see SamplingParams.speculation_metrics", "none"),
    "served_model_name": _ignored("names are the server's"),
}
"""Options of ``serve`` that vLLM's ``LLM`` takes too."""


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``LLM`` was called with, as options of ``EngineConfig``; those that are None are left out, as not given.

    Raises:
        ConfigError: an option whose being ignored would change answers, or one that is given under two names.
    """
    result: dict[str, Any] = {}
    speculation = {
        SPECULATION_OPTIONS[name]: value for name, value in options.items() if name in SPECULATION_OPTIONS and value
    }
    for name, value in options.items():
        if name in SPECULATION_OPTIONS:
            continue
        foreign = FOREIGN.get(name) or SERVER_ONLY.get(name)
        if foreign is not None:
            settle(name, value, foreign, shown=f"{name}={value!r}")
            continue
        ours = RENAMED[name].name if name in RENAMED else name
        if value is None:
            continue
        if ours in result:
            raise ConfigError(f"{name} and {ours} are both given; expected one of them, as they name the same thing")
        result[ours] = value
    if speculation:
        if "speculative_config" in result:
            names = ", ".join(SPECULATION_OPTIONS)
            raise ConfigError(f"speculative_config was given together with {names}; expected one or the other")
        result["speculative_config"] = speculation
    return result


def settle(name: str, value: object, foreign: Foreign, *, shown: str) -> None:
    """Takes an option that there is not here, with a warning if it asks for more than what happens anyway.

    Args:
        shown: name and value as they were given.

    Raises:
        ConfigError: answers would depend on it.
    """
    if _asks_nothing(value) or _word(value) in [_word(same) for same in foreign.same]:
        return
    if foreign.ignored:
        logger.warning("%s is ignored: %s", shown, foreign.why)
        return
    allowed = " or ".join(str(same) for same in foreign.same if not isinstance(same, bool))
    instead = f"{allowed}, or nothing" if allowed else "it left out"
    raise ConfigError(f"{shown} is not available; expected {instead}: {foreign.why}")


def _asks_nothing(value: object) -> bool:
    if isinstance(value, str) and value[:1] in ("{", "["):  # from a command line
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _word(value: object) -> str:
    """For values of command lines and of Python to be compared."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower()
