"""Input that commands refuse with exit status 2 and one message, before any work."""

import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from gdpo_tune import report, sweep
from gdpo_tune.core.errors import (
    IdentityError,
    LedgerHeldError,
    PolicyError,
    TrackingError,
    UsageError,
)
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "code.yaml"
NO_HOSTS = (
    *("https://sweeps.example", "*", "*.example", "a/b", "", "a b", "a:65536", "a:0", "[:::]"),
    "[::g]",
)
NO_PATHS = ("https://x.example/code", "/code?token=1", "/code#top")
COMMAND_LINES = [
    ("train", ""),
    ("train x.yaml --from x:1", ""),
    ("train x.yaml --pick knee", ""),
    ("train x.yaml --steps 0", ""),
    ("train x.yaml --seed -1", ""),
    ("train x.yaml --seed 4294967296", ""),
    ("merge runs/code", ""),
    ("merge runs/code --weights 1=0.5,2=0.5 --toward length>=0.6", ""),
    ("score x.yaml", ""),
    ("score x.yaml --reference --completions x", ""),
    ("score x.yaml --reference --policy embedded", ""),
    ("score x.yaml --reference -n 0", ""),
    ("score x.yaml --reference -n many", "invalid number value: 'many'"),
    ("steer runs/code dance", "dance"),
    ("sweep x.yaml --fres", "--fres"),  # options are not abbreviated
    ("schedule sweeps run nightly --at 2026-01-01T02:00:00", "has no zone: write"),
    ("schedule sweeps run nightly --at tonight", "is not a time"),
    ("schedule sweeps run nightly --at 9999-12-31T23:00:00-12:00", "is not a time"),
    ("schedule sweeps run nightly --at 0001-01-01T00:00:00Z", "is not a time"),
    ("schedule sweeps run nightly --at 2026-01-01T02:00Z --now", "not allowed with"),
    ("schedule sweeps serve --every 0", "write 0.1 to 86400 seconds"),
    ("schedule sweeps next --count 0", "must be between 1 and 1000"),
    ("schedule sweeps tik", "unknown value 'tik': did you mean 'tick'?"),
    ("schedule sweeps", "required: COMMAND"),
    *((f"watch x --port {port}", "--port") for port in ("0", "65536", "x")),
    *((f"watch x --allow-host={shlex.quote(text)}", f"argument --allow-host: {text!r} is not the "
       "name of a host; write the name") for text in NO_HOSTS),
    *((f"watch x --root-path={text}", f"argument --root-path: {text!r} is not a path; write what "
       "stands between") for text in NO_PATHS),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), COMMAND_LINES)
def test_wrong_arguments_end_with_usage_and_a_line(words, message, capsys):
    name, *arguments = shlex.split(words)
    with pytest.raises(SystemExit) as caught:
        import_module(f"gdpo_tune.{name}").main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "usage:" in errors
    assert message in errors.splitlines()[-1]


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """A function that runs a sweep in an empty directory and returns its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*overrides, error, options=()):
        words = [word for override in overrides for word in ("--set", override)]
        with pytest.raises(error) as caught:
            sweep.main([str(SPACE), *words, *options])
        assert caught.value.exit_status == 2
        return str(caught.value)

    return run


@pytest.mark.integration
@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("policy=./absent", PolicyError, "absent"),
        ("tracking={uri: 'http://127.0.0.1:9', required: true}", TrackingError, "127.0.0.1:9"),
    ],
)
def test_what_does_not_answer_or_is_not_there(refuse, tmp_path, override, error, message):
    assert message in refuse(override, error=error)
    assert not (tmp_path / "runs").exists()


@pytest.mark.integration
@pytest.mark.parametrize("policy", ["embeded", "./absent", "~nouser/x", "a" * 5000])
def test_a_dry_run_of_a_misspelt_policy(refuse, policy):
    """It names the file, and a policy of a similar name."""
    message = refuse(f"policy={policy}", error=UsageError, options=["--dry-run"])
    assert str(SPACE) in message or "--set policy" in message
    assert ("Did you mean 'embedded'?" in message) == (policy == "embeded")


HOLD = """
import sys
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
with Ledger.open(load_spec(sys.argv[1])):
    print('held', flush=True)
    sys.stdin.read()
"""


@pytest.mark.integration
def test_a_ledger_that_another_process_holds(refuse, tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLD, str(SPACE)]
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        message = refuse(error=LedgerHeldError)
        holder.stdin.close()
    assert str(holder.pid) in message
    assert holder.returncode == 0


@pytest.mark.integration
def test_another_sweep_under_the_same_name(refuse):
    Ledger.open(load_spec(SPACE)).close()
    message = refuse("training.length_limit=20", error=IdentityError)
    assert "training.length_limit = 26, not 20" in message
    assert "--name" in message


def test_a_report_of_a_sweep_that_was_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no sweep"):
        report.main([str(SPACE)])


@pytest.mark.integration
def test_the_exit_status_and_the_message_reach_a_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gdpo_tune.sweep", str(SPACE), "--set", "task=cod"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "did you mean" in done.stderr.lower()
    assert "Traceback" not in done.stderr
