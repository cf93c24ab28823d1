"""Where the server listens: what is wrong with an address or a certificate is told before a model is loaded."""

from __future__ import annotations

import resource
import ssl
import subprocess
from unittest import mock

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.server.config import ServerConfig
from dynaspec.server.run import allow_many_connections, bind, listen, tls_context
from support.certificates import make_certificate


def test_a_free_port_is_found_and_told():
    config = ServerConfig(port=0, root_path="/llm")
    with bind(config) as bound:
        assert listen(bound, config) == f"http://127.0.0.1:{bound.getsockname()[1]}/llm"


def test_nothing_is_accepted_before_it_listens():
    with bind(ServerConfig(port=0)) as bound:
        done = subprocess.run(
            ["python3", "-c", f"import socket; socket.create_connection(('127.0.0.1', {bound.getsockname()[1]}))"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "ConnectionRefusedError" in done.stderr


def test_a_port_in_use_is_told():
    config = ServerConfig(port=0)
    with bind(config) as bound:
        listen(bound, config)
        taken = ServerConfig(port=bound.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {taken.port}: .*in use"):
            bind(taken).close()


def test_a_port_taken_while_the_model_was_loaded_is_told():
    config = ServerConfig(port=0)
    with bind(config) as first:
        taken = ServerConfig(port=first.getsockname()[1])
        with bind(taken) as second:
            listen(first, config)
            with pytest.raises(ConfigError, match="in use"):
                listen(second, taken)


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_told(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {host}"):
        bind(ServerConfig(host=host)).close()


def test_a_url_has_brackets_around_ipv6_and_an_address_to_reach():
    for host, shown in (("::1", "[::1]"), ("0.0.0.0", "127.0.0.1")):
        config = ServerConfig(host=host, port=0)
        with bind(config) as bound:
            assert listen(bound, config) == f"http://{shown}:{bound.getsockname()[1]}"


def test_without_a_certificate_there_is_no_tls():
    assert tls_context(ServerConfig()) is None


def test_a_certificate_makes_it_https(tmp_path):
    certificate, key = make_certificate(tmp_path)
    config = ServerConfig(port=0, ssl_certfile=certificate, ssl_keyfile=key)
    context = tls_context(config)
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE
    with bind(config) as bound:
        assert listen(bound, config).startswith("https://127.0.0.1:")


def test_authorities_make_clients_show_a_certificate(tmp_path):
    certificate, key = make_certificate(tmp_path)
    context = tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate))
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_files_that_are_no_certificates_are_told(tmp_path):
    certificate, key = make_certificate(tmp_path)
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    with pytest.raises(ConfigError, match="ssl_certfile and ssl_keyfile cannot be used"):
        tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=str(other)))
    with pytest.raises(ConfigError, match="ssl_ca_certs cannot be used"):
        tls_context(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=str(other)))


@pytest.mark.parametrize(
    ("now", "most", "becomes"),
    [
        (1024, 4096, 4096),
        (1024, 10**6, 65536),
        (1024, resource.RLIM_INFINITY, 65536),
        (10**6, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_but_never_lowered(now, most, becomes):
    with (
        mock.patch("resource.getrlimit", return_value=(now, most)),
        mock.patch("resource.setrlimit") as changed,
    ):
        allow_many_connections()
    assert [call.args[1] for call in changed.call_args_list] == ([] if becomes is None else [(becomes, most)])
