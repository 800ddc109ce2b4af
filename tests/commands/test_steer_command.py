"""`python -m gdpo_tune.steer`: words, answers and exit statuses."""

import re
import threading
import time
from contextlib import contextmanager

import pytest

from gdpo_tune import steer
from gdpo_tune.core.errors import UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.steering import Steering
from gdpo_tune.tuning.lifecycle import RequestInbox
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome, load_code_spec


@pytest.fixture
def spec(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.begin_session(time.time(), 2, {})
        for seed in range(2):
            ledger.start(spec.space.complete_baseline({}), "search", "model", seed=seed)
        ledger.complete(0, build_outcome())
    return spec


@contextmanager
def drive(spec):
    """Take requests as the process of a sweep does."""
    ended = threading.Event()

    def take():
        with Ledger.open(spec) as ledger:
            started.set()
            while not ended.wait(0.05):
                list(RequestInbox(ledger).take())

    started, thread = threading.Event(), threading.Thread(target=take)
    thread.start()
    started.wait()
    try:
        yield spec
    finally:
        ended.set()
        thread.join()


def test_requests_are_applied_and_listed(spec, capsys):
    lines = (
        *("stop 1 --author anna", "clone 0 learning_rate=2e-4 group_size=4"),
        *("add normalization=gdpo --force learning_rate=0.01", "trials 24"),
        *("budget completions=100000 hours=8", "pause", "resume"),
    )
    with drive(spec):
        for line in lines:
            assert steer.main([str(spec.directory), *line.split()]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert answers == [
        "stop 1: applied: trial 1 ends at its next step",
        "clone 0 learning_rate=2e-4 group_size=4: applied: it starts once a slot is free, "
        "in addition to search.trials",
        "add normalization=gdpo learning_rate=0.01: applied: it starts once a slot is free, "
        "in addition to search.trials",
        "trials 24: applied: search.trials is 24 instead of 16",
        "budget completions=100000 hours=8: applied: search.budget.completions is 100,000 instead "
        "of 0; search.budget.hours is 8 instead of 0",
        "pause: applied: no further trial starts; 1 running trial will end normally",
        "resume: applied: trials start again",
    ]
    requests = Steering(spec.directory).list_requests()
    assert requests[0].author == "anna"
    changes = {"learning_rate": 2e-4, "group_size": 4}
    params = {"normalization": "gdpo", "learning_rate": 0.01}
    assert requests[1].arguments == {"trial": 0, "changes": changes}
    assert requests[2].arguments == {"params": params, "force": True}
    assert steer.main([str(spec.directory), "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 7
    assert listed[0].endswith("stop 1, asked by anna: applied: trial 1 ends at its next step")


def test_a_request_without_a_process_is_kept(spec, capsys):
    assert steer.main([str(spec.directory), "list"]) == 0
    assert capsys.readouterr().out == "no requests\n"
    assert steer.main([str(spec.directory), "trials", "24"]) == 0
    assert "applied when the sweep is run again" in capsys.readouterr().out
    assert steer.main([str(spec.directory), "list"]) == 0
    assert "trials 24, asked by" in (listed := capsys.readouterr().out)
    assert listed.endswith(": not applied yet\n")


def test_a_slow_driver_is_not_waited_for_too_long(spec, capsys, monkeypatch):
    monkeypatch.setattr(steer, "WAIT_SECONDS", 0.1)
    with Ledger.open(spec) as ledger:
        assert steer.main([str(spec.directory), "trials", "24"]) == 0
        assert "the sweep has not answered yet" in capsys.readouterr().out
        assert steer.main([str(spec.directory), "pause", "--no-wait"]) == 0
        assert capsys.readouterr().out.startswith("pause: stored as request ")
        assert [request.action for request in RequestInbox(ledger).take()] == ["trials", "pause"]


def test_what_the_driver_refuses_has_its_own_status(spec, capsys, monkeypatch):
    monkeypatch.setattr("gdpo_tune.results.steering.check_request", lambda *_: None)
    with drive(spec):
        assert steer.main([str(spec.directory), "stop", "0"]) == 1
    assert capsys.readouterr().out == "stop 0: refused: trial 0 has ended already: complete\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stop", "write the number of a trial"),
        ("stop seven", "write the number of a trial, not seven"),
        ("stop 1 2", "2: nothing takes this; leave it out"),
        ("pause now", "now: nothing takes this"),
        ("trials -3", "write a number of trials, not -3"),
        ("trials many", "write a number of trials, not many"),
        ("add learning_rate", "learning_rate: write NAME=VALUE"),
        ("add group_size=8 group_size=4", "group_size is given twice"),
        ("clone group_size=8", "write the number of a trial, not group_size=8"),
        ("pause --force", "--force has no effect on pause"),
        ("list 7", "list takes no argument: leave out 7"),
        ("list --force", "list takes no argument: leave out --force"),
        ("list --no-wait --author anna", "leave out --author --no-wait"),
        (f"trials {'9' * 5000}", r"write a number of trials, not 9{18}$"),
    ],
)
def test_wrong_words_are_refused(spec, line, message):
    with pytest.raises(UsageError, match=message):
        steer.main([str(spec.directory), *line.split()])
    assert Steering(spec.directory).list_pending() == []


def test_the_requests_of_the_page_can_be_typed():
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs/steering.md").read_text(), re.MULTILINE)
    requests = [text.split() for row in rows for text in re.findall(r"`([^`]*)`", row)]
    typed = [words[0] for words in requests if words[0] in steer.READERS]
    assert typed == ["stop", "add", "clone", "trials", "budget", "pause", "resume"]
    for action, *words in requests:
        if action in steer.READERS:
            steer.READERS[action](words)
