"""What ``chat`` says about speed and drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynaspec.cli.conversation import Answer

_BAR = 40
"""Characters of the longest bar."""


def describe(answers: Sequence[Answer]) -> str:
    """Lines about the last answer, its runs of accepted tokens, and all answers together."""
    if not answers:
        return "No answer yet."
    last = answers[-1]
    lines = [f"last answer: {_speed([last])}, the first after {last.first_s:.2f} s", f"             {_drafts([last])}"]
    lines += _runs(last)
    if len(answers) > 1:
        lines += [f"{len(answers)} answers:   {_speed(answers)}", f"             {_drafts(answers)}"]
    return "\n".join(lines)


def _speed(answers: Sequence[Answer]) -> str:
    tokens = sum(len(answer.completion.token_ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"


def _drafts(answers: Sequence[Answer]) -> str:
    metrics = [answer.completion.metrics for answer in answers]
    steps, drafts = sum(m.steps for m in metrics), sum(m.drafts for m in metrics)
    if not drafts:
        return f"{steps} steps, none with a draft"
    emitted = sum(m.draft_emitted for m in metrics)
    drafted, accepted = sum(m.drafted for m in metrics), sum(m.accepted for m in metrics)
    return (
        f"{drafts} of {steps} steps with a draft, acceptance length {emitted / drafts:.2f}; "
        f"{accepted} of {drafted} drafted tokens accepted"
    )


def _runs(answer: Answer) -> list[str]:
    """A bar for every number of tokens that a step's draft had accepted: how many steps had it."""
    counts = Counter(accepted for drafted, accepted in answer.completion.metrics.per_step if drafted)
    if not counts:
        return []
    most = max(counts.values())
    lines = ["  accepted in a row   steps"]
    for accepted in range(max(counts) + 1):
        steps = counts[accepted]
        lines.append(f"  {accepted:17d}   {steps:5d}  {'█' * -(-steps * _BAR // most)}".rstrip())
    return lines
