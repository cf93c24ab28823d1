"""What a load test sends where, how fast, and what is reported of it; questions to the server under test."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from dynaspec.contract.errors import ConfigError, DynaspecError

from .client import Api, find_api

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
"""Times that can be reported."""
GOALS = ("ttft", "tpot", "e2el")
"""Times of a request that can have a limit."""
_FIXED_FIELDS = {"stream": True, "n": 1}
"""Fields of a request that a measurement depends on."""
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=6 * 60 * 60)
"""Of a request under load: a queue may be long."""
_QUESTION_TIMEOUT = aiohttp.ClientTimeout(total=60)
"""Of a question about the server."""
_POLL_S = 0.5
_IDLE_S = 4.0
"""Idle connections are closed after this long: sooner than servers close theirs, or a request could meet the end of
its connection and be lost."""
_REFUSED = (401, 403)
OWN = "dynaspec"
"""The owner that a dynaspec server names for its models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    root: str
    """The server's address, without a path."""
    backend: str = "openai"
    endpoint: str | None = None
    """Path of the requests; None = the backend's."""
    model: str | None = None
    """Name to ask for; None = the first that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    request_id_prefix: str = "bench-"
    ready_check_timeout_s: float = 0.0
    """Seconds to wait for the server, and for a first request to be answered; 0 = neither is checked."""

    def __post_init__(self) -> None:
        if not self.root.startswith(("http://", "https://")):
            raise ConfigError(f"the base URL is {self.root!r}; expected http://… or https://…")
        api = find_api(self.backend)
        if self.endpoint is not None and not self.endpoint.endswith(api.suffix):
            raise ConfigError(
                f"the endpoint is {self.endpoint!r}; expected a path that ends with {api.suffix} for the "
                f"backend {self.backend}"
            )

    @property
    def api(self) -> Api:
        return find_api(self.backend)

    @property
    def url(self) -> str:
        """Where requests under load go."""
        return self.root + (self.endpoint or self.api.path)

    def request_headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return key | dict(self.headers)


def base_address(base_url: str | None, host: str, port: int) -> str:
    """The server's address without a path: ``--base-url`` may end with ``/v1``, as OpenAI's clients have it."""
    if base_url is not None:
        return base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWorkload:
    """What is asked."""

    dataset_name: str | None = None
    """None: the file's own form, or ``random`` without a file."""
    dataset_path: Path | None = None
    category: str | None = None
    """Only prompts of this category."""
    num_prompts: int = 1000
    output_len: int | None = None
    """Most tokens of each answer; None = what the data set asks for, or its usual length."""
    input_len: int = 1024
    """Tokens of a random prompt behind its prefix."""
    prefix_len: int = 0
    """Tokens that all random prompts begin with."""
    range_ratio: float = 0.0
    """Random lengths lie between (1 − ratio) and (1 + ratio) times their mean."""
    seed: int = 0
    shuffle: bool = True
    oversample: bool = True
    """Prompts are used again where the data set has too few."""

    def __post_init__(self) -> None:
        least = min(self.num_prompts, self.input_len, 1 if self.output_len is None else self.output_len)
        if least < 1 or self.prefix_len < 0:
            raise ConfigError(
                f"prompts are {self.num_prompts}, input tokens {self.input_len}, prefix tokens {self.prefix_len} and "
                f"output tokens {self.output_len}; expected at least 1 of each, and a prefix of at least 0"
            )
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(f"the range ratio is {self.range_ratio:g}; expected a number from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """When requests are sent."""

    request_rate: float = math.inf
    """Requests a second; infinity = all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between them: 1 = Poisson arrivals, below = bursts."""
    max_concurrency: int | None = None
    """Most requests under way at once; None = no limit."""
    num_warmups: int = 0
    """Times that the first request is sent beforehand."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise ConfigError(
                f"the request rate is {self.request_rate:g} and the burstiness {self.burstiness:g}; "
                "expected numbers above 0"
            )
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"the concurrency is {self.max_concurrency}; expected at least 1")
        if self.num_warmups < 0:
            raise ConfigError(f"the number of warm-up requests is {self.num_warmups}; expected at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What is said of the times."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    goals_ms: Mapping[str, float] = field(default_factory=dict)
    """A request is good if none of these times is longer; empty = no goodput."""

    def __post_init__(self) -> None:
        _check_names("the percentile metrics", self.metrics, METRICS)
        _check_names("the goodput's times", self.goals_ms, GOALS)
        wrong = [value for value in self.percentiles if not 0.0 <= value <= 100.0]
        if wrong:
            raise ConfigError(f"a percentile is {wrong[0]:g}; expected numbers from 0 to 100")
        negative = [name for name, value in self.goals_ms.items() if not value >= 0]
        if negative:
            raise ConfigError(f"the goodput's {negative[0]} is {self.goals_ms[negative[0]]:g} ms; expected at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """All of a load test."""

    target: Target
    workload: LoadWorkload = field(default_factory=LoadWorkload)
    traffic: Traffic = field(default_factory=Traffic)
    reported: Reported = field(default_factory=Reported)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request: sampling parameters and the extra body."""
    tokenizer: str | None = None
    """Checkpoint whose tokenizer counts and cuts prompts; None = the server's own."""
    acceptance: bool | None = None
    """Ask for what became of each request's drafts; None = where the server is dynaspec's."""

    def __post_init__(self) -> None:
        for name, value in _FIXED_FIELDS.items():
            if self.fields.get(name, value) != value:
                raise ConfigError(f"the extra body has {name}={self.fields[name]!r}; expected {value!r} or nothing")


def _check_names(what: str, given: Mapping[str, float] | tuple[str, ...], known: tuple[str, ...]) -> None:
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(f"{what} have {wrong[0]!r}; expected {', '.join(known)}")


class ServerError(DynaspecError, RuntimeError):
    """The server under test cannot be reached, or refuses what a load test needs."""


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is asked for."""

    name: str
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None if the server does not say."""
    owner: str | None = None
    root: str | None = None
    """The checkpoint's name or path."""

    @property
    def is_own(self) -> bool:
        """It is a dynaspec server's."""
        return self.owner == OWN


class Server:
    """Questions to a server. Requests under load go through ``session`` themselves."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.session = session
        self.target = target
        self.headers = target.request_headers()

    async def get(self, path: str) -> bytes | None:
        """The body of an answer with status 200; None for any other.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer with status 200; None for any other, or if it is no JSON.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        return _parsed(await self._ask("POST", path, body))

    async def models(self) -> list[Mapping[str, Any]] | None:
        """Entries of ``/v1/models``; None if the server has no such list.

        Raises:
            ServerError: nobody answers, or the key is wrong.
        """
        value = _parsed(await self.get("/v1/models"))
        entries = value.get("data") if isinstance(value, Mapping) else None
        return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else None

    async def served(self) -> Served:
        """The model asked for, or the server's first.

        Raises:
            ServerError: nobody answers, the key is wrong, the model is not served, or neither the settings nor the
                server name one.
        """
        wanted, entries = self.target.model, await self.models()
        if wanted is None and not entries:
            raise ServerError(f"{self.target.root} names no model at /v1/models; expected one, or --model")
        if not entries:
            return Served(str(wanted))
        names = [str(entry.get("id")) for entry in entries]
        if wanted is not None and wanted not in names:
            raise ServerError(f"the model {wanted!r} is not served at {self.target.root}; expected {_listed(names)}")
        entry = entries[0 if wanted is None else names.index(wanted)]
        return Served(str(entry.get("id")), entry.get("max_model_len"), entry.get("owned_by"), entry.get("root"))

    async def wait(self, timeout_s: float) -> None:
        """Waits until the server lists its models.

        Raises:
            ServerError: it does not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if await self.models() is not None:
                    return
                why = "/v1/models is not there"
            except ServerError as error:
                why = str(error)
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(f"{self.target.root} was not ready after {timeout_s:g} s: {why}")
            await asyncio.sleep(min(_POLL_S, left))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes | None:
        url = self.target.root + path
        try:
            async with self.session.request(
                method, url, json=body, headers=self.headers, timeout=_QUESTION_TIMEOUT
            ) as response:
                if response.status in _REFUSED:
                    raise ServerError(f"{url} refuses with status {response.status}; expected a key, see --api-key")
                content = await response.read()
                return content if response.status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            raise ServerError(f"no server answers at {self.target.root} ({why}); expected one there") from None


@asynccontextmanager
async def connect(target: Target) -> AsyncIterator[Server]:
    """A server with a pool of connections that sets no limit of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=_REQUEST_TIMEOUT) as session:
        yield Server(session, target)


def _parsed(body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
