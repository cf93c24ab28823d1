"""HTML of the report: one file, no script, nothing from a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #252b33; --soft: #5d6875; --rule: #dde2e8; --page: #ffffff; --card: #f6f8fa;
  --bar: #3f83cf; --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4ea; --soft: #98a3b0; --rule: #343b44; --page: #15181c;
  --card: #1d2127; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 var(--sans); -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; padding-top: 1.1rem; border-top: 1px solid var(--rule); }
p, li { max-width: 46rem; }
p { margin: .5rem 0; }
.soft, figcaption, summary { color: var(--soft); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.2; font-variant-numeric: tabular-nums; font-weight: 650; }
.tile span { color: var(--soft); font-size: .82rem; }
figure { margin: 1.25rem 0; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .75rem 0; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; }
td.bar { width: 14rem; }
td.bar i { display: block; height: .6rem; margin-top: .4rem; border-radius: .2rem; background: var(--bar); }
.split { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; margin: .9rem 0 .4rem; gap: 2px; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }
.keys span { margin-right: 1.4rem; font-size: .9rem; white-space: nowrap; }
details { margin: .75rem 0; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: .5rem; overflow-x: auto; font-size: .82rem; }
"""


def document(title: str, body: Sequence[str]) -> str:
    """The whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(title: str, subtitle: str) -> str:
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>'


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def paragraphs(lines: Sequence[str], *, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return "\n".join(f"<p{kind}>{escape(line)}</p>" for line in lines)


def figure(svg: str, caption: str = "") -> str:
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{said}</figure>"


def tiles(values: Mapping[str, str]) -> str:
    """Large figures, each with what it is."""
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items()
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text at the left, numbers at the right."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def shares(head: Sequence[str], counts: Sequence[tuple[str, int]]) -> str:
    """A table of counts, with a bar for each count's share of all."""
    total = sum(count for _, count in counts) or 1
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = (
        f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{100 * count / total:.1f} %</td>"
        f'<td class="bar"><i style="width:{100 * count / total:.2f}%"></i></td></tr>'
        for name, count in counts
    )
    return f'<div class="scroll"><table><tr>{top}<th></th></tr>{"".join(lines)}</table></div>'


def split(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of parts that make a whole.

    Args:
        parts: name, amount ≥ 0, colour.
    """
    total = sum(amount for _, amount, _ in parts) or 1.0
    bars = (f'<i style="flex:{amount / total:.5f};background:{colour}"></i>' for _, amount, colour in parts)
    keys = (
        f'<span><i class="key" style="background:{colour}"></i>{escape(name)} {100 * amount / total:.0f} %</span>'
        for name, amount, colour in parts
    )
    return f'<div class="split">{"".join(bars)}</div><p class="keys">{"".join(keys)}</p>'


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
