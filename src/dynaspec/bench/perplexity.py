"""What rounding a model's weights costs: the perplexity of one text in several forms of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dynaspec.api.llm import LLM
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams

FORMS: Mapping[str, Mapping[str, str]] = {
    **{name: {"dtype": name} for name in ("auto", "float32", "bfloat16", "float16")},
    **{name: {"dtype": "auto", "quantization": name} for name in ("int8", "int4")},
}
"""Names of forms, and the engine's options for each."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of one form."""

    form: str
    value: float
    """e to the mean of −ln p over the tokens."""
    tokens: int
    """That were predicted: all but the first of each window."""


def parse_forms(text: str) -> tuple[str, ...]:
    """Names of forms, separated by commas.

    Raises:
        ConfigError: one is unknown, or there is none.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in FORMS]
    if unknown or not names:
        what = f"there is no form {unknown[0]!r}" if unknown else "no form is given"
        raise ConfigError(f"{what}; expected some of {', '.join(FORMS)}, separated by commas")
    return names


def read_text(path: Path) -> str:
    """
    Raises:
        ConfigError: the file cannot be read, or is no text.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a readable text file: {error}") from error


def windows_of(ids: Sequence[int], window: int, most: int) -> list[list[int]]:
    """The first ``most`` tokens in pieces of ``window``, each read without those before it; a single token that is left
    predicts nothing, so it is left out.

    Raises:
        ConfigError: the text is shorter than two tokens.
    """
    pieces = [list(ids[at : min(at + window, most)]) for at in range(0, min(len(ids), most), window)]
    found = [piece for piece in pieces if len(piece) > 1]
    if not found:
        raise ConfigError(f"the text has {len(ids)} tokens; expected 2 at least")
    return found


def measure(
    model: str, form: str, text: str, window: int, most: int, engine: Mapping[str, Any] | None = None
) -> Perplexity:
    """The perplexity of the text's first ``most`` tokens, see ``windows_of``."""
    options = {"enable_prefix_caching": False, **(engine or {}), **FORMS[form]}
    with LLM(model, **options) as llm:
        windows = windows_of(llm.get_tokenizer().encode(text), window, most)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": piece} for piece in windows], params)
    lost = [
        -probable[token].logprob
        for piece, output in zip(windows, outputs, strict=True)
        for token, probable in zip(piece, output.prompt_logprobs or (), strict=True)
        if probable is not None
    ]
    return Perplexity(form, math.exp(math.fsum(lost) / len(lost)), len(lost))


def table_of(results: Sequence[Perplexity], title: str) -> Table:
    """A row a form; the last column compares with the first row."""
    table = Table(title=title)
    for heading in ("form", "perplexity", "tokens", f"beside {results[0].form}"):
        table.add_column(heading, justify="left" if heading == "form" else "right")
    for one in results:
        change = one.value / results[0].value - 1
        table.add_row(one.form, f"{one.value:.4f}", str(one.tokens), f"{change:+.2%}")
    return table
