"""Fixtures of tests of tasks in files."""

import sys

import pytest

from gdpo_tune.core import task_files
from gdpo_tune.training import worker_cache


@pytest.fixture
def fresh_task_files():
    """No file and no warm state passes from test to test."""
    task_files._load_module.cache_clear()
    yield
    worker_cache.release_worker_cache()
    task_files._load_module.cache_clear()
    for name in [name for name in sys.modules if name.startswith("gdpo_tune_task_")]:
        del sys.modules[name]
