"""The commands on vLLM's engine: what their options come to there, and ``serve``, which is handed over."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from typing import Any, NoReturn

from rich.text import Text

from dynaspec.cli.console import stderr_console
from dynaspec.cli.options import json_object
from dynaspec.cli.vllm_flags import read_pairs, settle
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.config import parse_bytes
from dynaspec.engine.vllm_options import Foreign
from dynaspec.hosts.vllm.launch import require_vllm, speculation_arguments
from dynaspec.server.config import keys_in
from dynaspec.version import __version__

_KEY = "speculation."
"""Before the names of keys, as some of them are options' names too."""
_NUMBERS = ("num_speculative_tokens", "draft_confidence_threshold")

SPECULATION: Mapping[str, tuple[str, ...]] = {
    "model": ("draft_model", "speculative_model", "spec_model"),
    "method": ("method", "spec_method"),
    "policy": ("policy",),
    "num_speculative_tokens": ("num_speculative_tokens", "spec_tokens"),
    "draft_confidence_threshold": ("draft_confidence_threshold",),
}
"""Keys of ``speculative_config`` that have flags of their own."""

SAME = frozenset(
    {
        *("tokenizer", "revision", "trust_remote_code", "dtype", "seed", "max_model_len", "max_num_seqs"),
        *(
            "quantization",
            "generation_config",
            "override_generation_config",
            "max_num_batched_tokens",
            "kv_cache_dtype",
            "enable_prefix_caching",
            "async_scheduling",
            "tensor_parallel_size",
        ),
        *("host", "port", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "allow_credentials"),
        *("enable_per_request_metrics", "per_request_spec_decode_metrics", "tool_call_parser"),
        *("chat_template", "uvicorn_log_level", "max_log_len", "otlp_traces_endpoint"),
    }
)
"""Options of dynaspec's that vLLM has under the same names; they are not looked at here."""

TRANSLATED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "access_log": ("disable_uvicorn_access_log", not_),
    "disable_docs": ("disable_fastapi_docs", bool),
    "drain_timeout_s": ("shutdown_timeout", lambda text: math.ceil(float(text))),
    "kv_cache_memory": ("kv_cache_memory_bytes", parse_bytes),
    "log_requests": ("enable_log_requests", bool),
    "log_stats": ("disable_log_stats", not_),
}
"""Options that vLLM has under another name, and their values there."""
LISTS: Mapping[str, bool] = {
    "api_key": False,
    "served_model_name": False,
    "allowed_origins": True,
    "allowed_methods": True,
    "allowed_headers": True,
}
"""Options that may be given several times here; whether vLLM wants them as one JSON list."""

_NO_PAGE = "vLLM's server has no live page"
_NO_LIMIT = "vLLM's server has no such limit"

REFUSED: Mapping[str, Foreign] = {
    "demo": Foreign((False,), "its model is a GGUF file, which has not been tried with vLLM"),
    "device": Foreign(("auto",), "vLLM runs on the platform that it was built for"),
    "enable_dashboard": Foreign((False,), _NO_PAGE),
    "keep_alive_s": Foreign((), "vLLM takes it from VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    "log_format": Foreign(("text",), "vLLM's log is text"),
    "max_queued_requests": Foreign((), "vLLM's own limit is --max-num-queued-reqs"),
    "max_request_bytes": Foreign((), _NO_LIMIT),
    "metrics_namespace": Foreign((), "vLLM's metrics keep their names, and dynaspec's stand beside them"),
    "read_timeout_s": Foreign((), _NO_LIMIT),
    "request_timeout_s": Foreign((), _NO_LIMIT),
    "shutdown_on_engine_death": Foreign((True,), "vLLM's server always ends with its engine"),
    "stats_interval_s": Foreign((), _NO_PAGE),
    "strict": Foreign((False,), "vLLM's server ignores unknown fields"),
    "stream_interval_s": Foreign((), "vLLM's own is --stream-interval, in tokens"),
}
"""Options that vLLM's server does not have, and values that ask for what it does anyway."""

_SEVERAL = "served_model_name"
"""The one of them that takes several names after one flag here too."""

_FLAGS = (
    *("access_log", "disable_docs", "log_requests", "log_stats"),
    *("demo", "enable_dashboard", "shutdown_on_engine_death", "strict"),
)
_VALUES = ("model", "backend", "config", "decision_log", "additional_config", "drain_timeout_s", "kv_cache_memory")


@dataclass(frozen=True, slots=True)
class Request:
    """What ``dynaspec serve --backend vllm`` was asked for."""

    model: str | None
    """As an option; it may also be among those passed."""
    may_differ: bool
    """The option is from a file, so that what is passed wins over it."""
    speculative_config: Any
    decision_log: str | None
    additional_config: Mapping[str, Any] | None
    passed: list[str]
    """Arguments that are vLLM's, as they were given."""
    translated: list[str]
    """Flags of dynaspec's, as vLLM has them."""
    secrets: frozenset[str]
    """Which of them are keys."""

    def shown(self, arguments: Sequence[str]) -> str:
        """Arguments as a shell takes them, without keys."""
        return " ".join("***" if argument in self.secrets else shlex.quote(argument) for argument in arguments)


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> Request:
    """
    Args:
        arguments: as after ``dynaspec serve``.
        environ: environment variables; ``DYNASPEC_API_KEY`` counts where no key is given.

    Raises:
        ConfigError: an option that vLLM's server does not have, a value that cannot be read, options that
            contradict each other.
    """
    spelled = [_with_dashes(argument) for argument in arguments]
    file = _switches(spelled).config
    in_file = [] if file is None else _from_file(Path(file), spelled)
    own, first = _parser().parse_known_args(in_file)
    own, rest = _parser().parse_known_args(spelled, own)
    leading = int(bool(rest) and not rest[0].startswith("-"))  # vLLM wants the model before all flags
    given = {name: value for name, value in vars(own).items() if value is not None}
    if "api_key" not in given and (keys := keys_in(environ)):
        given["api_key"] = keys
    for name in given.keys() & REFUSED.keys():
        settle(name, given[name], REFUSED[name])
    more = given.get("additional_config")
    return Request(
        model=given.get("model"),
        may_differ="--model" in in_file,
        speculative_config=_speculation(given),
        decision_log=given.get("decision_log"),
        additional_config=None if more is None else json_object("--additional-config", more),
        passed=[*rest[:leading], *first, *rest[leading:]],
        translated=_translated(given),
        secrets=frozenset(given.get("api_key", ())),
    )


def backend_of(arguments: Sequence[str]) -> str:
    """The backend that arguments, or else the file that they name, ask for.

    Raises:
        ConfigError: there is no such backend, or the file is no YAML mapping.
    """
    own = _switches([_with_dashes(argument) for argument in arguments])
    asked = own.backend
    if asked is None and own.config is not None and Path(own.config).is_file():  # else it is refused when it is read
        asked = dict(read_pairs(Path(own.config))).get("backend")
    if asked not in (None, "dynaspec", "vllm"):
        raise ConfigError(f"--backend is {asked!r}; expected 'dynaspec' or 'vllm'")
    return asked or "dynaspec"


def _switches(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("backend", "config"):
        parser.add_argument(_flag(name))
    return parser.parse_known_args(arguments)[0]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see 'dynaspec serve --help'")


def _parser() -> argparse.ArgumentParser:
    """Takes what is dynaspec's and leaves the rest, in its order."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-config", "-sc")
    for key, names in SPECULATION.items():
        parser.add_argument(*map(_flag, names), dest=f"{_KEY}{key}")
    for name in (*_VALUES, *(REFUSED.keys() - set(_FLAGS))):
        parser.add_argument(_flag(name))
    for name in _FLAGS:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None)
    for name in LISTS.keys() - {_SEVERAL}:
        parser.add_argument(_flag(name), action="append")
    parser.add_argument(_flag(_SEVERAL), action="extend", nargs="+")
    return parser


def _from_file(path: Path, arguments: Sequence[str]) -> list[str]:
    """The file's options as arguments; those that are given outside it are left out."""
    given = {argument.partition("=")[0].replace("--no-", "--") for argument in arguments if argument.startswith("--")}
    result: list[str] = []
    for key, value in read_pairs(path):
        flag = _flag(key.lstrip("-").replace("-", "_"))
        if flag not in given and value is not None:
            result += _as_arguments(flag, value)
    return result


def _as_arguments(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        parts = [part if isinstance(part, str) else json.dumps(part) for part in value]
        ours = any(flag == _flag(name) for name in LISTS)
        return [word for part in parts for word in (flag, part)] if ours else [flag, *parts]
    return [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]


def _translated(given: Mapping[str, Any]) -> list[str]:
    """Options that vLLM has under other names, or in another form.

    Raises:
        ConfigError: a value that cannot be read.
    """
    result: list[str] = []
    for name, value in given.items():
        if name in TRANSLATED:
            other, convert = TRANSLATED[name]
            result += _as_arguments(_flag(other), _converted(name, value, convert))
        elif name in LISTS:
            as_json = LISTS[name] and not value[0].startswith("[")
            result += [_flag(name), *([json.dumps(value)] if as_json else value)]
    return result


def _converted(name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{_flag(name)} is {value!r}, which cannot be read: {error}") from None


def _speculation(given: Mapping[str, Any]) -> Any:
    single = {key: given[_KEY + key] for key in SPECULATION if _KEY + key in given}
    whole = given.get("speculative_config")
    if whole is None:
        return {key: _number(value) if key in _NUMBERS else value for key, value in single.items()} or None
    if single:
        flags = ", ".join(_flag(SPECULATION[key][0]) for key in single)
        raise ConfigError(f"--speculative-config was given together with {flags}; expected one or the other")
    return whole


def _number(text: str) -> Any:
    """A number where it is one; what it may be is said where it is used."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    stderr_console().print(Text.assemble(f"dynaspec {__version__} hands over to vLLM:\n  ", (command, "bold")))
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
    flags = [
        part
        for name, value in speculation.items()
        for part in (_flag(name), value if isinstance(value, str) else json.dumps(value))
    ]
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
