"""``dynaspec bench serve`` and ``sweep``: load on servers; ``compare``: results side by side."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli import load_options as o
from dynaspec.cli.console import note, progress, result_console
from dynaspec.cli.options import in_panel
from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import make_folder, write_json, write_text

if TYPE_CHECKING:
    from dynaspec.bench.serving.server import LoadSettings, Target
    from dynaspec.bench.serving.sweep import Cell, Start, SweepPlan
    from dynaspec.control.policies.short_names import PolicySpec

_ALL_FAILED = 1
_TERMINATED = 128 + signal.SIGTERM
"""Exit codes: no request succeeded; stopped from outside."""
_SAVED = "Result"
_POLICIES = "plain,constant:4,auto"
_LOADS = "1,4,16"
_RUNNING = "server"
"""What a server that runs already is called."""
_NOWHERE = "http://127.0.0.1"
"""Where servers are that have no port yet."""


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
    save_result: Annotated[bool, in_panel(_SAVED, "Write the result to a JSON file.", "--save-result")] = False,
    save_detailed: Annotated[
        bool, in_panel(_SAVED, "The same, with a value for every request.", "--save-detailed")
    ] = False,
    result_dir: Annotated[Path, in_panel(_SAVED, "The file's folder.")] = Path(),
    result_filename: Annotated[
        str | None,
        in_panel(_SAVED, "Its name; default: LABEL-RATEqps[-concurrencyN]-MODEL-TIME.json."),
    ] = None,
    label: Annotated[str | None, in_panel(_SAVED, "Name of the run; default: the backend's.")] = None,
    metadata: Annotated[
        list[str] | None,
        in_panel(_SAVED, "Remarks for the file, KEY=VALUE.", metavar="KEY=VALUE…"),
    ] = None,
) -> None:
    """Send requests to a running server that speaks OpenAI's protocol: throughput, latencies, goodput, acceptance.

    Flags and figures are those of vllm bench serve. The exit code is 1 if no request succeeded.
    """
    options = dict(locals())
    from dynaspec.bench.serving.load import run_load_test
    from dynaspec.bench.serving.report import as_document, as_report, details, result_name

    settings, remarks = o.settings_of(options, o.target_of(options)), o.pairs("--metadata", metadata)
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


def sweep(
    *,
    model: Annotated[str | None, typer.Option(help="Checkpoint to serve, or to ask a running server for.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Checkpoint that drafts.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(help=f"One server each; separated by commas, as in bench offline. Default: {_POLICIES}."),
    ] = None,
    serve_args: Annotated[
        str, typer.Option(help="Further options of dynaspec serve, in one string, for all of them.")
    ] = "",
    base_url: Annotated[str | None, typer.Option(help="Measure this running server; none is started.")] = None,
    api_key: o.ApiKey = None,
    backend: o.Backend = "openai",
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Start servers anew for every round, so that memory holds one.")
    ] = False,
    ready_check_timeout_sec: Annotated[float, typer.Option(help="Seconds that a server gets to start.", min=1)] = 600,
    max_concurrency: Annotated[
        str, typer.Option(help=f"Most requests at once, separated by commas; default: {_LOADS}.")
    ] = "",
    request_rate: Annotated[str, typer.Option(help="Requests a second: numbers, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(help="Times that everything runs; medians are shown.", min=1)] = 1,
    num_prompts: Annotated[int, typer.Option(help="Requests of each load, at least.", min=1)] = 32,
    prompts_per_client: Annotated[
        int, typer.Option(help="And at least so many for each that may be under way.", min=1)
    ] = 4,
    burstiness: o.Burstiness = 1.0,
    seed: o.Seed = 0,
    dataset_name: o.DatasetName = None,
    dataset_path: o.DatasetPath = None,
    category: o.Category = None,
    output_len: o.OutputLen = None,
    input_len: o.InputLen = 1024,
    ignore_eos: o.IgnoreEos = False,
    temperature: o.Temperature = None,
    extra_body: o.ExtraBody = None,
    metric_percentiles: o.MetricPercentiles = "50,90,95,99",
    goodput: o.Goodput = None,
    disable_tqdm: o.DisableTqdm = False,
    output_dir: Annotated[Path, typer.Option(help="Folder for the result, the picture and logs.")] = Path("sweep-out"),
) -> None:
    """Measure speculation policies at several loads: each is a server of its own, started and stopped here.

    Servers take turns at every load. With --base-url one running server is measured instead. Writes sweep.json,
    sweep.md and sweep.png.
    """
    options = dict(locals())
    from dynaspec.bench.serving.sweep import run_sweep

    make_folder(output_dir)
    settings, sides, plan = _prepare(options)
    result = _Result(output_dir, {name: value for name, value in options.items() if name != "api_key"})
    with progress(hidden=disable_tqdm) as tell:
        cells = asyncio.run(_until_terminated(run_sweep(settings, sides, plan, tell, result.add)))
    result.show(model or base_url or "")
    if not any(cell.finished.measured.completed for cell in cells):
        raise typer.Exit(_ALL_FAILED)


def _prepare(options: Mapping[str, Any]) -> tuple[LoadSettings, Mapping[str, Start], SweepPlan]:
    """What is to be run.

    Raises:
        ConfigError: options that contradict each other, or a value that cannot be.
    """
    from dynaspec.bench.serving.server import Target, base_address
    from dynaspec.bench.serving.sweep import SweepPlan, make_points

    limits = options["max_concurrency"] or ("" if options["request_rate"] else _LOADS)
    plan = SweepPlan(
        points=make_points(
            [_whole(number) for number in o.numbers("--max-concurrency", limits)] if limits else [],
            o.numbers("--request-rate", options["request_rate"]) if options["request_rate"] else [],
        ),
        rounds=options["rounds"],
        prompts_per_client=options["prompts_per_client"],
        one_at_a_time=options["one_at_a_time"],
    )
    base_url = options["base_url"]
    target = Target(
        root=_NOWHERE if base_url is None else base_address(base_url, "", 0),
        backend=options["backend"],
        model=None if base_url is None else options["model"],
        api_key=options["api_key"] or (None if base_url is None else os.environ.get("OPENAI_API_KEY")),
        request_id_prefix=o.new_prefix(),
    )
    loads = ("max_concurrency", "request_rate")
    settings = o.settings_of({name: value for name, value in options.items() if name not in loads}, target)
    sides = _launched(options, target) if base_url is None else _running(options, target)
    return settings, sides, plan


def _running(options: Mapping[str, Any], target: Target) -> dict[str, Start]:
    """One server that is there already."""
    given = [name for name in ("policies", "draft_model", "serve_args") if options[name]]
    if given or options["one_at_a_time"]:
        flags = ", ".join("--" + name.replace("_", "-") for name in given) or "--one-at-a-time"
        raise ConfigError(f"--base-url was given together with {flags}, which is for servers that are started here")
    return {_RUNNING: lambda: nullcontext(target)}


def _launched(options: Mapping[str, Any], target: Target) -> dict[str, Start]:
    """A server a policy."""
    from dynaspec.control.policies.short_names import parse_policy

    if options["model"] is None:
        raise ConfigError("no model was given; expected --model to start servers with, or --base-url of one")
    names = [name for part in (options["policies"] or _POLICIES).split(",") if (name := part.strip())]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policies is {options['policies']!r}; expected policies, each once")
    if "--api-key" in options["serve_args"]:
        raise ConfigError("--serve-args has --api-key, which results would show; expected none: nobody else comes in")
    specs = [parse_policy(name, options["draft_model"]) for name in names]
    return {spec.name: partial(_launch, spec, options, target) for spec in specs}


@asynccontextmanager
async def _launch(spec: PolicySpec, options: Mapping[str, Any], target: Target) -> AsyncIterator[Target]:
    from dynaspec.bench.serving.sweep import HOST, free_port, launched, serve_command

    port = free_port()
    command = serve_command(options["model"], spec, port, shlex.split(options["serve_args"]))
    here = replace(target, root=f"http://{HOST}:{port}")
    log = options["output_dir"] / f"server-{re.sub(r'[^a-zA-Z0-9.=-]+', '-', spec.name)}.log"
    async with launched(spec.name, command, here.root, log, options["ready_check_timeout_sec"]):
        yield here


async def _until_terminated(work: Coroutine[Any, Any, list[Cell]]) -> list[Cell]:
    """Ends in order on SIGTERM too, as on Ctrl-C, so that no server is left behind."""
    task = asyncio.ensure_future(work)
    terminated = asyncio.Event()

    def terminate() -> None:
        terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated.is_set():
            raise typer.Exit(_TERMINATED) from None
        raise


class _Result:
    """What has been measured so far, and the files it is in."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self._cells: list[Cell] = []

    def add(self, cell: Cell) -> None:
        """Written at once, so that a sweep that is stopped has not been in vain."""
        from dynaspec.bench.serving.sweep import as_document

        self._cells.append(cell)
        write_json(self._folder / "sweep.json", as_document(self._cells, self._options))

    def show(self, title: str) -> None:
        from dynaspec.bench.plots import plot_sweep
        from dynaspec.bench.serving.sweep import all_remarks, as_table, as_text, summarise

        console = result_console()
        console.print(as_table(self._cells))
        for remark in all_remarks(self._cells):
            note(f"note: {remark}")
        write_text(self._folder / "sweep.md", as_text(self._cells))
        plot_sweep(summarise(self._cells), self._folder / "sweep.png", title)
        console.print(f"Result and picture: {self._folder}", soft_wrap=True)


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ConfigError(f"--max-concurrency has {number:g}; expected whole numbers")
    return int(number)


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
