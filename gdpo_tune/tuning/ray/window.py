"""How trials that share no disk with the driver see what asks them to end.

The driver asks by files in the sweep's folder, whether anybody else sees that or not. An actor on
its machine looks for them on behalf of the others.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Looker:
    """Looks at files of the driver's machine."""

    def exist(self, *paths: Path) -> bool:
        """Whether one of them is there."""
        return any(path.exists() for path in paths)


def open_window() -> tuple[str, Any]:
    """Start the actor on this machine; return its name, and what keeps it alive."""
    name = f"gdpo-tune-window-{uuid.uuid4().hex}"
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": 16}
    return name, ray.remote(Looker).options(name=name, **options).remote()


class Window:
    """The actor, seen from a trial."""

    def __init__(self, name: str) -> None:
        self._actor = ray.get_actor(name)

    def exist(self, *paths: Path) -> bool:
        """Whether one of these files of the driver's machine is there."""
        try:
            found: Any = ray.get(self._actor.exist.remote(*paths))
            return bool(found)
        except ActorUnavailableError:
            return False  # cut off for a moment: the next step asks again
