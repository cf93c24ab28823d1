"""``dynaspec bench serve``, and ``bench compare``, which puts its results side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from dynaspec.cli import bench_options as o
from dynaspec.cli.console import note, progress, result_console
from dynaspec.result_files import make_folder, write_json

_ALL_FAILED = 1
"""Exit code where no request succeeded."""
_SAVED = "Result"


def serve(
    *,
    backend: o.Backend = "openai",
    base_url: o.BaseUrl = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    endpoint: o.Endpoint = None,
    model: o.Model = None,
    served_model_name: o.ServedModelName = None,
    tokenizer: o.Tokenizer = None,
    api_key: o.ApiKey = None,
    header: o.Header = None,
    request_id_prefix: o.RequestIdPrefix = None,
    ready_check_timeout_sec: o.ReadyCheck = 0.0,
    num_prompts: o.NumPrompts = 1000,
    request_rate: o.RequestRate = math.inf,
    burstiness: o.Burstiness = 1.0,
    max_concurrency: o.MaxConcurrency = None,
    num_warmups: o.NumWarmups = 0,
    seed: o.Seed = 0,
    dataset_name: o.DatasetName = None,
    dataset_path: o.DatasetPath = None,
    category: o.Category = None,
    output_len: o.OutputLen = None,
    input_len: o.InputLen = 1024,
    range_ratio: o.RangeRatio = 0.0,
    prefix_len: o.PrefixLen = 0,
    disable_shuffle: o.DisableShuffle = False,
    no_oversample: o.NoOversample = False,
    ignore_eos: o.IgnoreEos = False,
    extra_body: o.ExtraBody = None,
    acceptance: o.Acceptance = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    frequency_penalty: o.FrequencyPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    repetition_penalty: o.RepetitionPenalty = None,
    percentile_metrics: o.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: o.MetricPercentiles = "50,90,95,99",
    goodput: o.Goodput = None,
    disable_tqdm: o.DisableTqdm = False,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result to a JSON file.", rich_help_panel=_SAVED)
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="The same, with a value for every request.", rich_help_panel=_SAVED)
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="The file's folder.", rich_help_panel=_SAVED)] = Path(),
    result_filename: Annotated[
        str | None,
        typer.Option(help="Its name; default: LABEL-RATEqps[-concurrencyN]-MODEL-TIME.json.", rich_help_panel=_SAVED),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Name of the run; default: the backend's.", rich_help_panel=_SAVED)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(help="Remarks for the file, KEY=VALUE.", metavar="KEY=VALUE…", rich_help_panel=_SAVED),
    ] = None,
) -> None:
    """Send requests to a running server that speaks OpenAI's protocol: throughput, latencies, goodput, acceptance.

    Flags and figures are those of vllm bench serve. The exit code is 1 if no request succeeded.
    """
    options = dict(locals())
    import asyncio

    from dynaspec.bench.serving.load import run_load_test
    from dynaspec.bench.serving.report import as_document, as_report, details, result_name
    from dynaspec.cli.bench_settings import pairs, settings_of, target_of

    settings, remarks = settings_of(options, target_of(options)), pairs("--metadata", metadata)
    wanted = save_result or save_detailed
    if wanted:
        make_folder(result_dir)
    with progress(hidden=disable_tqdm) as tell:
        finished = asyncio.run(run_load_test(settings, tell))
    result_console().print(as_report(finished))
    if wanted:
        document = as_document(finished, label=label, metadata=remarks)
        path = result_dir / (result_filename or result_name(finished, label))
        write_json(path, document | (details(finished) if save_detailed else {}))
        note(f"written to {path}")
    if not finished.measured.completed:
        raise typer.Exit(_ALL_FAILED)


def compare(
    files: Annotated[list[Path], typer.Argument(help="Results of bench serve, or of bench offline.", metavar="FILES…")],
) -> None:
    """Compare results: every figure of each, and its ratio to the first one's.

    Results of vllm bench serve can be compared too. Says in which settings the results differ.
    """
    from dynaspec.bench.serving.compare import as_table, load_results, warnings
    from dynaspec.bench.serving.compare import compare as compare_results

    comparison = compare_results(load_results(files))
    result_console().print(as_table(comparison))
    for warning in warnings(comparison):
        note(f"note: {warning}")
