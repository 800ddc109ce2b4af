"""Signals that ask for an end."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from gdpo_tune.core.signals import hangups_held, on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_ends(number):
    asked = []
    found = signal.signal(number, signal.default_int_handler)  # whoever runs this may ignore it
    try:
        with on_signals(lambda: asked.append(number)):
            os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert asked == [number]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, found)


def test_a_hangup_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = []
    with on_signals(lambda: asked.append(True)):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert asked == []


ENDS_IN_ORDER = """
import os, signal, sys, time
from gdpo_tune.core.signals import on_signals
asked = []
with on_signals(lambda: asked.append(True)):
    print("ready", flush=True)
    deadline = time.monotonic() + 30
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)
    print("what is left to say", flush=True)
print("to both", file=sys.stderr, flush=True)
sys.exit(130 if asked == [True] else 1)
"""


def test_a_terminal_that_closes_asks_once_and_ends_nothing():
    terminal, inside = pty.openpty()
    command = [sys.executable, "-c", ENDS_IN_ORDER]
    # its terminal is not this process's, so nobody but the kernel sends the signal
    own = {"start_new_session": True, "stdin": inside, "stdout": inside, "stderr": inside}
    before = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    command[-1] = before + command[-1]
    with subprocess.Popen(command, **own) as process:
        os.close(inside)
        assert b"ready" in os.read(terminal, 100)
        os.close(terminal)
        assert process.wait(30) == 130


def test_a_hangup_is_nobodys_second_signal():
    asked = []
    found = signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with on_signals(lambda: asked.append(True)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [True]
    finally:
        signal.signal(signal.SIGHUP, found)


def test_what_is_started_meanwhile_outlives_its_terminal():
    sleeps = [sys.executable, "-c", "import sys; print(flush=True); sys.exit(sys.stdin.read())"]
    asked = []
    with on_signals(lambda: asked.append(True)):
        with hangups_held():
            child = subprocess.Popen(sleeps, stdin=-1, stdout=-1, stderr=-1, text=True)
            os.kill(os.getpid(), signal.SIGHUP)
            assert asked == []
        assert asked == [True]
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "\n"
        child.send_signal(signal.SIGHUP)
        _, told = child.communicate("still here")
    assert told == "still here\n"
