"""Commands of README and docs that read `runs/code`, on the trials of a real default sweep.

`tests/data/code_sweep` is the ledger of `search_spaces/code.yaml`, run as it ships. Its policies
are not there: commands that load them are run as `--dry-run`.
"""

import gzip
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from gdpo_tune.results.open_sweep import find_sweep
from tests.support.paths import ROOT

STORED = ROOT / "tests" / "data" / "code_sweep"
NAMES = "report|compare|export|train|merge"


def list_commands():
    """List the indented lines of the pages that call this package on `runs/code`, each once."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    pattern = re.compile(
        rf"^    (python -m gdpo_tune\.(?:{NAMES}) .*\bruns/code\b.*)$", re.MULTILINE
    )
    found = [line for page in pages for line in pattern.findall(page.read_text())]
    return [line for line in dict.fromkeys(found) if "--sync" not in line]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Unpack the sweep as `runs/code` of the working directory."""
    sweep = tmp_path / "runs" / "code"
    sweep.mkdir(parents=True)
    (sweep / "spec.yaml").write_bytes((STORED / "spec.yaml").read_bytes())
    journal = gzip.decompress((STORED / "ledger.journal.gz").read_bytes())
    (sweep / "ledger.journal").write_bytes(journal)
    for name in re.findall(rb"trials/\d+/checkpoint-\d+", journal):
        (sweep / name.decode()).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for record in find_sweep("runs/code").records:
        for part in record.parts:
            policy = sweep / "trials" / str(part.trial) / f"checkpoint-{part.step}"
            policy.mkdir(parents=True, exist_ok=True)
    return sweep


def test_there_are_commands():
    assert len(list_commands()) > 10


@pytest.mark.parametrize("line", list_commands())
def test_a_documented_command_works_on_the_default_sweep(line, directory, capsys):
    words = shlex.split(line.partition(" # ")[0])
    arguments = [*words[3:]]
    if words[2] == "gdpo_tune.merge" and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    if words[2] == "gdpo_tune.train":  # as a process: libraries warn of what they experiment with
        short = ["--steps", "1", "--set", "training.test_prompts=4"]
        command = [sys.executable, *words[1:3], *arguments, *short]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return
    assert import_module(words[2]).main(arguments) == 0, capsys.readouterr().out


def test_the_recommended_candidate_keeps_what_the_untrained_policy_has(directory):
    front = find_sweep("runs/code").front
    assert front.knee_shortfall == []
    assert sum(bool(front.list_shortfalls(member)) for member in front.members) > 5
