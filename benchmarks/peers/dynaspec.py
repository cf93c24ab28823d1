"""dynaspec. Options: those of its ``EngineConfig``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from peers.common import Setting, Side, Workload, keep_running


class Dynaspec(Side):
    def __init__(self, setting: Setting) -> None:
        options: dict[str, Any] = {
            "model": setting["gguf"],
            "max_num_seqs": setting["most_at_once"],
            "max_model_len": setting["context"],
            "enable_prefix_caching": False,
        } | dict(setting["options"])
        self._engine = build_engine(EngineConfig.build(**options))
        self._started = 0
        self.versions = {name: version(name) for name in ("dynaspec", "torch", "numba")}

    def decode(self, workload: Workload) -> list[list[int]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=workload["max_tokens"],
            stop_token_ids=workload["eos"],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompts = workload["prompts"]
        answers: list[list[int]] = [[] for _ in prompts]
        numbers: dict[str, int] = {}

        def add(number: int) -> None:
            self._started += 1
            numbers[str(self._started)] = number
            self._engine.add(str(self._started), prompts[number], params)

        def step() -> list[int]:
            done = []
            for output in self._engine.step():
                number = numbers[output.request_id]
                answers[number] = list(output.outputs[0].token_ids)
                done.append(number)
            return done

        keep_running(len(prompts), workload["at_once"], add, step)
        return answers


load = Dynaspec
