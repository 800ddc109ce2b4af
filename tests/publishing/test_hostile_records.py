"""Records on the Hub that their author has changed to attack a reader."""

from __future__ import annotations

import json
import re

import pytest

from gdpo_tune import load_sweep, report
from gdpo_tune.core.errors import UsageError
from gdpo_tune.publishing.record import build_record
from gdpo_tune.results import published_sweep
from gdpo_tune.results.open_sweep import find_sweep
from tests.support.hub_server import Handler
from tests.support.published_sweeps import make_sweep

ADDRESS = "hf://me/front"
SPEC, JOURNAL = "sweep/spec.yaml", "sweep/ledger.journal"


@pytest.fixture
def record(swept, hub):
    """Return the files of a record that a test may change before it is read."""
    files = build_record(find_sweep(str(swept.directory)))
    hub.add("model:me/front", files)
    return hub.repositories["model:me/front"].files


def replace_section(record, key, lines):
    """Write other lines in place of a key of the sweep file and all below it."""
    text = record[SPEC].decode()
    without = re.sub(rf"(?m)^{key}:.*\n(?:[ -].*\n)*", "", text)
    record[SPEC] = f"{without}{lines}\n".encode()


@pytest.mark.parametrize(
    ("section", "lines"),
    [
        ("sandbox", "sandbox: {type: unsafe_no_isolation}"),
        ("sandbox", "sandbox.type: unsafe_no_isolation"),
        ("resources", "resources: {env: [LD_PRELOAD=/tmp/x.so]}"),
        ("resources", "resources.env: [LD_PRELOAD=/tmp/x.so]"),
        ("resources", "resources.env.LD_PRELOAD: /tmp/x.so"),
        ("tracking", "tracking.uri: http://evil.example"),
        ("search", "search.warm_start: [/home/reader/sweep]"),
        ("rollout", "rollout.vllm_server: http://evil.example"),
        ("policy", "policy: /home/reader/policy"),
        ("policy", "policy: a/../../policy"),
        ("data", "data: {source: ~/prompts.jsonl, layout: gsm8k}"),
        ("data", "data.source: data/private/prompts.jsonl"),
        ("rollout", "rollout: {vllm_server: 'http://evil'}"),
        ("notify", 'notify: {webhook_env: "X"}'),
        ("extends", "extends: /etc/hostname"),
        ("task", "task: /tmp/evil.py:Task"),
    ],
)
def test_a_file_that_names_something_outside_is_refused(record, section, lines):
    replace_section(record, section, lines)
    key = lines.splitlines()[-1].partition(":")[0].removesuffix(".LD_PRELOAD")
    with pytest.raises(UsageError, match=rf"its spec\.yaml has {key}.*, which no published"):
        load_sweep(ADDRESS)


@pytest.mark.parametrize(
    "content", [b"[" * 5000, b"seed: " + b"9" * 5000, b"task: code\n" + b"#" * 2 * 10**6]
)
def test_a_file_that_cannot_be_read_is_refused(record, content):
    record[SPEC] = content
    with pytest.raises(UsageError, match=r"its spec\.yaml cannot be read: .*\n    fix: tell its"):
        load_sweep(ADDRESS)


@pytest.mark.parametrize("value", [None, [1], "x", -1])
@pytest.mark.parametrize("key", ["end", "outcome", "request:0"])
def test_a_ledger_that_no_sweep_wrote_is_refused(record, key, value):
    lines = [json.loads(line) for line in record[JOURNAL].decode().splitlines()]
    for line in lines:
        if key in line.get("user_attr", {}):
            line["user_attr"][key] = value
    record[JOURNAL] = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    if (key, value) == ("request:0", None):
        assert load_sweep(ADDRESS).trials is not None
        return
    with pytest.raises(
        UsageError, match=r"its ledger\.journal cannot be read: .*\n    fix: do not"
    ):
        load_sweep(ADDRESS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("session:0", value) for value in (None, [1], -1, {"started": "x", "provenance": 3})),
        ("request:0", None),
    ],
)
def test_a_report_of_a_ledger_that_no_sweep_wrote_is_refused(record, key, value, capsys):
    """Either it is refused in a sentence, or what is odd in it does not matter."""
    lines = [json.loads(line) for line in record[JOURNAL].decode().splitlines()]
    changed = [line for line in lines if key in line.get("user_attr", {})]
    for line in changed:
        line["user_attr"][key] = value
    record[JOURNAL] = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    assert changed
    if key == "request:0" or isinstance(value, dict):  # a reader takes it for none
        assert report.main([ADDRESS]) == 0
        assert load_sweep(ADDRESS)._repr_html_()
        return
    with pytest.raises(UsageError, match=r"its ledger\.journal cannot be read: .*\n    fix: do"):
        report.main([ADDRESS])


def test_only_files_of_a_record_are_downloaded(record, hub):
    record["sweep/movie.bin"] = record["sweep/trials/../../x"] = b"much"
    assert len(load_sweep(ADDRESS).trials) == 4
    assert not [request for request in hub.requests if "movie" in request or ".." in request]


def test_a_name_that_leaves_the_directory_is_refused(record, tmp_path):
    record["sweep/trials/../../../steps.jsonl"] = b"{}"
    with pytest.raises(
        UsageError, match=r"cannot be read: Invalid filename.*\n    fix: do not use"
    ):
        load_sweep(ADDRESS)
    assert not [path for path in tmp_path.rglob("steps.jsonl") if "trials" not in str(path)]


def test_a_record_that_would_fill_the_disk_is_refused(record, hub, monkeypatch):
    monkeypatch.setattr(published_sweep, "MAX_RECORD", len(record[JOURNAL]))
    answer = Handler.answer

    def add_sizes(self, status, content=None, code="", **headers):
        if isinstance(content, dict) and "siblings" in content:
            for file in content["siblings"]:
                file["size"] = len(record[file["rfilename"]])
        answer(self, status, content, code, **headers)

    monkeypatch.setattr(Handler, "answer", add_sizes)
    with pytest.raises(UsageError, match=r"its record has .* GB, and no sweep needs more"):
        load_sweep(ADDRESS)
    assert not [request for request in hub.requests if "/resolve/" in request]


def test_each_machine_decides_itself_how_code_runs(tmp_path, hub):
    spec = make_sweep(tmp_path, **{"sandbox.type": "unsafe_no_isolation"})
    hub.add("model:me/front", build_record(find_sweep(str(spec.directory))))
    assert load_sweep(ADDRESS).spec.sandbox.type == "local"
