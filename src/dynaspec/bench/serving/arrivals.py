"""When the requests of an open load are sent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start, ascending.

    Times between requests are gamma distributed with mean 1/rate and shape ``burstiness``: 1 makes them a Poisson
    process, less makes bursts, more makes them even. They are scaled so that the last request is sent after
    count/rate seconds: otherwise the rate that is offered would differ by a few per cent from seed to seed.

    Args:
        rate: requests a second; infinity = all at once.
        burstiness: infinity = at even distances.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1.0 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return [float(time) for time in times * (count / rate / times[-1])]
