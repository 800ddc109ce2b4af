"""Addresses of services and of Ray clusters, and where a cluster's token comes from."""

import os

import httpx
import pytest
import requests

from gdpo_tune import cli
from gdpo_tune.core import addresses
from gdpo_tune.core.addresses import RAY_AUTH_MODE, RAY_TOKEN, RAY_TOKEN_PATH
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import HUB_ID
from gdpo_tune.core.http import bypass_proxies_on_loopback
from tests.support.tables import cases

HERE = ("http://127.0.0.1:5000", "http://127.0.1.1:8265", "http://localhost:80", "http://[::1]:80")
PROXY = "http://proxy.example:3128"


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
    variables.setenv("http_proxy", PROXY)
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
    variables.setenv("http_proxy", PROXY)
    variables.setenv("no_proxy", "*")
    bypass_proxies_on_loopback()
    assert os.environ["no_proxy"] == "*"


def test_every_command_does_it(variables):
    variables.setenv("ALL_PROXY", PROXY)
    with pytest.raises(SystemExit):
        cli.run_command(lambda _: len(list_proxied(*HERE)), [])
    assert list_proxied(*HERE) == []


@pytest.mark.parametrize("text", ["auto", "head:6379", "10.0.0.1:1", "[::1]:65535", "h-1.local:80"])
def test_an_address_to_join(text):
    assert addresses.check_ray_address(text, "--address") == text


@cases("core", "addresses that cannot be joined")
def test_an_address_that_cannot_be_joined(text):
    with pytest.raises(UsageError, match="--submit http://HOST:8265") as caught:
        addresses.check_ray_address(text, "--address")
    shown = text.removeprefix("me:secret@")
    assert str(caught.value).startswith(f"--address = {shown}: ")


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home\n")
    (tmp_path / "file").write_text("  of the file\n")
    return tmp_path


def test_sources_of_a_token(home):
    at_home = {"HOME": str(home)}
    in_file = {**at_home, RAY_TOKEN_PATH: str(home / "file")}
    assert addresses.find_ray_token({**in_file, RAY_TOKEN: "said"}) == "said"
    assert addresses.find_ray_token(in_file) == "of the file"
    assert addresses.find_ray_token(at_home) == "at home"
    for environment in ({"HOME": str(home / "other")}, {}, {**at_home, RAY_AUTH_MODE: "disabled"}):
        assert addresses.find_ray_token(environment) == ""


def test_a_token_of_a_variable_is_sent_and_one_at_home_is_left_to_ray(home):
    at_home = {"HOME": str(home)}
    for environment, mode in (
        ({**at_home, RAY_TOKEN: "said"}, "token"),
        (at_home, None),
        ({RAY_TOKEN: "said", RAY_AUTH_MODE: "disabled"}, "disabled"),
    ):
        addresses.enable_ray_token(environment)
        assert environment.get(RAY_AUTH_MODE) == mode


@cases("core", "missing tokens")
def test_a_missing_token_is_reported_before_ray_ends_the_process(environment, why):
    for ask in (addresses.find_ray_token, addresses.enable_ray_token):
        with pytest.raises(UsageError, match=why) as caught:
            ask(dict(environment))
        assert "fix: export RAY_AUTH_TOKEN_PATH=FILE" in str(caught.value)


def test_a_token_that_is_no_text_or_at_no_home(home):
    (home / ".ray" / "auth_token").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"auth_token: not a text\n.*fix: export"):
        addresses.find_ray_token({"HOME": str(home)})
    with pytest.raises(UsageError, match="no-such-user/x: No such file"):
        addresses.find_ray_token({RAY_TOKEN_PATH: "~no-such-user/x"})


@cases("core", "ids of the hub")
def test_an_id_of_the_hub_has_two_names(text, is_id):
    assert bool(HUB_ID.fullmatch(text)) is is_id
