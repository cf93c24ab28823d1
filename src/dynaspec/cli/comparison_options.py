"""Options of the commands that decode the same prompts in several ways, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaspec.cli.console import note

if TYPE_CHECKING:
    from dynaspec.bench.datasets import BenchPrompt
    from dynaspec.bench.offline import Session

Dataset = Annotated[
    Path,
    typer.Option(
        help="Spec-Bench, GSM8K or other JSON lines with prompt, turns or question; plain lines; or edits, for "
        "requests that change a little about few documents, over and over."
    ),
]
SpeculativeModels = Annotated[
    list[str] | None,
    typer.Option(
        *("--speculative-model", "--draft-model"),
        help="Checkpoint of a model or head that drafts; may be given several times.",
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Methods to compare, separated by commas, each perhaps with a policy (ngram:constant:3), and auto; "
        "default: all that can run."
    ),
]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens of every draft but auto's; default: the method's.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts, taken at even distances from the data.")]
Chat = Annotated[bool, typer.Option("--chat", help="Prompts are a user's turns, in the model's chat template.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that every side runs; medians are shown.")]
BatchSize = Annotated[
    int, typer.Option("--batch-size", "--max-num-seqs", min=1, help="Most requests that run at once.")
]
Temperature = Annotated[float, typer.Option(min=0, help="0 = greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the sampling; outputs are compared, so there is always one.")]
IgnoreEos = Annotated[bool, typer.Option(help="Go on after the end-of-sequence token.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write everything measured to this file.")]


def dataset_prompts(path: Path, count: int) -> list[BenchPrompt]:
    """``count`` prompts of a file, or of a data set that comes along.

    Raises:
        ConfigError: see ``named_or_file``.
    """
    from dynaspec.bench.datasets import named_or_file, spread

    return spread(named_or_file(path).prompts, count)


def note_cut(session: Session, prompts: Sequence[BenchPrompt]) -> None:
    if session.cut:
        note(f"note: {session.cut} of {len(prompts)} prompts did not fit into the model and lost their beginning")
