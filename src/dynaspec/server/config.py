"""Everything that can be set about the server. Each field is at once option, validation and documentation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from dynaspec.contract.errors import ConfigError
from dynaspec.engine.config import parse_bytes

API_KEY_VARIABLE = "DYNASPEC_API_KEY"
"""Environment variable with API keys, separated by commas; read where no key is given as an option."""

_KEY = re.compile(r"[\x21-\x7e]+")
_SECRETS = frozenset({"api_key"})
"""Fields whose values no message may show."""


def keys_in(environ: Mapping[str, str]) -> list[str]:
    """The API keys among environment variables."""
    return [key for part in environ.get(API_KEY_VARIABLE, "").split(",") if (key := part.strip())]


def _field(default: Any, group: str, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **limits)


class ServerConfig(BaseModel):
    """Configuration of one server; frozen. Names are vLLM's where vLLM has the option."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    host: str = _field("127.0.0.1", "Network", "Address to listen on; 0.0.0.0 = all.", min_length=1)
    port: int = _field(8000, "Network", "Port to listen on; 0 = a free one.", ge=0, le=65535)
    root_path: str = _field("", "Network", "Path below which a proxy in front offers the server, such as /llm.")
    ssl_certfile: str | None = _field(None, "Network", "Certificate chain (PEM); with it the server speaks HTTPS.")
    ssl_keyfile: str | None = _field(None, "Network", "The certificate's key (PEM); default: in the same file.")
    ssl_ca_certs: str | None = _field(
        None, "Network", "Authorities (PEM); clients must then show a certificate that one of them signed."
    )
    keep_alive_s: float = _field(
        75.0,
        "Network",
        "Seconds that an idle connection stays open; more than the proxy in front keeps it.",
        gt=0,
    )

    api_key: tuple[SecretStr, ...] = _field(
        (), "Access", f"A key that clients must send; may be given several times, or in {API_KEY_VARIABLE}."
    )
    allowed_origins: tuple[str, ...] = _field(
        (), "Access", "Web origin whose pages may call the server (CORS), or *; may be given several times."
    )
    allowed_methods: tuple[str, ...] = _field(("*",), "Access", "Methods that those pages may use.")
    allowed_headers: tuple[str, ...] = _field(("*",), "Access", "Headers that those pages may send.")
    allow_credentials: bool = _field(False, "Access", "Those pages may send cookies.")

    served_model_name: tuple[str, ...] = _field(
        (), "Model", "Name that clients ask for; may be given several times, the first is in answers. Default: MODEL."
    )
    chat_template: str | None = _field(None, "Model", "Jinja chat template, or a file of it; default: the tokenizer's.")

    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"] = _field(
        "auto", "Model", "How the model writes calls of tools; auto = as the chat template says, else hermes."
    )

    strict: bool = _field(
        False, "Limits", "Refuse requests with unknown fields; default: ignore the fields, with a warning in the log."
    )
    max_queued_requests: int = _field(
        1024, "Limits", "Requests that may wait for one of max_num_seqs places; more are answered 503.", ge=0
    )
    max_request_bytes: int = _field(10 * 2**20, "Limits", "Largest request body, such as 10M; more is 413.", ge=1024)
    request_timeout_s: float | None = _field(
        None, "Limits", "Seconds a request may take, waiting included; then it is aborted. Default: no limit.", gt=0
    )
    read_timeout_s: float = _field(
        30.0,
        "Limits",
        "Seconds for a request's headers, then its body, to arrive, and for what is sent to be taken.",
        gt=0,
    )
    drain_timeout_s: float = _field(
        20.0, "Limits", "Seconds that running requests get to finish after SIGTERM or Ctrl-C.", ge=0
    )

    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = _field(
        "warning", "Logging", "How much the HTTP layer says: critical, error, warning, info, debug or trace."
    )
    log_format: Literal["text", "json"] = _field("text", "Logging", "text, or json: one object a line.")
    access_log: bool = _field(True, "Logging", "Log a line for every request; prompts and keys are never in it.")
    log_requests: bool = _field(False, "Logging", "Log what requests hold, prompts included.")
    max_log_len: int = _field(1000, "Logging", "Most characters of a request that log_requests shows.", ge=0)
    log_stats: bool = _field(True, "Logging", "Log every ten seconds what the engine did.")

    metrics_namespace: Literal["dynaspec", "vllm"] = _field(
        "dynaspec", "Observability", "What the names of metrics begin with: dynaspec, or vllm for existing dashboards."
    )
    otlp_traces_endpoint: str | None = _field(
        None, "Observability", "Send OpenTelemetry traces to this URL, such as http://localhost:4318/v1/traces."
    )
    enable_per_request_metrics: bool = _field(
        False, "Observability", "Answers have vLLM's object metrics, with times (streams: with the usage)."
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = _field(
        "none", "Observability", "What answers' metrics.speculative_decoding, vLLM's, has: none, summary or detailed."
    )
    enable_dashboard: bool = _field(True, "Observability", "Offer the live page /dashboard.")
    stats_interval_s: float = _field(
        1.0, "Observability", "Seconds between two looks at the engine for the live page.", ge=0.1
    )
    disable_docs: bool = _field(False, "Observability", "Do not offer /openapi.json.")
    shutdown_on_engine_death: bool = _field(
        True, "Observability", "End the process when the engine has failed, so that a supervisor starts it again."
    )

    @classmethod
    def build(cls, environ: Mapping[str, str] | None = None, **options: Any) -> ServerConfig:
        """From keyword arguments, as texts or as what they are.

        Args:
            environ: environment variables; ``DYNASPEC_API_KEY`` counts where no ``api_key`` is given.

        Raises:
            ConfigError: an unknown option, or a value out of its range. No message shows a key.
        """
        if not options.get("api_key") and (keys := keys_in(environ or {})):
            options["api_key"] = keys
        try:
            return cls(**options)
        except ValidationError as error:
            # Without the cause: it holds the values.
            raise ConfigError(_sentence(error.errors(include_url=False)[0])) from None

    @field_validator(
        *("api_key", "allowed_origins", "allowed_methods", "allowed_headers", "served_model_name"), mode="before"
    )
    @classmethod
    def _several(cls, value: object) -> object:
        """One text stands for itself, or is a JSON list."""
        if isinstance(value, str):
            return _listed(value)
        if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], str):
            return _listed(value[0])
        return value

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_KEY.fullmatch(key.get_secret_value()) for key in keys):
            raise ValueError("a key is empty or has a character that cannot be sent; expected visible ASCII")
        return keys

    @field_validator("served_model_name")
    @classmethod
    def _named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in names):
            raise ValueError(f"one of {list(names)} is empty; expected names")
        return tuple(dict.fromkeys(names))

    @field_validator("max_request_bytes", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("root_path")
    @classmethod
    def _rooted(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError(f"{value!r} is no such path; expected one that begins, but does not end, with a slash")
        return value

    @field_validator("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"there is no file {value!r}; expected a PEM file")
        return value

    @field_validator("chat_template", mode="before")
    @classmethod
    def _template(cls, value: object) -> object:
        """Text of a template as it is; anything else names a file, whose text it stands for."""
        if not isinstance(value, str) or "{" in value or "\n" in value:
            return value
        try:
            return Path(value).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{value!r} is neither a template nor a file that can be read: {error}") from None

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).netloc):
            raise ValueError(f"{value!r} is no such URL; expected one that begins with http:// or https://")
        return value

    @field_validator("request_timeout_s", "read_timeout_s", "keep_alive_s", "drain_timeout_s", "stats_interval_s")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{value} is no time; expected seconds")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ServerConfig:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_keyfile or ssl_ca_certs is given without ssl_certfile; expected a certificate too")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "allow_credentials is given for the origin '*'; expected origins by name, as browsers refuse the two"
            )
        return self


def _listed(text: str) -> list[Any]:
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list):
        raise ValueError('what begins with [ is no JSON list; expected a text, or a list such as ["a", "b"]')
    return values


def _sentence(problem: ErrorDetails) -> str:
    """What is wrong, in one sentence that shows no secret."""
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        return f"unknown option {name!r}; expected one of {', '.join(sorted(ServerConfig.model_fields))}"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{name}: {message}" if name else message
    given = "" if name in _SECRETS else f" (given: {problem.get('input')!r})"
    return f"{name}: {problem['msg']}{given}"
