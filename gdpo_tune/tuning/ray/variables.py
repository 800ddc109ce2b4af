"""Environment variables of trials (`resources.env`): how they reach the processes of a cluster.

Processes of a cluster of our own inherit them. On a joined cluster, Ray sets them when it starts a
process, but it writes them into the logs of every node too. So secrets take another way: the
driver puts them into the head's memory, and a trial reads them before it imports anything of size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.core.redaction import is_secret

SHARED = "GDPO_TUNE_SHARED_VARIABLES"
"""Variable of a trial's process: the key under which the head has further ones."""
_NAMESPACE = b"gdpo_tune"


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that Ray may log, and the secrets."""
    secrets = {name: value for name, value in variables.items() if is_secret(name, value)}
    return {name: v for name, v in variables.items() if name not in secrets}, secrets


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables of this process, and so of those that it starts, during the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def share_secrets(key: str, secrets: Mapping[str, str]) -> Generator[None]:
    """Let trials of the joined cluster read these secrets during the block."""
    if not secrets:
        yield
        return
    store: Any = _import_store()
    store._internal_kv_put(key, json.dumps(dict(secrets)), overwrite=True, namespace=_NAMESPACE)
    try:
        yield
    except ClusterLostError:
        raise  # the head is gone, and its memory with it
    except BaseException:
        store._internal_kv_del(key, namespace=_NAMESPACE)
        raise
    store._internal_kv_del(key, namespace=_NAMESPACE)


def read_shared_variables() -> None:
    """Set the variables in this process that the driver shares with it, if any."""
    key = os.environ.get(SHARED)
    if key:
        content = _import_store()._internal_kv_get(key, namespace=_NAMESPACE)
        os.environ.update(json.loads(content) if content else {})


def _import_store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
