"""Memory and CPUs of a machine, from files as several machines have them."""

import os

import pytest

from gdpo_tune.core.system import count_local_cpus, count_parallel_candidates, read_machine_memory

GIB = 1 << 30
MACHINE = "MemTotal:        8388608 kB\nMemFree:          1024 kB\n"
NO_LIMIT_OF_VERSION_1 = "9223372036854771712\n"


def machine(root, files):
    for name, text in {"proc/meminfo": MACHINE, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 8 * GIB),
        # A container of version 2 sees its own group as the root.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, 8 * GIB),
        # A service inside a slice: the narrowest of all limits on the way up.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/memory.max": f"{5 * GIB}\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{3 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/user.slice/memory.max": "max\n",
            },
            GIB,
        ),
        # Version 1, seen from the host.
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_OF_VERSION_1,
            },
            GIB,
        ),
        # Version 1 in a container: the path is the one outside, the file is the container's.
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": NO_LIMIT_OF_VERSION_1,
            },
            8 * GIB,
        ),
        # Another controller's limit is none of memory.
        (
            {
                "proc/self/cgroup": "4:pids:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            },
            8 * GIB,
        ),
    ],
)
def test_the_smallest_of_machine_and_control_groups(files, expected, tmp_path):
    assert read_machine_memory(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        # Version 2: "$MAX $PERIOD", where "max" is no limit.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        # Whole cores, and one at least: a trial asks for a whole one.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "375000 50000\n"}, 7),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # The quota of a parent holds for all of its groups together.
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.service\n",
                "sys/fs/cgroup/user.slice/job.service/cpu.max": "500000 100000\n",
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/other.slice/cpu.max": "100000 100000\n",
            },
            3,
        ),
        # Version 1, seen from the host and in a container; -1 is no limit.
        (
            {
                "proc/self/cgroup": "4:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/0123\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
    ],
)
def test_cpus_are_the_fewest_of_affinity_and_quotas(files, expected, tmp_path, monkeypatch):
    """Quotas are those of the kernel's cgroup-v2.rst and sched-bwc.rst, counted as Ray counts."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert count_local_cpus(machine(tmp_path, files)) == expected


def test_candidates_share_half_of_the_memory_and_one_always_runs():
    assert count_parallel_candidates(8 * GIB, GIB) == 4
    assert count_parallel_candidates(8 * GIB, 3 * GIB) == 1
    assert count_parallel_candidates(GIB, 2 * GIB) == 1


def test_nothing_is_known_where_the_kernel_says_nothing(tmp_path):
    assert read_machine_memory(tmp_path) is None


def test_this_machine():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = read_machine_memory()
    assert memory is not None
    assert 64 << 20 < memory <= pages
