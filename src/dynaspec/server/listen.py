"""Where the server listens. Made before a model is loaded, so that a wrong port or certificate is told at once."""

from __future__ import annotations

import resource
import socket
import ssl
from contextlib import ExitStack

from dynaspec.contract.errors import ConfigError

from .config import ServerConfig

BACKLOG = 2048
"""Connections that wait to be accepted."""
_OPEN_FILES = 65536


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the configured address, which does not listen yet.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise _unusable(config, error) from None
        stack.pop_all()  # it stays open
    return bound


def listen(bound: socket.socket, config: ServerConfig) -> str:
    """Starts to listen; the URL to be reached at.

    Raises:
        ConfigError: another process has taken the address meanwhile.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _unusable(config, error) from None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}{config.root_path}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS needs; None = HTTP.

    Raises:
        ConfigError: a file is not what it should be.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile and ssl_keyfile cannot be used: {error}; expected PEM and its key") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_ca_certs cannot be used: {error}; expected PEM certificates") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def allow_many_connections() -> None:
    """Raises the limit of open files as far as the system lets it; the usual 1024 is less than a queue may hold."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _unusable(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror}; expected a free port of this machine"
    )
