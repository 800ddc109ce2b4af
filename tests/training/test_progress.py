"""Deadlines for progress: a process that hangs ends with its stacks, and a slow one does not."""

import subprocess
import sys
import threading
import time

import pytest

from gdpo_tune.training import engine as engines
from gdpo_tune.training import progress
from gdpo_tune.training.progress import MEDIANS, Deadline
from tests.support.vllm_double import RecordingLLM

FLOOR = 0.3


@pytest.fixture
def ended():
    """Reasons for which a process would have ended."""
    return []


@pytest.fixture
def deadline(ended):
    return Deadline("step", FLOOR, ended.append)


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_block_without_progress_ends_the_process(deadline, ended):
    with deadline.watch():
        assert wait_for(lambda: ended)
    assert ended == ["no step for 0 s; the limit is 0 s"]


def test_progress_and_waiting_for_others_do_not(deadline, ended):
    with deadline.watch():
        for _ in range(10):
            time.sleep(FLOOR / 5)
            deadline.note_progress()
        with deadline.pause():
            time.sleep(2 * FLOOR)
    time.sleep(2 * FLOOR)  # nothing is expected any more
    assert ended == []


def test_what_takes_long_may_take_long_again(deadline, ended):
    assert deadline.get_limit() == FLOOR
    with deadline.watch():
        for _ in range(3):
            time.sleep(FLOOR / 3)
            deadline.note_progress(step=True)
        assert deadline.get_limit() == pytest.approx(MEDIANS * FLOOR / 3, rel=0.5)
        time.sleep(2 * FLOOR)
    assert ended == []


def test_an_engine_that_never_returns_is_late_and_one_that_starts_is_not(
    deadline, ended, monkeypatch, thawed
):
    # Source: vllm#56816, verl#340.
    monkeypatch.setattr(progress, "ENGINE", deadline)
    released = threading.Event()

    class HangingLLM(RecordingLLM):
        def __init__(self):
            super().__init__()
            time.sleep(2 * FLOOR)
            self.llm_engine.step = released.wait

    engine = engines.Engine(HangingLLM, threads=1)
    assert ended == []

    def sample():
        with pytest.raises(TypeError):  # a step returns no list
            engine.generate([engines.SampleRequest([3], None)])

    call = threading.Thread(target=sample)
    call.start()
    assert wait_for(lambda: ended)
    released.set()
    call.join()


HANGING = """
import time
from gdpo_tune.training import progress

def hang_in_a_kernel():
    time.sleep(600)

progress.TRAINING = progress.Deadline("progress of the training", 0.2)
with progress.TRAINING.watch():
    hang_in_a_kernel()
"""


@pytest.mark.system
def test_the_process_of_a_trial_ends_and_shows_its_stacks():
    command = [sys.executable, "-c", HANGING]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 1
    assert "this process hangs: no progress of the training for" in answer.stderr
    assert "hang_in_a_kernel" in answer.stderr
