"""Prints the table of docs/methods.md, which is made from the registry of methods; with --write puts it there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS, Method
from dynaspec.control.config import SpeculativeConfig
from dynaspec.hosts.transformers.setup import resolve_setup
from dynaspec.hosts.vllm.launch import BACKEND_KEY, speculation_arguments
from dynaspec.simulate.simulator import HostConfig

BEGIN, END = "<!-- methods-table -->\n", "<!-- /methods-table -->\n"
COLUMNS = (
    *("method", "drafter", "`model`", "reads the target's hidden states", "drafter passes a draft"),
    *("drafts can be drawn", "has a confidence", "drafts trees", "dynaspec", "vLLM", "Transformers", "simulator"),
)
_PASSES = {"none": "none", "one": "one", "per_token": "one a token"}
Row = tuple[str, ...]


def rows() -> list[Row]:
    """A row a method, in the registry's order; ``COLUMNS`` names the cells."""
    return [_row(method) for method in METHODS.values()]


def as_markdown() -> str:
    """The table."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def replaced(page: str) -> str:
    """A page with the table between its markers.

    Raises:
        ConfigError: it has no markers.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ConfigError(f"the page has no place for the table; expected the lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}{as_markdown()}{end}{tail}"


def write(path: Path) -> None:
    """Puts the table into a page.

    Raises:
        ConfigError: it has no markers.
    """
    path.write_text(replaced(path.read_text("utf-8")), "utf-8")


def _row(method: Method) -> Row:
    config: dict[str, Any] = {"method": method.name}
    config |= {} if method.checkpoint is None else {"model": "drafter"}
    config |= {} if method.key is None else {method.key: 1}
    return (
        ", ".join(f"`{name}`" for name in (method.name, *method.aliases)),
        method.what,
        method.checkpoint or "none",
        _yes(method.reads_target),
        _PASSES[method.traits.passes_per_draft],
        _yes(_takes(_embedded, config | {"draft_sample_method": "probabilistic"})),
        _yes(method.traits.has_confidence),
        _yes(method.traits.trees),
        _yes(_takes(_embedded, config)),
        _on_vllm(config),
        _yes(_takes(_transformers, config)),
        _yes(_takes(_simulator, {"passes_per_draft": method.traits.passes_per_draft})),
    )


def _on_vllm(config: Mapping[str, Any]) -> str:
    """Whose code can draft there."""
    found = [
        name
        for name, backend in (("its own drafter", "vllm"), ("dynaspec's", "dynaspec"))
        if _takes(_vllm, {**config, BACKEND_KEY: backend})
    ]
    return ", ".join(found) or "no"


def _takes(host: Callable[[Mapping[str, Any]], object], config: Mapping[str, Any]) -> bool:
    try:
        host(config)
    except ConfigError:
        return False
    return True


def _embedded(config: Mapping[str, Any]) -> object:
    return SpeculativeConfig.parse(config)


def _vllm(config: Mapping[str, Any]) -> object:
    return speculation_arguments(config, {})


def _transformers(config: Mapping[str, Any]) -> object:
    """With an assistant where the method has a model: a model that Transformers has loaded."""
    target = SimpleNamespace(name_or_path="target", generation_config=None)
    assistant = SimpleNamespace(name_or_path=config.get("model"), generation_config=None) if "model" in config else None
    return resolve_setup(dict(config), target, assistant, {})


def _simulator(config: Mapping[str, Any]) -> object:
    return HostConfig(**config)


def _yes(true: bool) -> str:
    return "yes" if true else "no"


PAGE = Path(__file__).parents[1] / "docs" / "methods.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    if parser.parse_args().write:
        write(PAGE)
    else:
        print(as_markdown(), end="")


if __name__ == "__main__":
    main()
