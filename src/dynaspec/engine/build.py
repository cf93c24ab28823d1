"""Puts an engine together from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from dynaspec.contract.costs import PassCosts
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
from dynaspec.model.kernels.team import dissolve
from dynaspec.model.loader import load_model
from dynaspec.observe.decision_log import DecisionLog, LoggedController
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.calibrate import Runner, measure_costs
from dynaspec.propose.draft_model import DraftModelProposer
from dynaspec.propose.guard import Guard
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.none import NoProposer
from dynaspec.propose.patience import TargetPace
from dynaspec.propose.router import Router
from dynaspec.propose.warm_up import load_kernels
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


def build_engine(
    config: EngineConfig,
    *,
    proposer: Proposer | None = None,
    wrap: Callable[[Proposer], Proposer] | None = None,
    load: Callable[..., Model] = load_model,
) -> Engine:
    """Loads the models and connects the parts.

    Args:
        proposer: drafts instead of the one that ``speculative_config`` names, under its policy.
        wrap: puts something around each proposer, for tests and measurements.
        load: reads a checkpoint, as ``load_model`` does; models hold weights only, so engines may share them.

    Raises:
        CheckpointError, ConfigError, CapacityError: see there.
    """
    device = _device(config.device)
    speculation = config.speculative_config
    target = load(
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
    drafter = _load_drafter(config, target, load) if speculation and speculation.method == "draft_model" else None
    tables, arenas = _kv_cache(config, [m for m in (target, drafter) if m is not None], max_model_len)
    sampler = SamplerState(config.max_num_seqs, target.config.vocab_size, device)
    draft_runner = None if drafter is None else Runner(drafter, arenas[-1])
    proposers = _build_proposers(speculation, draft_runner, tables, sampler) if proposer is None else [proposer]
    stats = SpecStats()
    limits = _limits(speculation, proposers, config)
    costs = PassCosts()
    if speculation is not None and speculation.policy == "auto":
        runners = [draft_runner if isinstance(p, DraftModelProposer) else None for p in proposers]
        costs = measure_costs(Runner(target, arenas[0]), runners, time.perf_counter, config.max_num_batched_tokens)
    if wrap is not None:
        proposers = [wrap(p) for p in proposers]
    controller = build_controller(speculation, limits, seed=config.seed, costs=costs)
    log = _decision_log(config, costs)
    if log is not None:
        controller = LoggedController(controller, log)
    dissolve()  # who has built the engine need not be who steps it
    pace = TargetPace()
    vocab_size = target.config.vocab_size
    router = Router([Guard(p, vocab_size, stats.proposer_fault, pace, time.monotonic) for p in proposers])
    scheduler = Scheduler(
        Lanes(config.max_num_seqs, max_model_len), tables, config.max_num_batched_tokens, time.monotonic
    )
    step = Step(
        scheduler=scheduler,
        controller=controller,
        proposer=router,
        verifier=TargetVerifier(
            target,
            arenas[0],
            sampler,
            BLOCK_SIZE,
            tuple(sorted({tap for p in proposers for tap in p.needs.taps})),
            synthetic_rates=None if speculation is None else speculation.synthetic_rates,
        ),
        sampler=sampler,
        limits=limits,
        stats=stats,
        pace=pace,
        clock=time.perf_counter,
    )
    return Engine(
        config=config,
        tokenizer=tokenizer,
        intake=Intake(tokenizer, target.config.vocab_size, target.config.eos_token_ids, max_model_len, config.seed),
        scheduler=scheduler,
        controller=controller,
        proposers=router,
        loop=OverlappedLoop(step) if config.async_scheduling else SerialLoop(step),
        stats=stats,
        max_model_len=max_model_len,
        decision_log=log,
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


def _load_drafter(config: EngineConfig, target: Model, load: Callable[..., Model]) -> Model:
    """
    Raises:
        ConfigError: its vocabulary is not the target's.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        raise ConfigError("method is 'draft_model' but no model is given; expected its checkpoint")
    dtype = config.dtype if speculation.dtype == "auto" else speculation.dtype
    drafter = load(
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


def _build_proposers(
    speculation: SpeculativeConfig | None, drafter: Runner | None, tables: BlockTables, sampler: SamplerState
) -> list[Proposer]:
    """In the order of ``Limits.proposers``: a draft model before the lookup beside it."""
    if speculation is None:
        return [NoProposer()]
    proposers: list[Proposer] = []
    if drafter is not None:
        longest = drafter.model.config.max_position
        proposers.append(
            DraftModelProposer(
                drafter.model,
                drafter.arena,
                tables,
                sampler,
                max_length=min(longest, speculation.max_model_len or longest),
                probabilistic=speculation.draft_sample_method == "probabilistic",
            )
        )
    if speculation.lookup is not None:
        proposers.append(NgramProposer(*speculation.lookup))
    load_kernels()
    return proposers


def _limits(speculation: SpeculativeConfig | None, proposers: Sequence[Proposer], config: EngineConfig) -> Limits:
    longest = speculation.longest_draft if speculation is not None else 0
    return Limits(
        draft_lens=tuple(range(longest + 1)),
        proposers=tuple(proposer.traits for proposer in proposers),
        can_gate=any(proposer.needs.kv for proposer in proposers),
        plan_lag=int(config.async_scheduling),
    )


def _decision_log(config: EngineConfig, costs: PassCosts) -> DecisionLog | None:
    """The log, opened, with all that a replay needs to build the same controller."""
    if config.decision_log is None:
        return None
    speculation = config.speculative_config
    header = {
        "model": config.model,
        "speculative_config": None if speculation is None else speculation.model_dump(mode="json", exclude_none=True),
        "seed": config.seed,
        "costs": asdict(costs),
    }
    return DecisionLog(config.decision_log, header)
