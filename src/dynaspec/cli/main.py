"""The console entry ``dynaspec``: the commands, and ``collect-env``, what a bug report or a figure should come with."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dynaspec.cli import bench, chat, demo, explain, generate, profile, serve, simulate, train
from dynaspec.cli.console import print_error
from dynaspec.cli.options import SpacedValues
from dynaspec.compile_worker import compile_worker
from dynaspec.contract.errors import DynaspecError
from dynaspec.runtime import prepare_process
from dynaspec.version import __version__

BAD_INPUT = 2
"""Exit code where what was given cannot work; the shell's own for wrong usage."""

EXTRAS = {
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "matplotlib": "bench",
    "aiohttp": "bench",
}
"""The extra that brings a module which the package's core does without."""
INSTALL = {extra: f"pip install 'dynaspec[{extra}]'" for extra in EXTRAS.values()}


def collect_env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, processor, threads, settings, and whether a row's result depends on its batch here."""
    from dynaspec.bench.provenance import check_invariance, provenance

    facts = provenance() | {"row_invariant_gemm": check_invariance()}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = list(_flat(facts))
    width = max(len(name) for name, _ in rows)
    typer.echo("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            rows.extend(_flat(value, f"{prefix}{name}."))
        else:
            rows.append((prefix + name, _text(value)))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value in (None, {}) else str(value)


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("demo")(demo.demo)
app.command("collect-env")(collect_env)
app.command("profile", cls=SpacedValues)(profile.profile)
app.command("recommend")(explain.recommend)
app.command("explain")(explain.explain)
app.command("simulate")(simulate.simulate)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dynaspec {__version__}")
        raise typer.Exit


@app.callback()
def dynaspec(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exact speculative decoding whose draft length is decided at run time."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)


def main() -> None:
    """Runs the command line. What the user can mend is one line on stderr, never a traceback."""
    prepare_process()
    compile_worker.allow()
    try:
        app()
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(BAD_INPUT)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print_error(
            f"this command needs {missing}, which is not installed; install it with: {INSTALL[EXTRAS[missing]]}"
        )
        sys.exit(BAD_INPUT)
