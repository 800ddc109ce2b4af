"""Clusters whose nodes do not see the same folder are refused before anything runs on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gdpo_tune.core.errors import ClusterError
from gdpo_tune.tuning.ray.nodes import Node
from gdpo_tune.tuning.ray.survey import Answer, look, needed_paths, survey
from tests.support.tuning import spec_in

NODES = [Node("aaaaaaaaaa", "one", {}), Node("bbbbbbbbbb", "two", {})]


class Asked:
    """Nodes, some of which have a disk of their own at that path, or none that is writable."""

    def __init__(self, tmp_path: Path, *, local: Sequence[str] = (), lacking: str = "") -> None:
        self.local, self.lacking, self.elsewhere = local, lacking, tmp_path / "elsewhere"
        self.elsewhere.mkdir()

    def __call__(self, mark: Path, nodes: Sequence[Node], needed: Sequence[str]) -> list[Answer]:
        answers: list[Answer] = []
        for node in nodes:
            seen = self.elsewhere / mark.name if node.host in self.local else mark
            paths = [f"{path}-nowhere" if node.host == self.lacking else path for path in needed]
            answers.append(look(seen, f"{mark.name}-{node.id}", paths))
        return answers


def all_there(node: Node) -> bool:
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "code"
    made.mkdir(parents=True)
    return made


def test_a_folder_that_every_node_sees_is_left_as_it_was(tmp_path, folder):
    survey(spec_in(tmp_path), folder, NODES, all_there, Asked(tmp_path))
    assert os.listdir(folder) == []


def test_a_folder_that_is_local_to_a_node_is_refused(tmp_path, folder):
    with pytest.raises(ClusterError, match=r"is another folder on node two \(bbbbbbbb\)") as caught:
        survey(spec_in(tmp_path), folder, NODES, all_there, Asked(tmp_path, local=["two"]))
    assert "fix: --set storage=FOLDER, one that is mounted on every node" in str(caught.value)
    assert os.listdir(folder) == []


def test_a_node_that_sees_the_folder_and_writes_elsewhere_is_refused(tmp_path, folder):
    def ask(mark: Path, nodes: Sequence[Node], needed: Sequence[str]) -> list[Answer]:
        return [Answer(sees=True) for _ in nodes]

    with pytest.raises(ClusterError, match=r"node one \(aaaaaaaa\), two"):
        survey(spec_in(tmp_path), folder, NODES, all_there, ask)


def test_a_node_that_may_not_write(tmp_path, folder, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    def ask(mark: Path, nodes: Sequence[Node], needed: Sequence[str]) -> list[Answer]:
        monkeypatch.setattr(Path, "touch", refuse)
        return [look(mark, "x", needed) for _ in nodes]

    with pytest.raises(ClusterError, match=r"one .* cannot write into the sweep's folder \(Perm"):
        survey(spec_in(tmp_path), folder, NODES, all_there, ask)


def test_what_trials_read_has_to_be_everywhere(tmp_path, folder):
    policy = tmp_path / "policy"
    policy.mkdir()
    spec = spec_in(tmp_path).model_copy(update={"policy": str(policy)})
    assert needed_paths(spec) == [str(policy)]
    assert needed_paths(spec_in(tmp_path)) == []
    with pytest.raises(ClusterError, match=r"two \(bbbbbbbb\) lacks .*policy-nowhere"):
        survey(spec, folder, NODES, all_there, Asked(tmp_path, lacking="two"))


def test_a_task_of_ones_own_is_a_file_that_nodes_need(tmp_path):
    file = tmp_path / "mine.py"
    file.touch()
    spec = spec_in(tmp_path).model_copy(update={"task": f"{file}:Mine"})
    assert needed_paths(spec) == [str(file)]


def test_a_node_that_dies_meanwhile_is_no_reason_to_refuse_the_others(tmp_path, folder):
    died = ClusterError("node two cannot run trials: The node died.")

    def ask(mark: Path, nodes: Sequence[Node], needed: Sequence[str]) -> list[object]:
        return [look(mark, f"{mark.name}-{NODES[0].id}", needed), died]

    survey(spec_in(tmp_path), folder, NODES, lambda node: node is NODES[0], ask)
    died = None  # Ray would not place a task there
    survey(spec_in(tmp_path), folder, NODES, all_there, ask)
    died = ClusterError("node two cannot run trials: The node died.")
    with pytest.raises(ClusterError) as caught:
        survey(spec_in(tmp_path), folder, NODES, all_there, ask)
    assert caught.value is died
