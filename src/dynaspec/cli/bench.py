"""``dynaspec bench``: measure policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli import options as o
from dynaspec.cli.console import note, status
from dynaspec.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dynaspec.bench.session import Session

_FILE_WIDTH = 120
"""Columns of the table where there is no terminal to fit it into."""

app = typer.Typer(help="Measure speculation policies.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speculation policies."""


@app.command()
def offline(
    *,
    model: o.Model,
    dataset: Annotated[
        Path, typer.Option(help="Spec-Bench, GSM8K or other JSON lines with prompt, turns or question; or plain lines.")
    ],
    draft_model: o.DraftModel = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Separated by commas: plain, constant:K, heuristic[:K], heuristic_transient[:K], "
            "confidence[:T[:K]] (T: threshold or auto), each after ngram: to look drafts up."
        ),
    ] = "plain,constant:4,confidence:0.4",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, taken at even distances from the data.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every policy runs; medians are shown.")] = 3,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "--max-num-seqs", min=1, help="Most requests that run at once.")
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the sampling; outputs are compared, so there is always one.")
    ] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end-of-sequence token.")] = False,
    output_json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_model_len: o.MaxModelLen = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    kv_cache_memory: o.KvCacheMemory = None,
    async_scheduling: o.AsyncScheduling = None,
) -> None:
    """Decode the same prompts under several policies, alternating, and compare speed and output.

    Plain decoding always runs too, as the reference. Prefix caching is off, so that no round profits from another.
    """
    from dynaspec.bench.policies import parse_policies
    from dynaspec.bench.report import make_folder

    specs = parse_policies(policies, draft_model)
    engine = {"enable_prefix_caching": False, "max_num_seqs": batch_size} | o.given(
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        async_scheduling=async_scheduling,
    )
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)

    if output_json is not None:
        make_folder(output_json.parent)

    from dynaspec.bench import datasets

    prompts = datasets.spread(datasets.load_prompts(dataset), num_prompts)
    options: dict[str, Any] = {
        "model": model,
        "draft_model": draft_model,
        "dataset": str(dataset),
        "policies": [spec.name for spec in specs],
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "engine": engine,
    }
    with status(f"loading {model}") as tell:
        from dynaspec.bench.session import run_comparison

        session = run_comparison(model, specs, prompts, params, engine, rounds, tell)
    if session.cut:
        note(f"note: {session.cut} of {len(prompts)} prompts did not fit into the model and lost their beginning")
    _show(session, options, output_json)


def _show(session: Session, options: dict[str, Any], output_json: Path | None) -> None:
    from rich.console import Console

    from dynaspec.bench.report import as_table, write_json

    tokens = session.results[0].runs[-1].output_tokens
    title = f"{options['num_prompts']} prompts, {tokens} tokens, {options['engine']['max_num_seqs']} at a time"
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(as_table(session.results, title))
    if output_json is not None:
        write_json(output_json, session.document(options))
        note(f"written to {output_json}")
