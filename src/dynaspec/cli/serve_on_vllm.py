"""Hands ``dynaspec serve --backend vllm`` over to vLLM's server."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.text import Text

import dynaspec
from dynaspec.cli.console import stderr_console
from dynaspec.cli.vllm_backend import Request, read
from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.vllm.launch import require_vllm, speculation_arguments


def serve_on_vllm(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by vLLM's server, which serves until a signal.

    Args:
        arguments: as after ``dynaspec serve``.

    Raises:
        ConfigError: an option that neither has, or that cannot work under vLLM.
    """
    request = read(arguments, os.environ)
    require_vllm()
    from dynaspec.hosts.vllm.serve import VllmServer, become_server  # imports vLLM, which takes seconds

    server = VllmServer()
    told = handed_over(request, server.parse(request.passed))
    server.check(server.parse(told))
    command = request.shown(["vllm", "serve", *told])
    stderr_console().print(Text.assemble(f"dynaspec {dynaspec.__version__} hands over to vLLM:\n  ", (command, "bold")))
    become_server(told)


def handed_over(request: Request, seen: Any) -> list[str]:
    """The arguments of ``vllm serve``.

    Args:
        seen: what vLLM's parser made of those that are passed.

    Raises:
        ConfigError: see ``serve_on_vllm``.
    """
    for name in ("speculative_config", "additional_config"):
        if getattr(seen, name):  # else it would have been taken out
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} was given in parts (--{flag}.key); expected it as one JSON object")
    speculation = speculation_arguments(
        request.speculative_config,
        os.environ,
        decision_log=request.decision_log,
        additional_config=request.additional_config,
        scheduler_cls=seen.scheduler_cls if request.speculative_config is not None else None,  # else it is passed
        data_parallel_size=seen.data_parallel_size,
        tensor_parallel_size=seen.tensor_parallel_size,
        pipeline_parallel_size=seen.pipeline_parallel_size,
    )
    flags = [part for name, value in speculation.items() for part in _as_flag(name, value)]
    return [*_model(request, seen.model_tag), *request.passed, *request.translated, *flags]


def _model(request: Request, passed: str | None) -> list[str]:
    """The model, unless it is among the arguments that are passed."""
    if passed is None:
        if request.model is None:
            raise ConfigError(
                "no model was given; expected 'dynaspec serve MODEL', a key 'model' in --config, or --demo"
            )
        return [request.model]
    if request.model not in (None, passed) and not request.may_differ:
        raise ConfigError(f"the model is {passed!r} and --model is {request.model!r}; expected one of the two")
    return []


def _as_flag(name: str, value: object) -> list[str]:
    return ["--" + name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value)]
