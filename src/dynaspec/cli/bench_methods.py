"""``dynaspec bench methods``: every way of drafting that a target has, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli import comparison_options as c
from dynaspec.cli import options as o
from dynaspec.cli.console import note, result_console, status
from dynaspec.cli.demo import known_heads
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.result_files import make_folder, write_json

if TYPE_CHECKING:
    from dynaspec.bench.methods import Ways
    from dynaspec.bench.offline import Session

PICTURE = "methods.png"


@o.with_fields(EngineConfig, "Engine", only=("dtype", "device", "max_model_len", "kv_cache_memory"))
def methods(
    *,
    model: o.Model,
    dataset: c.Dataset,
    speculative_model: c.SpeculativeModels = None,
    methods: c.Methods = None,
    num_speculative_tokens: c.Length = None,
    num_prompts: c.NumPrompts = 26,
    chat: c.Chat = False,
    max_tokens: c.MaxTokens = 96,
    rounds: c.Rounds = 3,
    batch_size: c.BatchSize = 1,
    temperature: c.Temperature = 0.0,
    seed: c.Seed = 0,
    ignore_eos: c.IgnoreEos = False,
    output_json: c.OutputJson = None,
    output_dir: Annotated[Path | None, typer.Option(help="Folder for the picture of the speed-ups.")] = None,
    **fields: Any,
) -> None:
    """Decode the same prompts plainly, with every method's drafts and under auto; compare output, speed, acceptance.

    Methods that need no checkpoint always take part; the others where one is given or comes along for the model. The
    sides take turns. Prefix caching is off, so that no round profits from another.
    """
    from dynaspec.bench.methods import find_ways

    found = find_ways(
        model, speculative_model or (), known=known_heads(model), asked=methods, length=num_speculative_tokens
    )
    for folder in (output_dir, None if output_json is None else output_json.parent):
        if folder is not None:
            make_folder(folder)
    prompts = c.dataset_prompts(dataset, num_prompts)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)
    engine = {"enable_prefix_caching": False, "max_num_seqs": batch_size} | o.given(**fields)
    with status(f"loading {model}") as tell:
        from dynaspec.bench.methods import compare_ways, host_of_ways

        host = host_of_ways(found, params, engine)
        session = compare_ways(found, host, prompts, params, rounds, tell, chat=chat)
    c.note_cut(session, prompts)
    options: dict[str, Any] = {
        "model": found.model,
        "dataset": str(dataset),
        "methods": methods,
        "num_prompts": len(prompts),
        "chat": chat,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "engine": engine,
    }
    _show(found, session, options, output_json, output_dir)


def _show(
    found: Ways, session: Session, options: dict[str, Any], output_json: Path | None, output_dir: Path | None
) -> None:
    from dynaspec.bench import methods as report

    console = result_console()
    console.print(report.methods_table(session.results, report.title_of(options)))
    console.print(report.categories_table(session))
    for line in report.remarks(session):
        note(f"note: {line}")
    if output_dir is not None:
        from dynaspec.bench.plots import plot_categories

        plot_categories(session, output_dir / PICTURE, Path(found.model).name, report.title_of(options))
        note(f"picture: {output_dir / PICTURE}")
    if output_json is not None:
        write_json(output_json, report.as_document(session, options, found.given))
        note(f"written to {output_json}")
