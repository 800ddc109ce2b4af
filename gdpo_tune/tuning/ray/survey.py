"""Whether every node that trials may run on sees what they need: one small task on each, at first.

A folder that is local to each node looks right from all of them, and loses every checkpoint as soon
as a trial moves: so each node has to see a file that the driver has just written, and the driver
what each node writes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import ClusterError, StoreError
from gdpo_tune.ledger.sweep_store import check_writable
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.ray.nodes import Node

PATIENCE = 180.0
"""Seconds that a node has for its answer: its first process may have to fetch what was sent."""


@dataclass(frozen=True)
class Answer:
    """What a node says of itself."""

    sees: bool
    """Whether it sees the file that the driver has written."""
    missing: tuple[str, ...] = ()
    """Which of the paths that trials need are not there."""
    error: str = ""
    """Why it could not write beside that file."""


Ask = Callable[[Path | str, Sequence[Node], Sequence[str]], Sequence[Answer | ClusterError | None]]
"""Lets nodes `look`; an answer a node, in their order, or why one gives none."""


def look(mark: Path | str, own: str, needed: Sequence[str]) -> Answer:
    """Answer for this node; runs there.

    Args:
        mark: a file that the driver has written; or the address of an object store, which needs
            none.
        own: name of the file to write beside it.
        needed: paths that trials need.
    """
    missing = tuple(path for path in needed if not Path(path).expanduser().exists())
    if isinstance(mark, str):
        try:
            check_writable(mark)
        except StoreError as error:
            return Answer(sees=True, missing=missing, error=str(error).splitlines()[0])
        return Answer(sees=True, missing=missing)
    if not mark.exists():
        return Answer(sees=False, missing=missing)
    try:
        mark.with_name(own).touch()
    except OSError as error:
        return Answer(sees=True, missing=missing, error=error.strerror or str(error))
    return Answer(sees=True, missing=missing)


def survey(
    spec: SweepSpec,
    directory: Path,
    nodes: Sequence[Node],
    is_there: Callable[[Node], bool],
    ask: Ask | None = None,
) -> None:
    """Refuse a cluster on which trials could not be kept, or not be run.

    Args:
        spec: the sweep.
        directory: its folder, absolute.
        nodes: those on which trials may run.
        is_there: whether a node is one of the cluster's by now: one that has gone meanwhile is as
            good as one that goes later.
        ask: for tests: what asks the nodes; None: tasks of Ray, pinned to each.

    Raises:
        ClusterError: with every node that does not see the folder, or lacks something; or one that
            is there does not answer.
    """
    ask = ask or ask_by_tasks
    if spec.address:
        refuse_lacking(given(nodes, ask(spec.storage, nodes, needed_paths(spec)), is_there))
        return
    mark = directory / f".seen-{uuid.uuid4().hex}"
    mark.touch()
    try:
        answers = given(nodes, ask(mark, nodes, needed_paths(spec)), is_there)
        unseen = [
            node
            for node, answer in answers
            if not (answer.sees and (answer.error or _own(mark, node).exists()))
        ]
    finally:
        for path in directory.glob(f"{mark.name}*"):
            path.unlink()
    if unseen:
        raise ClusterError(
            f"storage = {spec.storage}: {directory} is another folder on {_listed(unseen)}, and "
            "trials that move between nodes would lose their checkpoints\n"
            "    fix: --set storage=FOLDER, one that is mounted on every node"
        )
    refuse_lacking(answers)


def given(
    nodes: Sequence[Node],
    answers: Sequence[Answer | ClusterError | None],
    is_there: Callable[[Node], bool],
) -> list[tuple[Node, Answer]]:
    """The answers of the nodes that are still there.

    Raises:
        ClusterError: one of those has given none.
    """
    found: list[tuple[Node, Answer]] = []
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, Answer):
            found.append((node, answer))
        elif answer is not None and is_there(node):
            raise answer
    return found


def refuse_lacking(answers: Sequence[tuple[Node, Answer]]) -> None:
    """Refuse nodes that see the folder, or need not, and lack something else.

    Raises:
        ClusterError: with every one of them.
    """
    wrong = [
        f"{node} {_told(answer)}" for node, answer in answers if answer.error or answer.missing
    ]
    if wrong:
        raise ClusterError(
            f"trials could not run everywhere: {'; '.join(wrong)}\n    fix: name paths that every "
            "node sees, writable for the user that runs Ray; --submit sends the working folder"
        )


def needed_paths(spec: SweepSpec) -> list[str]:
    """Files and folders of this machine that every trial reads, as the spec names them."""
    paths = [spec.policy, spec.data.source]
    if task_files.is_file(spec.task):
        paths.append(spec.task.rpartition(":")[0])
    return [path for path in paths if path and Path(path).expanduser().exists()]


def ask_by_tasks(
    mark: Path | str, nodes: Sequence[Node], needed: Sequence[str]
) -> list[Answer | ClusterError | None]:
    """Let every node answer, side by side; of one that does not, or cannot, why; of one that is
    gone, None."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=1)(look)
    asked = [
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(mark, "" if isinstance(mark, str) else _own(mark, node).name, list(needed))
        for node in nodes
    ]
    answers: list[Answer | ClusterError | None] = []
    for node, reference in zip(nodes, asked, strict=True):
        try:
            answers.append(ray.get(reference, timeout=PATIENCE))
        except GetTimeoutError:
            told = (
                f"node {node} did not answer within {PATIENCE:g} s\n"
                "    fix: look at that node, or take it out of the cluster"
            )
            answers.append(ClusterError(told))
        except TaskUnschedulableError:  # Ray lists a node for a while that it knows to be dead
            answers.append(None)
        except (RayError, ImportError) as error:  # the second one where the package is missing
            words = str(error).strip().splitlines()
            told = (
                f"node {node} cannot run trials: {words[-1] if words else type(error).__name__}\n"
                "    fix: install gdpo-tune there as it is here, or --submit, which sends it"
            )
            answers.append(ClusterError(told))
    return answers


def _own(mark: Path, node: Node) -> Path:
    return mark.with_name(f"{mark.name}-{node.id}")


def _listed(nodes: Sequence[Node]) -> str:
    return "node " + ", ".join(map(str, nodes))


def _told(answer: Answer) -> str:
    parts = [f"lacks {path}" for path in answer.missing]
    if answer.error:
        parts.append(f"cannot write into the sweep's folder ({answer.error})")
    return " and ".join(parts)
