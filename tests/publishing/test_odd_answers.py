"""Answers of a Hub, manifests and addresses that nobody expects."""

from __future__ import annotations

import json

import pytest

from gdpo_tune import compare, load_sweep, report, steer, sweep, watch
from gdpo_tune.core.addresses import MANIFEST
from gdpo_tune.core.errors import HubError, UsageError
from gdpo_tune.publishing import repositories
from gdpo_tune.publishing.hub import log_in
from tests.support.hub_server import USER, Handler
from tests.support.tuning import SPACE

KEYS = dict.fromkeys(("sweep", "candidate", "pick", "record"))
OUTSIDE = json.dumps({**KEYS, "files": ["../../x"]}).encode()
MANIFESTS = [b"", b"x", b"[]", b"null", b'{"sweep": 1}', b"\xff", b"[" * 10**5, OUTSIDE]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def change_answers(monkeypatch):
    """Let a function of the request change the status, content and code of every answer."""
    plain = Handler.answer

    def change(function):
        def answer(self, status, content=None, code="", **headers):
            plain(self, *(function(self) or (status, content, code)), **headers)

        monkeypatch.setattr(Handler, "answer", answer)

    return change


def test_answers_without_a_user_are_explained(hub, monkeypatch):
    for user in ({}, [], None, "x", {"name": "me", "orgs": [{}]}):
        hub.user = user
        with pytest.raises(UsageError, match="the Hub cannot be asked: its answer names no user"):
            log_in("me/a")
    for more in ({"orgs": None}, {"auth": None}):  # which are not needed
        hub.user = {**USER, **more}
        assert log_in("me/a")
    monkeypatch.setenv("HF_TOKEN", "hf_ü")
    with pytest.raises(UsageError, match="the Hub cannot be asked"):
        log_in("me/a")


@pytest.mark.parametrize("path", ["/api/whoami", "/api/models/me/a"])
def test_an_answer_of_something_else_is_explained(hub, publish_to, path, change_answers):
    change_answers(lambda request: (200, b"<html>", "") if request.path.startswith(path) else None)
    with pytest.raises(UsageError, match=r"the Hub cannot be asked: .*; nothing was uploaded"):
        publish_to("0", "me/a")


def test_a_manifest_of_others_is_not_ours(hub, publish_to, tmp_path):
    file = tmp_path / "out" / "a" / MANIFEST
    file.parent.mkdir(parents=True)
    for manifest in MANIFESTS:
        file.write_bytes(manifest)
        assert repositories.parse_manifest(file) is None
    with pytest.raises(UsageError, match="exists and holds other files"):
        publish_to("0", "me/a", "--dry-run", "--out", str(tmp_path / "out"))
    hub.add("model:me/a", {MANIFEST: OUTSIDE})
    with pytest.raises(UsageError, match=r"is taken: it holds 1 files .*this command did not make"):
        publish_to("0", "me/a")
    assert hub.repositories["model:me/a"].commits == []


def test_files_that_are_gone_on_the_hub_are_not_deleted_again(hub, publish_to):
    publish_to("0", "me/a")
    files = hub.repositories["model:me/a"].files
    manifest = json.loads(files[MANIFEST])
    manifest["files"] += ["gone.txt"]
    files[MANIFEST] = json.dumps(manifest).encode()
    hub.repositories["model:me/a"].commits.append([])  # another revision
    assert publish_to("0", "me/a") == 0


def test_an_interrupted_dry_run_leaves_the_earlier_one(publish_to, tmp_path, monkeypatch):
    options = ("--dry-run", "--out", str(tmp_path / "out"))
    publish_to("0", "me/a", *options)
    before = (tmp_path / "out" / "a" / MANIFEST).read_bytes()

    def fail(*_):
        raise OSError(5, "the disk fails")

    (tmp_path / "out" / "a" / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(repositories.shutil, "copyfile", fail)
        with pytest.raises(UsageError, match="the disk fails"):
            publish_to("0", "me/a", *options)
    assert (tmp_path / "out" / "a" / MANIFEST).read_bytes() == before
    assert publish_to("0", "me/a", *options) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    assert (tmp_path / "out" / "a" / "notes.txt").read_text() == "mine"


def test_a_licence_that_the_hub_does_not_know_is_refused_before_anything_is_created(
    hub, publish_to
):
    message = r'me/a: the Hub refuses the card: "license" must be one of .*\n    fix: .*--license'
    with pytest.raises(UsageError, match=message):
        publish_to("0", "me/a", "--license", "no-such-licence")
    assert not hub.repositories


@pytest.mark.parametrize("answer", [None, {"errors": 3}, {"errors": [{}]}])
def test_a_card_that_is_refused_without_a_reason(hub, publish_to, answer, change_answers):
    refused = (400, json.dumps(answer).encode(), "")
    change_answers(lambda request: refused if request.path == "/api/validate-yaml" else None)
    with pytest.raises(UsageError, match="it refuses a card without a reason; nothing was upl"):
        publish_to("0", "me/a")
    assert not hub.repositories


def test_a_card_that_is_refused_later_stops_the_upload(hub, publish_to, monkeypatch):
    monkeypatch.setattr("gdpo_tune.publishing.hub.check_cards", lambda api, contents: None)
    with pytest.raises(HubError, match=r'stopped: .*"license" must be one of the licences'):
        publish_to("0", "me/a", "--license", "no-such-licence")


def test_a_right_that_is_missing_is_named(hub, publish_to, change_answers):
    change_answers(lambda request: (403, {}, "") if request.command == "PUT" else None)
    with pytest.raises(HubError, match=r"403.*\n    fix: use a token that may write there"):
        publish_to("0", "me/a")


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (401, "log in with `hf auth login`, or set HF_TOKEN to a valid token"),
        (403, "use a token that may write there"),
        (500, "try again later"),
    ],
)
def test_a_refusal_before_the_first_upload_names_its_fix(
    hub, publish_to, change_answers, status, fix
):
    path = "/api/models/me/a"
    change_answers(lambda request: (status, {}, "") if request.path.startswith(path) else None)
    with pytest.raises(UsageError, match=rf"nothing was uploaded\n    fix: {fix}"):
        publish_to("0", "me/a")


@pytest.mark.parametrize(
    "run",
    [
        lambda: load_sweep("hf://me/front"),
        lambda: report.main(["hf://me/front:knee"]),
        lambda: compare.main(["hf://me/front", "hf://me/front"]),
        lambda: steer.main(["hf://me/front", "pause"]),
        lambda: watch.find_spec("hf://me/front"),
        lambda: sweep.main([str(SPACE), "--set", "storage=hf://me", "--dry-run"]),
    ],
)
def test_an_address_of_the_hub_is_no_sweep(run):
    with pytest.raises(UsageError, match=r"the Hub holds no sweeps: .*\n    fix: name a directory"):
        run()
