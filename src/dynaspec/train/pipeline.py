"""The stages of ``dynaspec train lm``, each of which reads what the one before has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.contract.errors import CheckpointError, ConfigError

from . import facts
from .data import (
    Corpus,
    Document,
    Mixture,
    Pool,
    RowSampler,
    Sampler,
    TokenSet,
    copy_tokenizer,
    encode,
    load_corpus,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from .distill import Distillation, Teacher, write_continuations
from .evaluate import Loss, behaviour, held_out_loss, held_out_prompts
from .loop import RowLoop
from .model import NextToken, Shape, build, export, load_exported
from .optimizer import Budget, Optimizers, Rates, RateSchedule
from .run import Checkpoints, Say, Watch, choose_device, read_checkpoint, run_stages, write_text_atomically
from .settings import LmSettings


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run: what, at which rates, for how long."""

    title: str
    shape: Shape
    rates: Rates
    schedule: RateSchedule
    budget: Budget


class Pipeline:
    """Runs stages with one set of settings; holds no state that is not on disk."""

    def __init__(self, settings: LmSettings, watch: Watch, say: Say) -> None:
        self._settings = settings
        self._places = settings.places
        self._device = choose_device(settings.device)
        self._watch, self._say = watch, say

    def run(self, stage: str) -> None:
        """Do ``stage``, or for ``all`` everything in order; a target that is given is not trained.

        Raises:
            ConfigError: ``stage`` is to train it, or there is no such stage.
        """
        stages = {
            "prepare": self.prepare,
            "target": self.train_target,
            "draft": self.train_draft,
            "export": self.export,
            "evaluate": self.evaluate,
        }
        given = self._places.given is not None
        if given and stage == "target":
            raise ConfigError("stage: got 'target' for a target that is given, expected a stage of the drafter")
        run_stages(stage, stages, usual=stages.keys() - ({"target"} if given else set()))

    def _corpus(self) -> Corpus:
        return load_corpus(self._settings.library, self._settings.gsm8k)

    def prepare(self) -> None:
        """Learn the tokenizer on the training split, or take the given target's; tokenise that split."""
        corpus, places, shape = self._corpus(), self._places, self._settings.target
        if places.given is None:
            tokenizer = train_tokenizer((d.text for d in corpus.train), shape.vocab)
            save_tokenizer(tokenizer, places.tokenizer, shape.positions)
        else:
            copy_tokenizer(places.given, places.tokenizer)
            tokenizer = load_tokenizer(places.tokenizer)
        train = encode(corpus.train, tokenizer)
        train.save(places.train)
        prompts = held_out_prompts(corpus.held_out, self._settings.prompts_per_kind)
        lines = [json.dumps({"category": kind, "prompt": text}) for kind, texts in prompts.items() for text in texts]
        write_text_atomically(places.held_out, "\n".join(lines) + "\n")
        self._say(
            f"prepared {len(corpus.train)} documents, {len(train.tokens)} tokens; "
            f"{len(corpus.held_out)} documents held out"
        )

    def train_target(self) -> None:
        settings = self._settings
        stable = self._places.target.stable
        if settings.extend and not stable.is_file():
            raise CheckpointError(f"extend: {str(stable)!r} does not exist, expected a run that reached its decay")
        model = build(settings.target, settings.seed).to(self._device)
        backbone = torch.compile(model.model) if settings.compile else None
        self._fit(
            TrainingRun("target", settings.target, settings.target_rates, settings.schedule, settings.target_budget),
            model,
            RowSampler(self._train_tokens(), settings.seq_len, settings.seed),
            NextToken(model, backbone),
            self._places.target,
            start=stable if settings.extend else None,
        )

    def train_draft(self) -> None:
        """Pretrain the drafter, let the target write, distil."""
        settings, places, distill = self._settings, self._places, self._settings.distill
        if not settings.resume:
            places.generated.unlink(missing_ok=True)
        self._write_teacher()
        model = build(settings.draft, settings.seed + 1).to(self._device)
        if settings.resume and (places.draft.latest.is_file() or places.generated.is_file()):
            self._restore(model, places.pretrained)
        else:
            self._pretrain(model, settings.draft_budget.part(distill.pretrain_share))
        rest = settings.draft_budget.after(distill.pretrain_share)
        with self._watch("continuations") as listener:
            written = write_continuations(
                places.teacher,
                self._corpus().train,
                load_tokenizer(places.tokenizer),
                distill,
                rest.part(distill.generate_share),
                settings.seed,
                self._device,
                places.generated,
                listener,
            )
        self._say(f"the target wrote {written.documents} continuations, {len(written.tokens)} tokens with prompts")
        corpus, own = self._draft_rows(), RowSampler(written, settings.seq_len, settings.seed + 2)
        rows = Mixture(
            Pool(corpus, min(distill.corpus_rows, corpus.rows_per_epoch), settings.seed + 3),
            Pool(own, own.rows_per_epoch, settings.seed + 4),
            distill.generated_share,
        )
        falling = RateSchedule(settings.warmup_steps, distill.decay_share)
        budget = rest.after(distill.generate_share)
        target = load_exported(places.teacher, self._device)
        teacher = Teacher(target, distill.teacher_tokens, distill.teacher_temperature)
        self._fit(
            TrainingRun("drafter, distillation", settings.draft, settings.draft_rates, falling, budget),
            model,
            rows,
            Distillation(teacher, model, distill.kl_weight),
            places.draft,
        )

    def _draft_rows(self) -> RowSampler:
        return RowSampler(self._train_tokens(), self._settings.seq_len, self._settings.seed + 1)

    def _pretrain(self, model: LlamaForCausalLM, budget: Budget) -> None:
        settings = self._settings
        steady = RateSchedule(settings.warmup_steps, 0.0)
        run = TrainingRun("drafter, text", settings.draft, settings.draft_rates, steady, budget)
        self._fit(run, model, self._draft_rows(), NextToken(model), self._places.pretrained)

    def export(self) -> None:
        """Write what was trained in the Hugging Face layout, with cards."""
        settings, places = self._settings, self._places
        if places.given is None:
            self._export("target", settings.target, places.target, places.out / "target")
        self._export("draft", settings.draft, places.draft, places.exported_draft)
        facts.write_training(settings, self._device)
        facts.write_cards(places.out)

    def _export(self, name: str, shape: Shape, checkpoints: Checkpoints, folder: Path) -> None:
        if not checkpoints.latest.is_file():
            self._say(f"{name}: nothing trained yet, not exported")
            return
        model = build(shape, seed=0)
        self._restore(model, checkpoints)
        export(model, self._places.tokenizer, folder)
        self._say(f"exported {name} to {folder}")

    def evaluate(self) -> None:
        """Measure target and exported drafter on held-out documents and write the figures."""
        settings, places = self._settings, self._places
        drafter = load_exported(places.exported_draft, self._device)
        tokenizer = load_tokenizer(places.measured_target)
        held_out = self._corpus().held_out
        target = load_exported(places.measured_target, self._device)
        losses = {
            name: self._held_out_losses(name, model, tokenizer, held_out)
            for name, model in (("target", target), ("draft", drafter))
        }
        half = min(256, settings.target.positions // 2)  # prompt and continuation share the target's positions
        shown = behaviour(
            places.measured_target,
            drafter,
            tokenizer,
            held_out,
            self._device,
            settings.prompts_per_kind,
            longest_prompt=half,
            new_tokens=half,
        )
        facts.write_evaluation(settings, losses, shown, self._device)
        facts.write_cards(places.out)
        for line in facts.summary(places.out):
            self._say(line)

    def _held_out_losses(
        self, name: str, model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: Sequence[Document]
    ) -> dict[str, Loss]:
        losses: dict[str, Loss] = {}
        for kind in ("code", "maths"):
            documents = [d for d in held_out if d.kind == kind]
            if not documents:
                continue
            tokens = encode(documents, tokenizer)
            size = sum(len(d.text.encode()) for d in documents)
            losses[kind] = held_out_loss(model, tokens, size, self._settings.seq_len, self._device)
            self._say(f"held-out loss, {name}, {kind}: {losses[kind].nats_per_token:.4f} nats a token")
        return losses

    def _train_tokens(self) -> TokenSet:
        return TokenSet.load(self._places.train)

    def _write_teacher(self) -> None:
        """Put a trained target where the drafter's training reads it; a given one is there."""
        places = self._places
        if places.given is None:
            model = build(self._settings.target, seed=0)
            self._restore(model, places.target)
            export(model, places.tokenizer, places.teacher)

    def _restore(self, model: LlamaForCausalLM, checkpoints: Checkpoints) -> None:
        state = read_checkpoint(checkpoints.latest)
        if state is None:
            raise CheckpointError(
                f"checkpoint: {str(checkpoints.latest)!r} does not exist, expected an earlier stage's"
            )
        model.load_state_dict(state["model"])

    def _fit(
        self,
        run: TrainingRun,
        model: LlamaForCausalLM,
        sampler: Sampler,
        loss: Callable[[Tensor], Tensor],
        checkpoints: Checkpoints,
        start: Path | None = None,
    ) -> None:
        settings = self._settings
        identity = {
            "shape": asdict(run.shape),
            "seed": settings.seed,
            "seq_len": settings.seq_len,
            "corpus_tokens": len(self._train_tokens().tokens),
        }
        loop = RowLoop(
            model,
            Optimizers(model, run.rates),
            sampler,
            loss,
            settings.batch_rows,
            run.schedule,
            checkpoints,
            identity,
            self._device,
        )
        if settings.resume and loop.resume(start or checkpoints.latest):
            self._say(f"{run.title}: resumed at step {loop.progress.step}")
        with self._watch(run.title) as listener:
            done = loop.run(run.budget, listener)
        self._say(
            f"{run.title}: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} min, loss {done.loss:.4f}"
        )
