"""Puts a worker's drafting together from vLLM's configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.settings import DrafterSettings, told_in
from dynaspec.kv.arena import Arena, blocks_within
from dynaspec.kv.blocks import BlockPool, BlockTables
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.loader import load_model
from dynaspec.observe.decision_log import header_of, logged
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer
from dynaspec.propose.pass_timing import measure_costs
from dynaspec.propose.registry import Source, Weights, build_proposers, load_drafter
from dynaspec.propose.router import Router
from dynaspec.propose.warm_up import load_kernels
from dynaspec.sampling.state import SamplerState

from .drafting import Drafting
from .outcome import load_compiled
from .texts import Texts

_KV_BYTES = 4 << 30
"""For the drafter's KV at most, on top of vLLM's own. A request that finds no room is not drafted for."""


def build_drafting(vllm_config: Any, clock: Callable[[], float]) -> Drafting:
    """
    Args:
        vllm_config: vLLM's; attributes are read.
        clock: seconds.

    Raises:
        CheckpointError, ConfigError, CapacityError: settings that are wrong, or that cannot be carried out here.
    """
    settings = settings_of(vllm_config)
    model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    max_requests, max_length = scheduler.max_num_seqs, model_config.max_model_len
    vocab_size, device = model_config.get_vocab_size(), vllm_config.device_config.device_type
    dtype = "auto" if device == "cpu" else str(model_config.dtype).removeprefix("torch.")
    loaded = load_drafter(Source(settings.config, None, "vLLM's model", vocab_size, dtype, device, load_model))
    tables, arena = _kv_cache(None if loaded is None else loaded.weights, max_requests, max_length)
    sampler = SamplerState(max_requests, vocab_size, torch.device(device))
    drafter = None if loaded is None or arena is None else loaded.drafter(arena, None)
    # Certain drafts: vLLM asks others' drafters for no distributions.
    proposers = build_proposers(settings.config, drafter, tables, sampler, probabilistic=False)
    limits = limits_of(*(proposer.traits for proposer in proposers), longest=settings.longest)
    costs = PassCosts()
    if settings.config.policy == "auto":
        runners = [None if drafter is None or not one.needs.kv else drafter.runner for one in proposers]
        costs = measure_costs(None, runners, clock, scheduler.max_num_batched_tokens)
    header = header_of(model_config.model, settings.config, costs=costs, host="vllm", method="custom_class")
    controller, log = logged(build_controller(settings.config, limits, costs=costs), settings.decision_log, header)
    load_kernels()
    load_compiled()
    pace, stats = TargetPassTimer(), SpecStats()
    return Drafting(
        Texts(max_requests, max_length),
        tables,
        Router([FaultBarrier(proposer, vocab_size, stats.proposer_fault, pace, clock) for proposer in proposers]),
        controller,
        limits,
        pace,
        max_model_len=max_length,
        clock=clock,
        log=log,
    )


def limits_of(*traits: ProposerTraits, longest: int = 1) -> Limits:
    """What drafting in a worker of vLLM's can carry out: all that the embedded engine can."""
    gates = any(one.passes_per_draft == "per_token" for one in traits)
    return Limits(draft_lens=tuple(range(longest + 1)), proposers=traits, can_gate=gates)


def settings_of(vllm_config: Any) -> DrafterSettings:
    """
    Raises:
        ConfigError: see ``DrafterSettings.read``.
    """
    parallel = vllm_config.parallel_config
    return DrafterSettings.read(
        told_in(vllm_config.additional_config),
        vllm_config.speculative_config.num_speculative_tokens,
        os.environ,
        workers=parallel.world_size,
        ranks=parallel.data_parallel_size,
    )


def _kv_cache(model: Weights | None, max_requests: int, max_length: int) -> tuple[BlockTables, Arena | None]:
    """The drafter's own. Without a model nothing is kept in the blocks, of which there are enough then."""
    blocks = max_requests * -(-(max_length + 1) // BLOCK_SIZE)
    if model is not None:
        blocks = blocks_within(_KV_BYTES, model.kv_bytes_per_block, blocks)
    tables = BlockTables(BlockPool(blocks), max_requests, max_length + 1, BLOCK_SIZE, caching=False)
    if model is None:
        return tables, None
    return tables, Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)
