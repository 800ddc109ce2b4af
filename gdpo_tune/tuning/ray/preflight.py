"""Checks before the first trial, on every node of a cluster: one small task on each.

A directory that is local to each node looks right from all of them, and loses checkpoints as soon
as a trial moves. So each node that sees a new file of the driver's replies with a file beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gdpo_tune.core import task_files
from gdpo_tune.core.engines import COMPILER_FIX, find_compiler_problem, list_versions
from gdpo_tune.core.errors import ClusterError, StoreError
from gdpo_tune.core.files import expand_path, path_exists
from gdpo_tune.ledger.sweep_store import check_store_writable
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.nodes import ClusterNode, Nodes, count_workers

T = TypeVar("T")
ANSWER_SECONDS = 180.0
"""Seconds that a node has to answer: its first process may have to fetch submitted files."""
COMPILER = "a C compiler"
"""Entry among the needed paths that stands for a C compiler that works."""
_CANNOT_WRITE = "cannot write into the sweep's directory"
_PATHS_FIX = (
    "name paths that every node sees, writable for the user that runs Ray; --submit sends the "
    "working directory"
)
NodeAnswer = Mapping[str, str]
"""Problem of a node -> its fix."""


def probe_node(mark: Path | str, reply: str, needed: Sequence[str]) -> NodeAnswer:
    """Return what is wrong on this node; runs there.

    `mark` is a file of the driver's, beside which it writes `reply`; or the address of a store.
    """
    problems = {
        f"lacks {path}": _PATHS_FIX
        for path in needed
        if path != COMPILER and not path_exists(expand_path(path))
    }
    try:
        if isinstance(mark, str):
            check_store_writable(mark)
        elif mark.exists():
            mark.with_name(reply).touch()
    except StoreError as error:
        problems[f"{_CANNOT_WRITE} ({str(error).splitlines()[0]})"] = _PATHS_FIX
    except OSError as error:
        problems[f"{_CANNOT_WRITE} ({error.strerror or error})"] = _PATHS_FIX
    if COMPILER in needed:
        compiler = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
        if compiler:
            problems[f"cannot compile kernels for a GPU ({compiler})"] = COMPILER_FIX
    return problems


def ask_nodes(
    nodes: Sequence[ClusterNode],
    function: Callable[..., T],
    list_arguments: Callable[[ClusterNode], Sequence[object]],
) -> dict[str, T | ClusterError]:
    """Call a function on every node, side by side, as tasks of Ray; return the answers by id.

    A `ClusterError` says why a node gives none. Nodes that have died are left out.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0, max_retries=1)(function)
    references: list[tuple[ClusterNode, Any]] = []
    for node in nodes:
        pinned = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, False))
        references.append((node, pinned.remote(*list_arguments(node))))
    answers: dict[str, T | ClusterError] = {}
    for node, reference in references:
        try:
            answers[node.id] = ray.get(reference, timeout=ANSWER_SECONDS)
        except TaskUnschedulableError:
            continue  # Ray lists a node for a while that it knows to be dead
        except GetTimeoutError:
            answers[node.id] = ClusterError(
                f"node {node} did not answer within {ANSWER_SECONDS:g} s\n"
                "    fix: check that node, or remove it from the cluster"
            )
        except (RayError, ImportError) as error:  # the second one where the package is missing
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answers[node.id] = ClusterError(
                f"node {node} cannot run trials: {lines[-1]}\n"
                "    fix: install gdpo-tune there as it is here, or --submit, which sends it"
            )
    return answers


def check_nodes(spec: SweepSpec, directory: Path, nodes: Nodes) -> None:
    """Refuse a cluster whose nodes cannot run trials, or would lose their checkpoints.

    Raises:
        ClusterError: with every node that has room for a trial and does not see the directory, or
            lacks something; or with one that does not answer and is still alive.
    """
    able = [n for n in nodes.list_alive() if count_workers(spec.resources, n.resources)]
    mark = directory / f".seen-{uuid.uuid4().hex}"
    try:
        if not spec.address:
            mark.touch()
        target, needed = spec.storage if spec.address else mark, list_needed_paths(spec)
        answers = ask_nodes(
            able, probe_node, lambda node: (target, f"{mark.name}-{node.id}", needed)
        )
    finally:
        replies = list(directory.glob(f"{mark.name}*"))
        for path in replies:
            path.unlink()
    blind: list[str] = []
    problems: list[str] = []
    fixes: dict[str, None] = {}  # in the order of the nodes, each once
    for node, answer in ((node, answers[node.id]) for node in able if node.id in answers):
        if isinstance(answer, ClusterError):
            nodes.refresh()
            if nodes.is_alive(node.id):
                raise answer
            continue
        replied = mark.with_name(f"{mark.name}-{node.id}") in replies
        if not (spec.address or replied or _CANNOT_WRITE in " ".join(answer)):
            blind.append(str(node))
        if answer:
            problems.append(f"{node} {' and '.join(answer)}")
            fixes |= dict.fromkeys(answer.values())
    if blind:
        raise ClusterError(
            f"storage = {spec.storage}: {directory} is another directory on node "
            f"{', '.join(blind)}, and trials that move between nodes would lose their checkpoints\n"
            "    fix: --set storage=DIRECTORY, one that is mounted on every node"
        )
    if problems:
        raise ClusterError(
            f"trials could not run everywhere: {'; '.join(problems)}\n    fix: {'; '.join(fixes)}"
        )


_NONE = "none"
_ASK_CUDA = """
import json, torch
torch.cuda.init()
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps({
    "GPU": ", ".join(sorted({f"{g.name} of {g.total_memory / 2**30:.0f} GiB" for g in gpus})),
    "bfloat16": "native" if torch.cuda.is_bf16_supported(including_emulation=False) else "none",
}))
"""


def describe_node(has_gpus: bool) -> dict[str, str]:
    """Return versions, and what CUDA says of the GPUs of this node, if any; runs there.

    A GPU that CUDA cannot use is a `problem`.
    """
    facts = list_versions()
    if has_gpus:
        # Ray hides all GPUs from a task that asks for none.
        hidden = {} if os.environ.get("CUDA_VISIBLE_DEVICES") else {"CUDA_VISIBLE_DEVICES"}
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        command = [sys.executable, "-c", _ASK_CUDA]
        answer = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if answer.returncode:
            lines = answer.stderr.strip().splitlines()
            return {**facts, "problem": lines[-1] if lines else f"status {answer.returncode}"}
        facts |= json.loads(answer.stdout.splitlines()[-1])
    return facts


def find_mixture(spec: SweepSpec, nodes: Nodes) -> str:
    """Return how the nodes with room for a trial differ; empty: in nothing that was asked.

    Raises:
        ClusterError: CUDA cannot use the GPUs of one, or `auto` would mean another number format or
            another engine on some of them.
    """
    has_gpus = spec.resources.gpus > 0
    able = [n for n in nodes.list_alive() if count_workers(spec.resources, n.resources)]
    answers = ask_nodes(able, describe_node, lambda _: (has_gpus,))
    facts = {str(n): f for n in able if isinstance(f := answers.get(n.id), dict)}
    if unfit := [f"{node} ({f['problem']})" for node, f in facts.items() if "problem" in f]:
        raise ClusterError(
            f"resources.gpus: CUDA cannot use the GPUs of node {', '.join(unfit)}, and trials "
            "would train on the CPU there\n"
            "    fix: a driver for the build of torch there (docs/gpus.md), or another build"
        )

    mixed: dict[str, str] = {}
    for name in dict.fromkeys(name for known in facts.values() for name in known):
        kinds: dict[str, list[str]] = {}
        for node, known in facts.items():
            kinds.setdefault(known.get(name, _NONE), []).append(node)
        parts = (f"{kind} on {', '.join(found)}" for kind, found in kinds.items())
        mixed |= {name: f"{name} {'; '.join(parts)}"} if len(kinds) > 1 else {}
    for name, key, value, other in (
        ("bfloat16", "model.dtype", spec.model.dtype, "float32"),
        ("vllm", "rollout.engine", spec.rollout.engine, "transformers"),
    ):
        if has_gpus and value == "auto" and f"{_NONE} on" in mixed.get(name, ""):
            raise ClusterError(
                f"{key} = auto would not mean the same for all trials ({mixed[name]})\n"
                f"    fix: --set {key}={other}, or nodes of one kind"
            )
    return ", ".join(mixed.values())


def list_needed_paths(spec: SweepSpec) -> list[str]:
    """Return the paths that every trial reads, as the spec has them; on GPUs also `COMPILER`."""
    data = spec.data
    paths = [spec.policy, data.source, data.validation.source, data.test.source]
    if spec.start is not None:
        paths.append(spec.start.file)
    if task_files.is_task_file(spec.task):
        paths.append(spec.task.rpartition(":")[0])
    present = [path for path in paths if path and path_exists(expand_path(path))]
    return [*present, COMPILER] if spec.resources.gpus else present
