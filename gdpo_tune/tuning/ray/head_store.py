"""Memory of the cluster's head, in which the driver leaves secrets for processes of trials.

Those among the variables of `resources.env` go there on a joined cluster, where Ray would write
them into the logs of every node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.core.redaction import is_secret

KEY_VARIABLE = "GDPO_TUNE_SHARED_VARIABLES"
"""Variable of a trial's process: the key under which the head has further ones."""
_NAMESPACE = b"gdpo_tune"


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that Ray may log, and the secrets."""
    secrets = {name: value for name, value in variables.items() if is_secret(name, value)}
    return {name: v for name, v in variables.items() if name not in secrets}, secrets


@contextmanager
def share_secrets(key: str, secrets: Mapping[str, str]) -> Generator[None]:
    """Let trials of the joined cluster read these secrets during the block."""
    if not secrets:
        yield
        return
    store, is_lost = _import_store(), False
    store._internal_kv_put(key, json.dumps(dict(secrets)), overwrite=True, namespace=_NAMESPACE)
    try:
        yield
    except ClusterLostError:
        is_lost = True  # the head is gone, and its memory with it
        raise
    finally:
        if not is_lost:
            store._internal_kv_del(key, namespace=_NAMESPACE)


def read_shared_variables() -> None:
    """Set the variables in this process that the driver shares with it, if any."""
    key = os.environ.get(KEY_VARIABLE)
    if key:
        content = _import_store()._internal_kv_get(key, namespace=_NAMESPACE)
        os.environ.update(json.loads(content) if content else {})


def _import_store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
