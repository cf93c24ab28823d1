"""What the tests of the public classes share."""

from __future__ import annotations

from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from unit.engine.fakes import Rig

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Built:
    """What ``build_engine`` was called with, and the engine that it gave."""

    config: EngineConfig
    engine: Engine
    rig: Rig


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)
