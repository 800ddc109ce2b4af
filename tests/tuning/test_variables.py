"""Variables of trials: who gets them, and where their values must not be."""

import json
import os
import subprocess
import sys

import pytest
from ray.experimental import internal_kv

from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.tuning.ray import cluster, head_store
from tests.support.fake_training import VARIABLES, digest
from tests.support.paths import ROOT
from tests.support.ray_nodes import make_short_directory, open_ray_cluster

SECRET = "sesame-2718281828"
GIVEN = {"HF_TOKEN": SECRET, "HF_HOME": "/models", "NCCL_DEBUG": "WARN"}


def test_secrets_are_told_apart():
    assert head_store.split_secrets(GIVEN) == (
        {"HF_HOME": "/models", "NCCL_DEBUG": "WARN"},
        {"HF_TOKEN": SECRET},
    )


def test_variables_of_this_process_are_as_before(monkeypatch):
    monkeypatch.setenv("HF_HOME", "/before")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with cluster.set_variables(GIVEN):
        assert os.environ["HF_HOME"] == "/models"
        assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["HF_HOME"] == "/before"
    assert "NCCL_DEBUG" not in os.environ


@pytest.fixture
def head(monkeypatch):
    """Memory of a head."""
    memory: dict[str, bytes] = {}

    def put(key, value, *, overwrite, namespace):
        memory[key] = value.encode()

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: memory.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, namespace: memory.pop(key))
    return memory


def test_a_trial_reads_secrets_while_the_driver_is_there(head, monkeypatch):
    monkeypatch.setenv(head_store.KEY_VARIABLE, "key")
    monkeypatch.setenv("HF_TOKEN", "")
    with head_store.share_secrets("key", {"HF_TOKEN": SECRET}):
        head_store.read_shared_variables()
    assert os.environ["HF_TOKEN"] == SECRET
    assert head == {}
    head_store.read_shared_variables()  # the driver has ended; so will this process
    with pytest.raises(KeyError), head_store.share_secrets("key", {"HF_TOKEN": SECRET}):
        raise KeyError
    assert head == {}


def test_a_lost_head_is_not_called(head):
    secrets = {"HF_TOKEN": SECRET}
    with pytest.raises(ClusterLostError), head_store.share_secrets("key", secrets):
        raise ClusterLostError("gone")
    assert head
    with head_store.share_secrets("another", {}):
        assert "another" not in head


def test_a_trial_without_secrets_asks_nobody(monkeypatch):
    monkeypatch.delenv(head_store.KEY_VARIABLE, raising=False)
    head_store.read_shared_variables()


SWEEP = """
import sys
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning.runner import run_sweep
spec = load_spec(sys.argv[1], sys.argv[2:], "sweep")
run_sweep(spec, train="tests.support.fake_training:train_and_note_variables")
"""
OVERRIDES = (
    "search={sampler: random, trials: 2, scheduler: {type: fifo}, replicates: {max_runs: 0}}",
    "training.steps=2",
    "resources.env=[HF_TOKEN, HF_HOME, NCCL_DEBUG=WARN]",
)


def run_sweep_of(directory, **environment):
    space = str(ROOT / "search_spaces" / "code.yaml")
    words = [sys.executable, "-c", SWEEP, space, f"storage={directory}", *OVERRIDES]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    given = {"HF_TOKEN": SECRET, "HF_HOME": "/models", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        words, env={**os.environ, **given}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert SECRET not in done.stdout + done.stderr
    return directory / "sweep"


def check_sweep(sweep):
    files = list(sweep.glob(f"trials/*/{VARIABLES}"))
    assert len(files) >= 3
    for file in files:
        assert json.loads(file.read_text()) == {n: digest(v) for n, v in GIVEN.items()}
    assert find_files_with(SECRET, sweep) == []
    assert "HF_TOKEN" in (sweep / "spec.yaml").read_text()


def find_files_with(text, directory):
    regular = [path for path in directory.rglob("*") if path.is_file() and not path.is_socket()]
    return [str(path) for path in regular if text.encode() in path.read_bytes()]


@pytest.mark.system
@pytest.mark.slow
def test_trials_of_a_cluster_of_our_own_have_them(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_sweep(run_sweep_of(tmp_path))


@pytest.mark.system
@pytest.mark.slow
def test_trials_of_a_joined_cluster_have_them_and_no_log_does(tmp_path):
    with make_short_directory() as directory, open_ray_cluster(directory) as cluster:
        cluster.start(2, cpus=2)
        address = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
        check_sweep(run_sweep_of(tmp_path, **address))
        assert find_files_with(SECRET, directory) == []
        assert find_files_with("/models", directory)  # the search finds what Ray writes down
