"""Puts an engine together from its configuration."""

from __future__ import annotations

import dynaspec.engine.threads  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dynaspec.compile_worker import compile_worker
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.step import Limits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.kv.blocks import Arena, BlockPool, BlockTables, blocks_within
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.model.taps import Taps
from dynaspec.observe.decision_log import header_of, logged
from dynaspec.observe.stats import SpecStats
from dynaspec.propose import warm_up as propose_warm_up
from dynaspec.propose.drafter import Drafter
from dynaspec.propose.guard import FaultBarrier, NoProposer, TargetPassTimer
from dynaspec.propose.pass_timing import Runner, measure_costs
from dynaspec.propose.registry import Loaded, Source, Weights, build_proposers, load_drafter
from dynaspec.propose.router import Router
from dynaspec.propose.state_heads import StateHeadsDrafter
from dynaspec.sampling.state import SamplerState
from dynaspec.schedule.scheduler import Lanes, Scheduler

from .config import EngineConfig
from .engine import Engine
from .intake import Intake
from .loop import OverlappedLoop, SerialLoop
from .sampling_defaults import sampling_defaults
from .step import Step
from .target import TargetVerifier
from .tokenizer import Tokenizer
from .warm_up import load_kernels

_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9


def default_kv_memory(device: torch.device) -> int:
    """Bytes: a quarter of the memory available on CPU, 90 % of what is free on CUDA."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return int(pages * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)


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
    compile_worker.allow()
    device = _device(config.device)
    speculation = config.speculative_config
    defaults = sampling_defaults(config)
    target = load(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=str(device),
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )
    tokenizer = Tokenizer(
        config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    max_model_len = _max_model_len(config, target)
    loaded = None if speculation is None else load_drafter(_source(config, speculation, target, tokenizer, load))
    tables, arenas, taps = _kv_cache(config, target, loaded, max_model_len)
    sampler = SamplerState(config.max_num_seqs, target.config.vocab_size, device)
    drafter = None if loaded is None else loaded.drafter(arenas[-1], taps)
    proposers = _proposers(speculation, drafter, tables, sampler) if proposer is None else [proposer]
    stats = SpecStats()
    limits = _limits(speculation, proposers, config)
    costs, passes = PassCosts(), Runner(target, arenas[0])
    passes.run(1)  # what it needs is compiled now, not when the first request waits for it
    compile_worker.wait()
    if speculation is not None and speculation.policy == "auto":
        runners = [None if drafter is None or not (p.needs.kv or p.needs.taps) else drafter.runner for p in proposers]
        costs = measure_costs(passes, runners, time.perf_counter, config.max_num_batched_tokens)
    if wrap is not None:
        proposers = [wrap(p) for p in proposers]
    header = header_of(config.model, speculation, seed=config.seed, costs=costs)
    controller, log = logged(build_controller(speculation, limits, costs=costs), config.decision_log, header)
    pace = TargetPassTimer()
    vocab_size = target.config.vocab_size
    router = Router([FaultBarrier(p, vocab_size, stats.proposer_fault, pace, time.monotonic) for p in proposers])
    scheduler = Scheduler(
        Lanes(config.max_num_seqs, max_model_len), tables, config.max_num_batched_tokens, time.monotonic
    )
    verifier = TargetVerifier(
        target,
        arenas[0],
        sampler,
        BLOCK_SIZE,
        taps,
        synthetic_rates=None if speculation is None else speculation.synthetic_rates,
        in_blocks=speculation is not None and speculation.rejection_sample_method == "block",
    )
    load_kernels()
    if limits.can_branch and any(traits.trees for traits in limits.proposers):
        verifier.load_trees()
    step = Step(
        scheduler=scheduler,
        controller=controller,
        proposer=router,
        verifier=verifier,
        sampler=sampler,
        limits=limits,
        stats=stats,
        pace=pace,
        clock=time.perf_counter,
    )
    compile_worker.forbid()
    return Engine(
        config=config,
        tokenizer=tokenizer,
        intake=Intake(
            tokenizer,
            target.config.vocab_size,
            tuple(dict.fromkeys(target.config.eos_token_ids + defaults.end_tokens)),
            max_model_len,
            config.seed,
        ),
        scheduler=scheduler,
        controller=controller,
        proposers=router,
        loop=OverlappedLoop(step) if config.async_scheduling else SerialLoop(step),
        stats=stats,
        max_model_len=max_model_len,
        decision_log=log,
        sampling_defaults=defaults,
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


def _source(
    config: EngineConfig,
    speculation: SpeculativeConfig,
    target: Model,
    tokenizer: Tokenizer,
    load: Callable[..., Model],
) -> Source:
    return Source(
        config=speculation,
        target=target,
        target_name=f"the target {config.model!r}",
        vocab_size=target.config.vocab_size,
        dtype=config.dtype,
        device=str(target.device),
        load=load,
        trust_remote_code=config.trust_remote_code,
        target_checkpoint=(config.model, config.revision),
        quantization=config.quantization,
        tokenizer=tokenizer,
        load_tokenizer=partial(Tokenizer, trust_remote_code=config.trust_remote_code),
    )


def _kv_cache(
    config: EngineConfig, target: Model, loaded: Loaded | None, max_model_len: int
) -> tuple[BlockTables, list[Arena], Taps | None]:
    """One pool and one table; an arena for each model and one for hidden states, all within one budget."""
    models: list[Weights] = [target]
    if loaded is not None and loaded.weights is not None:
        models.append(loaded.weights)
    wanted, width = () if loaded is None else loaded.taps, target.config.hidden_size
    memory = config.kv_cache_memory or default_kv_memory(target.device)
    needed = config.max_num_seqs * -(-max_model_len // BLOCK_SIZE)
    dtypes = [_kv_dtype(config, target, model) for model in models]
    per_block = sum(
        model.kv_bytes_per_block * dtype.itemsize // model.dtype.itemsize
        for model, dtype in zip(models, dtypes, strict=True)
    )
    per_block += BLOCK_SIZE * len(wanted) * width * target.dtype.itemsize
    blocks = blocks_within(memory, per_block, needed)
    tables = BlockTables(
        BlockPool(blocks),
        config.max_num_seqs,
        max_model_len,
        BLOCK_SIZE,
        caching=config.enable_prefix_caching,
    )
    arenas = [
        Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), dtype, model.device)
        for model, dtype in zip(models, dtypes, strict=True)
    ]
    if not wanted:
        return tables, arenas, None
    layers = target.config.num_layers
    return tables, arenas, Taps.allocate(wanted, blocks, layers, width, target.dtype, target.device)


def _kv_dtype(config: EngineConfig, target: Model, model: Weights) -> torch.dtype:
    """Of the target, or of a drafter, whose own dtype may be another."""
    widened = model.device.type == "cpu" and model.dtype == torch.float32
    if config.kv_cache_dtype == "auto":
        rounds = config.quantization is not None or target.product_dtype == torch.bfloat16
        return torch.bfloat16 if widened and rounds else model.dtype
    wanted: torch.dtype = getattr(torch, config.kv_cache_dtype)
    if wanted != model.dtype and not (widened and wanted == torch.bfloat16):
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r} but the model is in {dtype} on {model.device.type}; "
            f"expected 'auto', which is {dtype} there"
        )
    return wanted


def _proposers(
    speculation: SpeculativeConfig | None,
    drafter: Drafter | StateHeadsDrafter | None,
    tables: BlockTables,
    sampler: SamplerState,
) -> list[Proposer]:
    if speculation is None:
        return [NoProposer()]
    probabilistic = speculation.draft_sample_method == "probabilistic"
    proposers = build_proposers(speculation, drafter, tables, sampler, probabilistic=probabilistic)
    propose_warm_up.load_kernels()
    return proposers


def _limits(speculation: SpeculativeConfig | None, proposers: Sequence[Proposer], config: EngineConfig) -> Limits:
    longest = speculation.longest_draft if speculation is not None else 0
    ends = [proposer.traits.longest for proposer in proposers]
    longest = min(longest, max((longest if end is None else end for end in ends), default=longest))
    return Limits(
        draft_lens=tuple(range(longest + 1)),
        proposers=tuple(proposer.traits for proposer in proposers),
        can_branch=speculation is not None and speculation.synthetic_rates is None,
        can_gate=any(proposer.needs.kv for proposer in proposers),
        plan_lag=int(config.async_scheduling),
    )
