"""What became of one request's drafts; the only place where they are counted by request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Totals over the decoding steps of one request, preemptions and all.

    Args:
        detailed: also count by position and keep every step.
    """

    detailed: bool = False
    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens of steps with a draft, the target's own included."""
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)
    per_step: list[tuple[int, int]] = field(default_factory=list)

    def add(self, *, drafted: int, verified: int, accepted: int, emitted: int) -> None:
        """One decoding step; ``drafted`` may be 0. Accepted tokens behind the request's end do not count."""
        if self.detailed:
            self.per_step.append((drafted, accepted))
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.emitted += emitted
        if self.detailed:
            missing = drafted - len(self.drafted_per_pos)
            self.drafted_per_pos.extend([0] * missing)
            self.accepted_per_pos.extend([0] * missing)
            for position in range(drafted):
                self.drafted_per_pos[position] += 1
                self.accepted_per_pos[position] += position < accepted
