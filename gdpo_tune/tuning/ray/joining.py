"""Joining a Ray cluster that is there already, from one of its nodes.

Ray waits for minutes where nobody is, and ends the process where a token is missing; so the head is
asked first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gdpo_tune.core import ray_access, registry
from gdpo_tune.core.errors import ClusterError
from gdpo_tune.tuning.ray.head import connect

ANSWER_SECONDS = 10.0
"""How long the head may take to say that it is there."""
ELSEWHERE = "from a machine that is no node of the cluster: --submit http://HEAD:8265"


def join(options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Connect this process to the cluster that `RAY_ADDRESS` names.

    Args:
        options: for `ray.init`.
        environment: variables that trials are to find.

    Raises:
        ClusterError: there is none, it wants another token, or this machine is no node of it.
        UsageError: the address, or what there is of a token, is wrong.
    """
    address = ray_access.address(os.environ[ray_access.ADDRESS], ray_access.ADDRESS)
    ray_access.settle(os.environ)
    import ray

    place = find(address)
    check_head(place)
    try:
        ray.init(address=address, runtime_env={"env_vars": dict(environment)}, **options)
    except ConnectionError as error:
        raise ClusterError(
            f"no node of the Ray cluster at {place} runs on this machine ({error})\n"
            f"    fix: call on one of its nodes; {ELSEWHERE}"
        ) from error


def find(address: str) -> str:
    """`HOST:PORT` of the head.

    Raises:
        ClusterError: `auto`, and no cluster is known on this machine.
    """
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address(address))
    except ConnectionError as error:
        raise ClusterError(
            f"{ray_access.ADDRESS} = {address}: no Ray runs on this machine\n"
            f"    fix: start it with ray start, or write HOST:PORT of the head; {ELSEWHERE}"
        ) from error


def check_head(place: str) -> None:
    """Find out whether the head at `HOST:PORT` would let this process in.

    Raises:
        ClusterError: nothing answers there, or it wants another token.
    """
    from ray.exceptions import AuthenticationError, RayError

    try:
        connect(place, ANSWER_SECONDS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"the head of the Ray cluster at {place} does not answer ({reason})\n"
            "    fix: start the cluster, or mend the address"
        ) from error
    try:
        registry.load("ray._raylet:GcsClient")(address=place)
    except AuthenticationError as error:
        sends = os.environ.get(ray_access.MODE, "").lower() == "token"
        what = "does not take the token" if sends else "asks for a token"
        raise ClusterError(
            f"the Ray cluster at {place} {what}\n    fix: export {ray_access.MODE}=token and "
            f"{ray_access.FILE}=FILE with the cluster's token (default: ~/.ray/auth_token)"
        ) from error
    except RayError as error:
        raise ClusterError(
            f"what answers at {place} is not the head of a Ray cluster ({error})\n"
            "    fix: write the head's address, which has port 6379 by default"
        ) from error
