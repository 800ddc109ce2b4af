"""Addresses and tokens of Ray clusters: what is taken, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core import addresses
from gdpo_tune.core.errors import UsageError


@pytest.mark.parametrize("text", ["auto", "head:6379", "10.0.0.1:1", "[::1]:65535", "h-1.local:80"])
def test_an_address_to_join(text: str):
    assert addresses.check_ray_address(text, "--address") == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "head",
        "ray://head:10001",
        "http://head:8265",
        "head:0",
        "head:65536",
        "a b:1",
        "me:secret@h:1",
    ],
)
def test_an_address_that_cannot_be_joined(text: str):
    with pytest.raises(UsageError, match="--submit http://HOST:8265") as caught:
        addresses.check_ray_address(text, "--address")
    shown = text.removeprefix("me:secret@")
    assert str(caught.value).startswith(f"--address = {shown}: ")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home\n")
    (tmp_path / "file").write_text("  of the file\n")
    return tmp_path


def test_sources_of_a_token(home: Path, tmp_path: Path):
    everywhere = {
        "HOME": str(home),
        addresses.RAY_TOKEN_PATH: str(home / "file"),
        addresses.RAY_TOKEN: "said",
    }
    assert addresses.find_ray_token(everywhere) == "said"
    del everywhere[addresses.RAY_TOKEN]
    assert addresses.find_ray_token(everywhere) == "of the file"
    del everywhere[addresses.RAY_TOKEN_PATH]
    assert addresses.find_ray_token(everywhere) == "at home"
    assert addresses.find_ray_token({"HOME": str(tmp_path / "other")}) == ""
    assert addresses.find_ray_token({}) == ""
    assert addresses.find_ray_token({**everywhere, addresses.RAY_AUTH_MODE: "disabled"}) == ""


def test_a_token_of_a_variable_is_sent_and_one_at_home_is_left_to_ray(home: Path):
    environment = {"HOME": str(home), addresses.RAY_TOKEN: "said"}
    addresses.enable_ray_token(environment)
    assert environment[addresses.RAY_AUTH_MODE] == "token"
    at_home = {"HOME": str(home)}
    addresses.enable_ray_token(at_home)
    assert addresses.RAY_AUTH_MODE not in at_home
    refused = {addresses.RAY_TOKEN: "said", addresses.RAY_AUTH_MODE: "disabled"}
    addresses.enable_ray_token(refused)
    assert refused[addresses.RAY_AUTH_MODE] == "disabled"


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE = token, and there is no token"),
        ({"RAY_AUTH_MODE": "Basic"}, "RAY_AUTH_MODE = Basic: it must be token or disabled"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/x"}, "= /nowhere/x: No such file or directory"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "= /dev/null: the file is empty"),
    ],
)
def test_a_missing_token_is_reported_before_ray_ends_the_process(environment, why):
    for ask in (addresses.find_ray_token, addresses.enable_ray_token):
        with pytest.raises(UsageError, match=why) as caught:
            ask(dict(environment))
        assert "fix: export RAY_AUTH_TOKEN_PATH=FILE" in str(caught.value)


def test_a_token_at_home_that_is_no_text(home: Path):
    (home / ".ray").mkdir(exist_ok=True)
    (home / ".ray" / "auth_token").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"auth_token: not a text\n.*fix: export"):
        addresses.find_ray_token({"HOME": str(home)})
    with pytest.raises(UsageError, match="no-such-user/x: No such file"):
        addresses.find_ray_token({"RAY_AUTH_TOKEN_PATH": "~no-such-user/x"})
