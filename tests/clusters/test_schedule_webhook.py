"""The webhook hears how runs end; it may fail for a while."""

from __future__ import annotations

from tests.support.schedule import NIGHTLY, Scene

TOLD = NIGHTLY + "notify: {webhook_env: HOOK}\n"


def test_a_webhook_hears_how_runs_end(tmp_path, hook):
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended", "sent"]
    assert scene.tick_at(5) == []
    scene.tick_at(24 * 3 + 12)
    first, skipped = hook.got
    assert first["id"] == "nightly/4"
    assert (first["occasion"], first["run"]) == ("finished", "nightly-20260101T020000Z")
    assert first["text"].startswith("nightly-20260101T020000Z finished. 3 trials, 2 on the front")
    assert (skipped["occasion"], skipped["count"]) == ("skipped", 3)
    assert "3 runs from nightly-20260102T020000Z to nightly-20260104T020000Z" in skipped["text"]


def test_only_wanted_notices_are_sent(tmp_path, hook):
    scene = Scene(tmp_path, NIGHTLY + "notify: {webhook_env: HOOK, on: [failed, stopped]}\n")
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended"]
    assert hook.got == []


def test_a_webhook_that_fails_is_tried_again_and_delays_nothing(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended", "not_sent"]
    assert scene.context.events[-1].text == "nightly: HOOK: the webhook answered 500"
    assert scene.tick_at(5) == []  # tried, and known to fail already
    assert len(hook.got) == 2
    hook.answer = 200
    assert scene.tick_at(6) == ["sent"]
    assert {got["id"] for got in hook.got} == {"nightly/4"}


def test_old_notices_are_not_sent(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    scene.tick_at(4)
    hook.answer = 200
    hook.got.clear()
    scene.tick_at(24 + 4.5)
    assert all(got["id"] != "nightly/4" for got in hook.got)
