"""The nodes of the cluster: which there are, which have gone, and on which one a process runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    host: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        """For a person; several nodes may share a host."""
        return f"{self.host} ({self.id[:8]})"


Watcher = Callable[[Sequence[Node], Sequence[Node]], None]
"""Called with the nodes that have gone and those that have come."""


class Nodes:
    """The nodes that are alive, as of the last look."""

    def __init__(self, table: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """
        Args:
            table: `ray.nodes`.
        """
        self._table = table
        self._watchers: list[Watcher] = []
        self._lost: set[str] = set()
        self._known: dict[str, Node] = {}
        """All that there ever were."""
        self._alive = self._read()

    def alive(self) -> list[Node]:
        """Those that were alive at the last look."""
        return list(self._alive.values())

    def has(self, node: str) -> bool:
        """Whether a node was alive at the last look, by its id."""
        return node in self._alive

    def still_has(self, node: Node) -> bool:
        """Whether a node is alive now."""
        self.look()
        return self.has(node.id)

    def named(self, node: str) -> str:
        """What to call a node by its id, for a person, whether or not it is still there."""
        return str(self._known.get(node, "unknown"))

    def watch(self, watcher: Watcher) -> None:
        """Tell of every change from now on."""
        self._watchers.append(watcher)

    def lose(self, node: str) -> None:
        """Take a node for gone, which Ray may know of its processes before its table does."""
        self._lost.add(node)
        self.look()

    def look(self) -> None:
        """Look again, and tell what has changed."""
        before, self._alive = self._alive, self._read()
        gone = [node for node in before.values() if node.id not in self._alive]
        come = [node for node in self._alive.values() if node.id not in before]
        if gone or come:
            for watcher in self._watchers:
                watcher(gone, come)

    def _read(self) -> dict[str, Node]:
        found = {
            node["NodeID"]: Node(node["NodeID"], node["NodeManagerHostname"], node["Resources"])
            for node in self._table()
            if node["Alive"] and node["NodeID"] not in self._lost
        }
        self._known |= found
        return found


def node_of(actor: Any) -> str:
    """Id of the node on which an actor runs or ran; empty if Ray does not know."""
    from ray._private.state import actors

    about: Any = actors(actor._actor_id.hex())
    return about["Address"]["NodeID"] if about else ""
