"""``dynaspec recommend --prompts``: what to configure, by decoding a user's own prompts in every way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

import typer

from dynaspec.cli import comparison_options as c
from dynaspec.cli.bench_console import result_console
from dynaspec.cli.console import note
from dynaspec.cli.demo_model import known_heads
from dynaspec.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dynaspec.bench.methods import Ways
    from dynaspec.bench.offline import Session
    from dynaspec.bench.recommend_prompts import Advice


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
    from dynaspec.bench.console import stages
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
    c.note_cut(session, prompts)
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
    _show(found, session, options, decide(session.results, found.given), as_json=as_json)


def _show(found: Ways, session: Session, options: dict[str, Any], advice: Advice, *, as_json: bool) -> None:
    from dynaspec.bench import methods as report

    if as_json:
        verdict = {
            "recommendation": advice.way,
            "speculative_config": advice.speculative_config,
            "reasons": list(advice.reasons),
        }
        document = verdict | report.as_document(session, options, found.given)
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
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
