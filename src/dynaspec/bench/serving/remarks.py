"""What a reader of the figures must know of how they came about."""

from __future__ import annotations

import math

from .run import Finished

_BUSY = 0.8
"""Share of a processor from which on the client may hold the server up."""
_LATE_S = 0.05
"""A request sent later than this was not sent when its rate asked for."""


def remarks(finished: Finished) -> list[str]:
    """One sentence each; empty if there is nothing to say."""
    return [*_of_prompts(finished), *_of_answers(finished), *_of_client(finished)]


def _of_prompts(finished: Finished) -> list[str]:
    fitted, found = finished.fitted, []
    total = len(fitted.requests)
    if fitted.cut:
        length = finished.served.max_model_len
        found.append(f"{fitted.cut} of {total} prompts did not fit into {length} tokens and lost their beginning")
    if fitted.unchecked:
        found.append("prompts were not checked for length: the server does not say its tokens or its longest context")
    repeated = total - len({asked.prompt for asked in fitted.requests})
    if repeated:
        found.append(f"{repeated} of {total} prompts were sent before in this run; a prefix cache makes them cheap")
    return found


def _of_answers(finished: Finished) -> list[str]:
    done = [record for record in finished.load.records if record.failure is None]
    found = []
    uncounted = sum(record.usage is None for record in done)
    if uncounted:
        how = "the tokenizer counted their text" if finished.settings.tokenizer else "every chunk counts as one token"
        found.append(f"{uncounted} answers came without usage: {how}, and their prompts are not counted")
    whole = sum(not record.streamed for record in done)
    if whole:
        found.append(f"{whole} answers were not streamed: their time to the first token is all of their time")
    return found


def _of_client(finished: Finished) -> list[str]:
    load, found = finished.load, []
    share = load.client_cpu_s / load.duration_s
    if share > _BUSY:
        found.append(f"the client was busy {share:.0%} of the time and may have held the server up")
    if not math.isinf(finished.settings.traffic.request_rate) and load.send_lag_s > _LATE_S:
        found.append(f"a request was sent {1e3 * load.send_lag_s:.0f} ms late: the machine was busy")
    return found
