"""Requests as files, in the ledger, and the state of a sweep that follows from them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, Request, RequestEffect, Setting
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.locks import Lease, is_locked
from gdpo_tune.core.trials import Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import compute_hours
from gdpo_tune.ledger.requests import (
    REQUESTS,
    apply_settings,
    build_request,
    decode_recorded,
    fold_requests,
    leave_request,
    list_pending,
    set_aside,
)
from tests.support.tuning import load_code_spec

PARTS = (Part(2, 30, 0.25), Part(3, 60, 0.75))


def record(id: str, applied: float = 0.0, author: str = "anna", **effect: object):
    return RecordedRequest(
        id, "any", {}, author, 0.0, applied, "applied", "", RequestEffect(**effect)
    )


def test_a_request_is_a_whole_file_that_names_its_author(tmp_path: Path):
    request = build_request("stop", {"trial": 7}, "  Anna\nB. ")
    path = leave_request(tmp_path, request)
    assert path.parent == tmp_path / REQUESTS
    assert [file.request for file in list_pending(tmp_path)] == [request]
    assert request.author == "Anna B."
    assert [name.name for name in path.parent.iterdir()] == [path.name]  # no draft is left


def test_requests_wait_in_the_order_in_which_they_were_asked_for(tmp_path: Path):
    requests = [Request(name, "pause", {}, "anna", time) for name, time in [("b", 2.5), ("a", 1e9)]]
    requests += [build_request("pause", {}, "anna") for _ in range(3)]
    for request in reversed(requests):
        leave_request(tmp_path, request)
    assert [file.request for file in list_pending(tmp_path)] == requests


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"\xff\x00", b'{"id": 1}', b"[" * 100_000]
    + [
        json.dumps({**vars(Request("a", "stop", {}, "b", 1.0)), name: value}).encode()
        for name, value in [
            ("id", 3),
            ("action", None),
            ("arguments", [1]),
            ("arguments", {"x": math.inf}),
            ("asked", "now"),
            ("asked", math.nan),
            ("asked", 1e300),
            ("author", "\ud800"),
        ]
    ],
)
def test_a_file_that_is_no_request_is_told_apart_and_set_aside(tmp_path: Path, content: bytes):
    (tmp_path / REQUESTS).mkdir()
    (tmp_path / REQUESTS / "1-x.json").write_bytes(content)
    (file,) = list_pending(tmp_path)
    assert file.request is None
    assert file.problem
    set_aside(file.path)
    assert list_pending(tmp_path) == []
    assert (tmp_path / REQUESTS / "damaged" / "1-x.json").read_bytes() == content


def test_large_files_and_directories_are_no_requests_and_drafts_do_not_count(tmp_path: Path):
    (tmp_path / REQUESTS / "directory.json").mkdir(parents=True)
    (tmp_path / REQUESTS / "large.json").write_bytes(b" " * 2_000_000)
    (tmp_path / REQUESTS / ".1-x.json.77").write_bytes(b"{")
    assert [file.request for file in list_pending(tmp_path)] == [None, None]
    assert list_pending(tmp_path / "nowhere") == []


def test_a_name_for_requests_that_is_no_directory_is_told(tmp_path: Path):
    for place in (lambda path: path.write_text(""), lambda path: path.symlink_to(path)):
        requests = tmp_path / REQUESTS
        place(requests)
        assert list_pending(tmp_path) == []
        with pytest.raises(UsageError, match="requests is not a directory, so no request"):
            leave_request(tmp_path, build_request("pause", {}, "anna"))
        requests.unlink()


def test_a_name_that_no_terminal_can_show_is_cleaned():
    assert build_request("pause", {}, "a\x1b[31m\udcff b").author == "a[31m b"
    assert build_request("pause", {}, "\udcff").author == "unknown"


def test_the_sweep_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r"belongs to \w+, and you may not write there"):
        leave_request(tmp_path, build_request("pause", {}, "anna"))
    assert list(tmp_path.iterdir()) == []


def test_a_recorded_request_is_the_same_after_json():
    settings = {"trials": Setting(24, 16)}
    request = record("a", stop=3, point={"group_size": 8}, parts=PARTS, settings=settings)
    assert decode_recorded(json.loads(json.dumps(asdict(request)))) == request


def test_the_state_follows_from_the_requests_in_order():
    pause = record("d", 10.0, "ben", paused=True)
    requests = [
        record("a", stop=3),
        record("b", point={"group_size": 8}),
        replace(record("c"), outcome="refused"),
        pause,
        record("f", 11.0, parts=PARTS),
    ]
    state = fold_requests(requests)
    assert state.stopped == {3: "stopped by anna"}
    assert state.added == {
        "b": RequestEffect(point={"group_size": 8}),
        "f": RequestEffect(parts=PARTS),
    }
    assert state.pause == pause
    assert state.pauses == ((10.0, math.inf),)
    resumed = fold_requests([*requests, record("e", 15.0, paused=False)])
    assert resumed.pause is None
    assert resumed.pauses == ((10.0, 15.0),)


def test_a_later_value_of_the_file_wins_over_a_request(tmp_path: Path):
    requests = [
        record("a", settings={"trials": Setting(24, 16)}),
        record("b", settings={"budget.completions": Setting(5000, 0)}),
        record("c", settings={"trials": Setting(20, 16)}),
    ]
    spec = load_code_spec(tmp_path)
    steered = apply_settings(spec, requests)
    assert (steered.search.trials, steered.search.budget.completions) == (20, 5000)
    assert steered.compute_identity() == spec.compute_identity()
    edited = apply_settings(load_code_spec(tmp_path, ["search.trials=30"]), requests)
    assert (edited.search.trials, edited.search.budget.completions) == (30, 5000)
    assert apply_settings(spec, []) is spec


def test_the_ledger_keeps_requests_and_its_spec_follows_them(tmp_path: Path):
    spec = load_code_spec(tmp_path)
    requests = [record("a", settings={"trials": Setting(24, 16)}), record("b", stop=0)]
    with Ledger.open(spec) as ledger, Ledger.open(spec, read_only=True) as reader:
        for request in requests:
            ledger.record_request(request)
        assert ledger.spec.search.trials == 24
        assert reader.get_requests() == requests
        reader.get_records()
        assert reader.spec.search.trials == 24
    with Ledger.open(spec) as again:
        assert again.get_requests() == requests
        assert again.spec.search.trials == 24
        assert again.steering.stopped == {0: "stopped by anna"}
    assert "trials: 16" in (spec.directory / "spec.yaml").read_text()  # the file stays the file


def test_a_pause_does_not_count_as_running_time():
    sessions = [{"started": 0.0, "finished": 7200.0}, {"started": 10_000.0}]
    pauses = [(3600.0, 12_000.0), (15_000.0, math.inf)]
    assert compute_hours(sessions, [], 17_200.0, pauses) == pytest.approx(1 + 3000 / 3600)
    assert compute_hours(sessions, [], 17_200.0) == pytest.approx(2 + 2)


def test_a_look_at_the_lease_neither_takes_nor_blocks_it(tmp_path: Path):
    assert not is_locked(tmp_path / "lock")
    lease = Lease(tmp_path / "lock")
    assert is_locked(tmp_path / "lock")
    lease.release()
    assert not is_locked(tmp_path / "lock")
    Lease(tmp_path / "lock").release()


def test_a_reason_holds_nothing_that_no_file_or_terminal_takes(tmp_path: Path):
    with Ledger.open(load_code_spec(tmp_path)) as ledger:
        params = ledger.spec.space.complete_baseline({})
        ledger.start(params, "search", "model", seed=0)
        assert ledger.fail(0, "caf\u00e9: \ud800\x1b[31m\nline").reason == "caf\u00e9: ??[31m\nline"


def test_text_that_utf_8_lacks_is_written_as_an_escape(tmp_path: Path):
    write_atomically(tmp_path / "page", "caf\u00e9 \ud800")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "caf\u00e9 \\ud800"


@pytest.mark.parametrize("arguments", [None, [1], "trial=7"])
def test_arguments_that_are_no_mapping_are_refused(arguments):
    with pytest.raises(UsageError, match="write a dict"):
        build_request("pause", arguments, None)
