"""llama.cpp through the low-level functions of its Python bindings, which batch requests as its server does.

Options: ``weights``, BF16 or Q8_0 (requantised from the file by llama.cpp itself) or None (the file as it is), and
perhaps ``lookup``, the tokens that the bindings' prompt lookup drafts.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path

import llama_cpp as llama
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peers.common import Setting, Side, Workload, ended, keep_running

FORMATS = {"BF16": llama.LLAMA_FTYPE_MOSTLY_BF16, "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0}
BATCH = 2048
"""Tokens of one call at most, as llama.cpp has it by default."""


class LlamaCpp(Side):
    def __init__(self, setting: Setting) -> None:
        llama.llama_backend_init()
        path = requantised(Path(setting["gguf"]), Path(setting["models"]), setting["options"].get("weights"))
        self._model = llama.llama_load_model_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._threads, self._tokens_each = setting["threads"], setting["context"]
        lookup = setting["options"].get("lookup")
        self._draft = None if lookup is None else LlamaPromptLookupDecoding(2, lookup)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._context: int | None = None
        self._at_once = 0
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}

    def prepare(self, at_once: int) -> None:
        """A context for so many sequences; a new one each time, for idle ones would hold the memory."""
        params = llama.llama_context_default_params()
        params.n_seq_max = at_once
        params.n_ctx = at_once * -(-self._tokens_each // 256) * 256
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        self._context, self._at_once = llama.llama_init_from_model(self._model, params), at_once
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._memory = llama.llama_get_memory(self._context)
        self._forward([(0, 0, [1], False)])
        llama.llama_memory_clear(self._memory, True)

    def decode(self, workload: Workload) -> list[list[int]]:
        prompts = workload["prompts"]
        answers: list[list[int]] = [[] for _ in prompts]
        held: dict[int, int] = {}  # number → tokens in the cache
        sequence: dict[int, int] = {}  # number → its sequence
        free = list(range(self._at_once))

        def add(number: int) -> None:
            sequence[number], held[number] = free.pop(), 0

        def step() -> list[int]:
            drafts, room = {}, BATCH
            rows, served = [], []
            # llama.cpp takes sequences into one pass only where their numbers follow one another.
            for number, slot in sorted(sequence.items(), key=lambda one: one[1]):
                drafts[number] = self._drafted(prompts[number], answers[number], workload) if answers[number] else []
                tokens = [*(prompts[number] + answers[number])[held[number] :], *drafts[number]]
                if len(tokens) <= room:
                    room -= len(tokens)
                    rows.append((slot, held[number], tokens, bool(answers[number])))
                    served.append(number)
            done = []
            for number, guesses in zip(served, self._forward(rows), strict=True):
                held[number] = len(prompts[number]) + len(answers[number])
                for i, guess in enumerate(guesses):
                    answers[number].append(guess)
                    if ended(answers[number], workload) or drafts[number][i : i + 1] != [guess]:
                        break
                    held[number] += 1
                llama.llama_memory_seq_rm(self._memory, sequence[number], held[number], -1)
                if ended(answers[number], workload):
                    slot = sequence.pop(number)
                    llama.llama_memory_seq_rm(self._memory, slot, -1, -1)
                    free.append(slot)
                    done.append(number)
            return done

        keep_running(len(prompts), workload["at_once"], add, step)
        return answers

    def rest(self) -> None:
        """Frees the context."""
        llama.llama_free(self._context)
        self._context = None

    def _drafted(self, prompt: list[int], answer: list[int], workload: Workload) -> list[int]:
        room = workload["max_tokens"] - len(answer) - 1
        if self._draft is None or room < 1:
            return []
        return [int(token) for token in self._draft(np.array(prompt + answer, dtype=np.intc))[:room]]

    def _forward(self, rows: list[tuple[int, int, list[int], bool]]) -> list[list[int]]:
        """Each row's (sequence, tokens before, tokens, whether all are asked for) most likely next tokens."""
        batch, count = self._batch, 0
        asked: list[list[int]] = []
        for slot, before, tokens, every in rows:
            asked.append([])
            for i, token in enumerate(tokens):
                wanted = every or i == len(tokens) - 1
                batch.token[count], batch.pos[count] = token, before + i
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, slot
                batch.logits[count] = wanted
                if wanted:
                    asked[-1].append(count)
                count += 1
        batch.n_tokens = count
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        return [[self._first(place) for place in places] for places in asked]

    def _first(self, place: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def requantised(gguf: Path, models: Path, weights: str | None) -> Path:
    """The model with weights of another type, made if it is not there."""
    if weights is None:
        return gguf
    path = models / f"llama-{weights}.gguf"
    if not path.is_file():
        partial = path.with_suffix(".partial")
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = FORMATS[weights], True
        status = llama.llama_model_quantize(str(gguf).encode(), str(partial).encode(), ctypes.byref(params))
        if status:
            raise RuntimeError(f"llama.cpp does not requantise {gguf.name} to {weights}")
        partial.rename(path)
    return path


load = LlamaCpp
