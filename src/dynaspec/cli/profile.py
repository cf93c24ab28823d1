"""``dynaspec profile``: measure what the ``goodput`` policy decides by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dynaspec.cli.console import note, status
from dynaspec.cli.options import json_object
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.result_output import stages

if TYPE_CHECKING:
    from dynaspec.bench.profile_session import ProfileSettings
    from dynaspec.bench.profiling import Grid

_LENGTHS = (1, 2, 3, 5, 8)


def profile(
    *,
    model_dir: Annotated[str, typer.Option(help="The target's checkpoint.")],
    method: Annotated[str, typer.Option(help=f"What drafts: {', '.join(METHODS)}.")] = "draft_model",
    draft_dir: Annotated[str | None, typer.Option(help="The drafter's checkpoint.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that the target is split over.")] = 1,
    temp: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep a token while the mass before it is below this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many of the most probable tokens; -1 = all.")] = -1,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Largest batch of the default list.")] = 32,
    batch_size_list: Annotated[
        list[str] | None, typer.Option(help="Batch sizes to measure; default: powers of two up to --max-batch-size.")
    ] = None,
    num_speculative_tokens_list: Annotated[
        list[str] | None, typer.Option(help="Draft lengths to measure, besides 0; default: 1 2 3 5 8.")
    ] = None,
    num_batches: Annotated[
        int | None, typer.Option(min=1, help="Batches for each size and length; default: 2 on a CPU, 5 on a GPU.")
    ] = None,
    dataset_name: Annotated[
        str | None, typer.Option(help="demo (the prompts that come along), or the form of the file: spec_bench, gsm8k.")
    ] = None,
    dataset_path: Annotated[Path | None, typer.Option(help="File of prompts; default: those that come along.")] = None,
    no_oversample: Annotated[bool, typer.Option("--no-oversample", help="No prompt twice in a batch.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder that the results go below.")] = Path("profiles"),
    backend: Annotated[str, typer.Option(help="The engine to measure: dynaspec, vllm or transformers.")] = "dynaspec",
    engine_options: Annotated[
        str | None, typer.Option(help="Further options of vLLM's engine, as a JSON object.")
    ] = None,
) -> None:
    """Measure step times by batch size and draft length, and acceptance, for the policies goodput and auto.

    Writes RESULT_DIR/tp-…_temp-…_top_p-…_top_k-…/DATASET/dynamic_speculative_config.json, a picture beside it, and
    what was measured: run it again with the same options and it goes on where it was. On another engine than
    dynaspec's own, what was measured is a decision log, and is measured anew.
    """
    if backend == "vllm":
        from dynaspec.hosts.vllm.launch import require_vllm

        require_vllm()
    from dynaspec.bench.datasets import load_dataset
    from dynaspec.simulate.costs import batch_sizes

    dataset = load_dataset(dataset_name, dataset_path)
    largest = 1 if backend == "transformers" else max_batch_size
    grid_options: dict[str, Any] = {
        "batch_sizes": _numbers("--batch-size-list", batch_size_list) or tuple(batch_sizes(largest)),
        "lengths": _numbers("--num-speculative-tokens-list", num_speculative_tokens_list) or _LENGTHS,
    }
    with status(f"loading {model_dir}"):
        from dynaspec.bench.profile_session import ProfileSettings
        from dynaspec.bench.profiling import Grid, default_batches

        settings = ProfileSettings(
            method=method, model=model_dir, drafter=draft_dir, tensor_parallel=tp, temperature=temp, top_p=top_p,
            top_k=top_k, dataset=dataset, oversample=not no_oversample, result_dir=result_dir, backend=backend,
            options=json_object("--engine-options", engine_options),
        )  # fmt: skip
        grid = Grid(**grid_options, batches=num_batches or default_batches())
    _run(settings, grid)


def _run(settings: ProfileSettings, grid: Grid) -> None:
    from dynaspec.bench.profile_session import run_profile
    from dynaspec.bench.profiling import acceptance_line, as_table

    with stages() as tell:
        session = run_profile(settings, grid, tell, note)
    console = Console(highlight=False)
    console.print(as_table(session.profile, "Milliseconds a step"))
    console.print(acceptance_line(session.profile), soft_wrap=True)
    console.print(f"Profile: {session.path}", soft_wrap=True)
    if session.picture is not None:
        console.print(f"Picture: {session.picture}", soft_wrap=True)


def _numbers(option: str, given: list[str] | None) -> tuple[int, ...]:
    """
    Raises:
        ConfigError: not a list of integers.
    """
    if not given:
        return ()
    text = ",".join(given)
    try:
        numbers = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        numbers = ()
    if not numbers:
        raise ConfigError(f"{option} is {text!r}; expected integers, separated by spaces or commas")
    return numbers
