"""Signals that ask for an end."""

import os
import signal

import pytest

from gdpo_tune.signals import on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
