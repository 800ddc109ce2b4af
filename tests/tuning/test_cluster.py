"""What is remembered of Ray's processes, so that the next start ends what a killed run left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private.accelerators import accelerator

from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.tuning.ray import cluster, leftovers
from gdpo_tune.tuning.ray.interruption import ClusterLost, Interruption
from gdpo_tune.tuning.ray.nodes import Nodes

Spawn = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process that waits."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ray.processes"


def test_only_processes_of_the_cluster_are_remembered(
    file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "ENVIRONMENT", {})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    new: list[int] = []
    monkeypatch.setattr(ray, "init", lambda **options: new.append(spawn().pid))
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    spawn()  # a server of somebody else, say
    with cluster.ray_cluster(file) as up:
        assert [pid for pid, _ in leftovers.remembered(file)] == new
        new.append(spawn().pid)
        up.remember()
        assert sorted(pid for pid, _ in leftovers.remembered(file)) == sorted(new)
    assert not file.exists()


def slow_starts(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, times: int
) -> list[subprocess.Popen[bytes]]:
    """Let Ray's servers take too long so often; return all that are started."""
    monkeypatch.setattr(cluster, "ENVIRONMENT", {})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    started: list[subprocess.Popen[bytes]] = []

    def init(**options: object) -> None:
        started.append(spawn())
        if len(started) <= times:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    return started


def test_servers_that_take_too_long_are_ended_and_started_again(
    file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    other = spawn()
    started = slow_starts(spawn, monkeypatch, times=2)
    with cluster.ray_cluster(file):
        first, second, third = started
        assert (first.wait(), second.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert third.poll() is None
    assert other.poll() is None


def test_a_cluster_that_never_starts_ends_the_sweep_in_one_line(
    file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    started = slow_starts(spawn, monkeypatch, times=cluster.STARTS)
    late = pytest.raises(ClusterLostError, match="did not start in time, 4 times over")
    with late, cluster.ray_cluster(file):
        pytest.fail("there is no cluster")
    assert len(started) == cluster.STARTS


def test_another_error_of_ray_is_its_own(file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch):
    slow_starts(spawn, monkeypatch, times=0)
    monkeypatch.setattr(ray, "init", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError), cluster.ray_cluster(file):
        pytest.fail("there is no cluster")


def test_what_a_killed_run_left_is_ended_and_a_pid_used_again_is_not(file: Path, spawn: Spawn):
    left, other = spawn(), spawn()
    created = psutil.Process(left.pid).create_time()
    leftovers.remember(file, [(left.pid, created), (other.pid, created - 3600)])
    leftovers.end_orphans(file)
    assert left.wait() != 0
    assert other.poll() is None
    assert not file.exists()


@pytest.mark.parametrize("content", ["", "[[12", "[3]", "{}", '[["a", 1]]', "\0\0"])
def test_a_torn_file_remembers_nothing(file: Path, content: str):
    file.write_text(content)
    leftovers.end_orphans(file)
    assert not file.exists()


def test_a_process_of_another_user_is_left_alone(
    file: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    process = spawn()
    leftovers.remember(file, leftovers.children())
    assert process.pid in [pid for pid, _ in json.loads(file.read_text())]
    monkeypatch.setattr(psutil.Process, "kill", refuse)
    leftovers.end_orphans(file)
    assert not file.exists()
    assert process.poll() is None


def test_a_cluster_of_our_own_lives_as_long_as_every_server_of_it(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    servers = {spawn().pid: "raylet", spawn().pid: "gcs_server"}
    other = spawn()
    monkeypatch.setattr(cluster, "name_of", lambda pid: servers.get(pid, "monitor"))
    is_up = cluster.servers_watched()
    assert is_up()
    other.kill()
    other.wait()
    assert is_up()
    psutil.Process(next(iter(servers))).kill()  # nobody has asked for its exit status yet
    while is_up():
        pass


def test_a_server_whose_exit_status_was_asked_for_is_gone_too(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
):
    process = spawn()
    monkeypatch.setattr(cluster, "name_of", lambda pid: "raylet")
    is_up = cluster.servers_watched()
    process.kill()
    process.wait()
    assert not is_up()


@pytest.mark.parametrize(("alive", "answer"), [(True, True), (False, False)])
def test_a_cluster_that_was_joined_is_asked_for_our_node(
    alive: bool, answer: bool, monkeypatch: pytest.MonkeyPatch
):
    about = {"NodeManagerHostname": "here", "Resources": {}}
    nodes = [
        {"NodeID": "ours", "Alive": alive, **about},
        {"NodeID": "other", "Alive": not alive, **about},
    ]
    context = SimpleNamespace(get_node_id=lambda: "ours")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    assert cluster.our_node_is_alive(Nodes(lambda: nodes)) is answer


def test_a_cluster_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now))
    answers = [True, False]
    ask = cluster.asked_every(5.0, lambda: answers.pop(0))
    assert ask()
    assert len(answers) == 2
    now = 105.0
    assert ask()
    assert ask()
    now = 110.0
    assert not ask()
    assert not ask()


def test_the_loss_of_the_cluster_ends_a_sweep_that_nobody_interrupted(tmp_path: Path):
    alive = [True, False]
    interruption = Interruption(tmp_path / "stop", lambda: alive.pop(0))
    assert not interruption.stop_all()
    with pytest.raises(ClusterLost):
        interruption.stop_all()
    assert not interruption.requested


def test_a_trial_without_a_gpu_sees_none():
    """Ray reads this name; it says what actors that ask for no GPU find in CUDA_VISIBLE_DEVICES."""
    name = accelerator.RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR
    assert cluster.ENVIRONMENT[name] == "1"
