"""``dynaspec simulate``: policies over acceptance traces, for loads and hardware nobody has at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli.console import note, result_console, status
from dynaspec.cli.options import in_panel
from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import write_json

if TYPE_CHECKING:
    from dynaspec.control.profile import Profile
    from dynaspec.simulate.comparison import Case, SimulatedResult
    from dynaspec.simulate.costs import CostModel
    from dynaspec.simulate.simulator import HostConfig
    from dynaspec.simulate.traces import Trace

_FILE_WIDTH = 130
"""Columns of the table where there is no terminal to fit it into."""
_DEFAULT_SEATS = 64
_DEFAULT_ACCEPTANCE = "0.7"


def simulate(
    *,
    policies: Annotated[
        str,
        typer.Option(
            help="Separated by commas: plain, constant:K, heuristic[:K], heuristic_transient[:K], "
            "confidence[:T[:K[:SCOPE]]], schedule:LO-HI=K/…, goodput[:FILE[:K]], elastic[:A/B/C], "
            "auto[:K], oracle, oracle:cost."
        ),
    ] = "plain,constant:2,constant:4,goodput,auto,oracle:cost",
    gpu: Annotated[
        str | None, in_panel("Cost", "Roofline of this GPU: H100, H200, A100, B200, L40S, MI300X, …")
    ] = None,
    gpus: Annotated[int, in_panel("Cost", "GPUs of a node, with tensor parallelism.", min=1)] = 1,
    target: Annotated[str, in_panel("Cost", "Model whose size and shape the roofline has.")] = "llama-3.1-8b",
    draft: Annotated[str, in_panel("Cost", "Model that drafts.")] = "llama-3.2-1b",
    draft_gpus: Annotated[int, in_panel("Cost", "GPUs that the drafter is spread over.", min=1)] = 1,
    profile: Annotated[Path | None, in_panel("Cost", "Goodput profile (JSON) whose step times are used.")] = None,
    costs: Annotated[Path | None, in_panel("Cost", "Measured passes: JSON with target and drafter curves.")] = None,
    time_noise: Annotated[float, in_panel("Cost", "Relative noise of step times.", min=0.0, max=1.0)] = 0.0,
    trace: Annotated[Path | None, in_panel("Trace", "Recorded requests (JSON lines), or a decision log.")] = None,
    requests: Annotated[int, in_panel("Trace", "Requests of a synthetic trace.", min=1)] = 512,
    acceptance: Annotated[
        str | None,
        in_panel("Trace", "Mean conditional acceptance; several with commas: phases of equal size. Default: 0.7."),
    ] = None,
    concentration: Annotated[float, in_panel("Trace", "How alike requests are: strength of the Beta.")] = 12.0,
    decay: Annotated[float, in_panel("Trace", "Factor on acceptance from slot to slot.")] = 1.0,
    auc: Annotated[float, in_panel("Trace", "How well the drafter's confidence tells: 0.5 = not at all.")] = 0.8,
    confidence_noise: Annotated[float, in_panel("Trace", "Noise in the confidence's logit.")] = 0.0,
    prompt_tokens: Annotated[float, in_panel("Trace", "Mean prompt length.")] = 512,
    output_tokens: Annotated[float, in_panel("Trace", "Mean output length.")] = 256,
    spread: Annotated[float, in_panel("Trace", "Deviation of the logarithm of both; 1 = long tails.")] = 0.5,
    max_tokens: Annotated[int | None, in_panel("Trace", "Most output tokens; default: the longest.", min=1)] = None,
    save_trace: Annotated[Path | None, in_panel("Trace", "Write the first trace to this file.")] = None,
    arrivals: Annotated[
        str,
        in_panel(
            "Load",
            "poisson:RATE, burst:RATE:SIZE, shift:RATE:RATE[:…], rollout, closed:USERS[:THINK] or trace; "
            "requests a second, of all nodes together.",
        ),
    ] = "closed:32",
    nodes: Annotated[int, in_panel("Load", "Equal nodes that share the requests.", min=1)] = 1,
    router: Annotated[str, in_panel("Load", "round_robin or random.")] = "round_robin",
    max_num_seqs: Annotated[int | None, in_panel("Load", "Most requests that a node runs at once.", min=1)] = None,
    max_num_batched_tokens: Annotated[int, in_panel("Load", "Most target rows of a step.", min=1)] = 8192,
    max_draft: Annotated[int, in_panel("Load", "Longest draft that can run.", min=1, max=64)] = 16,
    parallel_heads: Annotated[bool, in_panel("Load", "One drafter pass gives all tokens of a draft.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the first repetition.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, each with traces and arrivals of its own.")] = 1,
    output_json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) to this file.")] = None,
    save_profile: Annotated[Path | None, typer.Option(help="Write the goodput profile of cost and trace.")] = None,
    show_schedule: Annotated[
        bool, typer.Option("--show-schedule", help="Print the best k by batch size, lines of 'lo hi k', and exit.")
    ] = False,
) -> None:
    """Run the production policies over acceptance traces on simulated hardware, and compare them.

    One cost model is needed: --gpu, --profile or --costs.
    """
    options = dict(locals())
    job = _Job(options)
    if show_schedule:
        _print_schedule(job)
        return
    _check_folders(output_json, plot, save_profile, save_trace)
    cases = job.cases()
    if save_trace is not None:
        from dynaspec.simulate.recorded import save_trace as write_trace

        write_trace(job.traces[0], save_trace)
    if save_profile is not None:
        _save_profile(job.profile(), save_profile)
    results = _compare(job, cases)
    _show(job, results, output_json, plot)


@dataclass
class _Job:
    """The command's options as the parts of a simulation."""

    options: dict[str, Any]

    def __post_init__(self) -> None:
        from dynaspec.simulate.simulator import HostConfig

        options = self.options
        self.measured = self._measured()
        self.costs: CostModel = self._costs()
        self.traces: list[Trace] = []
        self.seats = options["max_num_seqs"] or (max(self.measured.batch_stats) if self.measured else _DEFAULT_SEATS)
        longest = options["max_draft"]
        if self.measured is not None:
            # A profile says nothing of longer drafts: they would look free.
            longest = min(longest, self.measured.max_num_speculative_tokens)
            if self.seats > max(self.measured.batch_stats):
                note(f"note: the profile ends at batch size {max(self.measured.batch_stats)}; beyond it, times stay")
        self.host: HostConfig = HostConfig(
            max_num_seqs=self.seats,
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_draft=longest,
            passes_per_draft="one" if options["parallel_heads"] else "per_token",
        )

    @property
    def acceptance(self) -> tuple[float, ...]:
        text = self.options["acceptance"] or _DEFAULT_ACCEPTANCE
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(f"--acceptance is {text!r}; expected numbers from 0 to 1, separated by commas") from None
        bad = [value for value in values if not 0.0 <= value <= 1.0]
        if bad:
            raise ConfigError(f"--acceptance is {text!r}; expected numbers from 0 to 1, not {bad[0]:g}")
        return values

    def cases(self) -> list[list[Case]]:
        """For each seed, its nodes; the traces are kept."""
        import numpy as np

        from dynaspec.simulate.comparison import Case, spread_over_nodes
        from dynaspec.simulate.traces import parse_arrivals

        options, cases = self.options, []
        if options["router"] not in ("round_robin", "random"):
            raise ConfigError(f"--router is {options['router']!r}; expected 'round_robin' or 'random'")
        for seed in range(options["seed"], options["seed"] + options["repeats"]):
            rng = np.random.default_rng(seed)
            trace = self.trace(rng)
            self.traces.append(trace)
            whole = Case(seed, trace, parse_arrivals(options["arrivals"], trace, rng))
            cases.append(spread_over_nodes(whole, options["nodes"], options["router"], rng))
        return cases

    def trace(self, rng: Any) -> Trace:
        from dynaspec.simulate.recorded import load_trace
        from dynaspec.simulate.traces import Lengths, Synthetic

        options = self.options
        if options["trace"] is not None:
            if options["acceptance"] is not None:
                raise ConfigError("--acceptance was given together with --trace; expected one or the other")
            return load_trace(options["trace"], rng)
        return Synthetic(
            requests=options["requests"],
            acceptance=self.acceptance,
            concentration=options["concentration"],
            decay=options["decay"],
            auc=options["auc"],
            noise=options["confidence_noise"],
            prompt=Lengths(options["prompt_tokens"], options["spread"]),
            output=Lengths(options["output_tokens"], options["spread"], options["max_tokens"]),
            max_tokens=options["max_tokens"],
        ).draw(rng)

    def profile(self) -> Profile:
        """Step times of the cost model with the first trace's acceptance; a profile that was given stays itself."""
        import numpy as np

        from dynaspec.simulate.costs import batch_sizes, profile_of

        if self.measured is not None:
            return self.measured
        trace = self.traces[0] if self.traces else self.trace(np.random.default_rng(self.options["seed"]))
        traits = self.host.limits(has_confidence=trace.confidence is not None).proposers[0]
        batches = batch_sizes(self.seats)
        return profile_of(self.costs, trace, traits, batches=batches, longest=self.host.max_draft)

    def _measured(self) -> Profile | None:
        from dynaspec.control.profile import Profile

        path = self.options["profile"]
        return None if path is None else Profile.load(path)

    def _costs(self) -> CostModel:
        from dynaspec.simulate.costs import CurveCosts, ProfileCosts
        from dynaspec.simulate.roofline import RooflineCosts, find_gpu, find_model

        options = self.options
        given = [f"--{name}" for name in ("gpu", "profile", "costs") if options[name] is not None]
        if len(given) != 1:
            said = f"{' and '.join(given)} were" if given else "no cost model was"
            raise ConfigError(f"{said} given; expected one of --gpu, --profile and --costs")
        if self.measured is not None:
            return ProfileCosts(self.measured, name=Path(options["profile"]).name)
        if options["costs"] is not None:
            return CurveCosts.load(options["costs"])
        return RooflineCosts(
            find_model(options["target"]),
            find_model(options["draft"]),
            find_gpu(options["gpu"]),
            gpus=options["gpus"],
            draft_gpus=options["draft_gpus"],
        )


def _print_schedule(job: _Job) -> None:
    from dynaspec.control.policies.goodput import schedule_of
    from dynaspec.simulate.costs import with_acceptance

    profile = job.profile()
    if job.options["acceptance"] is not None:
        if len(job.acceptance) != 1:
            raise ConfigError(f"--acceptance is {job.options['acceptance']!r}; expected one number for a schedule")
        profile = with_acceptance(profile, job.acceptance[0])
    for low, high, k in schedule_of(profile, job.host.max_draft, job.seats):
        typer.echo(f"{low} {high} {k}")


def _compare(job: _Job, cases: list[list[Case]]) -> list[SimulatedResult]:
    from dynaspec.simulate.comparison import compare
    from dynaspec.simulate.policies import parse_policies

    specs = parse_policies(job.options["policies"], job.profile)
    with status("simulating") as tell:
        return compare(specs, cases, job.costs, job.host, time_noise=job.options["time_noise"], tell=tell)


def _show(job: _Job, results: list[SimulatedResult], output_json: Path | None, plot: Path | None) -> None:
    from dynaspec.simulate.comparison import as_table, document

    options = job.options
    size = f"{sum(len(trace) for trace in job.traces)} requests"
    fleet = f", {options['nodes']} nodes" if options["nodes"] > 1 else ""
    title = f"{job.costs.name}{fleet}: {size}, {options['arrivals']}, up to {job.seats} at a time"
    result_console(_FILE_WIDTH).print(as_table(results, title))
    if output_json is not None:
        write_json(output_json, document(results, options, job.costs.name))
        note(f"written to {output_json}")
    if plot is not None:
        from dynaspec.simulate.plots import plot_comparison

        plot_comparison(results, plot, title)
        note(f"written to {plot}")


def _save_profile(profile: Profile, path: Path) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None
    note(f"written to {path}")


def _check_folders(*paths: Path | None) -> None:
    """Before the work whose results go there."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"the folder {str(path.parent)!r} is not there; expected one to write {path.name} to")
