"""``dynaspec collect-env``: what a bug report or a figure should come with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer


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
