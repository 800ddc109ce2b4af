"""What the live page shows, and that it is made again only after a change."""

import json
import shlex
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.events import Incident, Outlook
from gdpo_tune.core.locks import Driver
from gdpo_tune.core.text import NO_VALUE
from gdpo_tune.figures.style import get_mark
from gdpo_tune.ledger.requests import SteeringState
from gdpo_tune.spec import load_spec
from gdpo_tune.web import page_content
from gdpo_tune.web.live_sweep import LiveSweep, Snapshot
from gdpo_tune.web.page_content import (
    MAX_CURVES,
    SILENCE,
    build_state,
    describe_sweep,
    draw_running,
    list_curve_colors,
    list_fields,
)
from tests.support.tuning import SPACE, build_outcome, load_code_spec
from tests.support.web import apply_requests, build_view, report_step, start_sweep

NOW = 10_000.0
LIVE, GONE = Driver(1, "box", NOW - 100, True), Driver(1, "box", NOW - 100, False)
ELSEWHERE = Driver(1, "box", NOW - 100, None)
RUNNING = {"started": NOW - 90, "slots": 2}
INTERRUPTED = {**RUNNING, "finished": NOW - 10, "ending": ""}
FINISHED = {**RUNNING, "finished": NOW - 10, "ending": "all 16 configurations were tried"}
EARLIER = {"started": NOW - 900, "slots": 2, "finished": NOW - 800, "ending": "all were tried"}


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path)


@contextmanager
def watch_sweep(spec, **sizes):
    """Begin a sweep; yield its ledger and a view of it."""
    view, sweep = build_view(spec)
    with start_sweep(spec, **sizes) as ledger, closing(sweep):
        yield ledger, view


@contextmanager
def open_view(spec):
    """Yield a view of a sweep that has not begun."""
    view, sweep = build_view(spec)
    with closing(sweep):
        yield view


def get_state(view):
    return json.loads(view.get_state())


def limit(spec, **budget):
    budget = spec.search.budget.model_copy(update=budget)
    return spec.model_copy(update={"search": spec.search.model_copy(update={"budget": budget})})


@pytest.mark.parametrize(
    ("driver", "session", "kind"),
    [
        (None, None, "not started"),
        (LIVE, None, "starting"),
        (LIVE, RUNNING, "running"),
        (LIVE, EARLIER, "starting"),
        (LIVE, FINISHED, "finished"),
        (GONE, RUNNING, "ended"),
        (GONE, INTERRUPTED, "ended"),
        (GONE, FINISHED, "finished"),
        (ELSEWHERE, RUNNING, "running"),
        (ELSEWHERE, {**RUNNING, "started": NOW - 2 * SILENCE}, "silent"),
        (ELSEWHERE, INTERRUPTED, "ended"),
        (None, RUNNING, "ended"),
    ],
)
def test_the_state_follows_from_driver_and_session(spec, driver, session, kind):
    snapshot = Snapshot(spec, (), [session] if session else [], driver, {})
    assert describe_sweep(snapshot, NOW)[0] == kind


def test_a_driver_elsewhere_is_silent_once_its_latest_record_is_old(spec):
    with start_sweep(spec) as ledger:
        first, *records = ledger.get_records()
    latest = max(time for record in records for time in record.times)
    first = replace(first, started=latest - 2 * SILENCE)
    snapshot = Snapshot(spec, [first, *records], [RUNNING], ELSEWHERE, {})
    for age, kind in ((SILENCE - 1, "running"), (SILENCE + 1, "silent")):
        assert describe_sweep(snapshot, latest + age)[0] == kind


def test_a_paused_sweep_says_so_until_it_is_resumed(spec):
    with watch_sweep(spec) as (ledger, view):
        view.request("pause", {}, "anna (page)")
        assert get_state(view)["status"]["kind"] == "running"  # it is pending
        apply_requests(ledger)
        status = get_state(view)["status"]
        assert status["kind"] == "paused"
        assert get_state(view)["ends_at"] is None
        assert status["text"] == "Paused by anna (page): no further trial starts."
        view.request("resume", {}, "anna (page)")
        apply_requests(ledger)
        assert get_state(view)["status"]["kind"] == "running"


def test_the_state_has_rows_tiles_and_the_time_left(spec):
    with watch_sweep(spec, ended=2, running=1) as (ledger, view):
        state = get_state(view)
        assert state["status"] == {"kind": "running", "text": "Running.", "problem": ""}
        assert state["progress"] == {"done": 2, "planned": 10}
        tiles = {tile["label"]: tile["value"] for tile in state["tiles"]}
        assert tiles["Trials done"] == "2 of at most 10"
        assert tiles["Slots in use"] == "1 of 2"
        assert tiles["On the front"] == "2"
        (row,) = state["running"]
        assert (row["number"], row["step"], row["steps"]) == (2, 1, spec.training.steps)
        assert (row["values"][0], row["started"]) == ("0.100", ledger.get_records()[2].started)
        assert row["searched"].keys() == set(spec.space.dimensions)
        assert [row["number"] for row in state["ended"]] == [1, 0]
        assert all(row["front"] for row in state["ended"])
        assert state["hidden_ended"] == 0
        # that much work in a minute
        expected = 10_000 * 60 / sum(record.cost.work for record in ledger.get_records())
        assert state["ends_at"] - time.time() == pytest.approx(expected, rel=0.05)
        ledger.fail(2, "it broke")
        failed = get_state(view)["ended"][0]
        assert (failed["state"], failed["note"]) == ("failed", "it broke")


def test_the_budget_has_a_tile_for_each_limit(spec):
    with watch_sweep(limit(spec, completions=6400, hours=2.0)) as (_, view):
        tiles = [t for t in get_state(view)["tiles"] if t["label"] == "Budget"]
    assert [(t["value"], t["note"]) for t in tiles] == [
        ("1,344 of 6,400", "completions"),
        ("0.017 of 2", "hours"),
    ]


def test_pauses_count_neither_for_the_hours_nor_for_the_time_left(spec):
    limited = limit(spec, hours=2.0)
    with start_sweep(limited), closing(LiveSweep(lambda: limited)) as sweep:
        snapshot, now = sweep.refresh(), time.time()
        (session,) = snapshot.sessions
        half = (now - session["started"]) / 2
        paused = replace(snapshot, steering=SteeringState(pauses=((now - half, now),)))
        front = build_front(snapshot.records, spec.list_objectives())
        whole, rest = (
            build_state(s, front, Outlook(10, 10_000.0), now) for s in (snapshot, paused)
        )
    assert rest["ends_at"] - now == pytest.approx((whole["ends_at"] - now) / 2)
    before, now = (float(s["tiles"][-1]["value"].split()[0]) for s in (whole, rest))
    assert now == pytest.approx(before / 2, rel=0.05)


def test_the_log_has_drivers_and_incidents_the_newest_first(spec):
    with watch_sweep(spec) as (ledger, view):
        ledger.record_incident(Incident(time.time(), "is tried again: lost", (2,)))
        ledger.end_session(ledger.begin_session(time.time(), 1, {}), "all were tried")
        log = [line["text"] for line in get_state(view)["log"]]
    assert log == [
        "the driver ended: all were tried",
        "the driver started with 1 slot",
        "trial 2 is tried again: lost",
        "the driver started with 2 slots",
    ]


def test_requests_have_their_outcome_and_author_and_count(spec):
    with watch_sweep(spec) as (ledger, view):
        view.request("stop", {"trial": 2}, "anna (page)")
        (request,) = get_state(view)["requests"]
        assert (request["outcome"], request["author"]) == ("pending", "anna (page)")
        assert (request["action"], request["trial"]) == ("stop", 2)
        ledger.complete(2, build_outcome(0.5, 0.5, 0.5))
        view.request("add", {"params": {"group_size": 4}}, "anna")
        view.request("trials", {"number": 40}, "anna")
        apply_requests(ledger)
        state = get_state(view)
    *_, request = state["requests"]
    assert request["outcome"] == "refused"
    assert "has ended already" in request["reason"]
    assert (state["progress"]["planned"], state["trials"]) == (11, 40)


def test_a_budget_leaves_the_number_of_trials_to_the_sweep(tmp_path):
    with open_view(load_spec(SPACE, [f"storage={tmp_path}"], "sweep")) as view:
        assert get_state(view)["trials"] is None


def test_the_command_for_mlflow_can_be_pasted_into_a_shell(tmp_path):
    database = f"sqlite:///{tmp_path}/of the team.db"
    with open_view(load_code_spec(tmp_path, [f"tracking.uri={database}"])) as view:
        command = shlex.split(get_state(view)["mlflow"]["text"])
        assert command == ["mlflow", "ui", "--backend-store-uri", database]


def test_what_has_changed_is_made_again(spec):
    with watch_sweep(spec) as (ledger, view):
        first, figure = view.get_state(), view.get_figure("running")
        assert view.get_state() is first
        report_step(ledger, 2, 2)
        assert view.get_state() != first
        assert view.get_figure("running") != figure
        before, after = json.loads(first)["figures"], get_state(view)["figures"]
        assert after["front"] == before["front"]
        assert after["running"] != before["running"]
        ledger.complete(2, build_outcome(0.95, 0.95, 0.95))
        view._front.expire()
        assert get_state(view)["figures"]["front"] != before["front"]
        assert view.get_figure("nonsense") is None


def test_a_sweep_before_its_first_trial_has_no_figures(spec):
    with open_view(spec) as view:
        assert view.get_figure("front") == view.get_figure("running") == b"null"
        state = get_state(view)
        assert state["status"]["kind"] == "not started"
        assert state["ends_at"] is None


def test_curves_hold_rungs_and_steps_of_the_running_trials(spec):
    with start_sweep(spec, ended=1, running=2) as ledger:
        report_step(ledger, 1, 2)
        records = ledger.get_records()
        _, sweep = build_view(spec)
        with closing(sweep):
            snapshot = sweep.refresh()
    goals = spec.list_objectives()
    figure = draw_running(goals, records, snapshot.steps, 60)
    assert len(figure["data"]) == 2 * 2 * len(goals)
    rungs, *_, rewards = figure["data"][: 2 * len(goals)]
    assert (rungs["x"], rungs["y"]) == ([1, 2], [0.1, 0.2])
    assert (rewards["x"], rewards["y"]) == ([1, 2], [0.05, 0.1])
    axes = {name for name in figure["layout"] if name.startswith("xaxis")}
    assert {trace["xaxis"].replace("x", "xaxis") for trace in figure["data"]} == axes
    assert draw_running(goals, records[:1], {}, 60) is None
    first, *rungs = records[1].rungs
    bare = replace(records[1], rungs=(replace(first, validation={}), *rungs))
    assert draw_running(goals, [bare], snapshot.steps, 60)["data"][0]["x"] == [2]


def test_many_running_trials_have_curves_of_the_latest(spec):
    with start_sweep(spec, ended=0, running=MAX_CURVES + 3) as ledger:
        colors = list_curve_colors(ledger.get_records())
    assert list(colors) == list(range(3, MAX_CURVES + 3))


def test_more_ended_trials_than_the_page_holds_are_counted(spec, monkeypatch):
    monkeypatch.setattr(page_content, "MAX_ENDED", 2)
    with watch_sweep(spec, ended=5, running=0) as (_, view):
        state = get_state(view)
    assert ([row["number"] for row in state["ended"]], state["hidden_ended"]) == ([4, 3], 3)


def test_a_row_has_the_mode_of_its_training_in_its_color(spec):
    with watch_sweep(spec, ended=3, running=0) as (ledger, view):
        records, rows = ledger.get_records(), get_state(view)["ended"]
    assert any(record.is_training for record in records)
    for row in rows:
        trained = records[row["number"]].trained_params
        mode = trained.get("normalization", "")
        color = get_mark(mode).color if mode else ""
        assert (row["mode"], row["mode_color"]) == (mode, color)


def test_a_parameter_without_effect_is_not_shown(tmp_path):
    rate = "{log: [3.0e-5, 3.0e-4], when: {normalization: [gdpo]}}"
    spec = load_code_spec(tmp_path, [f"space.learning_rate={rate}"])
    with watch_sweep(spec, ended=0, running=0) as (ledger, view):
        for mode in ("gdpo", "grpo"):
            params = spec.space.complete_baseline({"normalization": mode})
            ledger.start(params, "search", "model", seed=0)
        gdpo, grpo = get_state(view)["running"]
    assert "learning_rate" in gdpo["searched"]
    assert "learning_rate" not in grpo["searched"]
    assert grpo["parameters"].count(NO_VALUE) == gdpo["parameters"].count(NO_VALUE) + 1


def test_a_form_has_ranges_choices_conditions_and_the_centre(spec):
    fields = {field["name"]: field for field in list_fields(spec)}
    assert fields.keys() == set(spec.space.dimensions)
    rate = fields["learning_rate"]
    assert rate["low"] < rate["centre"] < rate["high"]
    assert rate["range"] == "3e-5 to 3e-4, on a log scale"
    assert fields["normalization"]["choices"] == list(spec.space.domains["normalization"].choices)
