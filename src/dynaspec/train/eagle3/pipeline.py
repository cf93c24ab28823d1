"""The stages in order: conversations, states, training, checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.device import choose_device
from dynaspec.train.eagle3.acceptance import Acceptance, agreement, walk
from dynaspec.train.eagle3.basis import Basis, load_basis, make_basis, save_basis
from dynaspec.train.eagle3.batch import Batch, join
from dynaspec.train.eagle3.cache import Cache, shard_path, write_shard
from dynaspec.train.eagle3.card import card
from dynaspec.train.eagle3.collect import Collector
from dynaspec.train.eagle3.conversations import append_conversations, read_conversations
from dynaspec.train.eagle3.export import export_head, head_config
from dynaspec.train.eagle3.facts import training_facts
from dynaspec.train.eagle3.head import Head
from dynaspec.train.eagle3.plan import Place, Plan
from dynaspec.train.eagle3.prompts import Chat, read_prompts
from dynaspec.train.eagle3.settings import Eagle3Settings
from dynaspec.train.eagle3.states import StatesPlace, compute_states, held_out_indices
from dynaspec.train.eagle3.target import Target, first_id, read_config
from dynaspec.train.eagle3.trainer import Progress, Trainer
from dynaspec.train.eagle3.workers import Bench, Gradients, InProcess, Workers
from dynaspec.train.eagle3.writer import open_writer
from dynaspec.train.loop import Checkpoints
from dynaspec.train.optimizer import Optimizers
from dynaspec.train.precision import precision
from dynaspec.train.report import Listener

HELD_OUT_ROWS = 2048  # chains measured at once


class Pipeline:
    """Runs the stages of ``settings``; each reads what the one before has left in the work folder."""

    def __init__(
        self,
        settings: Eagle3Settings,
        progress: Callable[[str], AbstractContextManager[Listener]],
        say: Callable[[str], None],
    ) -> None:
        """
        Raises:
            ConfigError: the device is unknown or missing.
        """
        self._settings, self._progress, self._say = settings, progress, say
        self._device = choose_device(settings.device)
        quick = self._device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        self._dtype = torch.bfloat16 if quick else torch.float32
        self._place = StatesPlace(settings.work)
        self._checkpoints = Checkpoints(settings.work)

    def run(self, stage: str) -> None:
        """Run ``stage``, or for ``all`` data, states and train, which exports the best head as it goes.

        Raises:
            ConfigError, CheckpointError: what was given cannot work.
        """
        self._place.folder.mkdir(parents=True, exist_ok=True)
        stages = {"data": self._data, "states": self._states, "train": self._train, "export": self._export}
        for name, run in stages.items():
            if stage == name or (stage == "all" and name != "export"):
                run()

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
            chat = Chat(writer.tokenizer, first_id(read_config(settings.model)))
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
        if load_basis(settings.work) is None:
            self._choose_basis()
        compute_states(
            settings.model,
            place,
            self._dtype,
            self._device,
            settings.workers if self._device.type == "cpu" else 1,
            settings.longest,
            settings.states_gb,
            self._say,
        )

    def _choose_basis(self) -> None:
        settings, place = self._settings, self._place
        conversations = list(read_conversations(place.conversations))
        target = Target(settings.model, self._dtype, self._device)
        basis = make_basis(
            settings.model,
            target,
            conversations,
            settings.draft_vocab,
            (),
            settings.norm_before_residual,
        )
        chosen = held_out_indices(conversations, settings.held_out, settings.longest)
        held_out = [conversations[i] for i in chosen]
        if not held_out:
            raise ConfigError("conversations: got none with an answer of two tokens or more, expected some")
        (settings.work / "held-out.jsonl").unlink(missing_ok=True)
        append_conversations(settings.work / "held-out.jsonl", held_out)
        write_shard(
            shard_path(place.held_out, 0), held_out, target, basis.shape.aux_layers, basis.vocabulary, basis.scale
        )
        save_basis(settings.work, basis)

    def _basis(self) -> Basis:
        basis = load_basis(self._settings.work)
        if basis is None:
            raise ConfigError("basis: got none in the work folder, expected the states stage to come first")
        return basis

    def _train(self) -> None:
        settings = self._settings
        basis = self._basis()
        if self._device.type == "cpu" and settings.workers > 0:
            torch.set_num_threads(1)
        head = basis.head(settings.train.seed, self._device, self._dtype)
        cache = Cache(self._place.shards)
        gradients = self._gradients(head, basis, cache)
        try:
            trainer = self._trainer(head, basis, cache, gradients)
            if settings.extend and not trainer.resume(self._checkpoints.stable):
                raise ConfigError(
                    "extend: got no checkpoint from before a decay, expected stable.pt in the work folder"
                )
            if not settings.extend and settings.resume and trainer.resume(self._checkpoints.latest):
                self._say(f"goes on at {trainer.progress.tokens / 1e6:.2f} M tokens")
            with self._progress("head") as listener:
                trainer.run(listener)
        finally:
            gradients.close()

    def _trainer(self, head: Head, basis: Basis, cache: Cache, gradients: Gradients) -> Trainer:
        settings = self._settings
        products = self._dtype if self._device.type == "cpu" else torch.float32
        batches = self._held_out()
        plan = Plan(cache, Place(), settings.train.seed, settings.train.batch_tokens, settings.train.micro_tokens)

        def evaluate() -> Acceptance:
            acceptance = self._acceptance(head, basis, batches)
            rates = " ".join(f"{rate:.3f}" for rate in acceptance.rates)
            self._say(f"held out: {acceptance.length:.3f} tokens a verification, drafts right {rates}")
            return acceptance

        return Trainer(
            head,
            Optimizers(head, settings.rates, products),
            plan,
            gradients,
            evaluate,
            lambda progress: self._write(head, basis, progress),
            settings.train,
            self._checkpoints,
            {"shape": basis.shape.as_facts(), "seed": settings.train.seed},
        )

    def _gradients(self, head: Head, basis: Basis, cache: Cache) -> Gradients:
        settings = self._settings
        target_head = basis.target_head.to(self._device, self._dtype)
        if self._device.type == "cpu" and settings.workers > 1:
            return Workers(head, target_head, self._place.shards, settings.loss, settings.workers)
        return InProcess(Bench(head, target_head, cache, settings.loss))

    def _held_out(self) -> list[Batch]:
        shard = Cache(self._place.held_out).shards[0]
        groups: list[list[int]] = [[]]
        rows = 0
        for i in range(len(shard)):
            if groups[-1] and rows + shard.chains(i) > HELD_OUT_ROWS:
                groups.append([])
                rows = 0
            groups[-1].append(i)
            rows += shard.chains(i)
        return [join([shard.example(i) for i in group]).to(self._device) for group in groups]

    def _acceptance(self, head: Head, basis: Basis, batches: list[Batch]) -> Acceptance:
        ids = basis.vocabulary.ids.to(self._device)
        depths = self._settings.loss.depths
        total = Acceptance((0,) * depths, (0,) * depths, 0, 0)
        for batch in batches:
            with precision(self._device):
                equal: Tensor = agreement(head, batch, ids, depths)
            total += walk(equal, batch.chain_spans)
        return total

    def _write(self, head: Head, basis: Basis, progress: Progress) -> None:
        settings = self._settings
        architectures = list(read_config(settings.model).get("architectures") or [])
        config = head_config(basis.shape, settings.verifier, architectures, settings.loss.depths)
        facts = training_facts(settings, basis, head, progress, self._place, self._device)
        export_head(settings.out, head, basis.vocabulary, config, facts, card(facts))

    def _export(self) -> None:
        """The checkpoint as it is, whether or not it is the best."""
        basis = self._basis()
        head = basis.head(self._settings.train.seed, self._device, self._dtype)
        path = self._checkpoints.latest
        if not path.is_file():
            raise ConfigError("export: got a work folder without a checkpoint, expected the train stage to come first")
        state = torch.load(path, map_location=self._device, weights_only=True)
        head.load_state_dict(state["head"])
        progress = Progress(**state["progress"])
        self._write(head, basis, progress)
        self._say(f"written to {self._settings.out}")
