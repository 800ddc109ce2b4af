"""A local sandbox for a whole file."""

import pytest

from gdpo_tune.sandbox import CodeSandbox


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox() as sandbox:
        yield sandbox
