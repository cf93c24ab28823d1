"""Which vLLM will do, and what is said of one that will not."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.vllm import Scheduler
from dynaspec.hosts.vllm.compat import CALLS, FIELDS, check_vllm


def fake(version: str = "0.32.0+cpu") -> dict[str, Any]:
    """Modules that have all that is used."""
    modules: dict[str, Any] = {"vllm": SimpleNamespace(__version__=version)}
    for place, names in CALLS.items():
        owner, name = _owner(modules, place)
        setattr(owner, name, _function(names))
    for place, names in FIELDS.items():
        module, _, cls = place.partition(":")
        setattr(modules.setdefault(module, SimpleNamespace()), cls, make_dataclass(cls, names))
    return modules


def _owner(modules: dict[str, Any], place: str) -> tuple[Any, str]:
    """What has the hook, which is made where it is missing, and the hook's name."""
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner = modules.setdefault(module, SimpleNamespace())
    for cls in classes:
        if not hasattr(owner, cls):
            setattr(owner, cls, type(cls, (), {}))
        owner = getattr(owner, cls)
    return owner, name


def _function(names: tuple[str, ...]) -> Any:
    return eval(f"lambda self, {', '.join(names)}: None" if names else "lambda self: None")


def load(modules: dict[str, Any]) -> Any:
    def found(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return modules[name]

    return found


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_a_known_vllm_that_has_everything_will_do(version: str) -> None:
    assert check_vllm(load(fake(version))) == version


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_vllm(load(fake(version)))
    assert str(refused.value) == (f"vLLM is {version}; expected one of 0.32 and 0.33: pip install 'vllm>=0.32,<0.34'")


def test_without_vllm_it_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError) as refused:
        check_vllm(load({}))
    assert str(refused.value) == (
        "vLLM is not installed; expected one of 0.32 and 0.33: pip install 'vllm>=0.32,<0.34'"
    )


@pytest.mark.parametrize("place", [place for place, names in CALLS.items() if names])
def test_a_hook_without_its_parameters_is_named(place: str) -> None:
    modules = fake()
    owner, name = _owner(modules, place)
    setattr(owner, name, lambda self, other: None)
    with pytest.raises(ConfigError) as refused:
        check_vllm(load(modules))
    assert str(refused.value).startswith(f"in vLLM 0.32.0+cpu, {place} has parameters ('self', 'other'); expected")


@pytest.mark.parametrize("place", CALLS)
def test_a_hook_that_is_gone_is_named(place: str) -> None:
    modules = fake()
    owner, name = _owner(modules, place)
    if name == "__init__":
        del modules[place.partition(":")[0]]
    else:
        delattr(owner, name)
    with pytest.raises(ConfigError, match=r"is not there; expected it, as in 0\.32 and 0\.33"):
        check_vllm(load(modules))


@pytest.mark.parametrize("place", FIELDS)
def test_a_field_that_is_gone_is_named(place: str) -> None:
    modules = fake()
    module, _, cls = place.partition(":")
    setattr(modules[module], cls, make_dataclass(cls, ["other"]))
    with pytest.raises(ConfigError) as refused:
        check_vllm(load(modules))
    assert str(refused.value).startswith(f"in vLLM 0.32.0+cpu, {place} has no field '{FIELDS[place][0]}'; expected one")


def test_the_scheduler_can_be_named_where_there_is_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"^vLLM is not installed; expected one of 0\.32 and 0\.33"):
        Scheduler(SimpleNamespace())


def test_a_broken_vllm_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    with pytest.raises(ModuleNotFoundError, match="triton"):
        check_vllm(broken)
