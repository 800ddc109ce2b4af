"""A cluster that exists already: its head is asked before Ray is, and watched from then on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import AuthenticationError, RpcError

from gdpo_tune.core.errors import ClusterError, UsageError
from gdpo_tune.tuning.ray import joining
from tests.support.jobs import without_tokens


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Somebody who listens, and whom nobody talks to."""
    without_tokens(monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", place)
        # Ray takes 127.0.0.1 for another name of this machine, on which nobody listens here
        monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", str)
        yield place


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def client(address: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("ray._raylet.GcsClient", client)


def test_a_cluster_is_joined_with_what_trials_are_to_find(head, monkeypatch):
    answer(monkeypatch, None)
    given = {}
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    joining.join({"log_to_driver": False}, {"A": "1"})
    assert given == {
        "address": head,
        "runtime_env": {"env_vars": {"A": "1"}},
        "log_to_driver": False,
    }


@pytest.mark.parametrize(
    ("mode", "what"), [("", "asks for a token"), ("token", "does not take the token")]
)
def test_a_cluster_that_wants_a_token(head, monkeypatch, mode, what):
    answer(monkeypatch, AuthenticationError("no"))
    if mode:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(ClusterError, match=f"{head} {what}\n    fix: export RAY_AUTH_MODE=token"):
        joining.join({}, {})


def test_a_token_that_is_missing_is_told_before_ray_is_asked(head, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UsageError, match="there is no token"):
        joining.join({}, {})


def test_nobody_is_there(monkeypatch, tmp_path):
    without_tokens(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ClusterError, match=r":9 does not answer \(.*refused"):
        joining.join({}, {})


def test_something_else_is_there(head, monkeypatch):
    answer(monkeypatch, RpcError("Timed out while waiting for GCS to become available."))
    with pytest.raises(ClusterError, match="is not the head of a Ray cluster"):
        joining.join({}, {})


def test_a_machine_that_is_no_node(head, monkeypatch):
    answer(monkeypatch, None)

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ClusterError, match=r"no node of .* runs on this machine .*\n.*--submit"):
        joining.join({}, {})


def test_no_cluster_is_known_here(head, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    def nothing(_: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", nothing)
    with pytest.raises(ClusterError, match="= auto: no Ray runs on this machine"):
        joining.join({}, {})


def test_an_address_of_the_environment_that_is_none(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UsageError, match="RAY_ADDRESS = ray://head:10001"):
        joining.join({}, {})


def test_a_name_that_no_host_can_have(monkeypatch, tmp_path):
    without_tokens(monkeypatch, tmp_path)
    with pytest.raises(ClusterError, match=r"a\.\.b:6379 does not answer \("):
        joining.check_head("a..b:6379")


# The head, once joined


class Head:
    """A head that answers until it does not, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.there, self.left = 100.0, True, 0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(joining, "time", clock)
        monkeypatch.setattr(joining, "find_silence", lambda *_: "" if self.there else "refused")
        monkeypatch.setattr(joining, "leave", self.leave)
        self.watch = joining.HeadWatch("head:6379")

    def leave(self) -> None:
        self.left += 1

    def after(self, seconds: float) -> joining.HeadWatch:
        self.now += seconds
        self.watch.check()
        return self.watch


def test_the_process_leaves_some_time_after_the_head_is_lost(monkeypatch):
    found = Head(monkeypatch)
    assert found.after(1000.0).silence == 0
    found.there = False
    assert found.after(joining.LOST_SECONDS).silence == joining.LOST_SECONDS
    assert found.after(joining.LEAVE_SECONDS).silence > joining.LOST_SECONDS
    assert found.left == 0
    found.after(1.0)
    assert found.left == 1


def test_a_head_that_answers_again_was_never_lost(monkeypatch):
    found = Head(monkeypatch)
    found.there = False
    found.after(joining.LOST_SECONDS - 1)
    found.there = True
    assert found.after(2.0).silence == 0


def test_who_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not joining.find_silence(address, 1.0)
    assert "refused" in joining.find_silence(address, 1.0)
