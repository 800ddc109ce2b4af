"""Signals that ask a command to stop. The tests may run under `nohup`, which ignores SIGHUP."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from gdpo_tune import cli
from gdpo_tune.core.system import block_hangups, stop_on_signals


@pytest.fixture
def hangups():
    """SIGHUP is not ignored, here and in processes that the test starts."""
    before = signal.signal(signal.SIGHUP, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_aborts(number):
    calls = []
    before = signal.signal(number, signal.default_int_handler)  # it may be ignored
    try:
        with stop_on_signals(calls.append):
            os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert calls == [128 + number]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.usefixtures("hangups")
def test_a_command_ends_with_128_and_the_number_of_its_signal(number, status):
    """POSIX, shell command language, 2.8.2: above 128; bash(1), "Exit status": 128 + n."""

    def command(words):
        with stop_on_signals(lambda _: None):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)  # the second one aborts
        raise AssertionError

    before = {each: signal.signal(each, signal.default_int_handler) for each in (2, 15)}
    try:
        with pytest.raises(SystemExit) as caught:
            cli.run_command(command, [])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert caught.value.code == status


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    calls = []
    with stop_on_signals(calls.append):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert calls == []


UNDER_NOHUP = """
import os, signal
from gdpo_tune.core.system import stop_on_signals
calls = []
with stop_on_signals(calls.append):
    os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
print(calls)
"""


@pytest.mark.usefixtures("hangups")
def test_a_command_under_nohup_goes_on_ignoring_hangups():
    command = ["nohup", sys.executable, "-c", UNDER_NOHUP]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n")


ENDS_IN_ORDER = """
import fcntl, os, signal, sys, termios, time
from gdpo_tune.core.system import stop_on_signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
calls = []
with stop_on_signals(calls.append):
    print("ready", flush=True)
    deadline = time.monotonic() + 30
    while not calls and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    print("last words", flush=True)
print("to both", file=sys.stderr, flush=True)
sys.exit(calls[0] if len(calls) == 1 else 1)
"""


@pytest.mark.usefixtures("hangups")
def test_a_terminal_that_closes_asks_once_and_aborts_nothing():
    terminal, inside = pty.openpty()
    # Its terminal is not that of this process, so the kernel alone sends the signal.
    own = {"start_new_session": True, "stdin": inside, "stdout": inside, "stderr": inside}
    with subprocess.Popen([sys.executable, "-c", ENDS_IN_ORDER], **own) as process:
        os.close(inside)
        assert b"ready" in os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(30) == 129


@pytest.mark.usefixtures("hangups")
def test_a_hangup_is_never_the_second_signal():
    calls = []
    with stop_on_signals(calls.append):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert calls == [129]


@pytest.mark.usefixtures("hangups")
def test_a_process_started_meanwhile_outlives_its_terminal():
    sleeps = [sys.executable, "-c", "import sys; print(flush=True); sys.exit(sys.stdin.read())"]
    calls = []
    with stop_on_signals(calls.append):
        with block_hangups():
            child = subprocess.Popen(sleeps, stdin=-1, stdout=-1, stderr=-1, text=True)
            # to this thread: another one, which an earlier test has left, does not block it
            signal.raise_signal(signal.SIGHUP)
            assert calls == []
        assert calls == [129]
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "\n"
        child.send_signal(signal.SIGHUP)
        _, message = child.communicate("still here")
    assert message == "still here\n"
