"""The stages of ``dynaspec train lm``, each of which reads what the one before has written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.contract.errors import CheckpointError
from dynaspec.train import card, evaluate, facts
from dynaspec.train.corpus import Corpus, load_corpus
from dynaspec.train.data import Mixture, Pool, RowSampler, Sampler, TokenSet, encode
from dynaspec.train.device import choose_device
from dynaspec.train.distill import write_continuations
from dynaspec.train.export import export, load_exported, round_weights
from dynaspec.train.loop import Checkpoints, Listener, Loop, LoopSettings
from dynaspec.train.model import Shape, build
from dynaspec.train.objective import NextToken
from dynaspec.train.optimizer import Optimizers, Rates
from dynaspec.train.schedule import Budget, Schedule
from dynaspec.train.settings import LmSettings, Stage
from dynaspec.train.teacher import Distillation, Teacher
from dynaspec.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

Watch = Callable[[str], AbstractContextManager[Listener]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: what, at which rates, for how long."""

    title: str
    shape: Shape
    rates: Rates
    schedule: Schedule
    budget: Budget


class Pipeline:
    """Runs stages with one set of settings; holds no state that is not on disk."""

    def __init__(self, settings: LmSettings, watch: Watch | None = None, say: Say | None = None) -> None:
        """``watch`` opens a progress display for a run's title; ``say`` takes one line of news."""
        self._settings = settings
        self._places = settings.places
        self._device = choose_device(settings.device)
        self._watch: Watch = watch or (lambda title: nullcontext(lambda report: None))
        self._say: Say = say or (lambda line: None)

    def run(self, stage: Stage) -> None:
        """Do ``stage``, or everything in order."""
        stages: dict[Stage, Callable[[], None]] = {
            "prepare": self.prepare,
            "target": self.train_target,
            "draft": self.train_draft,
            "export": self.export,
            "evaluate": self.evaluate,
        }
        for step in stages.values() if stage == "all" else (stages[stage],):
            step()

    def _corpus(self) -> Corpus:
        return load_corpus(self._settings.library, self._settings.gsm8k)

    def prepare(self) -> None:
        """Learn the tokenizer on the training split, and tokenise that split."""
        corpus = self._corpus()
        tokenizer = train_tokenizer((d.text for d in corpus.train), self._settings.target.vocab)
        save_tokenizer(tokenizer, self._places.tokenizer, self._settings.target.positions)
        train = encode(corpus.train, tokenizer)
        train.save(self._places.train)
        self._say(
            f"prepared {len(corpus.train)} documents, {len(train.tokens)} tokens; "
            f"{len(corpus.held_out)} documents held out"
        )

    def train_target(self) -> None:
        """Train the target on next tokens."""
        settings = self._settings
        stable = self._places.target.stable
        if settings.extend and not stable.is_file():
            raise CheckpointError(f"extend: {str(stable)!r} does not exist, expected a run that reached its decay")
        model = build(settings.target, settings.seed).to(self._device)
        backbone = torch.compile(model.model) if settings.compile else None
        self._fit(
            Run("target", settings.target, settings.target_rates, settings.schedule, settings.target_budget),
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
        model = build(settings.draft, settings.seed + 1).to(self._device)
        if settings.resume and (places.draft.latest.is_file() or places.generated.is_file()):
            self._restore(model, places.pretrained)
        else:
            self._pretrain(model, settings.draft_budget.part(distill.pretrain_share))
        target = self._trained_target()
        rest = settings.draft_budget.after(distill.pretrain_share)
        written = write_continuations(
            target,
            list(self._corpus().train),
            load_tokenizer(places.tokenizer),
            distill,
            rest.part(distill.generate_share),
            settings.seed,
            self._device,
            places.generated,
        )
        self._say(f"the target wrote {written.documents} continuations, {len(written.tokens)} tokens with prompts")
        corpus, own = self._draft_rows(), RowSampler(written, settings.seq_len, settings.seed + 2)
        rows = Mixture(
            Pool(corpus, min(distill.corpus_rows, corpus.rows_per_epoch), settings.seed + 3),
            Pool(own, own.rows_per_epoch, settings.seed + 4),
            distill.generated_share,
        )
        falling = Schedule(settings.warmup_steps, distill.decay_share)
        budget = rest.after(distill.generate_share)
        self._fit(
            Run("drafter, distillation", settings.draft, settings.draft_rates, falling, budget),
            model,
            rows,
            Distillation(Teacher(target, distill.teacher_tokens), model, distill.kl_weight),
            places.draft,
        )

    def _draft_rows(self) -> RowSampler:
        return RowSampler(self._train_tokens(), self._settings.seq_len, self._settings.seed + 1)

    def _pretrain(self, model: LlamaForCausalLM, budget: Budget) -> None:
        settings = self._settings
        steady = Schedule(settings.warmup_steps, 0.0)
        run = Run("drafter, text", settings.draft, settings.draft_rates, steady, budget)
        self._fit(run, model, self._draft_rows(), NextToken(model), self._places.pretrained)

    def export(self) -> None:
        """Write both models in the Hugging Face layout, with their cards."""
        places = self._places
        for name, shape, checkpoints in (
            ("target", self._settings.target, places.target),
            ("draft", self._settings.draft, places.draft),
        ):
            if not checkpoints.latest.is_file():
                self._say(f"{name}: nothing trained yet, not exported")
                continue
            model = build(shape, seed=0)
            self._restore(model, checkpoints)
            export(model, places.tokenizer, places.out / name)
            self._say(f"exported {name} to {places.out / name}")
        facts.write_training(self._settings, self._device)
        card.write_cards(places.out)

    def evaluate(self) -> None:
        """Measure the exported pair on held-out documents and write the figures."""
        settings, places = self._settings, self._places
        target = load_exported(places.out / "target", self._device)
        drafter = load_exported(places.out / "draft", self._device)
        tokenizer = load_tokenizer(places.out / "target")
        held_out = self._corpus().held_out
        losses: dict[str, dict[str, evaluate.Loss]] = {"target": {}, "draft": {}}
        for kind in ("code", "maths"):
            documents = [d for d in held_out if d.kind == kind]
            if not documents:
                continue
            tokens = encode(documents, tokenizer)
            size = sum(len(d.text.encode()) for d in documents)
            for name, model in (("target", target), ("draft", drafter)):
                losses[name][kind] = evaluate.held_out_loss(model, tokens, size, settings.seq_len, self._device)
                self._say(f"held-out loss, {name}, {kind}: {losses[name][kind].nats_per_token:.4f} nats a token")
        shown = evaluate.behaviour(target, drafter, tokenizer, held_out, self._device, settings.prompts_per_kind)
        facts.write_evaluation(settings, losses, shown, self._device)
        card.write_cards(places.out)
        for line in card.summary(places.out):
            self._say(line)

    def _train_tokens(self) -> TokenSet:
        return TokenSet.load(self._places.train)

    def _trained_target(self) -> LlamaForCausalLM:
        model = build(self._settings.target, seed=0)
        self._restore(model, self._places.target)
        return round_weights(model).to(self._device)

    def _restore(self, model: LlamaForCausalLM, checkpoints: Checkpoints) -> None:
        if not checkpoints.latest.is_file():
            raise CheckpointError(
                f"checkpoint: {str(checkpoints.latest)!r} does not exist, expected an earlier stage's"
            )
        state = torch.load(checkpoints.latest, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])

    def _fit(
        self,
        run: Run,
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
        loop = Loop(
            model,
            Optimizers(model, run.rates),
            sampler,
            loss,
            LoopSettings(settings.batch_rows, run.schedule, settings.save_seconds),
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
