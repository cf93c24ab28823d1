"""``dynaspec explain``: why drafts were as long as they were; ``recommend``: which settings suit a log or prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynaspec.cli import options as o
from dynaspec.cli.console import note, result_console, status
from dynaspec.cli.demo import known_heads
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.result_output import json_text, stages

if TYPE_CHECKING:
    from dynaspec.bench.methods import Ways
    from dynaspec.bench.offline import Session
    from dynaspec.bench.recommend_prompts import Advice
    from dynaspec.explain.recommend import Recommendation


def explain(
    file: Annotated[Path, typer.Argument(help="A decision log, as --decision-log writes it.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The report: one HTML file.")] = Path("report.html"),
) -> None:
    """Make a report of a decision log: what was decided, why, how it did, and what else could have been done."""
    with status(f"reading {file}"):
        from dynaspec.explain.report import analyse, write_report

        analysis = analyse(file)
        write_report(analysis, output, f"Decisions in {file.name}")
    for line in analysis.summary:
        typer.echo(line)
    note(f"written to {output}")


@dataclass(frozen=True, slots=True)
class Trial:
    """How much is decoded, and how."""

    methods: str | None = None
    chat: bool = False
    num_prompts: int | None = None
    """None = all of the file's."""
    max_tokens: int = 96
    temperature: float = 0.0
    rounds: int = 4
    minutes: float = 3.0
    """Fewer prompts if need be."""


def recommend_by_prompts(
    model: str, file: Path, checkpoints: Sequence[str], at_once: int, trial: Trial, *, as_json: bool
) -> None:
    """Measures, and prints the configuration that won with what was measured.

    Raises:
        ConfigError, CheckpointError, CapacityError, RequestError: what was given cannot work.
    """
    from dynaspec.bench.datasets import load_prompts, spread
    from dynaspec.bench.methods import compare_ways, find_ways, host_of_ways
    from dynaspec.bench.recommend_prompts import affordable, decide

    found = find_ways(model, checkpoints, known=known_heads(model), asked=trial.methods)
    given = load_prompts(file)
    chosen = spread(given, trial.num_prompts or len(given))
    params = SamplingParams(temperature=trial.temperature, seed=0, max_tokens=trial.max_tokens)
    engine = {"enable_prefix_caching": False, "max_num_seqs": at_once}
    host = host_of_ways(found, params, engine)
    with stages() as tell:
        tell("timing plain decoding", 0, 1)
        room = affordable(host, found, chosen, params, trial.rounds, 60.0 * trial.minutes, at_once, chat=trial.chat)
        tell("timing plain decoding", 1, 1)
        prompts = spread(chosen, room)
        stage = f"decoding {len(prompts)} prompts in {len(found.ways)} ways"
        total, done = len(found.ways) * (2 + trial.rounds), 0  # loading, a warm-up, the rounds

        def progress(message: str) -> None:
            nonlocal done
            tell(stage, done, total)
            done += 1

        session = compare_ways(found, host, prompts, params, trial.rounds, progress, chat=trial.chat)
        tell(stage, total, total)
    o.note_cut(session, prompts)
    if len(prompts) < len(chosen):
        note(f"note: in {trial.minutes:g} minutes there is time for {len(prompts)} of {len(chosen)} prompts")
    options: dict[str, Any] = {
        "model": found.model,
        "dataset": str(file),
        "methods": trial.methods,
        "num_prompts": len(prompts),
        "prompts_in_file": len(given),
        "chat": trial.chat,
        "max_tokens": trial.max_tokens,
        "rounds": trial.rounds,
        "temperature": trial.temperature,
        "seed": 0,
        "engine": engine,
    }
    _show_ways(found, session, options, decide(session.results, found.given), as_json=as_json)


def _show_ways(found: Ways, session: Session, options: dict[str, Any], advice: Advice, *, as_json: bool) -> None:
    from dynaspec.bench import methods as report

    if as_json:
        verdict = {
            "recommendation": advice.way,
            "speculative_config": advice.speculative_config,
            "reasons": list(advice.reasons),
        }
        document = verdict | report.as_document(session, options, found.given)
        typer.echo(json_text(document))
        return
    console = result_console()
    console.print(report.methods_table(session.results, report.title_of(options)))
    for reason in advice.reasons:
        console.print(reason, soft_wrap=True)
    command = ["dynaspec", "generate", "--model", found.model]
    if advice.speculative_config is None:
        console.print("Configure no speculation:\n", soft_wrap=True)
    else:
        config = json.dumps(dict(advice.speculative_config))
        console.print(f"Configure {advice.way}:\n\n{config}\n", soft_wrap=True, markup=False)
        command += ["--speculative-config", config]
    console.print(join(command), soft_wrap=True, markup=False)
    for line in report.remarks(session):
        note(f"note: {line}")


_trial = partial(o.in_panel, "With prompts")


def recommend(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A profile (dynaspec profile), decision logs (--decision-log), or both; without --prompts.",
            show_default=False,
        ),
    ] = None,
    *,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Settings for dynaspec, vllm or transformers; default: where the logs come from, or dynaspec."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests at once, separated by commas; default: powers of two as far as was measured. With --prompts "
            "one number; default: 1."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The target's name in the settings; default: the log's. With --prompts its checkpoint."),
    ] = None,
    draft_model: Annotated[
        list[str] | None,
        typer.Option(
            *("--draft-model", "--speculative-model"),
            help="The drafter's; default: the log's. With --prompts checkpoints that may draft: give it several times.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        _trial("Instead of files: prompts to decode in every way, one a line; .jsonl: prompt, turns or question."),
    ] = None,
    methods: o.Methods = None,
    chat: Annotated[bool | None, _trial("They are a user's turns, in the model's chat template.", "--chat")] = None,
    num_prompts: Annotated[int | None, _trial("At most so many of them; default: all.", min=1)] = None,
    max_tokens: Annotated[int | None, _trial("Tokens of each continuation; default: 96.", min=1)] = None,
    temperature: Annotated[float | None, _trial("Of the sampling; default: 0, greedy.", min=0)] = None,
    rounds: Annotated[int | None, _trial("Times that every way runs; default: 4.", min=2)] = None,
    minutes: Annotated[
        float | None, _trial("About how long it may take: fewer prompts if need be; default: 3.", min=0.01)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say which speculation to configure, with settings to paste.

    Plain decoding, every fixed length, a schedule by batch size and auto are simulated, under the controllers that
    engines run, over the acceptance and the step times that were measured: on any host. With --prompts everything is
    measured now, on dynaspec's engine: plain decoding, every method and auto.
    """
    loads = _loads(concurrency)
    trial = o.given(
        methods=methods,
        chat=chat,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        rounds=rounds,
        minutes=minutes,
    )
    if prompts is not None:
        _check_alone(prompts, files, backend)
        if model is None:
            raise ConfigError(f"--prompts is {prompts} but there is no --model; expected the target's checkpoint")
        at_once = _one(loads)
        recommend_by_prompts(model, prompts, draft_model or (), at_once, Trial(**trial), as_json=as_json)
        return
    if not files:
        raise ConfigError("there are neither files nor --prompts; expected a profile, decision logs, or prompts")
    if trial:
        flag = "--" + next(iter(trial)).replace("_", "-")
        raise ConfigError(f"{flag} is given without --prompts; expected both, or no {flag}")
    if len(draft_model or ()) > 1:
        raise ConfigError("--draft-model is given several times; expected one name, or --prompts")
    from dynaspec.explain.evidence import gather
    from dynaspec.explain.recommend import Names
    from dynaspec.explain.recommend import recommend as advise
    from dynaspec.simulate.costs import batch_sizes

    evidence = gather(files)
    names = Names(
        model or evidence.model or "TARGET",
        next(iter(draft_model or ()), evidence.drafter) or "DRAFTER",
        evidence.profile_path,
    )
    with stages() as tell:
        found = advise(evidence, loads or batch_sizes(evidence.most), backend, names, tell)
    if as_json:
        typer.echo(json_text(found.document()))
        return
    _show(found)


def _show(found: Recommendation) -> None:
    from dynaspec.explain.recommend import as_table

    console = result_console()
    console.print(as_table(found.predicted))
    for line in (found.advice, *found.verdict.reasons):
        console.print(line, soft_wrap=True)
    for paste in found.settings:
        console.print(f"\n{paste.title}:\n", soft_wrap=True)
        console.print(paste.text, soft_wrap=True, markup=False)
    for line in found.notes:
        note(f"note: {line}")


def _check_alone(prompts: Path, files: Sequence[Path] | None, backend: str | None) -> None:
    """
    Raises:
        ConfigError: something beside the prompts that has no meaning there.
    """
    if files:
        raise ConfigError(f"--prompts is {prompts} but {files[0]} is given too; expected prompts, or profiles and logs")
    if backend not in (None, "dynaspec"):
        raise ConfigError(
            f"--backend is {backend!r}; expected none with --prompts, which dynaspec's own engine decodes, or files"
        )


def _one(loads: tuple[int, ...]) -> int:
    """
    Raises:
        ConfigError: several loads.
    """
    if len(loads) > 1:
        raise ConfigError(
            f"--concurrency is {', '.join(map(str, loads))}; expected one number with --prompts, or files"
        )
    return loads[0] if loads else 1


def _loads(text: str | None) -> tuple[int, ...]:
    """
    Raises:
        ConfigError: no integers above 0.
    """
    if text is None:
        return ()
    try:
        loads = tuple(sorted({int(part) for part in text.replace(",", " ").split()}))
    except ValueError:
        loads = ()
    if not loads or loads[0] < 1:
        raise ConfigError(f"--concurrency is {text!r}; expected integers of at least 1, separated by commas")
    return loads
