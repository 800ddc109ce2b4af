"""Ray's processes: start, supervision, an existing cluster, and the end of a killed run."""

import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.accelerators import accelerator
from ray._private.runtime_env import uv_runtime_env_hook
from ray._private.utils import validate_socket_filepath
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.exceptions import AuthenticationError, GetTimeoutError, RpcError

from gdpo_tune.core.errors import ClusterError, ClusterLostError, UsageError
from gdpo_tune.core.system import identify_start
from gdpo_tune.sweep import print_environment
from gdpo_tune.tuning.attempts import STOP, StopFlag
from gdpo_tune.tuning.ray import cluster
from gdpo_tune.tuning.ray.tune import ClusterLostInterrupt, TuneStopper
from tests.support.jobs import hide_tokens
from tests.support.paths import ROOT
from tests.support.ray_nodes import PATIENCE, make_short_directory, open_ray_cluster
from tests.support.tuning import load_code_spec


@pytest.fixture
def spawn():
    """A function that starts a process that waits."""
    started = []

    def start():
        command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "ray.processes"


def read_recorded(file):
    return sorted(pid for pid, _ in json.loads(file.read_text()))


def fail_with(error):
    """Return a function that raises an error at each call."""

    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def fake_ray(spawn, monkeypatch):
    """A fake Ray that starts a server, the first `timeouts` times too slowly."""
    fake = SimpleNamespace(servers=[], timeouts=0)

    def init(**options):
        fake.servers.append(spawn())
        fake.timeouts -= 1
        if fake.timeouts >= 0:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(cluster, "ENVIRONMENT", {})
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, function in {"init": init, "nodes": list, "shutdown": lambda: None}.items():
        monkeypatch.setattr(ray, name, function)
    monkeypatch.setattr(cluster, "check_first_process", lambda: None)
    return fake


def test_slow_servers_are_started_again_and_only_processes_of_the_cluster_are_recorded(
    file, spawn, fake_ray
):
    other, fake_ray.timeouts = spawn(), 2  # a server of somebody else, say
    with cluster.open_cluster(file) as up:
        first, second, third = fake_ray.servers
        assert (first.wait(), second.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert third.poll() is None
        assert {*read_recorded(file)} - {first.pid, second.pid} == {third.pid}
        later = spawn()
        up.remember()
        assert read_recorded(file) == sorted([third.pid, later.pid])
    assert other.poll() is None
    assert not file.exists()


def test_a_cluster_that_never_starts_ends_the_sweep_in_one_line(file, fake_ray):
    fake_ray.timeouts = cluster.STARTS
    late = pytest.raises(ClusterLostError, match="did not start in time in 4 attempts")
    with late, cluster.open_cluster(file):
        pytest.fail("there is no cluster")
    assert len(fake_ray.servers) == cluster.STARTS


def test_other_errors_of_ray_are_raised_unchanged(file, fake_ray, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError), cluster.open_cluster(file):
        pytest.fail("there is no cluster")


@pytest.mark.parametrize("free", [None, 0, cluster.THREADS - 1, cluster.THREADS])
def test_a_limit_of_threads_is_named_before_anything_starts(free, tmp_path, monkeypatch):
    """ray-project/ray#37144, #8546: below it servers abort, or wait for minutes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "count_free_threads", lambda: free)
    monkeypatch.setattr("gdpo_tune.cli.preflight", lambda _: {})
    spec = load_code_spec(tmp_path)
    if free is None or free >= cluster.THREADS:
        print_environment(spec)
        return
    with pytest.raises(ClusterError, match=f"leaves {free} more threads .*\\n    fix: raise it"):
        print_environment(spec)
    assert not spec.directory.exists()


UNAVAILABLE = "terminate called\n  what():  Resource temporarily unavailable\n/lib/libc.so"
DEAD = "[2026-11-29 02:17:57,387 E 20976 20976] (raylet) pool.cc:660: It is dead.\n"
FINE = "[2026-11-29 02:17:57,387 I 20976 20976] (raylet) fine\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (UNAVAILABLE, r"\(raylet: what\(\): Resource temporarily unavailable; see .*logs\)"),
        (DEAD, r"\(raylet: \[.*It is dead\.; see"),
        (FINE, "for trials; see .*logs"),
        (None, "for trials; see .*logs"),
    ],
)
def test_the_first_process_has_a_time_limit_and_servers_are_quoted(
    log, said, tmp_path, monkeypatch
):
    """Lines as Ray 2.60 wrote them below `ulimit -u 110` and `180`."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(cluster, "SOCKET", "")
    monkeypatch.setattr("ray._common.utils.get_default_ray_temp_dir", lambda: str(tmp_path / "ray"))
    (logs := tmp_path / "ray" / "session_latest" / "logs").mkdir(parents=True)
    if log is not None:
        (logs / "raylet.err").write_text(log)
    limits = []

    def get(reference, timeout):
        limits.append(timeout)
        raise GetTimeoutError

    task = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: task)
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ClusterLostError, match=f"Ray can start no process.*{said}"):
        cluster.check_first_process()
    assert limits == [cluster.FIRST_PROCESS_SECONDS]


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({}, None),
        ({"TMPDIR": "/scratch/" + "a" * 30}, None),
        ({"TMPDIR": "/scratch/" + "a" * 31}, "/tmp/ray"),
        ({"TMPDIR": "/scratch/" + "é" * 16}, "/tmp/ray"),  # bytes count, not characters
        ({"TMPDIR": "/scratch/" + "a" * 31, "RAY_TMPDIR": "/scratch"}, None),
        ({"TMPDIR": "/tmp", "RAY_TMPDIR": "/scratch/" + "a" * 31}, "/tmp/ray"),
    ],
)
def test_sockets_of_ray_have_a_short_path_whatever_the_temporary_directory(
    variables, directory, monkeypatch
):
    """A socket's path has 107 bytes at most (unix(7), `sun_path`), and Ray refuses longer ones."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = {}
    monkeypatch.setattr(ray, "init", options.update)
    cluster.start_servers(set())
    assert options["_temp_dir"] == directory
    assert (options["address"], options["include_dashboard"]) == ("local", False)
    used = directory or get_default_ray_temp_dir()
    validate_socket_filepath(used + cluster.SOCKET.removeprefix("/ray"))


def test_processes_of_a_killed_run_are_ended_and_a_reused_pid_is_not(file, spawn, monkeypatch):
    """An earlier version has recorded creation times; proc_stat(5): they follow a set clock."""
    left, recorded, other = spawn(), spawn(), spawn()
    created = psutil.Process(recorded.pid).create_time()
    start = identify_start(left.pid)
    pairs = [(left.pid, start), (recorded.pid, created), (other.pid, created - 3600)]
    file.write_text(json.dumps([*pairs, (other.pid, f"{start}0")]))
    real = psutil.Process.create_time
    seconds = {left.pid: 60}  # the clock of the others was set before they were recorded
    monkeypatch.setattr(
        psutil.Process, "create_time", lambda self: real(self) + seconds.get(self.pid, 0)
    )
    cluster.end_orphans(file)
    assert left.wait() != 0
    assert recorded.wait() != 0
    assert other.poll() is None
    assert not file.exists()


@pytest.mark.parametrize("content", ["", "[[12", "[3]", "{}", '[["a", 1]]', "\0\0"])
def test_a_damaged_process_file_lists_no_processes(file, content):
    file.write_text(content)
    cluster.end_orphans(file)
    assert not file.exists()


def test_a_process_of_another_user_is_left_alone(file, spawn, monkeypatch):
    process = spawn()
    file.write_text(json.dumps([(process.pid, psutil.Process(process.pid).create_time())]))
    monkeypatch.setattr(psutil.Process, "kill", fail_with(psutil.AccessDenied(process.pid)))
    cluster.end_orphans(file)
    assert not file.exists()
    assert process.poll() is None


@pytest.mark.parametrize("buried", [False, True])
def test_an_own_cluster_is_alive_while_all_its_servers_run(
    file, spawn, fake_ray, monkeypatch, buried
):
    """With and without a read of the exit status of the server that has ended."""
    raylet, monitor = spawn(), spawn()
    names = {raylet.pid: "raylet", monitor.pid: "monitor"}
    monkeypatch.setattr(cluster, "read_name", lambda process: names.get(process.pid, "gcs_server"))
    monkeypatch.setattr(cluster, "CHECK_SERVERS", -1.0)
    with cluster.open_cluster(file) as up:
        assert up.is_alive()
        monitor.kill()
        monitor.wait()
        assert up.is_alive()
        raylet.kill()
        if buried:
            raylet.wait()
        while up.is_alive():
            pass
    assert fake_ray.servers[0].wait() == -signal.SIGKILL  # trials would keep writing


def test_a_joined_cluster_is_checked_for_our_node_unless_its_head_is_silent(file, monkeypatch):
    watch, alive, requests = SimpleNamespace(seconds_silent=0.0), {"ours", "other"}, []

    def list_nodes():
        requests.append(1)
        node = {"NodeManagerHostname": "here", "Resources": {}}
        return [{"NodeID": name, "Alive": name in alive, **node} for name in ("ours", "other")]

    context = SimpleNamespace(get_node_id=lambda: "ours", gcs_address="head:6379")
    for name in ("RAY_ADDRESS", *cluster.ENVIRONMENT):
        monkeypatch.setenv(name, "head:6379")
    monkeypatch.setattr(cluster, "CHECK_NODE", -1.0)
    monkeypatch.setattr(cluster, "connect_to_cluster", lambda options, environment: None)
    monkeypatch.setattr(cluster, "watch_head", lambda head: nullcontext(watch))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", list_nodes)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with cluster.open_cluster(file) as up:
        alive.remove("other")
        assert up.is_alive()
        watch.seconds_silent, before = cluster.LOST_SECONDS, len(requests)
        assert up.is_alive()
        watch.seconds_silent += 1.0
        assert not up.is_alive()
        assert len(requests) == before, "a call of Ray would block"
        watch.seconds_silent = 0.0
        assert up.is_alive()
        alive.symmetric_difference_update({"ours", "other"})
        assert not up.is_alive()


def test_a_cluster_is_checked_at_intervals(monkeypatch):
    now, answers = [100.0], [True, False]
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    ask = cluster.call_every(5.0, lambda: answers.pop(0))
    assert ask()
    assert len(answers) == 2
    now.append(105.0)
    assert [ask(), ask()] == [True, True]
    now.append(110.0)
    assert [ask(), ask()] == [False, False]


@pytest.fixture
def lifecycle(tmp_path):
    flag = StopFlag(tmp_path)
    return SimpleNamespace(apply_requests=lambda: None, stop=lambda: None, stop_flag=flag)


def test_the_loss_of_the_cluster_ends_a_sweep_that_nobody_interrupted(lifecycle):
    alive = [True, False]
    interruption = TuneStopper(lifecycle, lambda: alive.pop(0))
    assert not interruption.stop_all()
    with pytest.raises(ClusterLostInterrupt):
        interruption.stop_all()
    assert not interruption.requested


def test_an_interruption_requests_stops_and_later_ends_trials(tmp_path, lifecycle, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("gdpo_tune.tuning.ray.tune.time.monotonic", lambda: now[-1])
    interruption = TuneStopper(lifecycle, lambda: True, 30.0)
    assert not interruption.stop_all()
    assert not (tmp_path / STOP).exists()
    interruption.request()
    assert not interruption.stop_all()
    assert (tmp_path / STOP).exists()
    now.append(130.1)
    assert interruption.stop_all()


def test_stop_requests_of_an_earlier_run_are_removed(tmp_path):
    flag = StopFlag(tmp_path)
    flag.request(3)
    assert (flag.is_set(3), flag.is_set(4)) == (True, False)
    flag.request()
    assert flag.is_set(4)
    StopFlag(tmp_path).clear()
    assert not flag.is_set(3)
    flag.withdraw(3)


def test_no_environment_of_uv_is_built_for_trials(file, fake_ray, monkeypatch):
    """ray-project/ray#50462: the constant is Ray's switch, read from a variable on import."""
    monkeypatch.setattr(ray_constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", True)
    monkeypatch.setattr(uv_runtime_env_hook, "_get_uv_run_cmdline", lambda: ["uv", "run", "python"])
    environment = {"env_vars": {"A": "1"}}
    with cluster.open_cluster(file):
        assert ray_worker._maybe_modify_runtime_env(environment, False) == environment


def test_a_trial_without_a_gpu_sees_none():
    """Ray reads this variable for CUDA_VISIBLE_DEVICES of actors without a GPU."""
    name = accelerator.RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR
    assert cluster.ENVIRONMENT[name] == "1"


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Address of a socket that listens and never answers."""
    hide_tokens(monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        # Ray replaces 127.0.0.1 by another address of this machine, which has no listener here
        monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", str)
        yield address


VERSIONS = {"ray_version": ray.__version__, "python_version": platform.python_version()}


def build_client(**versions):
    """Build a client of a head that has told its versions."""
    metadata = json.dumps(VERSIONS | versions).encode()
    return lambda address: SimpleNamespace(internal_kv_get=lambda *_, **__: metadata)


def test_a_cluster_is_joined_with_the_environment_of_trials(head, monkeypatch):
    monkeypatch.setattr("ray._raylet.GcsClient", build_client())
    options = {}
    monkeypatch.setattr(ray, "init", lambda **given: options.update(given))
    cluster.connect_to_cluster({"log_to_driver": False}, {"A": "1"})
    environment = {"runtime_env": {"env_vars": {"A": "1"}}}
    assert options == {"address": head, "log_to_driver": False, **environment}


def test_a_head_that_has_not_told_its_versions_is_waited_for(head, monkeypatch):
    """Source: `put_cluster_metadata` of Ray, which a head calls after its server listens."""
    told = build_client()("").internal_kv_get()
    answers = itertools.chain([None, None], itertools.repeat(told))
    client = SimpleNamespace(internal_kv_get=lambda *_, **__: next(answers))
    monkeypatch.setattr("ray._raylet.GcsClient", lambda address: client)
    cluster.check_head(head)
    client.internal_kv_get = lambda *_, **__: None
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.3)
    with pytest.raises(ClusterError, match="is still starting\n    fix: run the command again"):
        cluster.check_head(head)


NOT_HERE = ConnectionError("Could not find any running Ray instance.")
AUTO = "ray._private.services.canonicalize_bootstrap_address"
CLIENT_OF_HEAD, INIT = "ray._raylet.GcsClient", "ray.init"
NO_TOKEN, NO_HEAD = AuthenticationError("no"), RpcError("Timed out while waiting for GCS")
NO_NODE = ConnectionError("Failed to connect to Ray cluster")


@pytest.mark.parametrize(
    ("variables", "fault", "message"),
    [
        ({}, (CLIENT_OF_HEAD, NO_TOKEN), "asks for a token\n    fix: export RAY_AUTH_MODE=token"),
        (
            {"RAY_AUTH_TOKEN": "another"},
            (CLIENT_OF_HEAD, NO_TOKEN),
            "HEAD does not take the token\n    fix: export RAY_AUTH",
        ),
        ({}, (CLIENT_OF_HEAD, NO_HEAD), "HEAD is not the head of a Ray cluster"),
        ({}, (INIT, RuntimeError("no room")), "does not join the cluster at HEAD: .*\n    fix: "),
        ({}, (INIT, RpcError("Deadline")), "does not join the cluster at HEAD: .*\n    fix: "),
        ({}, (INIT, NO_NODE), r"no node of .* runs on this machine .*\n.*--submit"),
        ({"RAY_AUTH_MODE": "token"}, (), "there is no token"),
        ({"RAY_ADDRESS": "auto"}, (AUTO, NOT_HERE), "= auto: no Ray runs on this machine"),
        ({"RAY_ADDRESS": "ray://head:10001"}, (), "RAY_ADDRESS = ray://head:10001"),
        (
            {"RAY_ADDRESS": "127.0.0.1:9"},
            (),
            r"^RAY_ADDRESS = 127.0.0.1:9: .* does not answer \(.*refused[^\0]*"
            "to train on this machine alone, unset RAY_ADDRESS$",
        ),
        ({"RAY_ADDRESS": "a..b:6379"}, (), r"a\.\.b:6379 does not answer \("),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_named(head, monkeypatch, variables, fault, message):
    monkeypatch.setattr(CLIENT_OF_HEAD, build_client())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if fault:
        monkeypatch.setattr(fault[0], fail_with(fault[1]))
    with pytest.raises((ClusterError, UsageError), match=message.replace("HEAD", head)):
        cluster.connect_to_cluster({}, {})


@pytest.mark.parametrize("other", [{"python_version": "3.11.99"}, {"ray_version": "2.1.0"}])
def test_a_head_of_other_versions_is_refused_with_both(head, monkeypatch, other):
    """ray-project/ray#7648, #44063: `check_version_info` of Ray raises a RuntimeError."""
    monkeypatch.setattr(CLIENT_OF_HEAD, build_client(**other))
    with pytest.raises(ClusterError) as caught:
        cluster.connect_to_cluster({}, {})
    first, fix = str(caught.value).splitlines()
    assert all(version in first for version in (*other.values(), *VERSIONS.values()))
    assert fix.startswith("    fix: install the same versions")


@pytest.mark.parametrize(
    ("error", "access"), [(None, "is open"), (NO_TOKEN, "asks for a token"), (NO_HEAD, "")]
)
def test_a_cluster_is_asked_without_our_token_whom_it_lets_in(head, monkeypatch, error, access):
    modes = []

    def client(address):
        modes.append((address, get_authentication_mode()))
        if error is not None:
            raise error

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    monkeypatch.setattr(CLIENT_OF_HEAD, client)
    assert cluster.describe_access(head).partition(":")[0] == access
    assert modes == [(head, AuthenticationMode.DISABLED)]
    assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert cluster.describe_access("127.0.0.1:9") == "", "nothing answers there"
    monkeypatch.undo()
    cluster.read_authentication()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_real_cluster_is_described_and_joined(mode, monkeypatch, tmp_path):
    hide_tokens(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ab" * 32)
    access, deadline = "", time.monotonic() + PATIENCE
    with (
        make_short_directory() as directory,
        open_ray_cluster(directory, RAY_AUTH_MODE=mode) as nodes,
    ):
        nodes.start_head(cpus=1)
        while not access:
            assert time.monotonic() < deadline
            access = cluster.describe_access(nodes.address)
        assert access.startswith("asks for a token" if mode == "token" else "is open")
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        with cluster.open_cluster(tmp_path / "processes") as up:
            assert up.joined
            assert up.is_alive()
    monkeypatch.undo()
    cluster.read_authentication()


SWEEP = """
import os, sys
from pathlib import Path
from gdpo_tune.tuning.ray import cluster
with cluster.open_cluster(Path(sys.argv[1])):
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
    sys.stdin.read()
    print(ray.get(ray.remote(num_cpus=1)(lambda: os.environ["RAY_AUTH_MODE"]).remote()))
"""
CLIENT = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_put(b"stranger", b"was here", True, b"fun")
"""
NODE = """
import sys
from ray._private import services
from ray.scripts.scripts import cli
services.resolve_ip_for_localhost = str  # the outer address has no listener
cli(["start", "--node-ip-address=127.0.0.1", f"--address={sys.argv[1]}"])
"""


@pytest.mark.system
def test_strangers_join_none_of_two_clusters_of_our_own(tmp_path, monkeypatch):
    """CVE-2023-48022: Ray runs what anyone sends. Its token, and the loopback address, prevent it.

    https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    hide_tokens(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of the shell: for clusters of others
    path, words = {**os.environ, "PYTHONPATH": str(ROOT)}, [sys.executable, "-c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    theirs = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    tokens = set()
    with ExitStack() as stack:  # whose end lets sweeps end
        sweeps = [
            stack.enter_context(
                subprocess.Popen([*words, SWEEP, tmp_path / name], env=path, **pipes)
            )
            for name in "ab"
        ]
        for sweep in sweeps:
            address, session = (sweep.stdout.readline().strip() for _ in range(2))
            processes = psutil.Process(sweep.pid).children(recursive=True)
            (raylet,) = [process for process in processes if process.name() == "raylet"]
            tokens.add(token := raylet.environ()["RAY_AUTH_TOKEN"])
            own = {sweep.pid, *(process.pid for process in processes)}
            listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
            hosts = {c.laddr.ip for c in listening if c.pid in own}
            assert hosts <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
            assert not any(token in word for process in processes for word in process.cmdline())
            files = [*Path(session).rglob("*"), *tmp_path.iterdir()]
            assert not [f for f in files if f.is_file() and token.encode() in f.read_bytes()]
            strangers = itertools.product((CLIENT, NODE), ({}, theirs)) if len(tokens) == 1 else ()
            for text, given in strangers:
                command = [*words, text, address]
                done = subprocess.run(command, env={**path, **given}, capture_output=True)
                assert done.returncode == 1
                assert b"InvalidAuthToken" in done.stderr
            known = {**path, **theirs, "RAY_AUTH_TOKEN": token}
            subprocess.run([*words, CLIENT, address], env=known, check=True)
        assert len(tokens) == 2
        for sweep in sweeps:
            assert sweep.communicate("") == ("token\n", None)
            assert sweep.returncode == 0


# The head, once joined


class FakeHead:
    """A fake head that may stop answering, with a fake clock."""

    def __init__(self, monkeypatch):
        self.now, self.answers, self.leaves = 100.0, True, []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(cluster, "time", clock)
        monkeypatch.setattr(cluster, "probe_head", lambda *_: "" if self.answers else "refused")
        monkeypatch.setattr(cluster, "exit_process", lambda: self.leaves.append(self.now))
        self.watch = cluster.HeadWatch("head:6379")

    def check_after(self, seconds):
        self.now += seconds
        self.watch.check()
        return self.watch.seconds_silent

    def check_for(self, seconds):
        for _ in range(int(seconds / cluster.HEAD_POLL_SECONDS)):
            self.check_after(cluster.HEAD_POLL_SECONDS)
        return self.watch.seconds_silent


def test_the_process_disconnects_some_time_after_the_head_is_lost(monkeypatch):
    head = FakeHead(monkeypatch)
    assert head.check_after(1000.0) == 0
    head.answers = False
    assert head.check_for(cluster.LOST_SECONDS) == cluster.LOST_SECONDS
    head.answers = True
    assert head.check_after(2.0) == 0, "it answers again"
    head.answers = False
    assert head.check_for(cluster.LOST_SECONDS) == cluster.LOST_SECONDS
    assert head.check_for(cluster.LEAVE_SECONDS) > cluster.LOST_SECONDS
    assert head.leaves == []
    head.check_after(cluster.HEAD_POLL_SECONDS)
    assert len(head.leaves) == 1


def test_a_process_that_was_stopped_itself_gives_the_head_time_to_answer(monkeypatch):
    """A stopped driver lost its sweep: a minute had passed since the last answer."""
    head = FakeHead(monkeypatch)
    head.check_after(cluster.HEAD_POLL_SECONDS)
    head.now += 60.0
    assert head.watch.seconds_silent == 0
    head.answers = False  # the network of a machine that wakes up is not there at once
    assert head.check_after(cluster.HEAD_POLL_SECONDS) == cluster.POLL_SECONDS
    assert head.leaves == []


def test_a_head_is_watched_from_a_thread_until_the_end(monkeypatch):
    polled = threading.Semaphore(0)
    monkeypatch.setattr(cluster, "HEAD_POLL_SECONDS", 0.001)
    monkeypatch.setattr(cluster.HeadWatch, "check", lambda watch: polled.release())
    with cluster.watch_head("head:6379") as watch:
        assert watch.seconds_silent == 0
        assert polled.acquire(timeout=60)
    assert "head" not in {thread.name for thread in threading.enumerate()}


def test_a_probe_finds_out_whether_a_head_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not cluster.probe_head(address, 1.0)
    assert "refused" in cluster.probe_head(address, 1.0)
