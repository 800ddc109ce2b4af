"""The memory of the GPUs of a cluster, as its nodes report it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.spec import Resources
from gdpo_tune.tuning.ray.preflight import read_cluster_memory
from tests.support.ray_nodes import make_short_directory, open_ray_cluster


def make_tool(directory: Path, *amounts: int) -> str:
    """Make a fake of NVIDIA's tool that reports so many MiB; return a PATH that begins with it."""
    directory.mkdir()
    tool = directory / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo {amount}\n" for amount in amounts))
    tool.chmod(0o755)
    return f"PATH={directory}:/usr/bin:/bin"


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_smallest_gpu_of_the_nodes_with_room_counts(tmp_path, monkeypatch):
    large, small = make_tool(tmp_path / "large", 81559), make_tool(tmp_path / "small", 49140, 24564)
    tiny = make_tool(tmp_path / "tiny", 8192)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with make_short_directory() as directory, open_ray_cluster(directory) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        cluster.start_head(cpus=2, gpus=0)
        cluster.add_node(prefix=["env", large], cpus=2, gpus=1)
        cluster.add_node(prefix=["env", small], cpus=2, gpus=2)
        cluster.add_node(prefix=["env", tiny], cpus=1, gpus=1)
        assert read_cluster_memory(Resources(cpus=2, gpus=1)) == 24564 << 20
        assert read_cluster_memory(Resources(cpus=1, gpus=1)) == 8192 << 20
        assert read_cluster_memory(Resources(cpus=2, gpus=0)) is None, "the head cannot tell"
        assert read_cluster_memory(Resources(cpus=3, gpus=1)) is None, "no node has room"
