"""Prints the table of docs/methods.md, which is made from the registry of methods; with --write puts it there."""

from __future__ import annotations

import argparse
from pathlib import Path

from dynaspec.bench.method_table import as_markdown, write

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
