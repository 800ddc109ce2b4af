"""Memory of a machine, from files as several machines have them."""

import os

import pytest

from gdpo_tune.core.system import count_parallel_candidates, read_machine_memory

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
