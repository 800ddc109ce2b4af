"""What fits on the machine at hand, and what is refused because it does not."""

import os

import psutil
import pytest

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec import Resources, machine
from gdpo_tune.spec.machine import check_resources, count_visible_gpus

CLUSTER = {"RAY_ADDRESS": "ray://cluster:10001"}


@pytest.fixture
def devices(tmp_path):
    """Make files of devices; return their directory."""

    def make(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        ([], None, 0),
        (["nvidiactl", "nvidia-uvm"], None, 0),
        (["nvidiactl", "nvidia0", "nvidia1"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "-1", 0),
        (["nvidia0", "nvidia1"], "0,-1,1", 1),
        (["nvidia0"], "0,1,2", 1),
        ([], "0", 0),
        (["nvidia0"], "GPU-8a1b", 1),
        (["kfd", "dri/renderD128", "dri/renderD129"], None, 2),
        (["dxg"], None, 1),
    ],
)
def test_visible_gpus(files, visible, count, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_visible_gpus(environment, devices(*files)) == count


HERE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("asked", "has", "fits", "reason", "fix"),
    [
        ("resources.gpus=0.5", [], None,
         "resources.gpus = 0.5: this machine has 0 GPUs", "--set resources.gpus=0"),
        # Source: vllm#41776: a part of a GPU reads as the whole.
        ("resources.gpus=1", ["nvidia0"], "resources.gpus=0",
         "part of a GPU (MIG)", "turn MIG off"),
        ("resources={gpus: 1, workers: 2}", ["nvidia0"], None,
         f"this machine has {HERE} and 1\n", "--set resources.workers=1"),
        (f"resources.cpus={HERE + 1}", [], f"resources.cpus={HERE}",
         f"this machine has {HERE} CPUs", ""),
        ("sandbox.memory_mb=1025", [], "sandbox.memory_mb=1024",
         "memory_mb = 1025: this machine has 1024 MiB", "--set sandbox.memory_mb=512"),
    ],
    ids=["GPUs", "MIG", "workers", "CPUs", "memory"],
)  # fmt: skip
def test_more_than_this_machine_has(load, devices, monkeypatch, asked, has, fits, reason, fix):
    monkeypatch.setattr(machine, "read_machine_memory", lambda: 1 << 30)
    visible = {"CUDA_VISIBLE_DEVICES": "MIG-5f2b"} if "MIG" in reason else {}
    with pytest.raises(ResourcesError) as caught:
        check_resources(load(asked), visible, devices(*has))
    assert caught.value.exit_status == 2
    text, _, remedy = str(caught.value).partition("fix: ")
    assert reason in text
    assert fix in remedy
    check_resources(load(fits or "search.trials=9"), visible, devices())
    if not visible:
        check_resources(load(asked), CLUSTER, devices())


def test_a_gpu_that_is_there_may_be_shared(load, devices):
    check_resources(load("resources.gpus=0.5"), {}, devices("nvidia0"))


@pytest.mark.parametrize(
    ("asked", "cpus", "gpus", "expected"),
    [
        ({}, 4, 0, 4),
        ({"cpus": 2.0}, 7, 0, 3),
        ({"cpus": 0.1}, 1, 0, 10),  # 1 / 0.1 is not quite 10 in floats, and tenfold is
        ({"cpus": 8.0}, 4, 8, 0),
        ({"gpus": 1.0}, 8, 2, 2),
        ({"gpus": 1.0, "cpus": 4.0}, 6, 8, 1),
        ({"gpus": 0.5}, 1, 1, 1),
        ({"gpus": 1.0}, 8, 0, 0),
    ],
)
def test_workers_that_fit_beside_each_other(asked, cpus, gpus, expected):
    assert machine.count_fitting_workers(Resources(**asked), cpus, gpus) == expected


def test_more_workers_than_fit_are_refused_with_how_many_do(load, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "count_local_cpus", lambda: 7)
    asked = load("resources={workers: 4, cpus: 2}")
    with pytest.raises(ResourcesError, match=r"(?s)workers = 4: each .* --set resources.workers=2"):
        check_resources(asked, {}, tmp_path)
    check_resources(asked, CLUSTER, tmp_path)
    check_resources(load("resources={workers: 2, cpus: 2}"), {}, tmp_path)


@pytest.mark.parametrize(
    ("workers", "most", "expected"), [(8, 7, 4), (8, 8, 8), (6, 4, 3), (7, 6, 1), (2, 9, 2)]
)
def test_fewer_workers_share_what_more_could(workers, most, expected):
    """A step that 8 workers share equally can be shared by 4, and not by 7."""
    assert Resources(workers=workers).reduce_workers(most) == expected


class FakeProcess:
    """A process as psutil shows it; of another user, everything but its name is refused."""

    def __init__(self, pid, name, parent=None, cores=(), words="", foreign=False):
        self.pid, self.cores, self.words, self.foreign = pid, cores, words, foreign
        self.name, self.parent = lambda: name, lambda: parent

    def cpu_affinity(self):
        return list(self.cores)

    def cmdline(self):
        if self.foreign:
            raise psutil.AccessDenied(self.pid)
        return self.words.split()

    def cwd(self):
        return "/home/me"


def test_another_sweep_on_the_same_cores_is_named(monkeypatch):
    """Each takes all CPUs that it finds; sets of CPUs that taskset(1) separates are no matter."""
    sweep = FakeProcess(7, "python", words="python -m gdpo_tune.sweep a.yaml")
    script = FakeProcess(8, "gdpo-tune", words="/venv/bin/gdpo-tune sweep a.yaml")
    other = FakeProcess(9, "python", words="python train.py")
    hidden = FakeProcess(10, "python", foreign=True)
    processes = [
        *(sweep, script, other, hidden, FakeProcess(3, "raylet", None, {0, 1})),
        *(FakeProcess(4, "raylet", sweep, {0, 1}), FakeProcess(5, "raylet", script, {2, 3})),
        *(FakeProcess(6, "raylet", other, {0, 1}), FakeProcess(2, "raylet", hidden, {0, 1})),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(processes))
    ours = FakeProcess(1, "python", cores={0, 1})
    monkeypatch.setattr(psutil, "Process", lambda: ours)
    (warning,) = machine.list_other_sweeps()
    assert "process 7, another sweep of yours in /home/me, uses 2 CPUs of this one" in warning
    ours.cores = {1, 3}
    assert len(list(machine.list_other_sweeps())) == 2
    ours.cores = {5}
    assert not list(machine.list_other_sweeps())
