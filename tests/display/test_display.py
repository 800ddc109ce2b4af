import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.events import (
    Incident,
    IncidentOccurred,
    Outlook,
    RecordedRequest,
    RequestEffect,
    SearchStarted,
    SweepFinished,
    SweepStarted,
    SweepSteered,
    TrackingState,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.text import format_estimate, format_hypervolume, format_number
from gdpo_tune.core.trials import UNCHANGED, Cost, Estimate, Measurement, Rung
from gdpo_tune.display import training
from gdpo_tune.display.console_summary import print_summary
from gdpo_tune.display.live_table import LiveDisplay
from gdpo_tune.display.tables import (
    MAX_ROWS,
    ONE_SEED,
    SEVERAL_SEEDS,
    WORSE,
    build_front_table,
    explain_marks,
    format_metrics,
)
from gdpo_tune.figures.front_png import write_front_png
from gdpo_tune.figures.report_page import write_report
from gdpo_tune.results.front_table import list_rows
from gdpo_tune.results.live import LiveState
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.results.wording import describe_origins
from gdpo_tune.spec.model import Constraint
from tests.support.figures import NASTY, add_candidates, make_records, make_spec
from tests.support.tuning import build_measurement


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


def paper(width=200, terminal=False):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def events(records, planned=30):
    yield Outlook(planned, 0.0)
    yield SweepStarted(())
    for record in records:
        yield TrialStarted(replace(record, state="running"))
        yield TrialProgress(record.number, build_measurement(30, format=0.5))
        yield TrialFinished(record)
    yield SweepFinished(tuple(records), interrupted=False)


def summary(spec, records, width=200, sessions=(), note="", **options):
    console = paper(width)
    print_summary(Sweep(spec, records, sessions, **options), console, note=note)
    return console.file.getvalue()


def show(spec, happened, console):
    """Return a display of what happened."""
    display = LiveDisplay(spec, console)
    for event in happened:
        display(event)
    return display


# Without a terminal


def test_one_line_an_event_and_none_for_progress(spec):
    console = paper()
    records = make_records(spec, 4)
    with LiveDisplay(spec, console) as display:
        for event in events(records):
            display(event)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 + 2 * len(records)
    assert "trial 2 starts: search" in lines[5]
    assert "trial 2 complete after" in lines[6]
    assert lines[-1].endswith("finished")


def test_a_training_that_goes_on_and_hours_that_are_used_up_are_told(spec):
    console = paper()
    record = make_records(spec, 2)[1]
    rung = Rung(30, record.validation, Cost())
    show(spec, [TrialStarted(replace(record, state="running", rungs=(rung,)))], console)
    assert f"trial {record.number} goes on: " in console.file.getvalue()
    show(spec, [*[*events([record])][:-1], Outlook(9, 600.0, 0.0), TrialFinished(record)], console)
    assert ", the hours are used up: what runs comes to its end" in console.file.getvalue()


def test_lines_hold_objectives_and_reasons_without_escape_codes_or_markup(spec):
    console = paper()
    records = make_records(spec, 3, failed=(3,))
    show(spec, events(records), console)
    text = console.file.getvalue()
    assert "\x1b" not in text
    for goal in spec.list_objectives():
        assert f"{goal.name} {format_estimate(records[2].test[goal.name])}" in text
    assert f"trial 3 failed: {NASTY}" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_where_an_earlier_sweep_was_moved_is_said(terminal, spec, tmp_path):
    console = paper(100, terminal=terminal)
    with LiveDisplay(spec, console) as display:
        display(SweepStarted((), tmp_path / "code.20260102-030405"))
    assert f"is now in {tmp_path}/code.20260102-030405" in console.file.getvalue()
    silent = paper(100, terminal=terminal)
    with LiveDisplay(spec, silent) as display:
        display(SweepStarted(()))
    assert "is now in" not in silent.file.getvalue()


def test_a_sweep_that_was_finished_says_that_nothing_was_started(spec):
    console = paper()
    display = LiveDisplay(spec, console)
    assert display.note == ""
    records = tuple(make_records(spec, 3))
    display(Outlook(len(records), 0.0))
    display(SweepStarted(records))
    display(SweepFinished(records, interrupted=False))
    assert display.note == "was finished already: nothing was started"
    display(SweepFinished(records, interrupted=False, reason="the budget of 2 hours is spent"))
    assert display.note == (
        "was finished already (the budget of 2 hours is spent): nothing was started"
    )
    assert console.file.getvalue().splitlines()[-1].endswith(display.note)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_note_says_how_a_sweep_ended(spec, terminal):
    console = paper(100, terminal=terminal)
    display = show(spec, events(make_records(spec, 3)), console)
    assert display.note == "finished"
    display(SweepFinished((), interrupted=True))
    assert display.note == "interrupted"
    assert terminal or "interrupted" in console.file.getvalue()


# In a terminal


def picture(display, width=140):
    console = paper(width)
    console.print(display.render())
    return console.file.getvalue()


def test_the_picture_before_anything_happens(spec):
    assert "0 of at most 0 trials done" in picture(LiveDisplay(spec, paper()))


def test_the_picture_shows_counts_running_trials_and_the_front(spec):
    records = make_records(spec, 10, failed=(4,))
    display = show(spec, list(events(records))[:-1], paper(140, terminal=True))
    display(TrialStarted(replace(records[2], number=12, state="running")))
    display(TrialProgress(12, build_measurement(30, format=0.5)))
    text = picture(display)
    assert "12 of at most 30 trials done, 1 running, 1 failed" in text
    head = ["trial", "role", "normalization", "step", "latest", "on", "validation", "prompts"]
    assert head in [line.split() for line in text.splitlines()]
    assert "30/60" in text
    assert "format 0.500" in text
    front = build_front(records, spec.list_objectives())
    assert f"hypervolume {format_number(front.hypervolume)}" in text
    assert format_estimate(front.members[0].mean["correctness"]) in text


def test_validation_values_stay_until_there_are_newer_ones(spec):
    display = LiveDisplay(spec, paper(140, terminal=True))
    display(TrialStarted(replace(make_records(spec, 3)[2], state="running")))
    display(TrialProgress(2, build_measurement(30, format=0.5)))
    display(TrialProgress(2, Measurement(31, {"train/loss": 1.0}, Cost())))
    text = picture(display)
    assert "31/60" in text
    assert "format 0.500" in text


def test_a_long_front_is_cut_short_and_says_so(spec):
    display = LiveDisplay(spec, paper(140, terminal=True))
    records = make_records(spec, 150)
    display(Outlook(160, 0.0))
    display(SweepStarted(tuple(records)))
    members = len(build_front(records, spec.list_objectives()).members)
    assert f"... and {members - 12} more" in picture(display)


def test_the_terminal_is_freed_once(spec):
    console = paper(100, terminal=True)
    with LiveDisplay(spec, console) as display:
        display(SweepStarted(()))
        display.close()
        display.close()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    output = console.file.getvalue()
    assert output.count(hidden) == output.count(shown) == 1


# Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(spec, clock):
    return LiveState(spec.list_objectives(), 60, clock)


def test_the_time_left_follows_the_pace_since_the_start(spec, clock, progress):
    records = [replace(record, cost=Cost(completions=100)) for record in make_records(spec, 8)]
    progress.apply(SweepStarted(tuple(records[:4])))
    progress.apply(Outlook(10, 600.0))
    assert progress.estimate_seconds_left() is None
    clock.now = 30.0
    progress.apply(TrialFinished(records[4]))
    running = replace(records[5], state="running", cost=Cost())
    progress.apply(TrialStarted(running))
    progress.apply(TrialProgress(records[5].number, Measurement(30, {}, Cost(completions=50))))
    # 150 completions in 30 s, and 600 - 150 are left
    assert progress.estimate_seconds_left() == pytest.approx(450 / 5)
    progress.apply(Outlook(12, 700.0))  # the plan expects more
    assert progress.estimate_seconds_left() == pytest.approx(700 / 5)


def test_hours_that_are_left_limit_the_time(spec, clock, progress):
    progress.apply(SweepStarted(()))
    progress.apply(Outlook(10, 4000.0, hours=0.1))
    clock.now = 10.0
    ended = replace(make_records(spec, 2)[1], cost=Cost(completions=100))
    progress.apply(TrialFinished(ended))
    assert progress.estimate_seconds_left() == 360.0


def test_a_pause_does_not_slow_the_pace_down(spec, clock, progress):
    ended = replace(make_records(spec, 8)[1], cost=Cost(completions=100))
    pause = RecordedRequest("a", "pause", {}, "anna", 0.0, 0.0, "applied", "")
    progress.apply(SweepStarted(()))
    clock.now = 20.0
    progress.apply(TrialFinished(ended))
    progress.apply(Outlook(12, 1100.0))
    progress.apply(SweepSteered(pause, pause))
    assert progress.estimate_seconds_left() is None
    clock.now = 500.0
    progress.apply(SweepSteered(pause, pause))  # another request in the pause
    clock.now = 1000.0
    progress.apply(SweepSteered(pause, None))
    assert progress.estimate_seconds_left() == pytest.approx(11 * 20)


def test_the_front_is_not_computed_more_often_than_it_may(spec, clock, progress):
    first = progress.compute_front()
    assert first is not None
    assert progress.compute_front() is None
    assert progress.get_front() is first
    clock.now = 1.5
    progress.apply(TrialFinished(make_records(spec, 1)[2]))
    assert len(progress.get_front().configurations) == 1


def test_the_end_of_a_sweep_always_has_a_front_of_its_own(spec, progress):
    progress.get_front()
    records = make_records(spec, 3)
    progress.apply(SweepFinished(tuple(records), interrupted=False))
    assert progress.get_front().records == tuple(records)


# The summary


def test_the_summary_has_the_front_with_its_errors_knee_and_extremes(spec):
    records = make_records(spec, 12, replicates=4)
    front = build_front(records, spec.list_objectives())
    text = summary(spec, records)
    for configuration in (*front.members, *front.baselines):
        for goal in front.objectives:
            assert format_estimate(configuration.mean[goal.name]) in text
    words = {word for member in front.members for word in front.list_labels(member)}
    assert {"knee", "best correctness", "best format", "best length"} <= words
    for word in (*words, "untrained policy"):
        assert word in text
    assert "published weights" in text
    volume = format_hypervolume(front.hypervolume, front.hypervolume_interval)
    assert f"hypervolume {volume}" in text


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_no_value_is_cut_in_a_narrow_terminal(spec, width):
    records = make_records(spec, 12, replicates=4)
    text = summary(spec, records, width)
    for member in build_front(records, spec.list_objectives()).members:
        for estimate in (member.mean["correctness"], member.mean["length"]):
            assert format_estimate(estimate) in text
    assert "…" not in text


def test_an_extreme_names_what_it_is_tied_with(spec):
    records = make_records(spec, 12, replicates=4)
    front = build_front(records, spec.list_objectives())
    tied = [member.name for member in front.list_ties("format")]
    assert tied
    assert f"best format (tied with {', '.join(tied[:3])}" in summary(spec, records)


def test_a_training_that_moved_no_weight_says_so_at_its_end(spec):
    console = paper()
    *_, record = make_records(spec, 3)
    show(spec, events([replace(record, environment={UNCHANGED: "true"})]), console)
    assert "; unchanged: every gradient was 0" in console.file.getvalue()


def test_the_summary_lists_the_labelled_members_of_a_large_front(spec):
    records = make_records(spec, 120)
    for index, record in enumerate(records[2:]):
        share = index / 120
        shares = {name: share if name == "correctness" else 1 - share for name in record.test}
        test = {name: Estimate(value, 0.01) for name, value in shares.items()}
        records[index + 2] = replace(record, test=test)
    front = build_front(records, spec.list_objectives())
    shown = [row.policy for row in list_rows(front, MAX_ROWS)]
    assert len(front.members) > 50
    assert len(shown) == MAX_ROWS + 1, "the untrained policy comes last"
    assert all(member in shown for member in front.members if front.list_labels(member))
    text = summary(spec, records)
    assert f"{len(front.members) - MAX_ROWS} more in the report" in text


@pytest.mark.parametrize("count", [10, 16, 17, 22])
def test_a_table_with_room_for_every_member_shows_every_member(spec, count):
    front = build_front(make_records(spec, count), spec.list_objectives())
    shown = [row for row in list_rows(front, MAX_ROWS) if row.policy.is_on_front]
    assert len(shown) == min(len(front.members), MAX_ROWS)


def test_only_marks_that_some_row_has_are_explained(spec):
    records = make_records(spec, 6)
    replicated = make_records(spec, 6, replicates=4)
    for shown in (records, replicated):
        front = build_front(shown, spec.list_objectives())
        rows = list_rows(front, MAX_ROWS)
        single = {row.policy.is_provisional for row in rows if row.policy.role != "untrained"}
        text = explain_marks(front, rows)
        assert (SEVERAL_SEEDS in text, ONE_SEED in text) == (False in single, True in single)
        assert (WORSE in text) == any(row.worse for row in rows)
    front = build_front(records, spec.list_objectives())
    assert explain_marks(front, list_rows(front, MAX_ROWS)).startswith(f"{ONE_SEED} one seed")


def test_a_value_that_is_clearly_worse_than_the_untrained_policys_is_marked(spec):
    records = make_records(spec, 6)
    high = {name: Estimate(0.99, 0.001) for name in records[0].test}
    text = summary(spec, [replace(records[0], test=high), *records[1:]])
    assert "▾ clearly worse than the untrained policy" in text
    low = {name: Estimate(0.0, 0.001) for name in records[0].test}
    baselines = [replace(record, test=low) for record in records[:2]]
    assert "▾" not in summary(spec, [*baselines, *records[2:]])


def test_the_answer_to_a_choice_is_the_last_thing(spec):
    records = make_records(spec, 6)
    chosen = pick_trial(Sweep(spec, records), parse_pick("max correctness where length >= 0"))
    lines = summary(spec, records, chosen=chosen).rstrip().splitlines()
    assert tuple(lines[-len(chosen.lines) :]) == chosen.lines


def test_warnings_come_before_the_front(spec):
    text = summary(spec, make_records(spec, 12))
    assert text.index("warning: ") < text.index("correctness  ")


def test_a_terminal_says_what_happens_before_the_first_trial(spec):
    display = LiveDisplay(spec, paper(terminal=True))
    shown: list[str] = []
    for event in (SweepStarted(()), SearchStarted(2, "gp"), *events(make_records(spec, 1))):
        display(event)
        shown.append(picture(display, 200).splitlines()[0])
    assert "starting Ray" in shown[0]
    assert "starting trials" in shown[1]
    assert "1 running" in shown[4]


def test_the_summary_calls_candidates_by_their_names(spec):
    records = add_candidates(make_records(spec, 12, replicates=3))
    text = summary(spec, records)
    for words in ("merge-18", "2@40", "0.25 x 2@60 + 0.75"):
        assert words in text
    front = build_front(records, spec.list_objectives())
    lines = describe_origins(front)
    assert [line.split()[0] for line in lines] == ["final", "earlier", "merges"]
    assert all(line in text for line in lines)
    assert describe_origins(build_front(records[:-3], spec.list_objectives())) == []


@pytest.mark.parametrize(
    ("pick", "command"),
    [
        ("merge-15", "python -m gdpo_tune.export {}:merge-15 --to mergekit"),
        ("2@40", "python -m gdpo_tune.train --from {}:2@40"),
        ("2", "python -m gdpo_tune.train --from {}:2"),
    ],
)
def test_the_next_steps_are_those_of_the_chosen_candidate(spec, pick, command):
    records = add_candidates(make_records(spec, 12))
    chosen = pick_trial(Sweep(spec, records), parse_pick(pick))
    text = summary(spec, records, chosen=chosen)
    assert command.format(spec.location) + "\n" in text
    assert ("Train this trial" in text) == (not pick.startswith("merge"))
    assert ("Train from its weights" in text) == pick.startswith("merge")


def test_the_live_display_calls_candidates_by_their_names(spec):
    records = add_candidates(make_records(spec, 4))
    console = paper()
    show(spec, events(records), console)
    text = console.file.getvalue()
    assert "merge-7 starts: evaluates 0.25 x 2@60 + 0.75 x 3@60" in text
    assert "checkpoint 2@40 starts: evaluates 2@40" in text
    assert "trial 8 starts: evaluates 0.25 x 2@60 + 0.75 x 3@60" in text
    assert "merge-7 complete after" in text
    started = [TrialStarted(replace(record, state="running")) for record in records]
    shown = picture(show(spec, started, paper(140, terminal=True)))
    assert "merge of 0.25 x 2@60 + 0.75 x 3@60" in shown
    assert shown.count("evaluating") == 4  # the untrained policy too


def test_the_summary_names_failures_with_their_reasons(spec):
    text = summary(spec, make_records(spec, 4, failed=(3,)))
    assert "\n1 failed\n" in text
    assert "trial 3: <script>alert('x')</script> [bold]&amp;" in text
    assert "second line </table>" in text


def test_the_summary_counts_node_losses_and_retries(spec):
    incidents = [
        Incident(0.0, "node h (a) was lost", (1, 2)),
        Incident(0.0, "resumes on node h (b)", (1,)),
        Incident(0.0, "is tried again: [bold]ValueError", (3,)),
    ]
    sessions = [{"incidents": incidents}, {"incidents": []}, {}]
    text = summary(spec, make_records(spec, 4), sessions=sessions)
    assert "1 node lost, with attempts at 2 trials" in text
    assert "1 attempt failed and retried" in text


def test_an_incident_is_printed_at_once(spec):
    console = paper()
    with LiveDisplay(spec, console) as display:
        display(IncidentOccurred(Incident(0.0, "node h (a) was lost", (1, 2))))
    assert "node h (a) was lost, with trials 1, 2" in console.file.getvalue()


def test_only_metrics_of_a_kind_are_shown():
    shown = {"train/rewards/a/mean": 0.5}
    others = {"train/rewards/a/std": 0.1, "train/entropy/mean": 1.0}
    assert format_metrics({**shown, **others}, "train/rewards/", "/mean") == "a 0.500"


def test_a_state_of_tracking_is_printed_once(spec):
    console, state = paper(), TrackingState("away", 3, "nobody there")
    with LiveDisplay(spec, console, lambda: state) as display:
        for _ in range(2):
            display(IncidentOccurred(Incident(0.0, "node h (a) was lost", (1, 2))))
    assert console.file.getvalue().count(str(state)) == 1


def test_the_summary_says_where_things_are_and_how_to_look_further(spec):
    records = make_records(spec, 4)
    report, png = write_report(Sweep(spec, records)), write_front_png(Sweep(spec, records))
    text = summary(spec, records, 80)
    assert str(report) in text
    assert str(png) in text
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in text
    assert f"python -m gdpo_tune.report {spec.directory}\n" in text
    front = build_front(records, spec.list_objectives())
    assert front.knee is not None
    assert str(records[front.knee.first].checkpoint) in text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://tracking:5000", "Open in MLflow     http://tracking:5000"),
        ("http://me:secret@host/db", "http://me:***@host/db"),
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
    ],
)
def test_a_tracking_server_is_named_by_its_address_without_a_password(spec, uri, shown):
    tracking = spec.tracking.model_copy(update={"uri": uri})
    text = summary(spec.model_copy(update={"tracking": tracking}), [])
    assert shown in text
    assert "secret" not in text


def test_the_head_of_the_summary_begins_with_the_note(spec):
    head = summary(spec, make_records(spec, 4, failed=(3,)), note="finished").splitlines()[1]
    assert head.startswith(f"{spec.name}: finished; 5 trials complete, 1 failed, ")


def test_the_summary_of_nothing(spec):
    text = summary(spec, [])
    assert "0 trials complete" in text
    assert "report.html" not in text


def test_a_narrow_terminal_keeps_the_weights_longest(spec):
    front = build_front(make_records(spec, 6), spec.list_objectives())
    rows, columns = list_rows(front, MAX_ROWS), {}
    for width in (200, 110, 20):
        table = build_front_table(front, rows, spec.space.dimensions, Console(width=width))
        columns[width] = [str(column.header) for column in table.columns]
        if width == 200:  # a terminal exactly as wide as the table has all of it
            exact = Console(width=10_000).measure(table).maximum
            whole = build_front_table(front, rows, spec.space.dimensions, Console(width=exact))
            assert len(whole.columns) == len(table.columns)
    assert {"P(front)", "group size", "w format"} <= set(columns[200])
    assert "w format" in columns[110]
    assert not {"P(front)", "group size"} & set(columns[110])
    assert "w format" not in columns[20]


def test_constraints_that_no_trial_satisfies_are_named_with_the_closest_value(spec):
    bounds = {
        "correctness": Constraint(op=">=", bound=0.99),
        "mean_length": Constraint(op="<=", bound=0.01),
    }
    strict = spec.model_copy(update={"constraints": bounds})
    records = [replace(r, feasible=False) for r in make_records(spec, 4)]
    said = summary(strict, records)
    trained = [r.validation for r in records if r.role != "untrained"]
    best = max(values["correctness"].mean for values in trained)
    shortest = min(values["mean_length"].mean for values in trained)
    assert "no trial satisfies all constraints" in said
    assert f"correctness >= 0.99: the closest trial has {format_number(best)}" in said
    assert f"mean_length <= 0.01: the closest trial has {format_number(shortest)}" in said


# Steering


def steer(action, pause=None, **effect):
    request = RecordedRequest(
        "a", action, {}, "anna", 0.0, 1.0, "applied", "as you wish", RequestEffect(**effect)
    )
    return SweepSteered(request, request if effect.get("paused") else pause)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_request_is_printed_with_who_asked_and_what_came_of_it(spec, terminal):
    console = paper(terminal=terminal)
    display = LiveDisplay(spec, console)
    display(SweepStarted(()))
    display(Outlook(38, 0.0))
    display(steer("trials"))
    assert "trials, asked by anna: applied: as you wish" in console.file.getvalue()
    assert display._state.outlook.planned == 38


def test_a_paused_sweep_says_so_with_the_command_that_resumes_it(spec):
    console = paper(width=400)
    display = LiveDisplay(spec, console)
    paused = steer("pause", paused=True)
    command = f"python -m gdpo_tune.steer {spec.location} resume"
    line = f"Paused by anna: no further trial starts. Go on with: {command}"
    display(SweepStarted((), pause=paused.request))  # also after a restart
    assert line in console.file.getvalue()
    assert line in picture(display, 400)
    display(steer("resume", paused=False))
    assert "Paused" not in picture(display, 400)
    display(paused)
    assert console.file.getvalue().count(line) == 2


def test_a_file_gets_no_live_table_even_where_colours_are_forced(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    with LiveDisplay(make_spec(tmp_path)) as display:
        display(SweepStarted(()))
        display(SearchStarted(2, "random"))
        time.sleep(0.7)
    printed = capsys.readouterr().out
    assert "2 at a time" in printed
    assert printed.count("trials done") == 1
    assert "\x1b" not in printed


def test_a_training_in_a_terminal_shows_its_step_and_latest_values(monkeypatch):
    console = paper(terminal=True)
    monkeypatch.setattr(training, "build_console", lambda: console)
    with training.TrainingDisplay(10) as display:
        display(build_measurement(3, format=0.5), None)
        display._bar.refresh()
    shown = console.file.getvalue()
    assert "3/10" in shown
    assert "on validation prompts format 0.500" in shown
