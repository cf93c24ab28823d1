"""``dynaspec demo``: see what speculation does, on a terminal, in a table and in a picture."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaspec.cli.console import print_error, status
from dynaspec.cli.demo_model import demo_head, demo_target
from dynaspec.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dynaspec.api import LLM
    from dynaspec.bench.demo import PromptTimes

DIFFERENT = 1
"""Exit code when an output was not plain decoding's."""


def demo(
    model: Annotated[
        str | None, typer.Option(help="The target's checkpoint, of a chat model; default: the demonstration's.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="The drafter's checkpoint; default: the demonstration's head.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder for the picture and the figures.")] = Path("demo-out"),
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of every prompt in every way.")] = 1,
) -> None:
    """Ask a chat model a dozen things, plainly and with speculation; show text, equality, speed and waste."""
    model, draft_model = model or demo_target(), draft_model or demo_head()
    from rich.console import Console

    from dynaspec.bench.offline import make_folder

    make_folder(output_dir)
    console = Console(highlight=False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with ExitStack() as stack:
        llms = _load(model, draft_model, stack)
        _introduce(console, model, draft_model)
        measured = _watch(console, llms, draft_model, params, rounds)
    _conclude(console, measured, output_dir, f"{Path(model).name} with {Path(draft_model).name}: greedy, batch 1")
    if any(m.different for m in measured):
        raise typer.Exit(DIFFERENT)


def _load(model: str, draft_model: str, stack: ExitStack) -> dict[str, LLM]:
    with status(f"loading {Path(model).name} and {Path(draft_model).name}"):
        from dynaspec.bench.demo import open_ways

        llms = open_ways(model, draft_model, max_num_seqs=1, enable_prefix_caching=False)
        for llm in llms.values():
            stack.callback(llm.close)
        return llms


def _introduce(console: Console, model: str, draft_model: str) -> None:
    from rich.text import Text

    from dynaspec.bench.console import DRAFTED
    from dynaspec.bench.demo import name_of, ways

    console.print()
    for role, path in (("Target ", model), ("Drafter", draft_model)):
        console.print(Text.assemble(f"{role} ", (Path(path).name, "bold"), (f"  {path}", "dim")), soft_wrap=True)
    console.print("Ways    " + ", ".join(map(name_of, ways(draft_model))) + ": greedy, one request at a time")
    console.print(
        Text.assemble(
            ("prompt", "dim"), " · ", ("drafted and accepted", DRAFTED), " · the target's own token, one a step"
        )
    )


def _watch(
    console: Console, llms: dict[str, LLM], draft_model: str, params: SamplingParams, rounds: int
) -> list[PromptTimes]:
    from rich.text import Text

    from dynaspec.bench.console import StreamView
    from dynaspec.bench.decoders import run_once
    from dynaspec.bench.demo import as_tokens, decode_shown, load_demo_prompts, measure_prompt, shown_way, speeds_line

    prompts = load_demo_prompts()
    shown = llms[shown_way(draft_model)]
    for llm in llms.values():
        run_once(llm, [as_tokens(shown.tokenizer, prompts[0])], params)  # warm-up
    measured: list[PromptTimes] = []
    for number, prompt in enumerate(prompts):
        console.print()
        console.rule(Text(f"{number + 1}/{len(prompts)}  {prompt.kind}: {prompt.title}"), align="left", style="dim")
        view = StreamView(console, shown.tokenizer, prompt.prompt + "\n\n")
        decode_shown(shown, prompt, params, view.update)
        measured.append(measure_prompt(llms, prompt, params, rounds, first=number))
        console.print(speeds_line(measured[-1]), soft_wrap=True)
    return measured


def _conclude(console: Console, measured: Sequence[PromptTimes], output_dir: Path, title: str) -> None:
    from dynaspec.bench.demo import as_document, by_kind, kinds_table, summary_table, verdict
    from dynaspec.bench.offline import write_json
    from dynaspec.bench.plots import plot_summaries

    console.print()
    console.print(summary_table(measured))
    console.print(kinds_table(measured))
    write_json(output_dir / "demo.json", as_document(measured))
    plot_summaries(by_kind(measured), output_dir / "demo.png", title)
    wrong = [m for m in measured if m.different]
    if wrong:
        names = "; ".join(f"{m.prompt.title}: {', '.join(m.different)}" for m in wrong)
        print_error(f"outputs differ from plain decoding ({names}); expected them token for token alike")
    else:
        console.print(verdict(measured))
    console.print(f"Picture: {output_dir / 'demo.png'}   Figures: {output_dir / 'demo.json'}", soft_wrap=True)
