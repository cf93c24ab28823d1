"""vLLM's build for the CPU. Options: those of its ``EngineArgs``."""

from __future__ import annotations

import os

from peers.common import Setting, Side, Workload, keep_running


class Vllm(Side):
    def __init__(self, setting: Setting) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setting["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))  # auto leaves a core free
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm  # reads the environment
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = {
            "model": setting["checkpoint"],
            "max_model_len": setting["context"],
            "max_num_seqs": setting["most_at_once"],
            "enable_prefix_caching": False,
        } | dict(setting["options"])
        self._engine = LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self._params = vllm.SamplingParams
        self._started = 0
        self.versions = {"vllm-cpu": vllm.__version__}

    def decode(self, workload: Workload) -> list[list[int]]:
        prompts = workload["prompts"]
        answers: list[list[int]] = [[] for _ in prompts]
        self._started += 1

        def add(number: int) -> None:
            params = self._params(
                temperature=0, max_tokens=workload["max_tokens"], stop_token_ids=workload["eos"], detokenize=False
            )
            self._engine.add_request(f"{self._started}-{number}", {"prompt_token_ids": prompts[number]}, params)

        def step() -> list[int]:
            done = []
            for output in self._engine.step():
                if output.finished:
                    number = int(output.request_id.split("-")[1])
                    answers[number] = list(output.outputs[0].token_ids)
                    done.append(number)
            return done

        keep_running(len(prompts), workload["at_once"], add, step)
        return answers


load = Vllm
