"""The console script `gdpo-tune`: its commands, its errors and its completion."""

import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_tune import cli
from tests.support.paths import ROOT

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_gdpo_tune
printf '%s\\n' "${COMPREPLY[@]}"
"""


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    program = "from gdpo_tune import cli; cli.main()"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_lists_the_commands():
    done = run_command("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_gets_the_arguments_after_its_name(name: str):
    done = run_command(name, "--help")
    module = [sys.executable, "-m", f"gdpo_tune.{name}", "--help"]
    assert done.returncode == 0
    assert done.stdout == subprocess.run(module, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), f"name a command: {', '.join(cli.COMMANDS)}"),
        (("swep",), "invalid choice: 'swep'"),
        (("--print-completion", "fish"), "invalid choice: 'fish'"),
        (("sweep", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_wrong_arguments_end_with_status_2(words: tuple[str, ...], message: str):
    done = run_command(*words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (("gdpo-tune", "sch"), ["schedule"]),
        (("gdpo-tune", "comp"), ["compare"]),
        (("gdpo-tune", "init", "--gp"), ["--gpus"]),
        (("gdpo-tune", "sweep", "--dry"), ["--dry-run"]),
        (("gdpo-tune", "sweep", "search_spaces/tools.y"), ["search_spaces/tools.yaml"]),
        (("gdpo-tune", "schedule", "sweeps", "st"), ["status", "stop"]),
    ],
)
def test_bash_completes(tmp_path: Path, words: tuple[str, ...], completions: list[str]):
    script = tmp_path / "completion.bash"
    script.write_text(run_command("--print-completion", "bash").stdout)
    command = ["bash", "-c", COMPLETE, "bash", str(script), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions


def test_a_reader_that_has_enough_sees_no_traceback():
    program = f"{sys.executable} -m gdpo_tune.sweep search_spaces/code.yaml --dry-run"
    command = ["bash", "-c", f"{program} | head -1; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, status = done.stdout.split("\n")[:2]
    assert first == "# Resolved"
    assert status in ("0", "141"), "0 if the reader was slower"
    assert done.stderr == ""
