"""Commands of README and docs that read `runs/code`, on the trials of a real sweep.

`tests/data/code_sweep` is the ledger of a real sweep of `search_spaces/code.yaml`: 16 trainings of
60 steps. Its policies are not there: the untrained one stands for merges, and commands that load
others are run as `--dry-run`.
"""

import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from gdpo_tune.core.registry import POLICIES
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
    """Unpack the sweep as `runs/code` of the working directory, and copy it as `runs/longer`."""
    sweep = tmp_path / "runs" / "code"
    sweep.mkdir(parents=True)
    (sweep / "spec.yaml").write_bytes((STORED / "spec.yaml").read_bytes())
    journal = gzip.decompress((STORED / "ledger.journal.gz").read_bytes())
    (sweep / "ledger.journal").write_bytes(journal)
    for name in re.findall(rb"trials/\d+/checkpoint-\d+", journal):
        (sweep / name.decode()).mkdir(parents=True, exist_ok=True)
    shutil.copytree(sweep, sweep.with_name("longer"))
    for merge in sweep.glob("trials/*/checkpoint-0"):  # the weights at which trainings begin
        merge.rmdir()
        merge.symlink_to(POLICIES["embedded"])
    monkeypatch.chdir(tmp_path)
    for record in find_sweep("runs/code").records:
        for part in record.parts:
            policy = sweep / "trials" / str(part.trial) / f"checkpoint-{part.step}"
            policy.mkdir(parents=True, exist_ok=True)
    return sweep


def test_there_are_commands():
    assert len(list_commands()) > 10


def split_command(line):
    """Return the module and its arguments."""
    words = shlex.split(line.partition(" # ")[0])
    return words[2], words[3:]


TRAININGS = [line for line in list_commands() if split_command(line)[0] == "gdpo_tune.train"]


@pytest.mark.parametrize("line", [line for line in list_commands() if line not in TRAININGS])
def test_a_documented_command_works_on_the_default_sweep(line, directory, capsys):
    module, arguments = split_command(line)
    if module == "gdpo_tune.merge" and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    if "--collect" in arguments:  # what the library would have trained there
        shutil.copytree(POLICIES["embedded"], arguments[arguments.index("--collect") + 1])
        arguments += ["--set", "training.test_prompts=4"]
    assert import_module(module).main(arguments) == 0, capsys.readouterr().out


TRAIN_EACH = """
import json, sys
from gdpo_tune.train import main
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0, arguments
"""


@pytest.mark.system
def test_documented_trainings_work_on_the_default_sweep(directory):
    """In a process of their own: libraries warn of what they experiment with."""
    short = ["--steps", "1", "--set", "training.test_prompts=4"]
    trainings = [[*split_command(line)[1], *short] for line in TRAININGS]
    assert trainings
    command = [sys.executable, "-c", TRAIN_EACH, json.dumps(trainings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_recommended_candidate_keeps_what_the_untrained_policy_has(directory):
    front = find_sweep("runs/code").front
    assert front.knee_shortfall == []
    assert sum(bool(front.find_shortfalls(member)) for member in front.members) > 5
