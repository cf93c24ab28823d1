"""Options as vLLM's users write them: vLLM's flags, and a YAML file with the flags' names as keys."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dynaspec.contract.errors import ConfigError
from dynaspec.engine import vllm_options
from dynaspec.engine.vllm_options import Foreign, Renamed

RENAMED: Mapping[str, Renamed] = {
    "disable_fastapi_docs": Renamed("disable_docs", is_flag=True),
    "disable_log_requests": Renamed("log_requests", is_flag=True, negated=True),
    "disable_log_stats": Renamed("log_stats", is_flag=True, negated=True),
    "disable_uvicorn_access_log": Renamed("access_log", is_flag=True, negated=True),
    "enable_log_requests": Renamed("log_requests", is_flag=True),
    "shutdown_timeout": Renamed("drain_timeout_s"),
    "spec_method": Renamed("method"),
    "spec_model": Renamed("draft_model"),
    "spec_tokens": Renamed("num_speculative_tokens"),
    "speculative_model": Renamed("draft_model"),
    **vllm_options.RENAMED,
}

FOREIGN: Mapping[str, Foreign] = {
    "api_server_count": Foreign((1,), "one process answers all requests", ignored=True),
    "chat_template_content_format": Foreign(("auto",), "templates say what they can take", ignored=True),
    "disable_frontend_multiprocessing": Foreign((True,), "server and engine share a process", ignored=True),
    "enable_auto_tool_choice": Foreign((True,), "calls of tools are always found", ignored=True),
    "enable_log_outputs": Foreign((False,), "the log has no answers", ignored=True),
    "enable_prompt_tokens_details": Foreign((True,), "usage always has them", ignored=True),
    "enable_request_id_headers": Foreign((True,), "answers always carry X-Request-Id", ignored=True),
    "enable_server_load_tracking": Foreign((True, False), "num_requests_admitted in /metrics says it", ignored=True),
    "exclude_tools_when_tool_choice_none": Foreign((True,), "prompts never show tools then", ignored=True),
    "log_config_file": Foreign((), "the log's form is --log-format", ignored=True),
    "lora_modules": Foreign((), "adapters are not available in this version"),
    "middleware": Foreign((), "the application is fixed"),
    "reasoning_parser": Foreign((), "reasoning is not told apart from the answer"),
    "response_role": Foreign(("assistant",), "answers are the assistant's"),
    "return_tokens_as_token_ids": Foreign((False,), "ids come with return_token_ids"),
    "ssl_cert_reqs": Foreign((0,), "--ssl-ca-certs alone makes clients show a certificate"),
    "tool_parser_plugin": Foreign(("",), "--tool-call-parser chooses among the ones that are here"),
    "trust_request_chat_template": Foreign((False,), "templates are the server's, set by --chat-template"),
    "uds": Foreign((), "the server listens on --host and --port"),
    **vllm_options.FOREIGN,
}

_SHORT = {
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
_SEVERAL = "--served-model-name"
"""vLLM takes several names after one such flag."""
_LISTS = frozenset({"cuda_graph_sizes", "cudagraph_capture_sizes", "ignore_patterns", "lora_modules", "middleware"})
"""Options of vLLM's that take several values after one flag, too."""


def translate(name: str, value: object) -> tuple[str, object] | None:
    """An option under the name that it has here; None if it has been settled: it is not here.

    Args:
        name: with underscores.

    Raises:
        ConfigError: it asks for what would change answers, and is not here.
    """
    if name in RENAMED:
        renamed = RENAMED[name]
        return renamed.name, not _is_true(value) if renamed.negated else value
    if name not in FOREIGN:
        return name, value
    settle(name, value, FOREIGN[name])
    return None


def settle(name: str, value: object, foreign: Foreign) -> None:
    """Takes a flag that there is not here.

    Raises:
        ConfigError: answers would depend on it.
    """
    flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    if value is False:
        flag = "--no-" + name.replace("_", "-")
    vllm_options.settle(name, value, foreign, shown=flag)


def translate_arguments(args: Sequence[str]) -> list[str]:
    """Arguments as ``serve`` has them: ``--speculative_config`` with dashes, vLLM's names as ours.

    Raises:
        ConfigError: see ``translate``.
    """
    result: list[str] = []
    rest = deque(_SHORT.get(arg, arg) for arg in args)
    while rest:
        arg = rest.popleft()
        if arg == "--":
            return [*result, arg, *rest]
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            flag = "--" + flag[2:].replace("_", "-")
            result += _translated_flag(flag, value if equals else None, rest)
        else:
            result.append(arg)
    return result


def _translated_flag(flag: str, value: str | None, rest: deque[str]) -> list[str]:
    """What stands for one flag; takes its value from the arguments after it, if it has one there."""
    name = flag[2:].replace("-", "_")
    positive = name.removeprefix("no_")
    if flag == _SEVERAL and value is None:
        return [part for one in _values(rest) for part in (flag, one)] or [flag]
    if _is_flag(positive) and value is None:
        return _as_flags(translate(positive, name == positive))
    if name not in RENAMED and name not in FOREIGN:
        return [flag if value is None else f"{flag}={value}"]
    if value is None:
        value = " ".join(_values(rest)) if positive in _LISTS else rest.popleft() if rest else ""
    translated = translate(name, value)
    return [] if translated is None else [f"--{translated[0].replace('_', '-')}={translated[1]}"]


def _is_flag(name: str) -> bool:
    known = RENAMED.get(name) or FOREIGN.get(name)
    return known is not None and known.is_flag


def _as_flags(translated: tuple[str, object] | None) -> list[str]:
    if translated is None:
        return []
    name, value = translated
    return [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]


def _values(rest: deque[str]) -> list[str]:
    """Takes the arguments up to the next flag."""
    values = []
    while rest and not rest[0].startswith("-"):
        values.append(rest.popleft())
    return values


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def read_config_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The file's options under the names that they have here; those that are empty or ask for nothing are left out.

    Args:
        known: names of options, with underscores.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a key is unknown, refused or there twice.
    """
    options: dict[str, Any] = {}
    for key, value in read_pairs(path):
        try:
            translated = translate(key.lstrip("-").replace("-", "_"), value)
        except ConfigError as error:
            raise ConfigError(f"{path}: key {key!r}: {error}") from None
        if translated is None:
            continue
        name, value = translated
        if name not in known:
            raise ConfigError(f"{path}: {_unknown(key, known)}")
        if name in options:
            raise ConfigError(f"{path}: key {key!r} sets --{name.replace('_', '-')} a second time; expected it once")
        options[name] = value
    return {name: value for name, value in options.items() if value is not None}


def read_pairs(path: Path) -> list[tuple[str, Any]]:
    """Keys and values in the file's order, also of keys that are there twice.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    try:
        loader = yaml.SafeLoader(path.read_text("utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} holds no mapping; expected lines such as 'port: 8000'")
        return [(str(_value(loader, key)), _value(loader, value)) for key, value in root.value]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{path}{line} is not YAML: {error.problem}; expected lines such as 'port: 8000'") from None
    except yaml.YAMLError as error:  # characters that no YAML has
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _value(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    return loader.construct_object(node, deep=True)


def _unknown(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), sorted(known), n=1)
    hint = f"did you mean {near[0].replace('_', '-')!r}?" if near else "expected the long name of an option of serve"
    return f"there is no option {key!r}; {hint}"
