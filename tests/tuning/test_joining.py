"""Joining an existing cluster: its head is checked before Ray connects, and watched afterwards."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import AuthenticationError, RpcError

from gdpo_tune.core.errors import ClusterError, UsageError
from gdpo_tune.tuning.ray import cluster
from tests.support.jobs import hide_tokens


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a socket that listens and never answers."""
    hide_tokens(monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        # Ray replaces 127.0.0.1 by another address of this machine, which has no listener here
        monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", str)
        yield address


def fake_client(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def client(address: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("ray._raylet.GcsClient", client)


def test_a_cluster_is_joined_with_the_environment_of_trials(head, monkeypatch):
    fake_client(monkeypatch, None)
    environment = {}
    monkeypatch.setattr(ray, "init", lambda **options: environment.update(options))
    cluster.connect_to_cluster({"log_to_driver": False}, {"A": "1"})
    assert environment == {
        "address": head,
        "runtime_env": {"env_vars": {"A": "1"}},
        "log_to_driver": False,
    }


@pytest.mark.parametrize(
    ("mode", "message"), [("", "asks for a token"), ("token", "does not take the token")]
)
def test_a_cluster_that_wants_a_token(head, monkeypatch, mode, message):
    fake_client(monkeypatch, AuthenticationError("no"))
    if mode:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(
        ClusterError, match=f"{head} {message}\n    fix: export RAY_AUTH_MODE=token"
    ):
        cluster.connect_to_cluster({}, {})


def test_a_missing_token_is_reported_before_ray_connects(head, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UsageError, match="there is no token"):
        cluster.connect_to_cluster({}, {})


def test_a_head_that_does_not_listen(monkeypatch, tmp_path):
    hide_tokens(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    named = r"^RAY_ADDRESS = 127.0.0.1:9: .* does not answer \(.*refused"
    with pytest.raises(ClusterError, match=named) as caught:
        cluster.connect_to_cluster({}, {})
    assert str(caught.value).endswith("to train on this machine alone, unset RAY_ADDRESS")


def test_a_server_that_is_no_ray_head(head, monkeypatch):
    fake_client(monkeypatch, RpcError("Timed out while waiting for GCS to become available."))
    with pytest.raises(ClusterError, match="is not the head of a Ray cluster"):
        cluster.connect_to_cluster({}, {})


def test_a_machine_that_is_not_a_node_of_the_cluster(head, monkeypatch):
    fake_client(monkeypatch, None)

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ClusterError, match=r"no node of .* runs on this machine .*\n.*--submit"):
        cluster.connect_to_cluster({}, {})


def test_no_cluster_on_this_machine(head, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    def nothing(_: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", nothing)
    with pytest.raises(ClusterError, match="= auto: no Ray runs on this machine"):
        cluster.connect_to_cluster({}, {})


def test_an_invalid_address_in_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(UsageError, match="RAY_ADDRESS = ray://head:10001"):
        cluster.connect_to_cluster({}, {})


def test_an_invalid_host_name(monkeypatch, tmp_path):
    hide_tokens(monkeypatch, tmp_path)
    with pytest.raises(ClusterError, match=r"a\.\.b:6379 does not answer \("):
        cluster.check_head("a..b:6379")


# The head, once joined


class FakeHead:
    """A fake head that may stop answering, with a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.answers, self.leaves = 100.0, True, 0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(cluster, "time", clock)
        monkeypatch.setattr(cluster, "probe_head", lambda *_: "" if self.answers else "refused")
        monkeypatch.setattr(cluster, "exit_process", self.leave)
        self.watch = cluster.HeadWatch("head:6379")

    def leave(self) -> None:
        self.leaves += 1

    def check_after(self, seconds: float) -> float:
        self.now += seconds
        self.watch.check()
        return self.watch.seconds_silent

    def check_for(self, seconds: float) -> float:
        for _ in range(int(seconds / cluster.ASK_SECONDS)):
            self.check_after(cluster.ASK_SECONDS)
        return self.watch.seconds_silent


def test_the_process_disconnects_some_time_after_the_head_is_lost(monkeypatch):
    head = FakeHead(monkeypatch)
    assert head.check_after(1000.0) == 0
    head.answers = False
    assert head.check_for(cluster.LOST_SECONDS) == cluster.LOST_SECONDS
    assert head.check_for(cluster.LEAVE_SECONDS) > cluster.LOST_SECONDS
    assert head.leaves == 0
    head.check_after(cluster.ASK_SECONDS)
    assert head.leaves == 1


def test_a_head_that_answers_again_is_not_lost(monkeypatch):
    head = FakeHead(monkeypatch)
    head.answers = False
    assert head.check_for(cluster.LOST_SECONDS) > 0
    head.answers = True
    assert head.check_after(2.0) == 0


def test_a_process_that_was_stopped_itself_gives_the_head_time_to_answer(monkeypatch):
    """A stopped driver lost its sweep: a minute had passed since the last answer."""
    head = FakeHead(monkeypatch)
    head.check_after(cluster.ASK_SECONDS)
    head.now += 60.0
    assert head.watch.seconds_silent == 0
    head.answers = False  # the network of a machine that wakes up is not there at once
    assert head.check_after(cluster.ASK_SECONDS) == cluster.POLL_SECONDS
    assert head.leaves == 0


def test_find_silence_checks_who_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not cluster.probe_head(address, 1.0)
    assert "refused" in cluster.probe_head(address, 1.0)
