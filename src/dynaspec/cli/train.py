"""``dynaspec train``: make a small target and a drafter for it, or a drafter alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaspec.cli.options import numbers
from dynaspec.cli.train_heads import eagle, eagle3, head_command, medusa, mlp_speculator
from dynaspec.contract.errors import ConfigError

if TYPE_CHECKING:
    from dynaspec.train.model import Shape
    from dynaspec.train.optimizer import Budget

TARGET_ONLY = (
    "target_steps",
    "target_minutes",
    "target_until",
    "target_size",
    "target_lr",
    "decay_share",
    "compile_model",
    "extend",
)

app = typer.Typer(help="Train models for speculative decoding.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train models for speculative decoding."""


WHOLE_VOCABULARY = ("draft_vocab",)
"""Left out where a checkpoint has no place for a part of the vocabulary."""
app.command()(head_command(eagle3, work=Path("eagle3-state")))
app.command()(head_command(eagle, WHOLE_VOCABULARY, work=Path("eagle-state")))
app.command()(head_command(medusa, work=Path("medusa-state")))
app.command("mlp_speculator")(
    head_command(mlp_speculator, WHOLE_VOCABULARY, work=Path("mlp_speculator-state"), lr="0.02,0.003")
)


@app.command()
def lm(
    ctx: typer.Context,
    stage: Annotated[
        str,
        typer.Option(help="What to do: prepare, target, draft, export, evaluate, or all of them in order."),
    ] = "all",
    target: Annotated[
        Path | None,
        typer.Option(help="Folder of a target that exists already: train a drafter for it, with its tokenizer."),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of Python sources; default: this interpreter's standard library."),
    ] = None,
    gsm8k: Annotated[
        Path | None, typer.Option(help="GSM8K's training problems, JSON lines; default: no maths.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that receives target/ (unless one is given), draft/ and the fact files.")
    ] = Path("models"),
    work: Annotated[Path, typer.Option(help="Folder for tokens and checkpoints; keep it to resume.")] = Path(
        "train-state"
    ),
    target_steps: Annotated[int | None, typer.Option(min=1, help="Train the target for so many steps.")] = None,
    target_minutes: Annotated[
        float | None, typer.Option(min=0, help="Train the target for so long, pauses left out; default 105.")
    ] = None,
    target_until: Annotated[
        str | None, typer.Option(help="Finish the target at a time of day, HH:MM or ISO date and time.")
    ] = None,
    draft_steps: Annotated[int | None, typer.Option(min=1, help="Train the drafter for so many steps.")] = None,
    draft_minutes: Annotated[
        float | None, typer.Option(min=0, help="Train the drafter for so long; default 18.")
    ] = None,
    draft_until: Annotated[
        str | None, typer.Option(help="Finish the drafter at a time of day, HH:MM or ISO date and time.")
    ] = None,
    target_size: Annotated[
        str, typer.Option(help="Target's hidden size, layers, heads, KV heads, intermediate size.")
    ] = "512,8,8,2,1408",
    draft_size: Annotated[str, typer.Option(help="The same of the drafter.")] = "192,2,3,1,512",
    vocab: Annotated[
        int | None,
        typer.Option(
            help="Entries of the shared vocabulary (257 to 65536); default: those of the given target, else 4096."
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a training row.")] = 512,
    batch_rows: Annotated[int, typer.Option(help="Rows a step.")] = 8,
    target_lr: Annotated[str, typer.Option(help="Target's peak rates: Muon, AdamW.")] = "0.01,0.004",
    draft_lr: Annotated[str, typer.Option(help="The same of the drafter.")] = "0.015,0.01",
    decay_share: Annotated[float, typer.Option(help="Last part of the target's training in which rates fall.")] = 0.25,
    kl_weight: Annotated[float, typer.Option(help="Weight of the divergence in the distillation loss.")] = 0.8,
    prompts: Annotated[int, typer.Option(min=1, help="Training prompts for the target to continue, at most.")] = 2048,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of such a prompt, at most.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of such a continuation, at most.")] = 192,
    generated_share: Annotated[
        float, typer.Option(help="Share of the distillation's rows that are such continuations.")
    ] = 0.5,
    corpus_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the corpus that the distillation asks the target about, over and over.")
    ] = 512,
    teacher_temperature: Annotated[
        float, typer.Option(help="Of the target's distribution in the distillation; below 1, for greedy requests.")
    ] = 1.0,
    prompts_per_kind: Annotated[int, typer.Option(min=1, help="Held-out prompts a kind in the evaluation.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the order of the data.")] = 1234,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_model: Annotated[
        bool, typer.Option("--compile", help="Compile the target's decoder (needs a C++ compiler on a CPU).")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue from the work folder's checkpoints.")] = True,
    extend: Annotated[
        bool, typer.Option("--extend", help="Train the target on from the checkpoint before its decay.")
    ] = False,
    note: Annotated[str, typer.Option(help="A sentence for the model cards.")] = "",
) -> None:
    """Train a language model and a drafter for it, from Python sources and maths problems.

    With --target, a drafter alone. Stages can be run one at a time; each reads what the one before has left in --work.
    """
    from transformers.utils.logging import disable_progress_bar

    from dynaspec.train.data import standard_library
    from dynaspec.train.distill import DistillSettings
    from dynaspec.train.model import read_shape
    from dynaspec.train.optimizer import Rates
    from dynaspec.train.pipeline import Pipeline
    from dynaspec.train.run import progress
    from dynaspec.train.settings import LmSettings, Places

    disable_progress_bar()  # of files that load in a moment
    if target is None:
        places = Places(work, out)
        target_shape = _shape("target_size", target_size, 4096 if vocab is None else vocab)
    else:
        _refuse_target_only(ctx)
        target_shape = read_shape(target)
        places = Places.for_given(work, out, target)
    settings = LmSettings(
        places=places,
        library=corpus or standard_library(),
        gsm8k=gsm8k,
        target=target_shape,
        draft=_shape("draft_size", draft_size, target_shape.vocab if vocab is None else vocab, target_shape.positions),
        seq_len=seq_len,
        batch_rows=batch_rows,
        seed=seed,
        target_budget=_budget(target_steps, target_minutes, target_until, default_minutes=105),
        draft_budget=_budget(draft_steps, draft_minutes, draft_until, default_minutes=18),
        target_rates=Rates(*numbers("target_lr", target_lr, float, 2)),
        draft_rates=Rates(*numbers("draft_lr", draft_lr, float, 2)),
        decay_share=decay_share,
        distill=DistillSettings(
            kl_weight=kl_weight,
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            generated_share=generated_share,
            corpus_rows=corpus_rows,
            teacher_temperature=teacher_temperature,
        ),
        device=device,
        compile=compile_model,
        resume=resume,
        extend=extend,
        prompts_per_kind=prompts_per_kind,
        note=note,
    )
    Pipeline(settings, progress, typer.echo).run(stage)


def _refuse_target_only(ctx: typer.Context) -> None:
    """
    Raises:
        ConfigError: options were given that are about training a target.
    """
    names = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name in TARGET_ONLY and _is_given(ctx, parameter.name)
    ]
    if names:
        raise ConfigError(f"target: got it together with {', '.join(names)}, expected none that is about its training")


def _is_given(ctx: typer.Context, parameter: str) -> bool:
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name != "DEFAULT"


def _budget(steps: int | None, minutes: float | None, until: str | None, default_minutes: float) -> Budget:
    from dynaspec.train.optimizer import Budget, parse_until

    if steps is None and minutes is None and until is None:
        minutes = default_minutes
    return Budget(steps, None if minutes is None else 60 * minutes, None if until is None else parse_until(until))


def _shape(option: str, text: str, vocab: int, positions: int = 2048) -> Shape:
    from dynaspec.train.model import Shape

    hidden, layers, heads, kv_heads, intermediate = numbers(option, text, int, 5)
    return Shape(hidden, layers, heads, kv_heads, intermediate, vocab=vocab, positions=positions)
