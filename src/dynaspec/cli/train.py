"""``dynaspec train``: heads that draft from hidden states; a small target and a drafter for it, or a drafter alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli.options import numbers
from dynaspec.contract.errors import ConfigError
from dynaspec.cores import usable_cores

if TYPE_CHECKING:
    from dynaspec.train.heads.head import Kind
    from dynaspec.train.model import Shape
    from dynaspec.train.optimizer import Budget

app = typer.Typer(help="Train models for speculative decoding.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train models for speculative decoding."""


# --- heads that draft from hidden states ---

_SELF_WRITTEN = 20_000


def eagle3(
    norm_before_residual: Annotated[
        bool, typer.Option(help="Whether the residual stream starts from the normalised hidden state.")
    ] = True,
    start_from: Annotated[
        str | None,
        typer.Option(help="An EAGLE-3 head to train on from, folder or hub id; its draft vocabulary stays."),
    ] = None,
) -> Kind:
    """Train an EAGLE-3 head for a model, on answers that the model writes."""
    from dynaspec.train.heads.eagle import Eagle3

    return Eagle3(norm_before_residual, start_from)


def eagle(
    regression: Annotated[
        float, typer.Option(min=0, help="Weight of the distance of guessed hidden states, beside that of tokens.")
    ] = 10.0,
) -> Kind:
    """Train an EAGLE head (EAGLE-1, EAGLE-2) for a model, on answers that the model writes."""
    from dynaspec.train.heads.eagle import Eagle

    return Eagle(regression)


def medusa(
    depths: Annotated[int, typer.Option(min=1, help="Heads, each of which drafts a token.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Residual layers of each.")] = 1,
) -> Kind:
    """Train Medusa heads for a model, on answers that the model writes."""
    from dynaspec.train.heads.state_heads import Medusa

    return Medusa(depths, layers)


def mlp_speculator(
    depths: Annotated[int, typer.Option(min=1, help="Steps, each of which drafts a token.")] = 4,
    inner_dim: Annotated[int, typer.Option(min=1, help="Width; the file has two rows of it for every token.")] = 64,
) -> Kind:
    """Train an MLP speculator for a model, on answers that the model writes."""
    from dynaspec.train.heads.state_heads import MlpSpeculator

    return MlpSpeculator(depths, inner_dim)


def _head_command(kind: Callable[..., Kind], leave_out: tuple[str, ...] = (), **defaults: Any) -> Callable[..., None]:
    """A command for heads of ``kind``: its own options, and those that all have.

    Args:
        kind: makes one from the options that it names; its docstring is the command's.
        leave_out: options of all that mean nothing for these.
        defaults: of options of all, where they are others here.
    """
    names = {"Kind": Any}  # imported only where types are checked
    own = inspect.signature(kind, eval_str=True, locals=names).parameters
    shared = inspect.signature(_train_head, eval_str=True, locals=names).parameters

    def command(**options: Any) -> None:
        chosen = {name: options[name] for name in own}
        _train_head(lambda: kind(**chosen), **{name: value for name, value in options.items() if name in shared})

    options = [
        one.replace(default=defaults.get(name, one.default))
        for name, one in shared.items()
        if name not in ("make", *leave_out, *own)
    ]
    options += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.values()]
    command.__name__, command.__doc__ = kind.__name__, kind.__doc__
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # typer's
    return command


def _train_head(
    make: Callable[[], Kind],
    *,
    model: Annotated[str, typer.Option(help="The model to draft for: checkpoint folder, GGUF file or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder that receives the head.")],
    work: Annotated[
        Path, typer.Option(help="Folder for conversations, hidden states and checkpoints; keep it to resume.")
    ],
    stage: Annotated[
        str,
        typer.Option(
            help="data, states, train, measure, or all of these; export writes the last checkpoint, best or not."
        ),
    ] = "all",
    conversations: Annotated[
        list[Path] | None,
        typer.Option(help="Ready conversations as token ids, JSON lines with prompt and answer; may be repeated."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts for the model to answer, JSON lines with messages, turns, prompt or question; repeatable."
        ),
    ] = None,
    self_written: Annotated[
        int,
        typer.Option(min=0, help="Conversations that the model makes up itself; default: 20000 if nothing is given."),
    ] = 0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, at most.")] = 256,
    at_once: Annotated[int, typer.Option(min=1, help="Answers written together; a kill may lose so many.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens to train on in all, repetitions included.")] = (
        20_000_000
    ),
    decay_share: Annotated[float, typer.Option(min=0, max=1, help="Last part of them in which rates fall.")] = 0.4,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps in which rates rise.")] = 50,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Answer tokens a step.")] = 8192,
    micro_tokens: Annotated[int, typer.Option(min=1, help="Answer tokens that are computed at once.")] = 1536,
    evaluate_tokens: Annotated[int, typer.Option(min=1, help="Measure on held-out answers so often.")] = 400_000,
    depths: Annotated[int, typer.Option(min=1, help="Drafts in a row that training unrolls.")] = 5,
    depth_decay: Annotated[float, typer.Option(min=0, help="Weight of each depth, seen from the one before.")] = 0.8,
    chain_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the positions that go on beyond the first draft.")
    ] = 0.5,
    temperature: Annotated[
        float, typer.Option(help="Of the target's distribution in the labels; below 1, for greedy requests.")
    ] = 1.0,
    lr: Annotated[
        str, typer.Option(help="Peak rates: Muon for the matrices, AdamW for tables of tokens and norms.")
    ] = "0.02,0.0003",
    weight_decay: Annotated[
        float, typer.Option(min=0, help="Of the matrices; strong, as texts are few and soon known by heart.")
    ] = 0.5,
    noise: Annotated[
        float, typer.Option(min=0, help="Noise on the hidden states in training, as a share of their size.")
    ] = 0.1,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that can be drafted: the most frequent ones.")] = 8192,
    held_out: Annotated[
        int, typer.Option(min=1, help="Conversations to measure on, greedy ones where there are.")
    ] = 48,
    measure: Annotated[
        Path | None,
        typer.Option(help="Prompts to measure the finished head on, by their category, for the model card."),
    ] = None,
    longest: Annotated[int, typer.Option(min=2, help="Conversations with more tokens are passed over.")] = 2048,
    states_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Disk space for hidden states, at most; 0: none, one process makes them for every batch. "
            "Default: 50 on a CPU, 0 on a GPU.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes on a CPU; default: one a core.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Name of the model in the head's config; default: --model.")] = (
        None
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the order of the data.")] = 1234,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Continue from the work folder's checkpoint.")] = True,
    extend: Annotated[
        bool, typer.Option("--extend", help="Continue from the checkpoint before the rates began to fall.")
    ] = False,
    note: Annotated[str, typer.Option(help="A sentence for the model card.")] = "",
) -> None:
    from transformers.utils.logging import disable_progress_bar

    from dynaspec.train.heads.loss import LossSettings
    from dynaspec.train.heads.pipeline import DataSettings, HeadPipeline, HeadSettings
    from dynaspec.train.heads.trainer import TrainSettings
    from dynaspec.train.optimizer import Rates, RateSchedule
    from dynaspec.train.run import progress

    disable_progress_bar()
    if not (conversations or prompts or self_written):
        self_written = _SELF_WRITTEN
    matrix_lr, other_lr = numbers("lr", lr, float, 2)
    settings = HeadSettings(
        kind=make(),
        model=model,
        out=out,
        work=work,
        verifier=verifier or model,
        data=DataSettings(tuple(conversations or ()), tuple(prompts or ()), self_written, new_tokens, at_once),
        train=TrainSettings(
            tokens=tokens,
            schedule=RateSchedule(warmup_steps, decay_share),
            batch_tokens=batch_tokens,
            micro_tokens=micro_tokens,
            evaluate_tokens=evaluate_tokens,
            seed=seed,
        ),
        loss=LossSettings(depths, depth_decay, chain_share, temperature, noise),
        rates=Rates(matrix_lr, other_lr, weight_decay),
        draft_vocab=draft_vocab,
        measure=measure,
        held_out=held_out,
        longest=longest,
        states_gb=states_gb,
        workers=workers or usable_cores(),
        device=device,
        resume=resume,
        extend=extend,
        note=note,
    )
    HeadPipeline(settings, progress, typer.echo).run(stage)


_WHOLE_VOCABULARY = ("draft_vocab",)
"""Left out where a checkpoint has no place for a part of the vocabulary."""
app.command()(_head_command(eagle3, work=Path("eagle3-state")))
app.command()(_head_command(eagle, _WHOLE_VOCABULARY, work=Path("eagle-state")))
app.command()(_head_command(medusa, work=Path("medusa-state")))
app.command("mlp_speculator")(
    _head_command(mlp_speculator, _WHOLE_VOCABULARY, work=Path("mlp_speculator-state"), lr="0.02,0.003")
)


# --- language models ---

_TARGET_ONLY = (
    "target_steps",
    "target_minutes",
    "target_until",
    "target_size",
    "target_lr",
    "decay_share",
    "compile_model",
    "extend",
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
        if parameter.name in _TARGET_ONLY and _is_given(ctx, parameter.name)
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
