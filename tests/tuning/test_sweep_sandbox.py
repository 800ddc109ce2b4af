"""Settings of `sandbox:` in a sweep, and input that the command refuses before any work."""

import errno
import os
import subprocess
import sys

import pytest

from gdpo_tune import cli, sweep
from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.tasks.code import CodeTask
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.system]

SPACE = ROOT / "search_spaces" / "code.yaml"
ON_A_MAC = """
import os, types
from gdpo_tune import cli, sweep
from gdpo_tune.sandbox import local_sandbox
local_sandbox.sys = types.SimpleNamespace(platform="darwin")
del os.sched_getaffinity
cli.run_command(sweep.main)
"""


def refuse_seccomp():
    """Refuse seccomp filters to this process and its children, as some containers do."""
    from gdpo_tune.sandbox.guest import lockdown, seccomp
    from gdpo_tune.sandbox.guest.seccomp import MACHINES

    machine = MACHINES[os.uname().machine]
    prctl = {"x86_64": 157, "aarch64": 167}[os.uname().machine]
    rule = seccomp.ArgumentRule(
        0, seccomp.JUMP_EQUAL, (22,), yes=seccomp.fail_with(errno.EINVAL), no=seccomp.ALLOW
    )
    lockdown.forbid_new_privileges()
    rules = seccomp.assemble(machine.audit, machine.first_foreign, {prctl: rule}, seccomp.ALLOW)
    lockdown.Filter(rules).load()


def run_command(directory, words, *overrides, **options):
    """Run the sweep command."""
    sets = [word for override in overrides for word in ("--set", override)]
    return subprocess.run(
        [sys.executable, *words, str(SPACE), *sets],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def read_refusal(done, directory, warnings=0):
    """Return the error line of a refused sweep, and check that nothing was started.

    Sweeps of other tests on this machine are warned about too.
    """
    assert done.returncode == 2, done.stderr
    *warned, line = done.stderr.splitlines()
    warned = [line for line in warned if "warning: process" not in line and line[:4].strip()]
    assert len(warned) == warnings
    assert all(warning.startswith("warning: sandbox.type") for warning in warned)
    assert line.startswith("error: ")
    assert done.stdout == ""
    assert not list(directory.iterdir())
    return line.removeprefix("error: ")


def test_without_seccomp_no_work_starts(tmp_path):
    done = run_command(tmp_path, ["-m", "gdpo_tune.sweep"], preexec_fn=refuse_seccomp)
    line = read_refusal(done, tmp_path)
    assert line.startswith("seccomp: the kernel or the container refuses to load a filter")
    assert "docs/sandbox.md lists causes" in line


@pytest.mark.parametrize("kind", ["local", "unsafe_no_isolation"])
def test_on_another_system_no_work_starts(tmp_path, kind):
    done = run_command(tmp_path, ["-c", ON_A_MAC], f"sandbox.type={kind}")
    line = read_refusal(done, tmp_path, warnings=kind == "unsafe_no_isolation")
    assert line.startswith("platform: the sandbox needs Linux, this is darwin")
    assert "docs/sandbox.md lists causes" in line


def test_a_module_that_cannot_be_loaded_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise ImportError('no such luck')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = load_spec(SPACE, ["sandbox.modules=[broken_module]"])
    with pytest.raises(SandboxUnavailable, match="modules: broken_module cannot be imported"):
        cli.preflight(spec)


def test_the_command_prints_the_tier_of_the_requirements(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "list_other_sweeps", lambda: iter(()))
    sweep.print_environment(load_spec(SPACE))
    printed = capsys.readouterr()
    assert printed.out.startswith("sandbox: ")
    assert printed.out.count("\n") == 1
    assert printed.err == ""
    sweep.print_environment(load_spec(SPACE, ["sandbox.type=unsafe_no_isolation"]))
    printed = capsys.readouterr()
    assert printed.out == "sandbox: unsafe\n"
    assert printed.err.startswith(
        "warning: sandbox.type = unsafe_no_isolation: code that the policy"
    )


def is_correct(program, **settings):
    """Return whether a program before a correct solution counts as correct."""
    with CodeTask(TrainingSettings(), SandboxSettings(**settings)) as task:
        [problem] = task.problems("test", 1, 0)
        code = f"{program}\n{problem.data['solution']}"
        scores = task.score([problem], [f"<think></think><answer>{code}</answer>"], [20])
    return scores.rewards["correctness"] == [1.0]


SPIN = "import time\nwhile time.process_time() < 0.5: pass"

EFFECTS = {
    "modules": ("import numpy\nassert numpy.arange(3).sum() == 3", {"modules": ("numpy",)}),
    "cpu_seconds": (SPIN, {"cpu_seconds": 1.5, "wall_seconds": 60.0}, {"cpu_seconds": 0.2}),
    "wall_seconds": ("import time\ntime.sleep(1)", {}, {"cpu_seconds": 0.2, "wall_seconds": 0.3}),
    "memory_mb": ("b = bytearray(300 << 20)", {}, {"memory_mb": 128}),
    "type": ("open('/etc/passwd').close()", {"type": "unsafe_no_isolation"}),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_each_setting_has_its_effect(name):
    program, allowing, *refusing = EFFECTS[name]
    assert is_correct(program, **allowing)
    assert not is_correct(program, **(refusing[0] if refusing else {}))


def test_workers_is_the_number_of_workers():
    with CodeTask(TrainingSettings(), SandboxSettings(workers=2)) as task:
        task.environment()
        assert len(task.sandbox._threads) == 2


def test_the_list_of_settings_is_complete():
    named = {*SandboxSettings.model_fields}
    assert named == {*EFFECTS, "workers"}
