"""Input that the sweep command refuses with exit status 2 and one message, before any work."""

import subprocess
import sys

import pytest

from gdpo_tune import sweep
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

pytestmark = pytest.mark.integration


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """A function that runs the command in an empty directory and returns its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*overrides, error, options=()):
        words = [word for override in overrides for word in ("--set", override)]
        with pytest.raises(error) as caught:
            sweep.main([str(SPACE), *words, *options])
        assert caught.value.exit_status == 2
        return str(caught.value)

    return run


def test_a_missing_policy_directory(refuse, tmp_path):
    message = refuse("policy=./absent", error=PolicyError)
    assert "absent" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("policy", ["embeded", "./absent", "~nouser/x", "a" * 5000])
def test_a_dry_run_of_a_misspelt_policy(refuse, policy):
    """It names the file, and a policy of a similar name."""
    message = refuse(f"policy={policy}", error=UsageError, options=["--dry-run"])
    assert str(SPACE) in message or "--set policy" in message
    assert ("Did you mean 'embedded'?" in message) == (policy == "embeded")


def test_a_ledger_that_another_process_holds(refuse, tmp_path):
    program = (
        "import sys\n"
        "from gdpo_tune.ledger import Ledger\n"
        "from gdpo_tune.spec import load_spec\n"
        "with Ledger.open(load_spec(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(SPACE)],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = refuse(error=LedgerHeldError)
        holder.stdin.close()
    assert str(holder.pid) in message
    assert holder.returncode == 0


def test_another_sweep_under_the_same_name(refuse, tmp_path):
    with Ledger.open(load_spec(SPACE)):
        pass
    message = refuse("training.length_limit=20", error=IdentityError)
    assert "training.length_limit = 26, not 20" in message
    assert "--name" in message


def test_a_required_tracking_server_that_does_not_answer(refuse, tmp_path):
    message = refuse("tracking={uri: 'http://127.0.0.1:9', required: true}", error=TrackingError)
    assert "127.0.0.1:9" in message
    assert not (tmp_path / "runs").exists()


def test_a_report_of_a_sweep_that_was_never_run(tmp_path, monkeypatch):
    from gdpo_tune import report

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no sweep"):
        report.main([str(SPACE)])


def test_the_exit_status_and_the_message_reach_a_shell(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gdpo_tune.sweep", str(SPACE), "--set", "task=cod"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SPACE.parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "did you mean" in done.stderr.lower()
    assert "Traceback" not in done.stderr
