"""docs/moving-from-vllm.md says of each flag, field, key and metric what the code does."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from dynaspec.cli.vllm_flags import FOREIGN, RENAMED, translate
from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.resolve import UNAVAILABLE_METHODS
from dynaspec.engine.vllm_options import SERVER_ONLY, Foreign
from dynaspec.observe.families import ENGINE_FAMILIES
from dynaspec.server.protocol.base import Unsupported
from dynaspec.server.protocol.chat import ChatRequest
from dynaspec.server.protocol.completions import CompletionRequest
from dynaspec.server.protocol.generation import SpeculationOptions
from unit.deploy.serve_command import DOCS, flags

TEXT = (DOCS / "moving-from-vllm.md").read_text()
FIELDS = [*ChatRequest.model_fields.items(), *CompletionRequest.model_fields.items()]


def section(heading: str) -> str:
    """What stands between a heading and the next."""
    [found] = re.findall(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def rows(heading: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def paragraph(opening: str) -> set[str]:
    """Names in the paragraph that begins so."""
    [found] = re.findall(rf"^\*\*{opening}\*\*:(.*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`(\w+)`", found))


def code(text: object) -> str:
    return f"`{text}`"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_every_flag_is_either_the_same_or_only_here() -> None:
    same = set(re.findall(r"`(--[\w-]+)`", section("The same")))
    only = set(re.findall(r"`(--[\w-]+)`", section("Only here")))
    assert not same & only
    assert same | only == {one for one in flags("serve") if not one.startswith("--no-")} - {"--help", "-h"}


def test_flags_under_another_name() -> None:
    renamed = {
        code(flag(name)): code(flag(("no_" if there.negated else "") + there.name)) for name, there in RENAMED.items()
    }
    assert dict(rows("Under another name")) == renamed


def _accepted(there: Foreign) -> str:
    return ", ".join(code(str(value).lower() or '""') for value in there.same) or "nothing"


@pytest.mark.parametrize(
    ("heading", "ignored"), [("Ignored with a warning", True), ("Only where they ask for what happens anyway", False)]
)
def test_options_that_are_not_here(heading: str, ignored: bool) -> None:
    told = {
        code(flag(name)): (_accepted(there), there.why) for name, there in FOREIGN.items() if there.ignored is ignored
    }
    assert {name: (accepted, why) for name, accepted, why in rows(heading)} == told


def test_options_of_llm_alone() -> None:
    told = {code(name): (_accepted(there), there.why) for name, there in SERVER_ONLY.items()}
    assert {name: (accepted, why) for name, accepted, why in rows("Of `LLM` alone")} == told


def test_the_sentences_about_options() -> None:
    with pytest.raises(ConfigError) as raised:
        translate("load_format", "dummy")
    assert f"error: {raised.value}" in re.sub(r"\s+", " ", TEXT)


def test_the_python_modules_are_there() -> None:
    cells = rows("Imports")
    assert len(cells) > 5
    for _, here in cells:
        module, name = re.fullmatch(r"`from (\S+) import (\w+)`", here).groups()  # type: ignore[union-attr]
        assert hasattr(import_module(module), name)


def _why(metadata: list[object]) -> str | None:
    return next((mark.why for mark in metadata if isinstance(mark, Unsupported)), None)


def test_every_field_is_somewhere() -> None:
    refused = {name for name, field in FIELDS if _why(field.metadata)} - {"echo"}
    idle = {name for name, field in FIELDS if (field.description or "").startswith("Of no effect")}
    ours = {"speculation", "max_draft_tokens", "timings_per_token"}
    assert paragraph("The same") == {name for name, _ in FIELDS} - refused - idle - ours
    assert paragraph("Accepted, of no effect") == idle
    assert paragraph("Only here") == ours | SpeculationOptions.model_fields.keys()


def test_the_sentences_of_refused_fields() -> None:
    told = {(name, why) for name, field in FIELDS if (why := _why(field.metadata))}
    assert {(cells[0].split("`")[1], cells[1]) for cells in rows("Fields of requests")} == told


def test_unknown_fields_are_unknown() -> None:
    unknown = paragraph("Newer or rarer fields of vLLM's that are unknown here")
    assert unknown
    assert not unknown & {name for name, _ in FIELDS}


def test_metrics() -> None:
    known = {family.name for family in ENGINE_FAMILIES}
    before, _, after = section("Metrics").partition("Beyond these")
    same = set(re.findall(r"`(\w+)`", before))
    assert len(same) > 20
    assert same <= known
    gone = {name for cells in rows("Metrics") for name in re.findall(r"`(\w+)`", cells[0])}
    assert not gone & known
    assert {name for cells in rows("Metrics") for name in re.findall(r"`(\w\w+)`", cells[1])} <= known
    assert "engine" in re.findall(r"`(\w+)`", after)


def test_methods_that_are_refused() -> None:
    [row] = [cells for cells in rows("speculative_config") if cells[1].startswith("refused")]
    assert set(re.findall(r"`(\w+)`", row[0])) == {"method", *UNAVAILABLE_METHODS}
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.parse({"method": "dflash", "model": "drafter"})
    assert code(str(raised.value).partition("; expected")[0]) in row[1]


def test_a_draft_length_alone_is_the_most_that_auto_drafts() -> None:
    config = SpeculativeConfig.parse({"model": "drafter", "num_speculative_tokens": 5})
    assert config is not None
    assert (config.method, config.policy, config.longest_draft) == ("draft_model", "auto", 5)
    assert config.draft_sample_method == "probabilistic"
