"""The webhook of a sweep hears how it goes; whatever it does, the sweep goes on."""

import json
import os
import threading
import time
from dataclasses import replace

import pytest

from gdpo_tune.core.errors import ClusterLostError, UsageError
from gdpo_tune.core.events import SweepFinished, SweepStarted, TrialFinished, TrialStarted
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.machine import find_unset_webhook
from gdpo_tune.spec.model import EVERY_SWEEP_OCCASION, SweepNotify
from gdpo_tune.tracking import sweep_notifier
from gdpo_tune.tracking.sweep_notifier import SweepNotifier
from tests.support.figures import make_records, make_spec
from tests.support.tuning import SPACE

NOTIFY = "notify={webhook_env: HOOK, on: [finished, failed, interrupted, trial_failed]}"


def make_notified_spec(directory, *occasions):
    spec = make_spec(directory)
    spec.directory.mkdir(parents=True)
    notify = SweepNotify(webhook_env="HOOK", on=occasions or EVERY_SWEEP_OCCASION)
    return spec.model_copy(update={"notify": notify})


def run(spec, records, *, interrupted=False, error=None):
    """Send the events of a sweep in which the last trial was started by this process."""
    with SweepNotifier(spec) as notifier:
        notifier(SweepStarted(tuple(records[:-1])))
        notifier(TrialStarted(records[-1]))
        notifier(TrialFinished(records[-1]))
        if error is not None:
            raise error
        reason = "" if interrupted else "all 6 configurations were tried"
        notifier(SweepFinished(tuple(records), interrupted, reason))


def read_notices(spec):
    return list(map(json.loads, (spec.directory / "notices.jsonl").read_text().splitlines()))


@pytest.fixture
def spec(tmp_path):
    return make_notified_spec(tmp_path)


def test_the_end_of_a_sweep_is_sent_with_its_front(spec, hook):
    records = make_records(spec, 6)
    run(spec, records)
    (message,) = hook.got
    assert (message["sweep"], message["occasion"]) == (spec.name, "finished")
    assert message["report"] == str(spec.directory / "report.html")
    assert message["trials"] == len(records)
    assert message["front"] > 0
    low, high = message["hypervolume_interval"]
    assert low <= message["hypervolume"] <= high
    knee, goal = message["knee"], next(iter(spec.objectives))
    (untrained,) = [record for record in records if record.role == "untrained"]
    assert knee["untrained"][goal] == untrained.test[goal].mean
    text = message["text"]
    assert text.startswith(f"{spec.name} finished: all 6 configurations were tried. ")
    assert f"{goal} {knee['test'][goal]:.3f} (untrained {knee['untrained'][goal]:.3f})" in text
    (stored,) = read_notices(spec)
    assert stored == {**message, "problem": ""}


def test_an_interrupted_sweep_says_how_it_goes_on(spec, hook):
    run(spec, make_records(spec, 6), interrupted=True)
    assert [message["occasion"] for message in hook.got] == ["interrupted"]
    assert "The same command resumes it" in hook.got[0]["text"]


def test_a_sweep_without_a_front_has_failed(tmp_path, hook):
    spec = make_notified_spec(tmp_path, "finished", "failed")
    records = make_records(spec, 3)
    run(spec, [replace(record, feasible=False) for record in records])
    broken = [r if r.role == "untrained" else replace(r, state="failed", test={}) for r in records]
    run(spec, broken)
    assert [message["occasion"] for message in hook.got] == ["failed", "failed"]
    first, second = (message["text"] for message in hook.got)
    assert "no trial satisfies all constraints" in first
    assert "every trial failed" in second


@pytest.mark.parametrize(
    ("error", "occasion", "text"),
    [
        (ClusterLostError("a server is gone\nmore"), "failed", "with an error: a server is gone."),
        (ValueError("HF_TOKEN=hf_abc"), "failed", "ValueError: HF_TOKEN=***"),
        (KeyboardInterrupt(), "interrupted", "was interrupted."),
    ],
)
def test_a_sweep_that_ends_with_an_error_says_so(spec, hook, error, occasion, text):
    with pytest.raises(type(error)):
        run(spec, make_records(spec, 6), error=error)
    (message,) = hook.got
    assert message["occasion"] == occasion
    assert text in message["text"]


def test_only_the_first_failure_of_a_trial_is_sent_and_at_once(tmp_path, hook):
    spec = make_notified_spec(tmp_path, "trial_failed")
    failed = replace(make_records(spec, 2)[-1], state="failed", reason="out of memory")
    with SweepNotifier(spec) as notifier:
        notifier(SweepStarted(()))
        notifier(TrialFinished(failed))
        notifier(TrialFinished(replace(failed, number=9)))
        deadline = time.monotonic() + 5
        while not hook.got and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [message["trial"] for message in hook.got] == [failed.number]
        end = f"goes on, but trial {failed.number} failed: out of memory."
        assert hook.got[0]["text"].endswith(end)
    assert len(hook.got) == 1


def test_a_finished_sweep_that_is_started_again_sends_nothing(spec, hook):
    with SweepNotifier(spec) as notifier:
        notifier(SweepStarted(tuple(make_records(spec, 6))))
        notifier(SweepFinished(tuple(make_records(spec, 6)), False, "all were tried"))
    with pytest.raises(UsageError), SweepNotifier(spec):
        raise UsageError("another process runs this sweep")
    assert hook.got == []


def test_unwanted_occasions_and_sweeps_without_a_webhook_send_nothing(tmp_path, hook):
    spec = make_notified_spec(tmp_path, "failed")
    run(spec, make_records(spec, 6))
    run(spec.model_copy(update={"notify": None}), make_records(spec, 6))
    assert hook.got == []


def test_a_webhook_that_refuses_is_one_warning_and_is_recorded(spec, hook, monkeypatch, capsys):
    monkeypatch.setattr(sweep_notifier, "PAUSES", (0.0, 0.0))
    hook.answer = 500
    records = make_records(spec, 6)
    run(spec, [*records[:-1], replace(records[-1], state="failed", reason="x")])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: notify: HOOK: the webhook answered 500")
    assert "(trial_failed, finished)" in line
    assert len(hook.got) == 4  # each is tried twice
    notices = read_notices(spec)
    assert [notice["problem"] for notice in notices] == ["the webhook answered 500"] * 2
    assert "secret" not in line + json.dumps(notices)


def test_a_webhook_that_fails_once_is_tried_again(spec, hook, monkeypatch, capsys):
    answers = iter(["the webhook answered 503", ""])
    monkeypatch.setattr(sweep_notifier, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(sweep_notifier, "post_message", lambda *_: next(answers))
    run(spec, make_records(spec, 6))
    assert capsys.readouterr().err == ""
    assert read_notices(spec)[0]["problem"] == ""


def test_a_webhook_that_hangs_delays_only_the_end_and_not_for_long(spec, monkeypatch, capsys):
    monkeypatch.setattr(sweep_notifier, "CLOSING_SECONDS", 0.3)
    monkeypatch.setattr(sweep_notifier, "PAUSES", (0.0,))
    hung = threading.Event()  # one that were waited for would end without a problem
    monkeypatch.setattr(sweep_notifier, "post_message", lambda *_: str(hung.wait(60) or ""))
    records = make_records(spec, 6)
    records[-1] = replace(records[-1], state="failed")
    run(spec, records)
    hung.set()
    assert "no answer within" in capsys.readouterr().err
    assert len(read_notices(spec)) == 2


def test_a_sweep_whose_webhook_is_not_set_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    (problem,) = find_unset_webhook(spec)
    assert "notify.webhook_env = HOOK: the environment variable is not set" in str(problem)
    assert not [*find_unset_webhook(make_spec(tmp_path))]
    monkeypatch.setenv("HOOK", "secret")
    (problem,) = find_unset_webhook(spec)
    assert "not the address of a webhook" in str(problem)
    assert "secret" not in str(problem)
    monkeypatch.setenv("HOOK", "https://chat.example.org/x")
    assert not [*find_unset_webhook(spec)]


def test_the_webhook_is_no_part_of_the_identity_and_survives_the_stored_file(tmp_path):
    plain, notified = load_spec(SPACE), load_spec(SPACE, [NOTIFY])
    assert plain.compute_identity() == notified.compute_identity()
    for spec in (plain, notified):
        (tmp_path / "spec.yaml").write_text(spec.dump_yaml())
        assert load_spec(tmp_path / "spec.yaml", name=spec.name) == spec
    assert notified.notify is not None
    assert notified.notify.on == EVERY_SWEEP_OCCASION
    assert os.environ.get("HOOK") is None
