"""Addresses on this machine are called without a proxy."""

import os

import httpx
import pytest
import requests

from gdpo_tune import cli
from gdpo_tune.core.http import bypass_proxies_on_loopback

HERE = ("http://127.0.0.1:5000", "http://127.0.1.1:8265", "http://localhost:80", "http://[::1]:80")


@pytest.fixture
def variables(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return monkeypatch


def list_proxied(*addresses):
    """Return the addresses that `requests` or `httpx` ask a proxy for."""
    proxied = [a for a in addresses if requests.utils.get_environ_proxies(a)]
    with httpx.Client() as client:
        direct = client._transport
        proxied += [a for a in addresses if client._transport_for_url(httpx.URL(a)) is not direct]
    return proxied


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_loopback_bypasses_the_proxy_and_nothing_else_changes(variables, name):
    """RFC 1122, 3.2.1.3: addresses 127/8 never leave a host, so no proxy can reach them."""
    variables.setenv("http_proxy", "http://proxy.example:3128")
    variables.setenv(name, "inner.example")
    assert set(list_proxied(*HERE)) == set(HERE)
    for _ in range(2):
        bypass_proxies_on_loopback()
        assert list_proxied(*HERE, "http://inner.example") == []
        assert os.environ["no_proxy"].endswith(",inner.example")
        assert os.environ["no_proxy"].count("::1") == 1
    assert list_proxied("http://other.example") == ["http://other.example"] * 2
    assert requests.utils.get_environ_proxies("http://127.9.9.9:1") == {}


def test_without_a_proxy_or_with_none_allowed_nothing_is_set(variables):
    bypass_proxies_on_loopback()
    assert "no_proxy" not in os.environ
    variables.setenv("http_proxy", "http://proxy.example:3128")
    variables.setenv("no_proxy", "*")
    bypass_proxies_on_loopback()
    assert os.environ["no_proxy"] == "*"


def test_every_command_does_it(variables):
    variables.setenv("ALL_PROXY", "http://proxy.example:3128")
    with pytest.raises(SystemExit):
        cli.run_command(lambda _: len(list_proxied(*HERE)), [])
    assert list_proxied(*HERE) == []
