"""Clusters whose nodes do not share the directory are refused before any trial starts."""

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import ClusterError
from gdpo_tune.spec import Resources
from gdpo_tune.tuning.nodes import ClusterNode, Nodes
from gdpo_tune.tuning.ray import preflight
from gdpo_tune.tuning.ray.preflight import (
    COMPILER,
    NodeAnswer,
    check_nodes,
    find_mixture,
    list_needed_paths,
    probe_node,
)
from tests.support.tuning import load_code_spec

NODES = [
    {"NodeID": "aaaaaaaaaa", "NodeManagerHostname": "one", "Resources": {"CPU": 2.0}},
    {"NodeID": "bbbbbbbbbb", "NodeManagerHostname": "two", "Resources": {"CPU": 2.0}},
]
Probe = Callable[[ClusterNode, Path, str, Sequence[str]], NodeAnswer | ClusterError | None]


class Check:
    """A check of two nodes, of which a function answers for each; the arguments are a probe's."""

    def __init__(self, tmp_path, monkeypatch):
        self.directory = tmp_path / "runs" / "code"
        self.directory.mkdir(parents=True)
        self.lost = set()
        self.nodes = Nodes(lambda: [{**n, "Alive": n["NodeID"][0] not in self.lost} for n in NODES])
        self._spec, self._monkeypatch = load_code_spec(tmp_path), monkeypatch

    def __call__(self, answer, **changes):
        def ask(nodes, _, list_arguments):
            answers = {node.id: answer(node, *list_arguments(node)) for node in nodes}
            return {node: found for node, found in answers.items() if found is not None}

        self._monkeypatch.setattr(preflight, "ask_nodes", ask)
        check_nodes(self._spec.model_copy(update=changes), self.directory, self.nodes)


@pytest.fixture
def check(tmp_path, monkeypatch):
    return Check(tmp_path, monkeypatch)


def probe(_, *arguments):
    return probe_node(*arguments)


def test_a_directory_that_every_node_sees_is_left_as_it_was(check):
    check(probe)
    assert os.listdir(check.directory) == []


def test_a_directory_that_is_local_to_a_node_is_refused(tmp_path, check):
    def see_another_disk(node, mark, *arguments):
        return probe_node(tmp_path / mark.name if node.host == "two" else mark, *arguments)

    other = r"is another directory on node two \(bbbbbbbb\)"
    with pytest.raises(ClusterError, match=other) as caught:
        check(see_another_disk)
    assert "fix: --set storage=DIRECTORY, one that is mounted on every node" in str(caught.value)
    assert os.listdir(check.directory) == []
    with pytest.raises(ClusterError, match=r"node one \(aaaaaaaa\), two"):
        check(lambda *_: {})


def test_a_node_that_may_not_write(check, monkeypatch):
    def probe_without_permission(_, *arguments):
        refused = PermissionError(13, "Permission denied")
        monkeypatch.setattr(Path, "touch", Mock(side_effect=refused))
        return probe_node(*arguments)

    with pytest.raises(ClusterError, match=r"one .* cannot write into the sweep's directory \(P"):
        check(probe_without_permission)


def test_a_node_without_room_for_a_trial_is_not_checked(check):
    check(lambda node, *_: pytest.fail(f"{node} has 2 cores"), resources=Resources(cpus=4))


def test_files_that_trials_read_must_exist_on_every_node(tmp_path, check):
    policy, file = tmp_path / "policy", tmp_path / "mine.py"
    policy.mkdir()
    file.touch()
    usual = load_code_spec(tmp_path)
    for changes, paths in (({}, []), ({"policy": str(policy)}, [str(policy)])):
        assert list_needed_paths(usual.model_copy(update=changes)) == paths
    assert list_needed_paths(usual.model_copy(update={"task": f"{file}:Mine"})) == [str(file)]

    def lack_all(node, mark, reply, needed):
        lacking = [f"{p}-nowhere" if node.host == "two" else p for p in needed]
        return probe_node(mark, reply, lacking)

    with pytest.raises(ClusterError, match=r"two \(bbbbbbbb\) lacks .*policy-nowhere"):
        check(lack_all, policy=str(policy))


def test_a_node_that_dies_during_the_check_is_ignored_once_it_counts_as_lost(check):
    died = ClusterError("node two cannot run trials: The node died.")

    def lose_two(node, *arguments):
        return died if node.host == "two" else probe_node(*arguments)

    def lose_two_noticed(node, *arguments):
        check.lost = {"b"}
        return lose_two(node, *arguments)

    with pytest.raises(ClusterError) as caught:
        check(lose_two)
    assert caught.value is died
    # Ray would not place a task there
    check(lambda node, *arguments: probe(node, *arguments) if node.host == "one" else None)
    check(lose_two_noticed)


def test_a_node_reports_whether_it_can_write_to_the_object_store(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    assert probe_node("memory://bucket/runs", "", []) == {}
    refused = Mock(side_effect=PermissionError("Access Denied"))
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refused)
    answer = probe_node("memory://bucket/runs", "", ["/nowhere"])
    assert " and ".join(answer) == (
        "lacks /nowhere and cannot write into the sweep's directory "
        "(storage memory://bucket/runs: Access Denied)"
    )


def test_a_node_without_a_compiler_is_named_where_trials_train_on_a_gpu(tmp_path, monkeypatch):
    assert list_needed_paths(load_code_spec(tmp_path, ["resources.gpus=1"]))[-1] == COMPILER
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
def test_a_fix_is_one_of_the_problem(tmp_path, check, needed, fix, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(ClusterError) as caught:
        check(lambda _, mark, reply, __: probe_node(mark, reply, [needed]))
    assert fix in str(caught.value)
    assert str(caught.value).count("fix:") == 1
    assert ("apt-get" in str(caught.value)) is (needed == COMPILER)


# Nodes of several kinds

H100 = {"torch": "2.11.0", "vllm": "0.24.0", "GPU": "NVIDIA H100 of 80 GiB", "bfloat16": "native"}
T4 = {**H100, "GPU": "Tesla T4 of 15 GiB", "bfloat16": "none"}
WITHOUT_VLLM = {name: value for name, value in H100.items() if name != "vllm"}


@pytest.fixture
def mix(tmp_path, monkeypatch):
    """Return a function that compares two nodes by what they answer."""

    def find(facts, *overrides):
        with_gpus = [{**n, "Resources": {"CPU": 2.0, "GPU": 1.0}, "Alive": True} for n in NODES]
        answers = dict(zip((n["NodeID"] for n in NODES), facts, strict=True))
        monkeypatch.setattr(preflight, "ask_nodes", lambda *_: answers)
        spec = load_code_spec(tmp_path, ["resources.gpus=1", *overrides])
        return find_mixture(spec, Nodes(lambda: with_gpus))

    return find


@pytest.mark.parametrize(
    ("other", "key", "fix"),
    [
        (T4, "model.dtype", "float32"),  # Source: RLinf#562
        (WITHOUT_VLLM, "rollout.engine", "transformers"),  # Source: ray#64294
    ],
)
def test_nodes_on_which_auto_means_something_else_are_refused(mix, other, key, fix):
    with pytest.raises(ClusterError, match=rf"{key} = auto would .* none on two") as caught:
        mix([H100, other])
    assert f"fix: --set {key}={fix}" in str(caught.value)
    assert "on two (bbbbbbbb)" in mix([H100, other], f"{key}={fix}")


def test_nodes_that_differ_in_what_decides_nothing_are_named(mix):
    assert mix([H100, H100]) == ""
    newer = {**H100, "torch": "2.12.0", "vllm": "0.27.0"}
    assert mix([H100, newer]) == (
        "torch 2.11.0 on one (aaaaaaaa); 2.12.0 on two (bbbbbbbb), "
        "vllm 0.24.0 on one (aaaaaaaa); 0.27.0 on two (bbbbbbbb)"
    )


@pytest.mark.system
def test_a_gpu_that_cuda_cannot_use_is_refused(mix, monkeypatch):
    old = {"torch": "2.11.0", "problem": "RuntimeError: The NVIDIA driver is too old"}
    with pytest.raises(ClusterError, match=r"node two \(bbbbbbbb\) \(RuntimeError: The NVIDIA"):
        mix([H100, old])
    answer = preflight.describe_node(True)  # here, where CUDA finds no GPU, or torch has none
    assert ("problem" in answer) is not torch.cuda.is_available()
    assert answer["torch"] == importlib.metadata.version("torch")
    assert "problem" not in preflight.describe_node(False)
