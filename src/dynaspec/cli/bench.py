"""``dynaspec bench``: measure policies, methods and what rounding costs; load tests are in ``bench_serve.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli import bench_serve
from dynaspec.cli import options as o
from dynaspec.cli.console import note, result_console, status
from dynaspec.cli.demo import known_heads
from dynaspec.cli.options import SpacedValues
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.result_output import make_folder, stages, write_json

if TYPE_CHECKING:
    from dynaspec.bench.methods import Ways
    from dynaspec.bench.offline import Session
    from dynaspec.bench.oracle import Study, TaskResult

app = typer.Typer(help="Measure speculation policies, and servers under load.", no_args_is_help=True)
app.command("serve", cls=SpacedValues)(bench_serve.serve)
app.command("sweep", cls=SpacedValues)(bench_serve.sweep)
app.command("compare")(bench_serve.compare)

_METHODS_PICTURE = "methods.png"
_DEFAULT_POLICIES = {
    "dynaspec": "plain,constant:4,confidence:0.4,auto",
    "vllm": "plain,constant:4,auto",  # which cannot stop between draft passes
}


@app.callback()
def bench() -> None:
    """Measure speculation policies, and servers under load."""


_ENGINE = (
    *("dtype", "quantization", "device", "max_model_len"),
    *("max_num_batched_tokens", "kv_cache_memory", "async_scheduling"),
)


@app.command()
@o.with_fields(EngineConfig, "Engine", only=_ENGINE)
def offline(
    *,
    model: o.Model,
    dataset: o.Dataset,
    draft_model: o.DraftModel = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: auto, constant:K, confidence[:T[:K]], heuristic[:K], goodput:FILE, "
            "schedule:LO-HI=K/…, elastic[:A/B/C[:GATE]]; after ngram: or suffix: drafts are looked up, after both: or "
            "all: that too. Default: plain,constant:4,confidence:0.4,auto; under vLLM without confidence."
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="The engine: dynaspec, vllm or transformers.")] = "dynaspec",
    one_at_a_time: Annotated[
        bool | None,
        typer.Option(
            "--one-at-a-time/--alternating",
            help="One policy's engine after the other, or all open and taking turns; default: turns, but for vLLM on a "
            "GPU, whose memory one engine fills.",
        ),
    ] = None,
    engine_options: Annotated[
        str | None, typer.Option(help="Further options of vLLM's engine, as a JSON object.")
    ] = None,
    num_prompts: o.NumPrompts = 24,
    chat: o.Chat = False,
    max_tokens: o.MaxTokens = 96,
    rounds: o.Rounds = 3,
    batch_size: o.BatchSize = 1,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    ignore_eos: o.IgnoreEos = False,
    output_json: o.OutputJson = None,
    **fields: Any,
) -> None:
    """Decode the same prompts under several policies, alternating, and compare speed and output.

    Plain decoding always runs too, as the reference. Prefix caching is off, so that no round profits from another.
    """
    if backend == "vllm":
        from dynaspec.hosts.vllm.launch import require_vllm

        require_vllm()
    further = o.json_object("--engine-options", engine_options)
    if further and backend != "vllm":
        raise ConfigError(f"--engine-options is given but --backend is {backend!r}; expected none, or vllm")
    from dynaspec.control.policies.short_names import parse_policies

    specs = parse_policies(policies or _DEFAULT_POLICIES.get(backend, _DEFAULT_POLICIES["dynaspec"]), draft_model)
    engine = {"enable_prefix_caching": False, "max_num_seqs": batch_size} | o.given(**fields) | further
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)

    if output_json is not None:
        make_folder(output_json.parent)

    prompts = o.dataset_prompts(dataset, num_prompts)
    options: dict[str, Any] = {
        "model": model,
        "draft_model": draft_model,
        "backend": backend,
        "dataset": str(dataset),
        "policies": [spec.name for spec in specs],
        "num_prompts": len(prompts),
        "chat": chat,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "engine": engine,
    }
    with status(f"loading {model}") as tell:
        from dynaspec.bench.decoders import host_of
        from dynaspec.bench.offline import run_comparison

        alone = _fills_memory(backend) if one_at_a_time is None else one_at_a_time
        host = host_of(backend, model, specs, params, engine, one_at_a_time=alone)
        options["alternating"] = host.alternating
        session = run_comparison(host, specs, prompts, params, rounds, tell, chat=chat)
    o.note_cut(session, prompts)
    _show_offline(session, options, output_json)


def _fills_memory(backend: str) -> bool:
    """Whether one engine takes all there is."""
    if backend != "vllm":
        return False
    import torch

    return torch.cuda.is_available()


def _show_offline(session: Session, options: dict[str, Any], output_json: Path | None) -> None:
    from dynaspec.bench.offline import as_table

    tokens = session.results[0].runs[-1].output_tokens
    title = f"{options['num_prompts']} prompts, {tokens} tokens, {options['engine']['max_num_seqs']} at a time"
    if options["backend"] != "dynaspec":
        title += f"; {options['backend']}"
    if not options["alternating"]:
        title += "; one policy's rounds after the other's, not alternating"
    console = result_console()
    console.print(as_table(session.results, title))
    if output_json is not None:
        write_json(output_json, session.document(options))
        note(f"written to {output_json}")


@app.command()
@o.with_fields(EngineConfig, "Engine", only=("dtype", "device", "max_model_len", "kv_cache_memory"))
def methods(
    *,
    model: o.Model,
    dataset: o.Dataset,
    speculative_model: Annotated[
        list[str] | None,
        typer.Option(
            *("--speculative-model", "--draft-model"),
            help="Checkpoint of a model or head that drafts; may be given several times.",
        ),
    ] = None,
    methods: o.Methods = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of every draft but auto's; default: the method's.")
    ] = None,
    num_prompts: o.NumPrompts = 26,
    chat: o.Chat = False,
    max_tokens: o.MaxTokens = 96,
    rounds: o.Rounds = 3,
    batch_size: o.BatchSize = 1,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    ignore_eos: o.IgnoreEos = False,
    output_json: o.OutputJson = None,
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
    prompts = o.dataset_prompts(dataset, num_prompts)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)
    engine = {"enable_prefix_caching": False, "max_num_seqs": batch_size} | o.given(**fields)
    with status(f"loading {model}") as tell:
        from dynaspec.bench.methods import compare_ways, host_of_ways

        host = host_of_ways(found, params, engine)
        session = compare_ways(found, host, prompts, params, rounds, tell, chat=chat)
    o.note_cut(session, prompts)
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
    _show_methods(found, session, options, output_json, output_dir)


def _show_methods(
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

        plot_categories(session, output_dir / _METHODS_PICTURE, Path(found.model).name, report.title_of(options))
        note(f"picture: {output_dir / _METHODS_PICTURE}")
    if output_json is not None:
        write_json(output_json, report.as_document(session, options, found.given))
        note(f"written to {output_json}")


@app.command()
def oracle(
    *,
    model: Annotated[str, typer.Option(help="The target's checkpoint.")],
    draft_model: Annotated[str, typer.Option(help="The drafter's checkpoint.")],
    dataset: Annotated[
        Path | None, typer.Option(help="Prompts, grouped by their category; default: those that come along.")
    ] = None,
    policies: Annotated[
        str,
        typer.Option(help="Besides plain decoding and the fixed lengths 1 to 8; separated by commas, as in offline."),
    ] = "confidence:0.2:20,confidence:0.4:20,confidence:0.6:20,confidence:0.8:20,auto",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, at even distances from the data.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each continuation.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every side runs; medians are shown.")] = 3,
    output_dir: Annotated[Path, typer.Option(help="Folder for pictures and figures.")] = Path("oracle-out"),
) -> None:
    """Compare policies with the oracle, which drafts exactly to the first mismatch: passes, time, share of the gap.

    Greedy, one request at a time. The target's texts are decoded once, the drafter drafts from all their positions;
    what fixed lengths and the oracle do follows from that, what they take from step times measured in the same run.
    """
    from dynaspec.bench.datasets import load_dataset, spread
    from dynaspec.control.policies.short_names import PLAIN, parse_policies

    specs = [spec for spec in parse_policies(policies, draft_model) if spec.name != PLAIN]
    prompts = spread(load_dataset(None, dataset).prompts, num_prompts)
    make_folder(output_dir)
    with status(f"loading {model}"):
        from dynaspec.bench.oracle import run_study, summarise
    with stages() as tell:
        study = run_study(model, draft_model, prompts, specs, max_tokens, rounds, tell)
    options = {
        "model": model,
        "draft_model": draft_model,
        "dataset": None if dataset is None else str(dataset),
        "policies": [spec.name for spec in specs],
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "rounds": rounds,
    }
    _show_study(study, summarise(study), options, output_dir)


def _show_study(study: Study, results: list[TaskResult], options: dict[str, Any], output_dir: Path) -> None:
    from dynaspec.bench import oracle as report
    from dynaspec.bench.plots import plot_iterations, plot_speeds

    console = result_console()
    if study.left_out:
        note(f"note: {study.left_out} prompts are left out, as their continuation ends with its first token")
    for result in results:
        console.print(report.as_table(result))
    for result in results[: len(study.tasks)]:
        sides = report.shown_sides(result, options["policies"])
        console.print("\n".join(report.iterations_text(result, sides)), end="\n\n", soft_wrap=True)
        plot_iterations(result, sides, output_dir / f"iterations-{result.name}.png")
    console.print(report.explanation(study), soft_wrap=True)
    names = f"{Path(options['model']).name} with {Path(options['draft_model']).name}"
    plot_speeds(results, output_dir / "speeds.png", f"{names}: greedy, one request at a time")
    write_json(output_dir / "oracle.json", report.as_document(study, results, options))
    console.print(f"Pictures and figures: {output_dir}", soft_wrap=True)


@app.command()
@o.with_fields(EngineConfig, "Engine", only=("kv_cache_dtype", "device"))
def perplexity(
    *,
    model: o.Model,
    text: Annotated[Path, typer.Option(help="A file of plain text, which the model should not have been trained on.")],
    forms: Annotated[
        str,
        typer.Option(
            help="Separated by commas: auto, float32, bfloat16, float16 (types of computation), int8, int4 "
            "(quantisations, on a CPU); the first is what others are compared with."
        ),
    ] = "auto,int8,int4",
    window: Annotated[
        int, typer.Option(min=2, help="Tokens that are read at a time, each without those before.")
    ] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text.")] = 8192,
    **fields: Any,
) -> None:
    """Print the perplexity of a text under a model in several forms: what each costs in quality."""
    from dynaspec.bench.perplexity import measure, parse_forms, read_text, table_of

    names, content = parse_forms(forms), read_text(text)
    engine = o.given(**fields)
    results = []
    with status(f"loading {model}") as tell:
        for name in names:
            tell(f"reading {text} in {name}")
            results.append(measure(model, name, content, window, max_tokens, engine))
    result_console().print(table_of(results, f"{text.name}, {window} tokens at a time"))
