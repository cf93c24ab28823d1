"""``dynaspec recommend``: what to configure, by what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dynaspec.cli.console import note
from dynaspec.contract.errors import ConfigError

if TYPE_CHECKING:
    from dynaspec.bench.recommend.report import Recommendation


def recommend(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A profile (dynaspec profile), decision logs (--decision-log), or both.", show_default=False
        ),
    ],
    *,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Settings for dynaspec, vllm or transformers; default: where the logs come from, or dynaspec."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Requests at once, separated by commas; default: powers of two as far as was measured."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The target's name in the settings; default: the log's.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="The drafter's; default: the log's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say which speculation to configure, with settings to paste.

    Plain decoding, every fixed length, a schedule by batch size and auto are simulated, under the controllers that
    engines run, over the acceptance and the step times that were measured: on any host.
    """
    loads = _loads(concurrency)
    from dynaspec.bench.progress import stages
    from dynaspec.bench.recommend.evidence import gather
    from dynaspec.bench.recommend.report import recommend as advise
    from dynaspec.bench.recommend.settings import Names
    from dynaspec.simulate.planning import batch_sizes

    evidence = gather(files)
    names = Names(
        model or evidence.model or "TARGET", draft_model or evidence.drafter or "DRAFTER", evidence.profile_path
    )
    with stages() as tell:
        found = advise(evidence, loads or batch_sizes(evidence.most), backend, names, tell)
    if as_json:
        typer.echo(json.dumps(found.document(), indent=2, ensure_ascii=False))
        return
    _show(found)


def _show(found: Recommendation) -> None:
    from dynaspec.bench.recommend.report import as_table
    from dynaspec.cli.bench_console import result_console

    console = result_console()
    console.print(as_table(found.predicted))
    for line in (found.advice, *found.verdict.reasons):
        console.print(line, soft_wrap=True)
    for paste in found.settings:
        console.print(f"\n{paste.title}:\n", soft_wrap=True)
        console.print(paste.text, soft_wrap=True, markup=False)
    for line in found.notes:
        note(f"note: {line}")


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
