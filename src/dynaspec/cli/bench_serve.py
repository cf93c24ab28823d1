"""``dynaspec bench serve`` and ``sweep``: load on servers; ``compare``: results side by side.

Options have vLLM's names and meaning.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from dynaspec.cli.console import note, progress, result_console
from dynaspec.cli.options import in_panel, json_object
from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import make_folder, write_json, write_text

if TYPE_CHECKING:
    from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Reported, Target, Traffic
    from dynaspec.bench.serving.sweep import Cell, Start, SweepPlan
    from dynaspec.control.policies.short_names import PolicySpec

_SERVER, _LOAD, _ASKED, _SAMPLING, _SAID = "Server", "Load", "Requests", "Sampling", "Result"

Backend = Annotated[
    str,
    in_panel(
        _SERVER,
        "openai (completions), openai-chat; vllm and dynaspec are other words for openai.",
        *("--backend", "--endpoint-type"),
    ),
]
ApiKey = Annotated[
    str | None, in_panel(_SERVER, "Key for the server; better in OPENAI_API_KEY, as others see command lines.")
]

Burstiness = Annotated[
    float, in_panel(_LOAD, "1 = Poisson arrivals; less = bursts, more = even distances (gamma distribution).")
]
Seed = Annotated[int, in_panel(_LOAD, "Of the choice of prompts and of arrivals.")]

DatasetName = Annotated[
    str | None, in_panel(_ASKED, "random, sharegpt, custom, spec_bench, gsm8k, prompts or demo; default: random.")
]
DatasetPath = Annotated[Path | None, in_panel(_ASKED, "The data set's file; without a name, its lines say their form.")]
Category = Annotated[
    str | None, in_panel(_ASKED, "Only prompts of this category.", "--category", "--spec-bench-category")
]
OutputLen = Annotated[
    int | None,
    in_panel(
        _ASKED,
        "Most tokens of an answer; default: what the data set says, 128 for random and demo, else 256.",
        *("--output-len", "--max-tokens", "--random-output-len", "--sharegpt-output-len", "--custom-output-len"),
        "--spec-bench-output-len",
        min=1,
    ),
]
InputLen = Annotated[int, in_panel(_ASKED, "Tokens of random prompts.", "--random-input-len", "--input-len", min=1)]
IgnoreEos = Annotated[
    bool, in_panel(_ASKED, "Go on after the end-of-sequence token; random always does.", "--ignore-eos")
]
ExtraBody = Annotated[str | None, in_panel(_ASKED, "Further fields of every request, as JSON.")]

Temperature = Annotated[float | None, in_panel(_SAMPLING, "0 = greedy; default: the server's.")]

MetricPercentiles = Annotated[str, in_panel(_SAID, "Percentiles of them.")]
Goodput = Annotated[
    list[str] | None,
    in_panel(
        _SAID,
        "Limits in ms, such as ttft:200 tpot:20 e2el:5000: requests within all count as good.",
        metavar="NAME:MS…",
    ),
]
DisableTqdm = Annotated[bool, in_panel(_SAID, "No progress.", "--disable-tqdm")]

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Options that are fields of a request under the same names."""
_ALL_FAILED = 1
_TERMINATED = 128 + signal.SIGTERM
"""Exit codes: no request succeeded; stopped from outside."""
_POLICIES = "plain,constant:4,auto"
_LOADS = "1,4,16"
_RUNNING = "server"
"""What a server that runs already is called."""
_NOWHERE = "http://127.0.0.1"
"""Where servers are that have no port yet."""


def serve(
    *,
    backend: Backend = "openai",
    base_url: Annotated[str | None, in_panel(_SERVER, "The server's address, instead of host and port.")] = None,
    host: Annotated[str, in_panel(_SERVER, "The server's host.")] = "127.0.0.1",
    port: Annotated[int, in_panel(_SERVER, "The server's port.")] = 8000,
    endpoint: Annotated[str | None, in_panel(_SERVER, "Path of the requests; default: the backend's.")] = None,
    model: Annotated[
        str | None, in_panel(_SERVER, "Model to ask for; default: the first that the server lists.")
    ] = None,
    served_model_name: Annotated[str | None, in_panel(_SERVER, "Its name in requests, if that is another.")] = None,
    tokenizer: Annotated[
        str | None, in_panel(_SERVER, "Checkpoint whose tokenizer counts and cuts prompts; default: ask the server.")
    ] = None,
    api_key: ApiKey = None,
    header: Annotated[list[str] | None, in_panel(_SERVER, "Further headers, KEY=VALUE.", metavar="KEY=VALUE…")] = None,
    request_id_prefix: Annotated[
        str | None, in_panel(_SERVER, "What X-Request-Id begins with; default: one of this run.")
    ] = None,
    ready_check_timeout_sec: Annotated[
        float,
        in_panel(
            _SERVER,
            "Seconds to wait for the server, and then for a first request; 0 = neither is tried.",
            "--ready-check-timeout-sec",
            min=0,
        ),
    ] = 0.0,
    num_prompts: Annotated[int, in_panel(_LOAD, "Requests to send.", min=1)] = 1000,
    request_rate: Annotated[float, in_panel(_LOAD, "Requests a second; inf = all at once.")] = math.inf,
    burstiness: Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, in_panel(_LOAD, "Most requests under way at once; default: no limit.", min=1)
    ] = None,
    num_warmups: Annotated[int, in_panel(_LOAD, "Times that the first request is sent beforehand.", min=0)] = 0,
    seed: Seed = 0,
    dataset_name: DatasetName = None,
    dataset_path: DatasetPath = None,
    category: Category = None,
    output_len: OutputLen = None,
    input_len: InputLen = 1024,
    range_ratio: Annotated[
        float, in_panel(_ASKED, "Random lengths lie within this share of their mean.", "--random-range-ratio")
    ] = 0.0,
    prefix_len: Annotated[
        int, in_panel(_ASKED, "Tokens that random prompts begin with, all the same.", "--random-prefix-len")
    ] = 0,
    disable_shuffle: Annotated[
        bool, in_panel(_ASKED, "Prompts in the order of the file.", "--disable-shuffle")
    ] = False,
    no_oversample: Annotated[
        bool, in_panel(_ASKED, "No prompt twice, even if there are too few.", "--no-oversample")
    ] = False,
    ignore_eos: IgnoreEos = False,
    extra_body: ExtraBody = None,
    acceptance: Annotated[
        bool | None,
        in_panel(_ASKED, "Ask for what became of each request's drafts; default: if the server is dynaspec's."),
    ] = None,
    temperature: Temperature = None,
    top_p: Annotated[float | None, in_panel(_SAMPLING, "Keep a token while the mass before it is below this.")] = None,
    top_k: Annotated[int | None, in_panel(_SAMPLING, "Keep so many of the most probable tokens.")] = None,
    min_p: Annotated[float | None, in_panel(_SAMPLING, "Keep tokens with so much of the largest probability.")] = None,
    frequency_penalty: Annotated[
        float | None, in_panel(_SAMPLING, "Above 0: the more often seen, the less likely.")
    ] = None,
    presence_penalty: Annotated[float | None, in_panel(_SAMPLING, "Above 0: tokens seen are less likely.")] = None,
    repetition_penalty: Annotated[float | None, in_panel(_SAMPLING, "Above 1: tokens seen are less likely.")] = None,
    percentile_metrics: Annotated[
        str, in_panel(_SAID, "Times to report: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: MetricPercentiles = "50,90,95,99",
    goodput: Goodput = None,
    disable_tqdm: DisableTqdm = False,
    save_result: Annotated[bool, in_panel(_SAID, "Write the result to a JSON file.", "--save-result")] = False,
    save_detailed: Annotated[
        bool, in_panel(_SAID, "The same, with a value for every request.", "--save-detailed")
    ] = False,
    result_dir: Annotated[Path, in_panel(_SAID, "The file's folder.")] = Path(),
    result_filename: Annotated[
        str | None,
        in_panel(_SAID, "Its name; default: LABEL-RATEqps[-concurrencyN]-MODEL-TIME.json."),
    ] = None,
    label: Annotated[str | None, in_panel(_SAID, "Name of the run; default: the backend's.")] = None,
    metadata: Annotated[
        list[str] | None,
        in_panel(_SAID, "Remarks for the file, KEY=VALUE.", metavar="KEY=VALUE…"),
    ] = None,
) -> None:
    """Send requests to a running server that speaks OpenAI's protocol: throughput, latencies, goodput, acceptance.

    Flags and figures are those of vllm bench serve. The exit code is 1 if no request succeeded.
    """
    options = dict(locals())
    from dynaspec.bench.serving.load import run_load_test
    from dynaspec.bench.serving.report import as_document, as_report, details, result_name

    settings, remarks = _settings_of(options, _target_of(options)), _pairs("--metadata", metadata)
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
    api_key: ApiKey = None,
    backend: Backend = "openai",
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Start servers anew for every round, so that memory holds one.")
    ] = False,
    ready_check_timeout_sec: Annotated[float, typer.Option(help="Seconds that a server gets to start.", min=1)] = 600,
    max_concurrency: Annotated[
        str, typer.Option(help=f"Most requests at once, separated by commas; default: {_LOADS}.")
    ] = "",
    request_rate: Annotated[str, typer.Option(help="Requests a second: _numbers, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(help="Times that everything runs; medians are shown.", min=1)] = 1,
    num_prompts: Annotated[int, typer.Option(help="Requests of each load, at least.", min=1)] = 32,
    prompts_per_client: Annotated[
        int, typer.Option(help="And at least so many for each that may be under way.", min=1)
    ] = 4,
    burstiness: Burstiness = 1.0,
    seed: Seed = 0,
    dataset_name: DatasetName = None,
    dataset_path: DatasetPath = None,
    category: Category = None,
    output_len: OutputLen = None,
    input_len: InputLen = 1024,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = None,
    extra_body: ExtraBody = None,
    metric_percentiles: MetricPercentiles = "50,90,95,99",
    goodput: Goodput = None,
    disable_tqdm: DisableTqdm = False,
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


def _settings_of(options: Mapping[str, Any], target: Target) -> LoadSettings:
    """Settings from options by their names; those that a command does not have keep their defaults.

    Raises:
        ConfigError: a value that cannot be.
    """
    from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Traffic

    workload = _chosen(options, LoadWorkload)
    if options.get("disable_shuffle"):
        workload["shuffle"] = False
    if options.get("no_oversample"):
        workload["oversample"] = False
    return LoadSettings(
        target=target,
        workload=LoadWorkload(**workload),
        traffic=Traffic(**_chosen(options, Traffic)),
        reported=_reported_of(options),
        fields=_fields_of(options),
        tokenizer=options.get("tokenizer"),
        acceptance=options.get("acceptance"),
    )


def _target_of(options: Mapping[str, Any]) -> Target:
    """A running server; its key is the environment's where none is given."""
    from dynaspec.bench.serving.server import Target, base_address

    return Target(
        root=base_address(options["base_url"], options["host"], options["port"]),
        backend=options["backend"],
        endpoint=options["endpoint"],
        model=options["served_model_name"] or options["model"],
        api_key=options["api_key"] or os.environ.get("OPENAI_API_KEY") or None,
        headers=_pairs("--header", options["header"]),
        request_id_prefix=options["request_id_prefix"] or _new_prefix(),
        ready_check_timeout_s=options["ready_check_timeout_sec"],
    )


def _new_prefix() -> str:
    """What the ids of this run's requests begin with."""
    return f"bench-{uuid4().hex[:8]}-"


def _reported_of(options: Mapping[str, Any]) -> Reported:
    """
    Raises:
        ConfigError: an unknown time, or something that is no number.
    """
    from dynaspec.bench.serving.server import Reported

    goals = _pairs("--goodput", options["goodput"], ":")
    reported = Reported(
        percentiles=_numbers("--metric-percentiles", options["metric_percentiles"]),
        goals_ms={name: _number("--goodput", value) for name, value in goals.items()},
    )
    if "percentile_metrics" not in options:
        return reported
    names = (part.strip() for part in options["percentile_metrics"].split(","))
    return replace(reported, metrics=tuple(dict.fromkeys(name for name in names if name)))


def _fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of every request: sampling that was given, then the extra body, which has the last word.

    Raises:
        ConfigError: the extra body is no JSON object.
    """
    given: dict[str, Any] = {name: options[name] for name in _SAMPLING_FIELDS if options.get(name) is not None}
    if options["ignore_eos"]:
        given["ignore_eos"] = True
    return given | json_object("--extra-body", options["extra_body"])


def _pairs(option: str, given: Sequence[str] | None, sign: str = "=") -> dict[str, str]:
    """
    Raises:
        ConfigError: one of them is not a key and a value with the sign between.
    """
    found: dict[str, str] = {}
    for text in given or ():
        key, found_sign, value = text.partition(sign)
        if not found_sign or not key.strip():
            raise ConfigError(f"{option} has {text!r}; expected KEY{sign}VALUE")
        found[key.strip()] = value.strip()
    return found


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """
    Raises:
        ConfigError: not _numbers with commas between.
    """
    found = tuple(_number(option, part) for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError(f"{option} is {text!r}; expected _numbers, separated by commas")
    return found


def _chosen(options: Mapping[str, Any], kind: type[LoadWorkload] | type[Traffic]) -> dict[str, Any]:
    """The options that are fields of this kind of settings."""
    return {field.name: options[field.name] for field in fields(kind) if field.name in options}


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} has {text!r}; expected a number") from None


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
            [_whole(number) for number in _numbers("--max-concurrency", limits)] if limits else [],
            _numbers("--request-rate", options["request_rate"]) if options["request_rate"] else [],
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
        request_id_prefix=_new_prefix(),
    )
    loads = ("max_concurrency", "request_rate")
    settings = _settings_of({name: value for name, value in options.items() if name not in loads}, target)
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
        raise ConfigError(f"--max-concurrency has {number:g}; expected whole _numbers")
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
