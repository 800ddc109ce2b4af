"""A local sandbox for a whole file, which may replace it by another, and a job in it."""

import pytest

from gdpo_tune.sandbox import CodeSandbox, Job


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def run(sandbox):
    """A function that runs a program against free-form tests, or others, and returns the result."""

    def run(code, *asserts, **options):
        [result] = sandbox.run_batch([Job(code, asserts=asserts, **options)])
        return result

    return run
