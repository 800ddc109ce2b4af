"""A Ray cluster without Ray's output: our own on this machine, or the one of RAY_ADDRESS.

An existing cluster is joined from one of its nodes. Ray waits for minutes if nothing answers, and
ends the process if a token is missing; so the head is polled first. A call of Ray during which the
head is lost does not return, and after a minute Ray ends the process; so a thread polls the head.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import psutil

from gdpo_tune.core import addresses, registry
from gdpo_tune.core.errors import ClusterError, ClusterLostError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.system import (
    block_hangups,
    count_free_threads,
    count_local_cpus,
    find_process,
    identify_start,
)
from gdpo_tune.tuning.nodes import Nodes
from gdpo_tune.tuning.ray.head_store import KEY_VARIABLE, share_secrets, split_secrets

FOR_TRIALS: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",  # no reports to the makers of TRL and vLLM
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU sees none
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report of several workers waits for it
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # importing torch on a busy machine
}
"""Variables that an existing cluster lacks."""
ENVIRONMENT: Mapping[str, str] = {
    **FOR_TRIALS,
    "RAY_AIR_NEW_OUTPUT": "0",  # no progress tables: listeners show the sweep
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a trial as in the command
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # three files a result otherwise
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours lets trials write a checkpoint
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # no metric is special
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the ledger is the state; snapshots are never restored
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # failures are in the ledger with their reason
    "TUNE_WARN_THRESHOLD_S": "10",  # a proposal may take a second
}
QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
"""Options of `ray.init`: the ledger has the reasons of failed trials."""
SERVERS = ("gcs_server", "raylet")
"""Names of the processes that a cluster of our own cannot work without."""
CHECK_SERVERS, CHECK_NODE = 0.5, 5.0
"""Seconds between two polls: of the servers of a cluster of our own, and of our node's state in a
cluster that was joined."""
OBJECT_STORE = 128 * 2**20
"""Bytes. Results are a few KB; Ray's default takes a third of the memory."""
SOCKET = "/ray/session_2026-11-26_12-00-00_000000_4194304/sockets/plasma_store"
"""Longest path of a socket of Ray below the directory for temporary files."""
STARTS = 4
"""Attempts to start a cluster of our own: half a minute is not always enough on a busy machine."""
TOO_SLOW = "timed out during startup"
"""In the message of Ray's error, which has no type of its own, if the start took too long."""
COMPLAINT = re.compile(r"what\(\):|\bfailed\b|\] *Error|\s[EF] \d+ \d+\]")
"""In lines of Ray's logs: an exception, or the severity error or fatal."""
QUOTED = 200
"""Characters of such a line in a message."""
THREADS = 200
"""Threads that Ray's servers on two cores, 165 with Ray 2.60, and the process of one trial need."""
FIRST_PROCESS_SECONDS = 300.0
"""Seconds that Ray may take for its first process, which imports Ray on a busy machine."""
ANSWER_SECONDS = 10.0
"""Seconds that the head may take for its first answer."""
HEAD_POLL_SECONDS, CONNECT_SECONDS = 2.0, 2.0
POLL_SECONDS = HEAD_POLL_SECONDS + CONNECT_SECONDS
"""Longest time in seconds from one poll to the next."""
LOST_SECONDS = 20.0
"""Seconds without an answer after which the head counts as lost."""
LEAVE_SECONDS = 15.0
"""Seconds that the process then has to clean up and end, before Ray's minute is over."""
LOST = (
    "a server of Ray is gone (killed, out of memory, or crashed), and no trial can run "
    "without it; what trials have recorded is kept"
)
ALONE = f"to train on this machine alone, unset {addresses.RAY_ADDRESS}"
ELSEWHERE = "from a machine that is no node of the cluster: --submit http://HEAD:8265"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that is up."""

    nodes: Nodes
    remember: Callable[[], None]
    """Record the present processes, so that the next start can end them if this one is killed."""
    is_alive: Callable[[], bool]
    """Returns whether trials can still be placed; cheap enough for frequent calls."""
    joined: bool = False
    """True if it existed before."""


def open_cluster(
    processes: Path, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[Cluster]:
    """Start a Ray cluster, or join the one of RAY_ADDRESS; `variables` are for trials.

    The file `processes` remembers the processes of a cluster of our own, some of which may outlive
    a killed driver. The next start ends them.

    Raises:
        ClusterLostError: the servers of a cluster of our own did not start.
        ClusterError: the existing cluster cannot be joined from here.
    """
    end_orphans(processes)
    variables = variables or {}
    joins = os.environ.get(addresses.RAY_ADDRESS)
    return _join_cluster(variables) if joins else _start_cluster(processes, variables)


@contextmanager
def _join_cluster(variables: Mapping[str, str]) -> Generator[Cluster]:
    """Join the cluster that RAY_ADDRESS names; see `open_cluster`."""
    _set_defaults()
    import ray

    public, hidden = split_secrets(variables)
    key = f"variables-{uuid.uuid4().hex}"
    shared = {KEY_VARIABLE: key} if hidden else {}
    ours = {name: os.environ[name] for name in FOR_TRIALS}
    connect_to_cluster(QUIET, {**ours, **public, **shared})
    context = ray.get_runtime_context()
    nodes, own_node = Nodes(ray.nodes), context.get_node_id()
    with watch_head(context.gcs_address) as watch:

        def is_alive() -> bool:
            # a call of Ray would block while the head is silent, and the sweep with it
            if watch.seconds_silent:
                return watch.seconds_silent <= LOST_SECONDS
            nodes.refresh()
            return nodes.is_alive(own_node)

        try:
            with share_secrets(key, hidden):
                yield Cluster(nodes, lambda: None, call_every(CHECK_NODE, is_alive), joined=True)
        finally:
            ray.shutdown()


@contextmanager
def _start_cluster(processes: Path, variables: Mapping[str, str]) -> Generator[Cluster]:
    _set_defaults()
    import ray

    others = list_children()
    # Ray runs what everyone sends who reaches its ports and has the token. A variable is in no
    # file, log or command line, and the sandbox does not pass it on
    token = {addresses.RAY_AUTH_MODE: "token", addresses.RAY_TOKEN: secrets.token_hex(32)}
    with set_variables({**variables, **token}):  # servers pass them on to each process of a trial
        read_authentication()
        start_servers(others)
    started = [process.pid for process in list_children() if read_name(process) in SERVERS]
    servers = [(pid, identify_start(pid)) for pid in started]

    def is_alive() -> bool:
        return all(find_process(pid, start) for pid, start in servers)

    def remember() -> None:
        pids = [process.pid for process in list_children() - others]
        write_atomically(processes, json.dumps([(pid, identify_start(pid)) for pid in pids]))

    try:
        remember()
        check_first_process()
        yield Cluster(Nodes(ray.nodes), remember, call_every(CHECK_SERVERS, is_alive))
    finally:
        lost = not is_alive()
        ray.shutdown()
        if lost:
            end_orphans(processes)  # trials outlive a killed raylet, and would keep writing
        processes.unlink(missing_ok=True)
        read_authentication()


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables of this process, and of those that it starts, during the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def read_authentication() -> None:
    """Let Ray read the variables of its authentication again, which it does only when imported."""
    registry.load("ray._raylet:Config").initialize("")
    registry.load("ray._raylet:AuthenticationTokenLoader").instance().reset_cache()


def _set_defaults() -> None:
    for name, value in ENVIRONMENT.items():  # Ray reads some of them when it is imported
        os.environ.setdefault(name, value)
    from ray._private import ray_constants

    # Below `uv run` every process would build an environment from a copy of this directory
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False


def start_servers(others: set[psutil.Process]) -> None:
    """Start Ray's servers, up to `STARTS` times if they take too long; `others` are not of Ray."""
    import ray
    from ray._private import ray_constants
    from tenacity import RetryError, Retrying, retry_if_exception, stop_after_attempt

    starting = Retrying(
        retry=retry_if_exception(lambda error: TOO_SLOW in str(error)),
        stop=stop_after_attempt(STARTS),
        after=lambda _: end_processes(list_children() - others),
    )
    node: Any = registry.load("ray._private.node:Node")
    usual_value, usual_start = ray_constants.ENABLE_RAY_CLUSTER, node.start_api_server
    # Ray listens on the loopback address where it knows no clusters, as on macOS. Elsewhere it
    # replaces 127.0.0.1, also in its option _node_ip_address, and listens on every interface
    ray_constants.ENABLE_RAY_CLUSTER = False
    # Without a dashboard this server is there for usage statistics alone, and asks the metadata
    # services of three clouds for them even where they are switched off
    node.start_api_server = _leave_out_api_server
    try:
        with block_hangups():  # otherwise the servers end with the terminal, and trials unsaved
            starting(
                ray.init,
                address="local",
                num_cpus=count_local_cpus(),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                _temp_dir=_choose_directory(),
                **QUIET,
            )
    except RetryError as error:
        raise ClusterLostError(
            f"the servers of Ray did not start in time in {STARTS} attempts{quote_logs()}"
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, node.start_api_server = usual_value, usual_start


def check_first_process() -> None:
    """Let Ray start one process; raise a `ClusterLostError` with Ray's own words if it does not."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        ray.get(ray.remote(num_cpus=0)(_answer).remote(), timeout=FIRST_PROCESS_SECONDS)
    except (GetTimeoutError, RayError) as error:
        raise ClusterLostError(f"Ray can start no process for trials{quote_logs()}") from error


def _answer() -> None:
    """Stand for a trial."""


def quote_logs() -> str:
    """Return the first line in which each of Ray's servers says what is wrong, for a message."""
    from ray._common.utils import get_default_ray_temp_dir

    logs = Path(_choose_directory() or get_default_ray_temp_dir(), "session_latest", "logs")
    quotes: list[str] = []
    for name in SERVERS:
        with suppress(OSError):  # it has written none
            lines = (logs / f"{name}.err").read_text(errors="replace").splitlines()
            found = [line.strip() for line in lines if COMPLAINT.search(line)]
            quotes += [f"{name}: {shorten(found[0], QUOTED)}"] if found else []
    return f" ({'; '.join(quotes)}; see {logs})" if quotes else f"; see {logs}"


def _choose_directory() -> str | None:
    """Return the directory of Ray's sockets; None for Ray's own, where its paths are not too long.

    Source: unix(7), whose `sun_path` has 107 bytes.
    """
    usual = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", ""))
    is_too_long = len(os.fsencode(os.path.abspath(usual) + SOCKET)) > 107
    return "/tmp/ray" if usual and is_too_long else None


def find_thread_problem() -> str:
    """Return why Ray's servers cannot run beside the threads of this user; empty if they can."""
    free = count_free_threads()
    if free is None or free >= THREADS:
        return ""
    return (
        f"a limit leaves {max(0, free)} more threads to this user or container, and Ray needs "
        f"{THREADS}\n    fix: raise it: ulimit -u, docker run --pids-limit, or TasksMax= of systemd"
    )


def _leave_out_api_server(node: Any, **_: Any) -> None:
    """Stand for `ray._private.node.Node.start_api_server`, whose address others read."""
    node._webui_url = ""


def call_every(seconds: float, check: Callable[[], bool]) -> Callable[[], bool]:
    """Return a cheap form of a check, which repeats the last answer, at first True, for a while."""
    answer, due = True, time.monotonic() + seconds

    def repeat() -> bool:
        nonlocal answer, due
        if time.monotonic() >= due:
            answer, due = check(), time.monotonic() + seconds
        return answer

    return repeat


def list_children() -> set[psutil.Process]:
    """Return every process below this one."""
    return set(psutil.Process().children(recursive=True))


def read_name(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def end_orphans(file: Path) -> None:
    """End the processes that a killed run recorded; an incomplete file names none."""
    with suppress(OSError, ValueError, TypeError):
        entries = json.loads(file.read_bytes())
        left = [find_process(int(pid), start) for pid, start in entries]
        end_processes(process for process in left if process is not None)
    file.unlink(missing_ok=True)


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """End those of these processes that still exist and belong to this user."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def connect_to_cluster(options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Connect to the cluster of `RAY_ADDRESS`, with options of `ray.init` and variables of trials.

    Raises:
        ClusterError: this machine is no node of it, or `find_cluster` refuses it.
    """
    address, head = find_cluster()
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, runtime_env={"env_vars": dict(environment)}, **options)
    except ConnectionError as error:
        raise ClusterError(
            f"{addresses.RAY_ADDRESS} = {address}: no node of the Ray cluster at {head} runs on "
            f"this machine ({error})\n    fix: call on one of its nodes; {ELSEWHERE}; {ALONE}"
        ) from error
    except (RuntimeError, RayError) as error:
        raise ClusterError(
            f"{addresses.RAY_ADDRESS} = {address}: Ray does not join the cluster at {head}: "
            f"{shorten(str(error), QUOTED)}\n    fix: see what its nodes log; {ALONE}"
        ) from error


def find_cluster() -> tuple[str, str]:
    """Return the address of `RAY_ADDRESS`, and `HOST:PORT` of the head of the cluster there.

    Raises:
        ClusterError: there is none, it wants another token, or it has other versions.
        UsageError: the address, or the token, is wrong.
    """
    address = addresses.check_ray_address(os.environ[addresses.RAY_ADDRESS], addresses.RAY_ADDRESS)
    addresses.enable_ray_token(os.environ)
    from ray._private.services import canonicalize_bootstrap_address

    read_authentication()
    try:
        head = str(canonicalize_bootstrap_address(address))
        check_head(head)
    except ConnectionError as error:
        raise ClusterError(
            f"{addresses.RAY_ADDRESS} = {address}: no Ray runs on this machine\n"
            f"    fix: start it with ray start, or write HOST:PORT of the head; {ELSEWHERE}"
        ) from error
    except ClusterError as error:
        raise ClusterError(f"{addresses.RAY_ADDRESS} = {address}: {error}; {ALONE}") from error
    return address, head


def describe_access(address: str) -> str:
    """Return whom the Ray cluster at an address lets in; empty if it does not answer from here."""
    _set_defaults()
    from ray._private.services import canonicalize_bootstrap_address
    from ray.exceptions import AuthenticationError, RayError

    try:
        head = str(canonicalize_bootstrap_address(address))
        if probe_head(head, CONNECT_SECONDS):
            return ""
        with set_variables({addresses.RAY_AUTH_MODE: "disabled"}):
            read_authentication()
            registry.load("ray._raylet:GcsClient")(address=head)
    except (ConnectionError, RayError) as error:
        return "asks for a token" if isinstance(error, AuthenticationError) else ""
    finally:
        read_authentication()
    return "is open: everyone who reaches its ports can run programs there"


def _read_versions(head: str) -> dict[str, Any]:
    """Read the versions of a head, which it tells last while it starts."""
    from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER

    client = registry.load("ray._raylet:GcsClient")(address=head)
    deadline = time.monotonic() + ANSWER_SECONDS
    asked = {"namespace": KV_NAMESPACE_CLUSTER}
    while not (found := client.internal_kv_get(CLUSTER_METADATA_KEY, **asked)):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the head of the Ray cluster at {head} is still starting\n"
                "    fix: run the command again once `ray status` shows the cluster's nodes"
            )
        time.sleep(0.1)
    versions: dict[str, Any] = json.loads(found)
    return versions


def check_head(head: str) -> None:
    """Raise a `ClusterError` for a head at `HOST:PORT` that Ray would not join from this process.

    Nothing answers there, it wants another token, or it has another Python or Ray.
    """
    from ray._private.utils import check_version_info
    from ray.exceptions import AuthenticationError, RayError

    reason = probe_head(head, ANSWER_SECONDS)
    if reason:
        raise ClusterError(
            f"the head of the Ray cluster at {head} does not answer ({reason})\n"
            f"    fix: start the cluster; or correct or unset {addresses.RAY_ADDRESS}"
        )
    try:
        check_version_info(_read_versions(head), "here")
    except RuntimeError as error:  # of the versions
        raise ClusterError(
            f"the Ray cluster at {head} cannot be joined: {' '.join(str(error).split())}\n"
            "    fix: install the same versions of Python and Ray here and on every node"
        ) from error
    except AuthenticationError as error:
        has_token = os.environ.get(addresses.RAY_AUTH_MODE, "").lower() == "token"
        problem = "does not take the token" if has_token else "asks for a token"
        raise ClusterError(
            f"the Ray cluster at {head} {problem}\n"
            f"    fix: export {addresses.RAY_AUTH_MODE}=token and "
            f"{addresses.RAY_TOKEN_PATH}=FILE with the cluster's token (default: ~/.ray/auth_token)"
        ) from error
    except RayError as error:
        raise ClusterError(
            f"what answers at {head} is not the head of a Ray cluster ({error})\n"
            "    fix: write the head's address, which has port 6379 by default"
        ) from error


def probe_head(head: str, seconds: float) -> str:
    """Return why nothing at `HOST:PORT` answers within `seconds`; empty if something does."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except (OSError, ValueError) as error:  # the second one: no host or port can be that
        return getattr(error, "strerror", None) or str(error)
    return ""


class HeadWatch:
    """Watch on the head at `HOST:PORT` that measures how long it has been silent."""

    def __init__(self, head: str) -> None:
        self.seconds_silent = 0.0
        """Seconds from the last answer to the last poll; a call of Ray may block if above 0."""
        self._head = head
        self._polled = time.monotonic()

    def check(self) -> None:
        """Poll the head once; exit if it is lost and the main thread did not end the process.

        This process may have been stopped itself: polls far apart count as `POLL_SECONDS`.
        """
        silent = bool(probe_head(self._head, CONNECT_SECONDS))
        before, self._polled = self._polled, time.monotonic()
        passed = min(self._polled - before, POLL_SECONDS)
        self.seconds_silent = self.seconds_silent + passed if silent else 0.0
        if self.seconds_silent > LOST_SECONDS + LEAVE_SECONDS:
            exit_process()


@contextmanager
def watch_head(head: str) -> Generator[HeadWatch]:
    """Watch the head at `HOST:PORT` from a thread."""
    watch = HeadWatch(head)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(HEAD_POLL_SECONDS):
            watch.check()

    thread = threading.Thread(target=repeat, name="head", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def exit_process() -> None:
    """End this process, whose main thread waits for Ray."""
    print(f"error: {LOST}. Run the same command to resume.", file=sys.stderr, flush=True)
    os._exit(1)
