"""Addresses and tokens of Ray clusters: what is taken, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core import ray_access
from gdpo_tune.core.errors import UsageError


@pytest.mark.parametrize("text", ["auto", "head:6379", "10.0.0.1:1", "[::1]:65535", "h-1.local:80"])
def test_an_address_to_join(text: str):
    assert ray_access.check_ray_address(text, "--address") == text


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
        ray_access.check_ray_address(text, "--address")
    shown = text.removeprefix("me:secret@")
    assert str(caught.value).startswith(f"--address = {shown}: ")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at home\n")
    (tmp_path / "file").write_text("  of the file\n")
    return tmp_path


def test_sources_of_a_token(home: Path, tmp_path: Path):
    everywhere = {"HOME": str(home), ray_access.FILE: str(home / "file"), ray_access.TOKEN: "said"}
    assert ray_access.find_token(everywhere) == "said"
    del everywhere[ray_access.TOKEN]
    assert ray_access.find_token(everywhere) == "of the file"
    del everywhere[ray_access.FILE]
    assert ray_access.find_token(everywhere) == "at home"
    assert ray_access.find_token({"HOME": str(tmp_path / "other")}) == ""
    assert ray_access.find_token({}) == ""
    assert ray_access.find_token({**everywhere, ray_access.MODE: "disabled"}) == ""


def test_a_token_of_a_variable_is_sent_and_one_at_home_is_left_to_ray(home: Path):
    environment = {"HOME": str(home), ray_access.TOKEN: "said"}
    ray_access.enable_token(environment)
    assert environment[ray_access.MODE] == "token"
    at_home = {"HOME": str(home)}
    ray_access.enable_token(at_home)
    assert ray_access.MODE not in at_home
    refused = {ray_access.TOKEN: "said", ray_access.MODE: "disabled"}
    ray_access.enable_token(refused)
    assert refused[ray_access.MODE] == "disabled"


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
    for ask in (ray_access.find_token, ray_access.enable_token):
        with pytest.raises(UsageError, match=why) as caught:
            ask(dict(environment))
        assert "fix: export RAY_AUTH_TOKEN_PATH=FILE" in str(caught.value)


def test_a_token_at_home_that_is_no_text(home: Path):
    (home / ".ray").mkdir(exist_ok=True)
    (home / ".ray" / "auth_token").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"auth_token: not a text\n.*fix: export"):
        ray_access.find_token({"HOME": str(home)})
    with pytest.raises(UsageError, match="no-such-user/x: No such file"):
        ray_access.find_token({"RAY_AUTH_TOKEN_PATH": "~no-such-user/x"})
