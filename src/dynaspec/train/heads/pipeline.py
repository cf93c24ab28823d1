"""``dynaspec train`` for a head: settings, the stages, and the facts that they leave behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.facts import provenance
from dynaspec.train.optimizer import Budget, Optimizers, Rates
from dynaspec.train.run import Checkpoints, Say, Watch, choose_device, has_bfloat16, read_checkpoint, run_stages

from .basis import (
    Basis,
    FrozenTarget,
    choose_vocabulary,
    first_id,
    has_basis,
    load_basis,
    make_basis,
    read_config,
    save_basis,
)
from .conversations import Collector, Conversation, append_conversations, open_writer, read_conversations
from .export import card, export_head, read_facts, read_weights, write_facts
from .head import Kind, TrainedHead
from .loss import LossSettings
from .measure import Acceptance, acceptance, answer_greedily, batches, by_category
from .prompts import Chat, read_prompts
from .shape import coverage
from .states import (
    Cache,
    StatesOnDemand,
    StateSource,
    StatesPlace,
    compute_states,
    held_out_indices,
    shard_path,
    write_shard,
)
from .trainer import BatchPlan, Gradients, HeadLoop, HeadProgress, InProcess, PlanPosition, TrainSettings, Workers

CACHE_GB = 50.0


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where conversations come from: ready ones, questions from files, and what the target makes up itself.

    ``self_written`` of the latter; answers of up to ``new_tokens``, ``at_once`` together.
    """

    conversations: tuple[Path, ...]
    prompts: tuple[Path, ...]
    self_written: int
    new_tokens: int
    at_once: int


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """A whole run.

    ``states_gb`` bounds the cache of hidden states on disk; 0 = none, they are made for every batch in one process;
    None = ``CACHE_GB`` on a CPU, 0 on a GPU. ``workers`` are processes on a CPU.
    """

    kind: Kind
    model: str
    out: Path
    work: Path
    train: TrainSettings
    verifier: str
    data: DataSettings
    loss: LossSettings
    rates: Rates
    draft_vocab: int
    measure: Path | None
    held_out: int
    longest: int
    states_gb: float | None
    workers: int
    device: str
    resume: bool
    extend: bool
    note: str


def training_facts(
    settings: HeadSettings,
    basis: Basis,
    head: TrainedHead,
    progress: HeadProgress,
    place: StatesPlace,
    device: torch.device,
) -> dict[str, Any]:
    """Data, settings, and how training went."""
    conversations = list(read_conversations(place.conversations))
    held_out = list(read_conversations(place.held_out_conversations))
    train = settings.train
    return {
        "provenance": provenance(device),
        "note": settings.note,
        "verifier": settings.verifier,
        "shape": basis.shape.as_facts(),
        "options": settings.kind.options,
        "parameters": sum(p.numel() for p in head.parameters()),
        "data": {
            "conversations": len(conversations),
            "by_source": dict(Counter(c.source for c in conversations)),
            "by_temperature": {str(t): n for t, n in sorted(Counter(c.temperature for c in conversations).items())},
            "answer_tokens": sum(len(c.answer) for c in conversations),
            "held_out_conversations": len(held_out),
            "held_out_greedy": sum(c.temperature == 0.0 for c in held_out),
            "held_out_coverage": round(coverage((torch.tensor(c.answer) for c in held_out), basis.vocabulary), 4),
        },
        "training": {
            "seed": train.seed,
            "start_from": settings.kind.start_from,
            "batch_tokens": train.batch_tokens,
            "warmup_steps": train.schedule.warmup_steps,
            "decay_share": train.schedule.decay_share,
            "loss": asdict(settings.loss),
            "rates": asdict(settings.rates),
            "workers": settings.workers,
        },
        "progress": asdict(progress),
    }


class HeadPipeline:
    """Runs the stages of ``settings``; each reads what the one before has left in the work folder."""

    def __init__(self, settings: HeadSettings, watch: Watch, say: Say) -> None:
        """
        Raises:
            ConfigError: the device is unknown or missing, or there is no file of prompts to measure on.
        """
        if settings.measure is not None and not settings.measure.is_file():  # else it would be said after the training
            raise ConfigError(f"measure: got {str(settings.measure)!r}, expected a file of prompts")
        self._settings, self._watch, self._say = settings, watch, say
        self._device = choose_device(settings.device)
        self._dtype = torch.bfloat16 if has_bfloat16(self._device) else torch.float32
        self._place = StatesPlace(settings.work)
        self._checkpoints = Checkpoints(settings.work / settings.kind.method)
        self._config = read_config(settings.model)
        on_demand = self._device.type == "cuda"
        self._states_gb = settings.states_gb if settings.states_gb is not None else 0.0 if on_demand else CACHE_GB

    def run(self, stage: str) -> None:
        """Run ``stage``, or for ``all`` data, states, train, which exports the best head as it goes, and measure.

        Raises:
            ConfigError, CheckpointError: what was given cannot work.
        """
        stages = {
            "data": self._data,
            "states": self._states,
            "train": self._train,
            "export": self._export,
            "measure": self._measure,
        }
        run_stages(
            stage, stages, usual={"data", "states", "train"} | ({"measure"} if self._settings.measure else set())
        )

    def _data(self) -> None:
        settings, data, path = self._settings, self._settings.data, self._place.conversations
        known = {c.tokens for c in read_conversations(path)} if self._written() else set()
        for given in data.conversations:
            new = {c.tokens: c for c in read_conversations(given) if c.tokens not in known}
            append_conversations(path, new.values())
            known |= set(new)
            self._say(f"{len(new)} conversations from {given.name}")
        if not data.prompts and not data.self_written:
            return
        with open_writer(
            settings.model, self._device, settings.longest, data.at_once, settings.train.seed + len(known)
        ) as writer:
            chat = Chat(writer.tokenizer, first_id(self._config))
            collector = Collector(path, chat, writer, data.new_tokens, data.at_once, settings.train.seed)
            for prompts in data.prompts:
                collector.answer_prompts(read_prompts(prompts, chat), self._say)
            if (missing := data.self_written - collector.made_up) > 0:
                collector.make_up(missing, self._say)

    def _written(self) -> bool:
        return self._place.conversations.is_file()

    def _states(self) -> None:
        settings, place = self._settings, self._place
        if not self._written():
            raise ConfigError("conversations: got none in the work folder, expected the data stage to come first")
        if not has_basis(settings.work):
            self._choose_basis()
        self._basis()
        if self._states_gb:
            compute_states(
                settings.model,
                place,
                self._dtype,
                self._device,
                settings.workers if self._device.type == "cpu" else 1,
                settings.longest,
                self._states_gb,
                self._say,
            )

    def _choose_basis(self) -> None:
        settings, place = self._settings, self._place
        conversations = list(read_conversations(place.conversations))
        start = settings.kind.start(self._config)
        if start is None:
            vocabulary = choose_vocabulary(self._config, conversations, settings.draft_vocab)
        else:
            vocabulary = start.vocabulary
        shape = settings.kind.shape(self._config, len(vocabulary.ids), start)
        target = FrozenTarget(settings.model, self._dtype, self._device)
        basis = make_basis(target, conversations, shape, vocabulary)
        chosen = held_out_indices(conversations, settings.held_out, settings.longest)
        held_out = [conversations[i] for i in chosen]
        if not held_out:
            raise ConfigError("conversations: got none with an answer of two tokens or more, expected some")
        place.held_out_conversations.unlink(missing_ok=True)
        append_conversations(place.held_out_conversations, held_out)
        write_shard(
            shard_path(place.held_out, 0), held_out, target, basis.shape.aux_layers, basis.vocabulary, basis.scale
        )
        save_basis(settings.work, basis)

    def _basis(self) -> Basis:
        basis = load_basis(self._settings.work)
        reads = self._settings.kind.shape(self._config, basis.shape.draft_vocab, None).aux_layers
        if basis.shape.aux_layers != reads:
            raise ConfigError(
                f"work: got {str(self._settings.work)!r} with the hidden states {list(basis.shape.aux_layers)}, "
                f"expected {list(reads)}; use another folder, with this one's conversations.jsonl as --conversations"
            )
        return basis

    def _head(self, basis: Basis) -> TrainedHead:
        """One with its start weights; what it shares with the target is in the dtype of products."""
        return self._settings.kind.head(basis.cast(self._dtype), self._settings.train.seed).to(self._device)

    def _train(self) -> None:
        settings = self._settings
        basis = self._basis()
        if self._device.type == "cpu" and settings.workers > 0:
            torch.set_num_threads(1)
        head = self._head(basis)
        states = self._open_states(basis)
        gradients = self._gradients(head, basis, states)
        try:
            loop = self._loop(head, basis, states, gradients)
            if settings.extend and not loop.resume(self._checkpoints.stable):
                raise ConfigError(
                    "extend: got no checkpoint from before a decay, expected stable.pt in the work folder"
                )
            resumed = settings.extend or (settings.resume and loop.resume(self._checkpoints.latest))
            if resumed:
                self._say(f"goes on at {loop.progress.tokens / 1e6:.2f} M tokens")
            elif (start := settings.kind.start(self._config)) is not None:
                if not torch.equal(start.vocabulary.ids, basis.vocabulary.ids):
                    raise ConfigError(
                        "start-from: got a head with another draft vocabulary than the states in the work folder, "
                        "expected the states stage to have been given it too"
                    )
                head.load(start.tensors, f"start-from: of {str(start.path)!r}")
            with self._watch("head") as listener:
                loop.run(Budget(max_tokens=settings.train.tokens), listener)
        finally:
            gradients.close()

    def _open_states(self, basis: Basis) -> StateSource:
        if self._states_gb:
            return Cache(self._place.shards)
        target = FrozenTarget(self._settings.model, self._dtype, self._device)
        return StatesOnDemand(self._place, target, basis, self._settings.longest)

    def _loop(self, head: TrainedHead, basis: Basis, states: StateSource, gradients: Gradients) -> HeadLoop:
        settings = self._settings
        products = self._dtype if self._device.type == "cpu" else torch.float32
        shard = Cache(self._place.held_out).shards[0]
        held_out = batches(shard, range(len(shard)), self._device)
        plan = BatchPlan(
            states, PlanPosition(), settings.train.seed, settings.train.batch_tokens, settings.train.micro_tokens
        )

        def evaluate() -> Acceptance:
            measured = acceptance(head, held_out, settings.loss.depths, self._device)
            rates = " ".join(f"{rate:.3f}" for rate in measured.rates)
            self._say(f"held out: {measured.length:.3f} tokens a verification, drafts right {rates}")
            return measured

        return HeadLoop(
            head,
            Optimizers(head, settings.rates, products),
            plan,
            gradients,
            evaluate,
            lambda progress: self._write(head, basis, progress),
            settings.train,
            self._checkpoints,
            {"shape": basis.shape.as_facts(), "options": settings.kind.options, "seed": settings.train.seed},
        )

    def _gradients(self, head: TrainedHead, basis: Basis, states: StateSource) -> Gradients:
        settings = self._settings
        target_head = basis.output[head.get_buffer("ids").cpu()].to(self._device, self._dtype)
        if self._device.type == "cpu" and settings.workers > 1 and self._states_gb:
            return Workers(head, target_head, self._place.shards, settings.loss, settings.workers)
        return InProcess(head, target_head, states, settings.loss)

    def _write(self, head: TrainedHead, basis: Basis, progress: HeadProgress) -> None:
        settings = self._settings
        architectures = list(self._config.get("architectures") or [])
        config = settings.kind.config(basis, settings.verifier, architectures, settings.loss.depths)
        facts = training_facts(settings, basis, head, progress, self._place, self._device)
        export_head(settings.out, head, config, facts, self._card(facts))

    def _card(self, facts: dict[str, Any]) -> str:
        kind = self._settings.kind
        return card(kind.title, kind.method, kind.described(facts), facts)

    def _export(self) -> None:
        """The checkpoint as it is, whether or not it is the best."""
        basis = self._basis()
        head = self._head(basis)
        state = read_checkpoint(self._checkpoints.latest)
        if state is None:
            raise ConfigError("export: got a work folder without a checkpoint, expected the train stage to come first")
        head.load_state_dict(state["head"])
        progress = HeadProgress(**state["progress"])
        self._write(head, basis, progress)
        self._say(f"written to {self._settings.out}")

    def _measure(self) -> None:
        """The head in the output folder on the prompts to measure on, into its card."""
        settings = self._settings
        if settings.measure is None:
            raise ConfigError("measure: got no prompts, expected --measure FILE")
        basis = self._basis()
        weights, head = read_weights(settings.out), self._head(basis)
        if not all(name in weights and torch.equal(weights[name], ids) for name, ids in head.maps().items()):
            raise ConfigError(f"measure: got a head in {str(settings.out)!r} that was not trained in this work folder")
        head.load(weights, f"measure: of {str(settings.out)!r}")
        conversations = self._measured_answers(settings.measure)
        if not conversations:
            raise ConfigError("measure: got no prompt with an answer of two tokens or more, expected some")
        target = FrozenTarget(settings.model, self._dtype, self._device)
        folder = settings.work / "measured"
        found = by_category(head, basis, target, conversations, folder, settings.loss.depths, self._device)
        facts = read_facts(settings.out) | {
            "measured": {"prompts": settings.measure.name, "new_tokens": settings.data.new_tokens, **found}
        }
        write_facts(settings.out, facts, self._card(facts))
        for name, part in {**found["categories"], "all": found["all"]}.items():
            self._say(f"{name}: {part['acceptance_length']:.3f} tokens a verification")

    def _measured_answers(self, prompts: Path) -> list[Conversation]:
        """Greedy answers to ``prompts``; they are kept in the work folder, and only missing ones are written."""
        settings, path = self._settings, self._settings.work / "measured.jsonl"
        known = {c.prompt: c for c in read_conversations(path)} if path.is_file() else {}
        data = settings.data
        with open_writer(settings.model, self._device, settings.longest, data.at_once, settings.train.seed) as writer:
            asked = read_prompts(prompts, Chat(writer.tokenizer, first_id(self._config)))
            left = [a for a in asked if a.tokens not in known]
            self._say(f"answers to {len(left)} prompts of {prompts.name}")
            for begin in range(0, len(left), data.at_once):
                new = answer_greedily(writer, left[begin : begin + data.at_once], data.new_tokens)
                append_conversations(path, new)
                known |= {c.prompt: c for c in new}
        return [known[a.tokens] for a in asked if a.tokens in known]
