"""Every way of decoding that a target has: plainly, with each method's drafts, and under ``auto``; side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control import keys
from dynaspec.control.checkpoint import checkpoint_method, own_target
from dynaspec.control.policies.short_names import PLAIN, PolicySpec, policy_options, spec_of
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.format import number_text
from dynaspec.result_output import new_table

from .datasets import BenchPrompt
from .decoders import DecodingHost, host_of
from .offline import (
    PolicyResult,
    Progress,
    Session,
    identical_text,
    percent_text,
    rates_text,
    run_comparison,
)

AUTO = "auto"
Drafters = Mapping[str, Sequence[str | None]]
"""Method → its checkpoints; None stands for one that needs none, or may be in the target's own."""
_TOTAL = "all"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of decoding."""

    name: str
    given: Mapping[str, Any] | None
    """``speculative_config`` as a user writes it; None = plain decoding."""

    @property
    def spec(self) -> PolicySpec:
        """
        Raises:
            ConfigError: what was given cannot work.
        """
        return PolicySpec(self.name, None) if self.given is None else spec_of(self.name, self.given)


@dataclass(frozen=True, slots=True)
class Ways:
    """What is to be compared."""

    model: str
    """The target's checkpoint."""
    ways: tuple[Way, ...]
    """Plain decoding first."""
    left_out: Mapping[str, str]
    """Method → why it is not among them."""

    @property
    def given(self) -> dict[str, Mapping[str, Any] | None]:
        """Way → its ``speculative_config``."""
        return {way.name: way.given for way in self.ways}


def find_ways(
    model: str,
    checkpoints: Sequence[str],
    *,
    known: Sequence[str] = (),
    asked: str | None = None,
    length: int | None = None,
) -> Ways:
    """The ways of a target, in the registry's order.

    A method drafts a fixed number of tokens, so that what is seen is the method's doing; ``auto`` decides with
    everything that one checkpoint allows, so there is one for each of them, or for each method that needs none. Whether
    a drafter is in the target's own checkpoint shows when it is opened.

    Args:
        model: the target's checkpoint; one of a drafter that names its target stands for both.
        checkpoints: of those that draft; their ``config.json`` says of which method.
        known: checkpoints that take part where none of their method is among these.
        asked: names of methods, separated by commas, each perhaps with a policy (``ngram:constant:3``), ``auto`` and
            ``plain``; None = all.
        length: tokens of every draft; None = what the method has by default.

    Raises:
        ConfigError: an unknown method, one without its checkpoint, a checkpoint that nothing uses, or one given twice.
    """
    own = own_target(model)
    if own is not None:
        model, checkpoints = own.target, (*checkpoints, model)
    drafters = _by_method(checkpoints, known)
    names = (*METHODS, AUTO) if asked is None else _names(asked)
    ways, left_out = [Way(PLAIN, None)], {}
    for name in names:
        if name == AUTO:
            ways += _autos(drafters)
        elif drafters[name.partition(":")[0]]:
            ways += _of_method(name, drafters[name.partition(":")[0]], length)
        elif asked is None:
            left_out[name] = f"it needs {_needed(name)}"
        else:
            raise ConfigError(f"the method {name!r} needs {_needed(name)}")
    _check_used(checkpoints, ways)
    return Ways(model, tuple(ways), left_out)


def host_of_ways(found: Ways, params: SamplingParams, engine: Mapping[str, Any]) -> DecodingHost:
    """dynaspec's own engine, in which the ways' engines share their weights and take turns.

    Args:
        engine: fields of ``EngineConfig``.
    """
    specs = [way.spec for way in found.ways]
    return host_of("dynaspec", found.model, specs, params, engine, one_at_a_time=False)


def compare_ways(
    found: Ways,
    host: DecodingHost,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    rounds: int,
    progress: Progress,
    *,
    chat: bool = False,
) -> Session:
    """Decodes the prompts in every way, in rounds that alternate. Ways that this target cannot have are left out.

    Raises:
        ConfigError: no way but plain decoding is left; otherwise see ``run_comparison``.
    """
    specs = [way.spec for way in found.ways]
    session = run_comparison(host, specs, prompts, params, rounds, progress, chat=chat, leave_out=True)
    return replace(session, left_out={**found.left_out, **session.left_out})


def _by_method(checkpoints: Sequence[str], known: Sequence[str]) -> Drafters:
    found: dict[str, list[str | None]] = {name: [] for name in METHODS}
    for i, checkpoint in enumerate(checkpoints):
        if checkpoint in checkpoints[:i]:
            raise ConfigError(f"--speculative-model {checkpoint} is given twice; expected each once")
        found[checkpoint_method(checkpoint)].append(checkpoint)
    given = {method for method, of_method in found.items() if of_method}
    for checkpoint in known:
        if checkpoint_method(checkpoint) not in given:
            found[checkpoint_method(checkpoint)].append(checkpoint)
    for name, method in METHODS.items():
        if not found[name] and method.key is None and (method.checkpoint is None or method.in_target):
            found[name].append(None)
    return found


def _needed(name: str) -> str:
    """What a method that is left out lacks."""
    method = METHODS[name.partition(":")[0]]
    if method.key is not None:
        return f"{method.key}, which is chosen for a target; expected a speculative_config, as generate takes it"
    return f"{method.checkpoint}, which is not given; expected --speculative-model"


def _names(asked: str) -> list[str]:
    names = [name for part in asked.split(",") if (name := part.strip())]
    known = ", ".join((PLAIN, *METHODS, AUTO))
    for i, name in enumerate(names):
        if name.partition(":")[0] not in METHODS and name not in (PLAIN, AUTO):
            raise ConfigError(f"--methods has {name!r}; expected some of {known}, or METHOD:POLICY as in bench offline")
        if name in names[:i]:
            raise ConfigError(f"--methods has {name!r} twice; expected each once")
    if not set(names) - {PLAIN}:
        raise ConfigError(f"--methods is {asked!r}; expected some of {known}, separated by commas")
    return [name for name in names if name != PLAIN]


def _of_method(name: str, checkpoints: Sequence[str | None], length: int | None) -> Iterator[Way]:
    trained = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    for checkpoint, label in _labelled(trained) if trained else [(None, "")]:
        if ":" in name:
            given: dict[str, Any] = policy_options(name, checkpoint)
        else:
            given = {"method": name, "policy": "constant"}
            given |= {} if length is None else {"num_speculative_tokens": length}
            given |= {} if checkpoint is None else {"model": checkpoint}
        yield Way(f"{name} {label}".rstrip(), given)


def _autos(drafters: Drafters) -> Iterator[Way]:
    """With every checkpoint, n-grams or suffix trees beside it, and what may be in the target's own; without any, with
    every method that needs none."""
    trained = {checkpoint: name for name, found in drafters.items() for checkpoint in found if checkpoint is not None}
    for checkpoint, label in _labelled(list(trained)):
        given: dict[str, Any] = {"method": trained[checkpoint], "model": checkpoint, "policy": AUTO}
        yield Way(f"{AUTO} {label}".rstrip(), given)
        yield Way(f"{AUTO} {label}".rstrip() + " with suffixes", {**given, **keys.SUFFIX_DEFAULTS})
    for name, found in drafters.items():
        if METHODS[name].in_target and None in found:
            yield Way(f"{AUTO} {name}", {"method": name, "policy": AUTO})
    alone = [] if trained else [name for name, found in drafters.items() if found and METHODS[name].checkpoint is None]
    for name in alone:
        yield Way(AUTO if len(alone) == 1 else f"{AUTO} {name}", {"method": name, "policy": AUTO})


def _labelled(checkpoints: Sequence[str]) -> list[tuple[str, str]]:
    """Checkpoints with what tells them apart: nothing if there is one, else the folder's name, or all of its path."""
    if len(checkpoints) == 1:
        return [(checkpoints[0], "")]
    names = [Path(checkpoint).name for checkpoint in checkpoints]
    return list(zip(checkpoints, names if len(set(names)) == len(names) else checkpoints, strict=True))


def _check_used(checkpoints: Sequence[str], ways: Sequence[Way]) -> None:
    used = {way.given.get("model") for way in ways if way.given is not None}
    for checkpoint in checkpoints:
        if checkpoint not in used:
            raise ConfigError(
                f"--speculative-model {checkpoint} is for the method {checkpoint_method(checkpoint)!r}, but --methods "
                "has neither that nor 'auto'; expected one of them, or no such model"
            )


def methods_table(results: Sequence[PolicyResult], title: str) -> Table:
    """One way a line; counts and times are those of the last round.

    The acceptance length is that of steps with a draft, the target's own token included; tokens per step are those of
    all steps of a request. Rows are the target's, for a request in a step. Drafting is its share of the steps' time.
    """
    columns = (
        *(
            "\nmethod",
            "\nidentical",
            "tokens\n/ s",
            "speed-\nup",
            "in the\nrounds",
            "accept.\nlength",
            "tokens\n/ step",
        ),
        *("accepted\nper position", "draft-\ning", "rows\n/ step"),
    )
    table = new_table(title, columns, left=("\nmethod", "accepted\nper position"), dense=True)
    fastest = max(result.tokens_per_second for result in results)
    for result in results:
        counts = result.counts
        style = "bold green" if result.tokens_per_second == fastest else ""
        table.add_row(
            Text(result.name, style=style),
            identical_text(result),
            Text(f"{result.tokens_per_second:.1f}", style=style),
            Text(f"{result.speedup:.2f}×", style=style),
            "-" if result.name == PLAIN else spread_text(result),
            number_text(counts.mean_acceptance_length),
            number_text(counts.tokens_per_request_step),
            rates_text(counts.rate_per_position),
            percent_text(drafting_share(counts)),
            number_text(target_rows(counts)),
        )
    return table


def categories_table(session: Session) -> Table:
    """Kinds of prompts down, ways across: times plain decoding's speed."""
    speedups = with_total(session)
    table = Table(box=SIMPLE_HEAD, title="Speed-up by category", title_justify="left", pad_edge=False)
    table.add_column("category", no_wrap=True)
    ways = [name for name in speedups if name != PLAIN]
    for name in ways:
        table.add_column(name, justify="right")
    for category in speedups[PLAIN]:
        best = max(ways, key=lambda name: speedups[name][category])
        cells = [Text(f"{speedups[name][category]:.2f}×", style="bold green" if name == best else "") for name in ways]
        table.add_row(category, *cells)
    return table


def as_document(session: Session, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured, with its provenance, as JSON values.

    Args:
        given: way → its ``speculative_config``.
    """
    document = session.document(options)
    for entry, result in zip(document["results"], session.results, strict=True):
        counts = result.counts
        entry |= {
            "speculative_config": given[result.name],
            "drafting_share": drafting_share(counts),
            "target_rows_per_request_step": target_rows(counts),
        }
    return document | {"left_out": dict(session.left_out)}


def drafting_share(counts: SpecCounts) -> float | None:
    """Of the time of all steps, prefill included; None where the host does not tell."""
    return counts.draft_s / counts.step_s if counts.step_s else None


def target_rows(counts: SpecCounts) -> float | None:
    """Rows that the target processes for a decoding request in a step: its last token's, and those of its draft."""
    return 1 + counts.verified / counts.request_steps if counts.request_steps else None


def spread_text(result: PolicyResult) -> str:
    """The lowest and the highest speed-up of a round."""
    return f"{min(result.speedups):.2f}–{max(result.speedups):.2f}"


def title_of(options: Mapping[str, Any]) -> str:
    """How much was decoded, and how."""
    drawn = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']}"
    at_once = options["engine"]["max_num_seqs"]
    how_many = "one request at a time" if at_once == 1 else f"{at_once} requests at once"
    given = options.get("prompts_in_file", options["num_prompts"])
    prompts = f"{options['num_prompts']} of {given}" if given != options["num_prompts"] else given
    rounds = "1 round" if options["rounds"] == 1 else f"{options['rounds']} rounds"
    return f"{prompts} prompts, up to {options['max_tokens']} tokens each, {drawn}, {how_many}, {rounds}"


def remarks(session: Session) -> list[str]:
    """A sentence for the ways that are missing, by the reason, and for every one whose drafter failed."""
    missing: dict[str, list[str]] = {}
    for name, reason in session.left_out.items():
        missing.setdefault(reason, []).append(name)
    faults = {result.name: sum(run.counts.proposer_faults for run in result.runs) for result in session.results}
    failed = [
        f"the drafter of {name} failed {count} times; it went on plainly" for name, count in faults.items() if count
    ]
    return [f"left out: {', '.join(names)}: {reason}" for reason, names in missing.items()] + failed


def with_total(session: Session) -> dict[str, dict[str, float]]:
    """Way → kind of prompt → speed-up, at last over all prompts."""
    speedups = session.speedups
    return {
        result.name: {name: ratio for name, ratio in speedups[result.name].items() if name != _TOTAL}
        | {_TOTAL: result.speedup}
        for result in session.results
    }
