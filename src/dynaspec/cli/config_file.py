"""Options from a YAML file, as vLLM reads them: the long flags' names as keys."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from dynaspec.cli.vllm_flags import translate
from dynaspec.contract.errors import ConfigError


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
