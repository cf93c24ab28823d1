"""OpenVINO GenAI's pipeline with continuous batching, on a model that Optimum has exported.

Options: ``weights``, a format of Optimum's, and perhaps ``lookup`` (tokens that prompt lookup drafts) and ``ngram``.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.common import Setting, Side, Workload, keep_running


class OpenVino(Side):
    def __init__(self, setting: Setting) -> None:
        folder = exported(Path(setting["checkpoint"]), Path(setting["models"]), setting["options"]["weights"])
        self._lookup = setting["options"].get("lookup")
        self._ngram = setting["options"].get("ngram", 3)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.max_num_seqs = setting["most_at_once"]
        scheduler.enable_prefix_caching = False
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": setting["threads"]}
        if self._lookup is not None:
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._started = 0
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel", "nncf")}

    def decode(self, workload: Workload) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = workload["max_tokens"]
        config.do_sample = False
        config.eos_token_id = workload["eos"][0]
        config.stop_token_ids = set(workload["eos"])
        if self._lookup is not None:
            config.num_assistant_tokens = self._lookup
            config.max_ngram_size = self._ngram
        prompts = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in workload["prompts"]]
        answers: list[list[int]] = [[] for _ in prompts]
        handles: dict[int, Any] = {}

        def add(number: int) -> None:
            self._started += 1
            handles[number] = self._pipeline.add_request(self._started, prompts[number], config)

        def step() -> list[int]:
            self._pipeline.step()
            done = [number for number, handle in handles.items() if handle.get_status() != RUNNING]
            for number in done:
                answers[number] = list(handles.pop(number).read_all()[0].generated_ids)
            return done

        keep_running(len(prompts), workload["at_once"], add, step)
        return answers


RUNNING = genai.GenerationStatus.RUNNING


def exported(checkpoint: Path, models: Path, weights: str) -> Path:
    """The model in OpenVINO's format, made if it is not there."""
    folder = models / f"openvino-{weights}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        optimum = Path(sys.executable).with_name("optimum-cli")
        what = ["--model", str(checkpoint), "--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([str(optimum), "export", "openvino", *what, str(partial)], check=True)
        partial.rename(folder)
    return folder


load = OpenVino
