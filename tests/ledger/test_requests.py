"""Requests as files, in the ledger, and the state of a sweep that follows from them."""

import json
import math
import os
from dataclasses import replace

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, Request, RequestEffect, Setting
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.locks import Lease, is_locked
from gdpo_tune.core.trials import Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger import requests as module
from gdpo_tune.ledger.requests import (
    REQUESTS,
    apply_settings,
    build_request,
    fold_requests,
    leave_request,
    list_pending,
    set_aside,
)
from tests.support.tuning import load_code_spec

PARTS = (Part(2, 30, 0.25), Part(3, 60, 0.75))


def record(id, applied=0.0, author="anna", **effect):
    return RecordedRequest(
        id, "any", {}, author, 0.0, applied, "applied", "", RequestEffect(**effect)
    )


@pytest.fixture
def pause():
    return build_request("pause", {}, "anna")


def test_a_request_is_a_whole_file_that_names_its_author(tmp_path):
    request = build_request("stop", {"trial": 7}, "  Anna\nB. ")
    path = leave_request(tmp_path, request)
    assert path.parent == tmp_path / REQUESTS
    assert [file.request for file in list_pending(tmp_path)] == [request]
    assert request.author == "Anna B."
    assert [name.name for name in path.parent.iterdir()] == [path.name]  # no draft is left


@pytest.mark.parametrize(
    ("name", "shown"), [("a\x1b[31m\udcff b", "a[31m b"), ("\udcff", "unknown")]
)
def test_a_name_that_no_terminal_can_show_is_cleaned(name, shown):
    assert build_request("pause", {}, name).author == shown


@pytest.mark.parametrize("arguments", [None, [1], "trial=7"])
def test_arguments_that_are_no_mapping_are_refused(arguments):
    with pytest.raises(UsageError, match="write a dict"):
        build_request("pause", arguments, None)


def test_requests_wait_in_the_order_in_which_they_were_asked_for(tmp_path):
    requests = [Request(name, "pause", {}, "anna", time) for name, time in [("b", 2.5), ("a", 1e9)]]
    requests += [build_request("pause", {}, "anna") for _ in range(3)]
    for request in reversed(requests):
        leave_request(tmp_path, request)
    assert [file.request for file in list_pending(tmp_path)] == requests


def test_two_people_may_make_the_directory_at_once(tmp_path, pause, monkeypatch):
    (tmp_path / REQUESTS).mkdir()
    monkeypatch.setattr(type(tmp_path), "exists", lambda self: False)  # as it was a moment before
    monkeypatch.setattr(module, "check_requests_writable", lambda directory: None)
    assert leave_request(tmp_path, pause).is_file()


CHANGES = [{"id": 3}, {"action": None}, {"arguments": [1]}, {"arguments": {"x": math.inf}}]
CHANGES += [{"asked": "now"}, {"asked": math.nan}, {"asked": 1e300}, {"author": "\ud800"}]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"\xff\x00", b'{"id": 1}', b"[" * 100_000]
    + [
        json.dumps(vars(Request("a", "stop", {}, "b", 1.0)) | change).encode() for change in CHANGES
    ],
)
def test_a_file_that_is_no_request_is_told_apart_and_set_aside(tmp_path, content):
    (tmp_path / REQUESTS).mkdir()
    (tmp_path / REQUESTS / "1-x.json").write_bytes(content)
    (file,) = list_pending(tmp_path)
    assert file.request is None
    assert file.problem
    set_aside(file.path)
    assert list_pending(tmp_path) == []
    assert (tmp_path / REQUESTS / "damaged" / "1-x.json").read_bytes() == content


@pytest.mark.parametrize(("size", "is_read"), [(module.MAX_BYTES, True), (2_000_000, False)])
def test_large_files_and_directories_are_no_requests_and_drafts_do_not_count(
    tmp_path, pause, size, is_read
):
    leave_request(tmp_path, pause).rename(whole := tmp_path / REQUESTS / "large.json")
    whole.write_bytes(whole.read_bytes().ljust(size))
    (tmp_path / REQUESTS / "directory.json").mkdir()
    (tmp_path / REQUESTS / ".1-x.json.77").write_bytes(b"{")
    assert [file.request for file in list_pending(tmp_path)] == [None, pause if is_read else None]
    assert list_pending(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "place", [lambda path: path.write_text(""), lambda path: path.symlink_to(path)]
)
def test_a_name_for_requests_that_is_no_directory_is_told(tmp_path, pause, place):
    place(tmp_path / REQUESTS)
    assert list_pending(tmp_path) == []
    with pytest.raises(UsageError, match="requests is not a directory, so no request"):
        leave_request(tmp_path, pause)


def test_the_sweep_of_another_user_is_refused(tmp_path, pause, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r"belongs to \w+, and you may not write there"):
        leave_request(tmp_path, pause)
    assert list(tmp_path.iterdir()) == []


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
    effects = {"b": RequestEffect(point={"group_size": 8}), "f": RequestEffect(parts=PARTS)}
    assert state.added == effects
    assert state.pause == pause
    assert state.pauses == ((10.0, math.inf),)
    resumed = fold_requests([*requests, record("e", 15.0, paused=False)])
    assert (resumed.pause, resumed.pauses) == (None, ((10.0, 15.0),))


def test_a_later_value_of_the_file_wins_over_a_request(tmp_path):
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


def test_the_ledger_keeps_requests_and_its_spec_follows_them(tmp_path):
    spec = load_code_spec(tmp_path)
    settings = {"trials": Setting(24, 16)}
    whole = record("a", stop=3, point={"group_size": 8}, parts=PARTS, settings=settings)
    requests = [whole, record("b", stop=0)]
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
        assert again.steering.stopped == {3: "stopped by anna", 0: "stopped by anna"}
    assert "trials: 16" in (spec.directory / "spec.yaml").read_text()  # the file stays the file


def test_a_look_at_the_lease_neither_takes_nor_blocks_it(tmp_path):
    assert not is_locked(tmp_path / "lock")
    lease = Lease(tmp_path / "lock")
    assert is_locked(tmp_path / "lock")
    lease.release()
    assert not is_locked(tmp_path / "lock")
    Lease(tmp_path / "lock").release()


def test_text_that_utf_8_lacks_is_written_as_an_escape(tmp_path):
    write_atomically(tmp_path / "page", "caf\u00e9 \ud800")
    assert (tmp_path / "page").read_text(encoding="utf-8") == "caf\u00e9 \\ud800"
