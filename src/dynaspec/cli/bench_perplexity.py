"""``dynaspec bench perplexity``: what rounding a model's weights costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dynaspec.cli import options as o
from dynaspec.cli.console import result_console, status
from dynaspec.engine.config import EngineConfig


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
