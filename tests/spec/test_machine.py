"""What fits on the machine at hand, and what is refused because it does not."""

import psutil
import pytest

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec import Resources, load_spec, machine
from gdpo_tune.spec.machine import check_resources
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "code.yaml"


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


@pytest.fixture
def spec():
    def load(*overrides):
        return load_spec(SPACE, overrides)

    return load


def test_more_workers_than_fit_are_refused_with_how_many_do(spec, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "count_local_cpus", lambda: 7)
    asked = spec("resources={workers: 4, cpus: 2}", "training.completions_per_step=64")
    with pytest.raises(ResourcesError, match=r"(?s)workers = 4: each .* --set resources.workers=2"):
        check_resources(asked, {}, tmp_path)
    check_resources(asked, {"RAY_ADDRESS": "ray://cluster:10001"}, tmp_path)
    check_resources(spec("resources={workers: 2, cpus: 2}"), {}, tmp_path)


@pytest.mark.parametrize(
    ("workers", "most", "expected"), [(8, 7, 4), (8, 8, 8), (6, 4, 3), (7, 6, 1), (2, 9, 2)]
)
def test_fewer_workers_share_what_more_could(workers, most, expected):
    """A step that 8 workers share equally can be shared by 4, and not by 7."""
    assert Resources(workers=workers).reduce_workers(most) == expected


class FakeProcess:
    """A process as psutil shows it; of another user, everything but its name is refused."""

    def __init__(self, pid, name, parent=None, cores=(), words=(), foreign=False):
        self.pid, self.cores, self.words, self.foreign = pid, cores, words, foreign
        self.name, self.parent = lambda: name, lambda: parent

    def cpu_affinity(self):
        return list(self.cores)

    def cmdline(self):
        if self.foreign:
            raise psutil.AccessDenied(self.pid)
        return list(self.words)

    def cwd(self):
        return "/home/me"


def test_another_sweep_on_the_same_cores_is_named(monkeypatch):
    """Each takes all CPUs that it finds; sets of CPUs that taskset(1) separates are no matter."""
    sweep = FakeProcess(7, "python", words=("python", "-m", "gdpo_tune.sweep", "a.yaml"))
    script = FakeProcess(8, "gdpo-tune", words=("/venv/bin/gdpo-tune", "sweep", "a.yaml"))
    other = FakeProcess(9, "python", words=("python", "train.py"))
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
