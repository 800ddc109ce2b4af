"""Checks before the first trial, on every node of a cluster: one small task on each.

A directory that is local to each node looks right from all of them, and loses every checkpoint as
soon as a trial moves. So each node has to see a file that the driver has just written, and the
driver has to see what each node writes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import ClusterError, StoreError
from gdpo_tune.ledger.sweep_store import check_writable
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.ray.nodes import ClusterNode, Nodes, count_workers

PATIENCE = 180.0
"""Seconds that a node has for its answer: its first process may have to fetch what was sent."""


@dataclass(frozen=True)
class NodeAnswer:
    """What a node finds."""

    sees: bool
    """True if it sees the file that the driver has written."""
    lacks: tuple[str, ...] = ()
    """Paths that trials need and that do not exist there."""
    error: str = ""
    """Why it cannot write into the sweep's directory."""

    def __str__(self) -> str:
        """Return what is wrong, for a person; empty if nothing is."""
        parts = [f"lacks {path}" for path in self.lacks]
        if self.error:
            parts.append(f"cannot write into the sweep's folder ({self.error})")
        return " and ".join(parts)


Mark = Path | str
"""A file that the driver has written; or the address of an object store."""
Answers = Sequence[NodeAnswer | ClusterError | None]
"""An answer a node; or why it gives none; None: Ray does not place a task there."""
Probe = Callable[[Mark, Sequence[ClusterNode], Sequence[str]], Answers]


def probe_node(mark: Mark, reply: str, needed: Sequence[str]) -> NodeAnswer:
    """Return what this node finds; runs there.

    Args:
        mark: see `Mark`.
        reply: name of the file to write beside it.
        needed: paths that trials need.
    """
    lacks = tuple(path for path in needed if not Path(path).expanduser().exists())
    if isinstance(mark, Path) and not mark.exists():
        return NodeAnswer(False, lacks)
    try:
        if isinstance(mark, str):
            check_writable(mark)
        else:
            mark.with_name(reply).touch()
    except StoreError as error:
        return NodeAnswer(True, lacks, str(error).splitlines()[0])
    except OSError as error:
        return NodeAnswer(True, lacks, error.strerror or str(error))
    return NodeAnswer(True, lacks)


def probe_by_tasks(mark: Mark, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
    """Run `probe_node` on every node, side by side."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=1)(probe_node)

    def ask(node: ClusterNode) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node.id, soft=False)
        pinned_task = task.options(scheduling_strategy=pinned)
        return pinned_task.remote(mark, reply_name(mark, node), list(needed))

    def wait_for(node: ClusterNode, reference: Any) -> NodeAnswer | ClusterError | None:
        try:
            return ray.get(reference, timeout=PATIENCE)
        except TaskUnschedulableError:  # Ray lists a node for a while that it knows to be dead
            return None
        except GetTimeoutError:
            problem = f"did not answer within {PATIENCE:g} s"
            fix = "look at that node, or take it out of the cluster"
        except (RayError, ImportError) as error:  # the second one where the package is missing
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problem = f"cannot run trials: {lines[-1]}"
            fix = "install gdpo-tune there as it is here, or --submit, which sends it"
        return ClusterError(f"node {node} {problem}\n    fix: {fix}")

    references = [ask(node) for node in nodes]
    return [wait_for(*pair) for pair in zip(nodes, references, strict=True)]


def check_nodes(
    spec: SweepSpec, directory: Path, nodes: Nodes, probe: Probe = probe_by_tasks
) -> None:
    """Refuse a cluster on which trials could not be kept, or not be run.

    Args:
        spec: the sweep.
        directory: its directory, absolute.
        nodes: of the cluster; those without room for a trial are not asked.
        probe: asks nodes; another one in tests.

    Raises:
        ClusterError: with every node that does not see the directory, or lacks something; or with
            one that does not answer and is still alive.
    """
    asked = [n for n in nodes.list_alive() if count_workers(spec.resources, n.resources)]
    mark = spec.storage if spec.address else directory / f".seen-{uuid.uuid4().hex}"
    if isinstance(mark, Path):
        mark.touch()
    try:
        answers = live_answers(nodes, asked, probe(mark, asked, list_needed_paths(spec)))
        blind = [str(node) for node, answer in answers if is_blind(mark, node, answer)]
    finally:
        if isinstance(mark, Path):
            for path in directory.glob(f"{mark.name}*"):
                path.unlink()
    if blind:
        raise ClusterError(
            f"storage = {spec.storage}: {directory} is another folder on node {', '.join(blind)}, "
            "and trials that move between nodes would lose their checkpoints\n"
            "    fix: --set storage=FOLDER, one that is mounted on every node"
        )
    problems = [f"{node} {answer}" for node, answer in answers if str(answer)]
    if problems:
        raise ClusterError(
            f"trials could not run everywhere: {'; '.join(problems)}\n    fix: name paths that "
            "every node sees, writable for the user that runs Ray; --submit sends the working "
            "folder"
        )


def live_answers(
    nodes: Nodes, asked: Sequence[ClusterNode], answers: Answers
) -> list[tuple[ClusterNode, NodeAnswer]]:
    """Return the answers of nodes that are still alive: one may be lost at any time.

    Raises:
        ClusterError: one of those has given none.
    """
    for node, answer in zip(asked, answers, strict=True):
        if isinstance(answer, ClusterError):
            nodes.refresh()
            if nodes.is_alive(node.id):
                raise answer
    pairs = zip(asked, answers, strict=True)
    return [(node, answer) for node, answer in pairs if isinstance(answer, NodeAnswer)]


def is_blind(mark: Mark, node: ClusterNode, answer: NodeAnswer) -> bool:
    """Return whether a node has another directory than the driver at the same path."""
    if isinstance(mark, str):
        return False
    replied = mark.with_name(reply_name(mark, node)).exists()
    return not answer.sees or not (answer.error or replied)


def list_needed_paths(spec: SweepSpec) -> list[str]:
    """Return files and directories of this machine that every trial reads, as the spec has them."""
    paths = [spec.policy, spec.data.source]
    if task_files.is_file(spec.task):
        paths.append(spec.task.rpartition(":")[0])
    return [path for path in paths if path and Path(path).expanduser().exists()]


def reply_name(mark: Mark, node: ClusterNode) -> str:
    """Return the name of the file that a node writes beside the driver's."""
    return "" if isinstance(mark, str) else f"{mark.name}-{node.id}"
