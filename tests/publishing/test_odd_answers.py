"""Answers of a Hub, and manifests, that nobody expects."""

from __future__ import annotations

import json

import pytest

from gdpo_tune.core.addresses import MANIFEST
from gdpo_tune.core.errors import HubError, UsageError
from gdpo_tune.publishing import repositories
from gdpo_tune.publishing.hub import log_in
from tests.support.hub_server import USER, Handler

KEYS = dict.fromkeys(("sweep", "candidate", "pick", "record"))
OUTSIDE = json.dumps({**KEYS, "files": ["../../x"]}).encode()
MANIFESTS = [b"", b"x", b"[]", b"null", b'{"sweep": 1}', b"\xff", b"[" * 10**5, OUTSIDE]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.parametrize("user", [{}, [], None, "x", {"name": "me", "orgs": [{}]}])
def test_an_answer_without_a_user_is_explained(hub, user):
    hub.user = user
    with pytest.raises(UsageError, match="the Hub cannot be asked: its answer names no user"):
        log_in("me/a")


@pytest.mark.parametrize("more", [{"orgs": None}, {"auth": None}])
def test_an_answer_may_lack_what_is_not_needed(hub, more):
    hub.user = {**USER, **more}
    assert log_in("me/a")


@pytest.mark.parametrize("path", ["/api/whoami", "/api/models/me/a"])
def test_an_answer_of_something_else_is_explained(hub, publish_to, path, monkeypatch):
    answer = Handler.answer

    def answer_page(self, status, content=None, code="", **headers):
        is_page = self.path.startswith(path)
        answer(self, 200 if is_page else status, b"<html>" if is_page else content, code, **headers)

    monkeypatch.setattr(Handler, "answer", answer_page)
    with pytest.raises(UsageError, match=r"the Hub cannot be asked: .*; nothing was uploaded"):
        publish_to("0", "me/a")


def test_a_token_that_is_none_is_explained(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_ü")
    with pytest.raises(UsageError, match="the Hub cannot be asked"):
        log_in("me/a")


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
def test_a_card_that_is_refused_without_a_reason_is_explained(hub, publish_to, answer, monkeypatch):
    plain = Handler.answer

    def answer_oddly(self, status, content=None, code="", **headers):
        if self.path == "/api/validate-yaml":
            status, content, code = 400, json.dumps(answer).encode(), ""
        plain(self, status, content, code, **headers)

    monkeypatch.setattr(Handler, "answer", answer_oddly)
    with pytest.raises(UsageError, match="it refuses a card without a reason; nothing was upl"):
        publish_to("0", "me/a")
    assert not hub.repositories


def test_a_card_that_is_refused_later_stops_the_upload(hub, publish_to, monkeypatch):
    monkeypatch.setattr("gdpo_tune.publishing.hub.check_cards", lambda api, contents: None)
    with pytest.raises(HubError, match=r'stopped: .*"license" must be one of the licences'):
        publish_to("0", "me/a", "--license", "no-such-licence")


def test_a_right_that_is_missing_is_named(hub, publish_to, monkeypatch):
    answer = Handler.answer

    def refuse(self, status, content=None, code="", **headers):
        answer(self, 403 if self.command == "PUT" else status, content, code, **headers)

    monkeypatch.setattr(Handler, "answer", refuse)
    with pytest.raises(HubError, match=r"403.*\n    fix: use a token that may write there"):
        publish_to("0", "me/a")
