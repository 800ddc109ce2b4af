"""Clusters whose nodes do not share the directory are refused before any trial starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import ClusterError
from gdpo_tune.spec import Resources, SweepSpec
from gdpo_tune.tuning.nodes import ClusterNode, Nodes
from gdpo_tune.tuning.ray import preflight
from gdpo_tune.tuning.ray.preflight import (
    COMPILER,
    Answers,
    NodeAnswer,
    check_nodes,
    list_needed_paths,
    probe_node,
)
from tests.support.tuning import load_code_spec

NODES = [
    {"NodeID": "aaaaaaaaaa", "NodeManagerHostname": "one", "Resources": {"CPU": 2.0}},
    {"NodeID": "bbbbbbbbbb", "NodeManagerHostname": "two", "Resources": {"CPU": 2.0}},
]


class FakeProbe:
    """A fake probe of nodes, some with their own disk at the path, some without needed files."""

    def __init__(self, tmp_path: Path, *, local: Sequence[str] = (), lacking: str = "") -> None:
        self.local, self.lacking, self.elsewhere = local, lacking, tmp_path / "elsewhere"
        self.elsewhere.mkdir()

    def __call__(
        self, mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]
    ) -> dict[str, NodeAnswer]:
        answers: dict[str, NodeAnswer] = {}
        for node in nodes:
            path_on_node = self.elsewhere / mark.name if node.host in self.local else mark
            paths = [f"{path}-nowhere" if node.host == self.lacking else path for path in needed]
            answers[node.id] = probe_node(path_on_node, f"{mark.name}-{node.id}", paths)
        return answers


class NodeTable:
    """A fake of Ray's table of nodes."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def __call__(self) -> list[dict[str, Any]]:
        return [{**row, "Alive": row["NodeManagerHostname"] not in self.lost} for row in NODES]


@pytest.fixture
def table() -> NodeTable:
    return NodeTable()


@pytest.fixture
def nodes(table: NodeTable) -> Nodes:
    return Nodes(table)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    created = tmp_path / "runs" / "code"
    created.mkdir(parents=True)
    return created


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that checks nodes with a fake probe."""

    def check_with(spec: SweepSpec, directory: Path, nodes: Nodes, probe: object) -> None:
        monkeypatch.setattr(preflight, "probe_by_tasks", probe)
        check_nodes(spec, directory, nodes)

    return check_with


def test_a_directory_that_every_node_sees_is_left_as_it_was(tmp_path, directory, nodes, check):
    check(load_code_spec(tmp_path), directory, nodes, FakeProbe(tmp_path))
    assert os.listdir(directory) == []


def test_a_directory_that_is_local_to_a_node_is_refused(tmp_path, directory, nodes, check):
    with pytest.raises(
        ClusterError, match=r"is another directory on node two \(bbbbbbbb\)"
    ) as caught:
        check(load_code_spec(tmp_path), directory, nodes, FakeProbe(tmp_path, local=["two"]))
    assert "fix: --set storage=DIRECTORY, one that is mounted on every node" in str(caught.value)
    assert os.listdir(directory) == []


def test_a_node_that_sees_the_directory_and_writes_elsewhere_is_refused(
    tmp_path, directory, nodes, check
):
    def probe(mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
        return {node.id: {} for node in nodes}

    with pytest.raises(ClusterError, match=r"node one \(aaaaaaaa\), two"):
        check(load_code_spec(tmp_path), directory, nodes, probe)


def test_a_node_that_may_not_write(tmp_path, directory, nodes, check, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    def probe(mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
        monkeypatch.setattr(Path, "touch", refuse)
        return {node.id: probe_node(mark, "x", needed) for node in nodes}

    with pytest.raises(ClusterError, match=r"one .* cannot write into the sweep's directory \(P"):
        check(load_code_spec(tmp_path), directory, nodes, probe)


def test_a_node_without_room_for_a_trial_is_not_checked(tmp_path, directory, nodes, check):
    spec = load_code_spec(tmp_path).model_copy(update={"resources": Resources(cpus=4)})

    def probe(mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
        assert not nodes
        return {}

    check(spec, directory, nodes, probe)


def test_files_that_trials_read_must_exist_on_every_node(tmp_path, directory, nodes, check):
    policy = tmp_path / "policy"
    policy.mkdir()
    spec = load_code_spec(tmp_path).model_copy(update={"policy": str(policy)})
    assert list_needed_paths(spec) == [str(policy)]
    assert list_needed_paths(load_code_spec(tmp_path)) == []
    with pytest.raises(ClusterError, match=r"two \(bbbbbbbb\) lacks .*policy-nowhere"):
        check(spec, directory, nodes, FakeProbe(tmp_path, lacking="two"))


def test_the_file_of_a_custom_task_must_exist_on_nodes(tmp_path):
    file = tmp_path / "mine.py"
    file.touch()
    spec = load_code_spec(tmp_path).model_copy(update={"task": f"{file}:Mine"})
    assert list_needed_paths(spec) == [str(file)]


def test_a_node_that_dies_during_the_check_is_ignored(tmp_path, directory, nodes, check, table):
    died = ClusterError("node two cannot run trials: The node died.")
    of_two = {"bbbbbbbbbb": died}

    def probe(mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
        one = nodes[0].id
        return {one: probe_node(mark, f"{mark.name}-{one}", needed), **of_two}

    with pytest.raises(ClusterError) as caught:
        check(load_code_spec(tmp_path), directory, nodes, probe)
    assert caught.value is died
    of_two.clear()  # Ray would not place a task there
    check(load_code_spec(tmp_path), directory, nodes, probe)


def test_a_node_that_is_lost_during_the_check_need_not_answer(
    tmp_path, directory, nodes, check, table
):
    died = ClusterError("node two cannot run trials: The node died.")

    def probe(mark: Path, nodes: Sequence[ClusterNode], needed: Sequence[str]) -> Answers:
        table.lost.add("two")
        one = nodes[0].id
        return {one: probe_node(mark, f"{mark.name}-{one}", needed), "bbbbbbbbbb": died}

    check(load_code_spec(tmp_path), directory, nodes, probe)


def test_a_node_reports_whether_it_can_write_to_the_object_store(tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    assert probe_node("memory://bucket/runs", "", []) == {}

    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    answer = probe_node("memory://bucket/runs", "", ["/nowhere"])
    assert " and ".join(answer) == (
        "lacks /nowhere and cannot write into the sweep's directory "
        "(storage memory://bucket/runs: Access Denied)"
    )


def test_a_node_without_a_compiler_is_named_where_trials_train_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = load_code_spec(tmp_path, ["resources.gpus=1"])
    assert list_needed_paths(spec)[-1] == COMPILER
    assert COMPILER not in list_needed_paths(load_code_spec(tmp_path))
    assert probe_node(tmp_path / "mark", "reply", [COMPILER]) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    answer = probe_node(tmp_path / "mark", "reply", [COMPILER, "/nowhere"])
    assert " and ".join(answer) == (
        "lacks /nowhere and cannot compile kernels for a GPU (there is no C compiler (CC, gcc or "
        "clang))"
    )


@pytest.mark.parametrize(
    ("needed", "fix"),
    [(COMPILER, "fix: apt-get install gcc"), ("/nowhere", "fix: name paths that every node sees")],
)
def test_a_fix_is_one_of_the_problem(tmp_path, directory, nodes, check, needed, fix, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))

    def probe(mark: Path, nodes: Sequence[ClusterNode], _: Sequence[str]) -> Answers:
        return {n.id: probe_node(mark, f"{mark.name}-{n.id}", [needed]) for n in nodes}

    with pytest.raises(ClusterError) as caught:
        check(load_code_spec(tmp_path), directory, nodes, probe)
    assert fix in str(caught.value)
    assert str(caught.value).count("fix:") == 1
    assert ("apt-get" in str(caught.value)) is (needed == COMPILER)
