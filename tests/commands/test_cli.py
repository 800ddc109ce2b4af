"""The console script `gdpo-tune`: its commands, its errors and its completion."""

import io
import os
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from gdpo_tune import cli
from gdpo_tune.display.tables import build_console
from tests.support.paths import ROOT

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_gdpo_tune
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def run_command(monkeypatch, capsys):
    """A function that runs `gdpo-tune` in this process; returns status, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gdpo-tune", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


def test_help_lists_the_commands(run_command):
    status, printed, _ = run_command("--help")
    assert status == 0
    assert all(name in printed for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_gets_the_arguments_after_its_name(name, run_command):
    help_text = import_module(f"gdpo_tune.{name}").build_parser().format_help()
    assert run_command(name, "--help") == (0, help_text, "")


def test_help_imports_nothing_heavy():
    program = f"""import sys
from importlib import import_module
for name in {list(cli.COMMANDS)}:
    import_module(f"gdpo_tune.{{name}}").build_parser().format_help()
print({{"torch", "optuna", "pydantic", "rich", "ray", "numpy"}} & sys.modules.keys())"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), f"name a command: {', '.join(cli.COMMANDS)}"),
        (("swep",), "unknown value 'swep': did you mean 'sweep'? choose from"),
        (("--print-completion", "fish"), "unknown value 'fish': choose from bash"),
        (("sweep", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_wrong_arguments_end_with_status_2(words, message, run_command):
    status, _, errors = run_command(*words)
    assert status == 2
    assert message in errors


def test_bash_completes(tmp_path, run_command):
    script = tmp_path / "completion.bash"
    script.write_text(run_command("--print-completion", "bash")[1])
    for line, completions in {
        "sch": ["schedule"],
        "comp": ["compare"],
        "init --gp": ["--gpus"],
        "sweep --dry": ["--dry-run"],
        "sweep search_spaces/tools.y": ["search_spaces/tools.yaml"],
        "schedule sweeps st": ["status", "stop"],
    }.items():
        command = ["bash", "-c", COMPLETE, "bash", str(script), "gdpo-tune", *line.split()]
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


LONG = r"""
import signal, sys
from gdpo_tune import cli
def work(_):
    cli.outlive_readers()
    print("begun", flush=True)
    sys.stdin.readline()  # the reader has gone
    print("lost", flush=True)
    print("lost, too", file=sys.stderr)
    open(sys.argv[1], "w").write("done")
    return 130
cli.run_command(work, [])
"""


def test_long_work_goes_on_when_its_reader_ends(tmp_path):
    """log4rs#31: Ctrl-C reaches `tee` as well, which ends before a sweep has said how to resume."""
    done = tmp_path / "done"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", LONG, str(done)], **pipes) as process:
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait() == 130
    assert done.read_text() == "done"


SPELL = r"""
from gdpo_tune import cli
cli.run_command(lambda _: print('\u25cf 7 \u00b1 1 \u25be \u4e2d') or 0, [])
"""


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [("ascii", "* 7 +- 1 v ?"), ("latin-1", "* 7 ± 1 v ?"), ("utf-8", "● 7 ± 1 ▾ 中")],
)
def test_marks_are_spelled_out_where_the_output_lacks_them(encoding, printed):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", SPELL], capture_output=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, printed.encode(encoding))


def test_a_command_works_where_its_output_is_closed(tmp_path):
    file, python = tmp_path / "code.yaml", shlex.quote(sys.executable)
    command = f"{python} -m gdpo_tune.init {file} --task code --yes >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 0
    assert file.exists()


def test_a_console_ends_as_other_output_does_if_nobody_reads(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        build_console().print("words")
