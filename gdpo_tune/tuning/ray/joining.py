"""Joining a Ray cluster that exists already, from one of its nodes, and watching its head.

Ray waits for minutes if nothing answers, and ends the process if a token is missing; so the head is
polled first. A call of Ray during which the head is lost does not return, and after a minute Ray
ends the process without cleaning up. So a thread of ours polls the head.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gdpo_tune.core import addresses, registry
from gdpo_tune.core.errors import ClusterError

ANSWER_SECONDS = 10.0
"""Seconds that the head may take for its first answer."""
ASK_SECONDS, CONNECT_SECONDS = 2.0, 2.0
POLL_SECONDS = ASK_SECONDS + CONNECT_SECONDS
"""Longest time in seconds from one poll to the next."""
LOST_SECONDS = 20.0
"""Seconds without an answer after which the head counts as lost."""
LEAVE_SECONDS = 15.0
"""Seconds that the process then has to clean up and end, before Ray's minute is over."""
LOST = (
    "a server of Ray is gone (killed, out of memory, or crashed), and no trial can run "
    "without it; what trials have recorded is kept"
)
ELSEWHERE = "from a machine that is no node of the cluster: --submit http://HEAD:8265"


def connect_to_cluster(options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Connect this process, with these options of `ray.init`, to the cluster of `RAY_ADDRESS`.

    Trials find `environment` among their variables.

    Raises:
        ClusterError: there is none, it wants another token, or this machine is no node of it.
        UsageError: the address, or the token, is wrong.
    """
    address = addresses.check_ray_address(os.environ[addresses.RAY_ADDRESS], addresses.RAY_ADDRESS)
    addresses.enable_ray_token(os.environ)
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    try:
        head = str(canonicalize_bootstrap_address(address))
    except ConnectionError as error:
        raise ClusterError(
            f"{addresses.RAY_ADDRESS} = {address}: no Ray runs on this machine\n"
            f"    fix: start it with ray start, or write HOST:PORT of the head; {ELSEWHERE}"
        ) from error
    try:
        check_head(head)
        ray.init(address=address, runtime_env={"env_vars": dict(environment)}, **options)
    except (ClusterError, ConnectionError) as error:
        reason = str(error)
        if isinstance(error, ConnectionError):
            reason = f"no node of the Ray cluster at {head} runs on this machine ({error})\n"
            reason += f"    fix: call on one of its nodes; {ELSEWHERE}"
        alone = f"to train on this machine alone, unset {addresses.RAY_ADDRESS}"
        raise ClusterError(f"{addresses.RAY_ADDRESS} = {address}: {reason}; {alone}") from error


def check_head(head: str) -> None:
    """Refuse a head at `HOST:PORT` that would not let this process in.

    Raises:
        ClusterError: nothing answers there, or it wants another token.
    """
    from ray.exceptions import AuthenticationError, RayError

    reason = find_silence(head, ANSWER_SECONDS)
    if reason:
        raise ClusterError(
            f"the head of the Ray cluster at {head} does not answer ({reason})\n"
            f"    fix: start the cluster; or correct or unset {addresses.RAY_ADDRESS}, which names "
            "it"
        )
    try:
        registry.load("ray._raylet:GcsClient")(address=head)
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


def find_silence(head: str, seconds: float) -> str:
    """Return why nothing at `HOST:PORT` answers within so many seconds; empty if something does."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except (OSError, ValueError) as error:  # the second one: no host or port can be that
        return getattr(error, "strerror", None) or str(error)
    return ""


class HeadWatch:
    """For how long polls of the head at `HOST:PORT` have had no answer."""

    def __init__(self, head: str) -> None:
        self.seconds_silent = 0.0
        """Seconds from the last answer to the last poll; a call of Ray may block if above 0."""
        self._head = head
        self._polled = time.monotonic()

    def check(self) -> None:
        """Poll the head once; exit if it is lost and the main thread did not end the process.

        Time in which this process was stopped itself, like a laptop that sleeps, says nothing about
        the head. So two polls that are far apart count as `POLL_SECONDS`.
        """
        silent = bool(find_silence(self._head, CONNECT_SECONDS))
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
        while not ended.wait(ASK_SECONDS):
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
