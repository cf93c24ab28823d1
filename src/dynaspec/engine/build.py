"""Puts an engine together from its configuration."""

from __future__ import annotations

import time

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.step import Limits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.kv.arena import Arena, blocks_within
from dynaspec.kv.pool import BlockPool
from dynaspec.kv.tables import BlockTables
from dynaspec.model.base import Model
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.loader import load_model
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.draft_model import DraftModelProposer
from dynaspec.propose.guard import Guard
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.none import NoProposer
from dynaspec.sampling.state import SamplerState
from dynaspec.schedule.lanes import Lanes
from dynaspec.schedule.scheduler import Scheduler

from .config import EngineConfig
from .engine import Engine
from .intake import Intake
from .loop import OverlappedLoop, SerialLoop
from .memory import default_kv_memory
from .step import Step
from .target import TargetVerifier
from .tokenizer import Tokenizer


def build_engine(config: EngineConfig, *, proposer: Proposer | None = None) -> Engine:
    """Loads the models and connects the parts.

    Args:
        proposer: drafts instead of the one that ``speculative_config`` names, under its policy.

    Raises:
        CheckpointError, ConfigError, CapacityError: see there.
    """
    device = _device(config.device)
    speculation = config.speculative_config
    target = load_model(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=str(device),
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
    )
    tokenizer = Tokenizer(
        config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    max_model_len = _max_model_len(config, target)
    drafter = _load_drafter(config, target) if speculation and speculation.method == "draft_model" else None
    tables, arenas = _kv_cache(config, [m for m in (target, drafter) if m is not None], max_model_len)
    sampler = SamplerState(config.max_num_seqs, target.config.vocab_size, device)
    if proposer is None:
        proposer = _build_proposer(speculation, drafter, arenas[-1], tables, sampler)
    stats = SpecStats()
    limits = _limits(speculation, proposer, config)
    scheduler = Scheduler(
        Lanes(config.max_num_seqs, max_model_len), tables, config.max_num_batched_tokens, time.monotonic
    )
    step = Step(
        scheduler=scheduler,
        controller=build_controller(speculation, limits, seed=config.seed),
        proposer=Guard(proposer, target.config.vocab_size, stats.proposer_fault),
        verifier=TargetVerifier(target, arenas[0], sampler, BLOCK_SIZE, proposer.needs.taps),
        sampler=sampler,
        limits=limits,
        stats=stats,
        clock=time.perf_counter,
    )
    return Engine(
        config=config,
        tokenizer=tokenizer,
        intake=Intake(tokenizer, target.config.vocab_size, target.config.eos_token_ids, max_model_len, config.seed),
        scheduler=scheduler,
        loop=OverlappedLoop(step) if config.async_scheduling else SerialLoop(step),
        stats=stats,
        max_model_len=max_model_len,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but PyTorch finds no CUDA device here; expected 'cpu' or 'auto'")
    return torch.device(name)


def _max_model_len(config: EngineConfig, target: Model) -> int:
    """The request's length limit: as configured, else the model's.

    Raises:
        ConfigError: more than the model's positions.
    """
    limit = target.config.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the model has {limit} positions; expected no more"
        )
    return config.max_model_len or limit


def _load_drafter(config: EngineConfig, target: Model) -> Model:
    """
    Raises:
        ConfigError: its vocabulary is not the target's.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        raise ConfigError("method is 'draft_model' but no model is given; expected its checkpoint")
    dtype = config.dtype if speculation.dtype == "auto" else speculation.dtype
    drafter = load_model(
        speculation.model,
        revision=speculation.revision,
        dtype=dtype,
        device=str(target.device),
        trust_remote_code=config.trust_remote_code,
    )
    if drafter.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"the drafter {speculation.model!r} has a vocabulary of {drafter.config.vocab_size} tokens but the target "
            f"{config.model!r} has {target.config.vocab_size}; expected a drafter with the target's vocabulary"
        )
    return drafter


def _kv_cache(config: EngineConfig, models: list[Model], max_model_len: int) -> tuple[BlockTables, list[Arena]]:
    """One pool and one table; an arena for each model, all within one budget."""
    memory = config.kv_cache_memory or default_kv_memory(models[0].device)
    needed = config.max_num_seqs * -(-max_model_len // BLOCK_SIZE)
    blocks = blocks_within(memory, sum(model.kv_bytes_per_block for model in models), needed)
    tables = BlockTables(
        BlockPool(blocks),
        config.max_num_seqs,
        max_model_len,
        BLOCK_SIZE,
        caching=config.enable_prefix_caching,
    )
    arenas = [
        Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device) for model in models
    ]
    return tables, arenas


def _build_proposer(
    speculation: SpeculativeConfig | None,
    drafter: Model | None,
    arena: Arena,
    tables: BlockTables,
    sampler: SamplerState,
) -> Proposer:
    if speculation is None:
        return NoProposer()
    if drafter is not None:
        longest = drafter.config.max_position
        return DraftModelProposer(
            drafter,
            arena,
            tables,
            sampler,
            max_length=min(longest, speculation.max_model_len or longest),
            probabilistic=speculation.draft_sample_method == "probabilistic",
        )
    return NgramProposer(speculation.prompt_lookup_min or 1, speculation.prompt_lookup_max or 1)


def _limits(speculation: SpeculativeConfig | None, proposer: Proposer, config: EngineConfig) -> Limits:
    longest = speculation.longest_draft if speculation is not None else 0
    return Limits(
        draft_lens=tuple(range(longest + 1)),
        proposers=(proposer.traits,),
        plan_lag=int(config.async_scheduling),
    )
