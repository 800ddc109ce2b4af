"""Every attack ends as expected, whichever way the tests ask, and leaves nothing behind."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_attacks import attacks

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
LIMITS = Limits(cpu_seconds=0.25, wall_seconds=0.5, memory_bytes=256 << 20)
ATTACKS = attacks()
# The expected value is unlike anything that an attack returns or finds lying about.
BY_VALUE = {"calls": (Call("f", (1,), 17.25), Call("f", (2,), 34.5))}
BY_CHECKER = {"asserts": ("assert f(1) == 17.25 and f(2) > f(1)", "assert not f(2) != 34.5")}
HONEST = Job("def f(x): return 17.25 * x", **BY_VALUE)


@pytest.fixture(scope="module")
def sandbox():
    os.environ["SANDBOX_TEST_SECRET"] = "hunter2"
    with CodeSandbox() as sandbox:
        yield sandbox
    del os.environ["SANDBOX_TEST_SECRET"]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_pass(sandbox, name):
    code, statuses = ATTACKS[name]
    victim, planted = Path("/tmp/sandbox-victim"), Path("/tmp/sandbox-was-here")
    victim.touch()
    attack, honest = sandbox.run_batch([Job(code, **BY_VALUE, limits=LIMITS), HONEST])
    assert attack.status in statuses, attack
    assert honest.status == "passed"
    assert victim.exists()
    assert not planted.exists()
    victim.unlink()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_pass_free_form_tests(sandbox, name):
    code, _ = ATTACKS[name]
    attack, honest = sandbox.run_batch([Job(code, **BY_CHECKER, limits=LIMITS), HONEST])
    assert attack.status != "passed"
    assert "passed" not in attack.verdicts
    assert honest.status == "passed"


def test_a_dead_candidate_does_not_pass_a_test_that_catches_everything(sandbox):
    tests = ("try:\n    f(1)\n    assert False\nexcept BaseException:\n    pass",)
    [gone] = sandbox.run_batch([Job("import os\ndef f(x): os._exit(0)", asserts=tests)])
    assert gone.status == "crash"


@pytest.mark.parametrize("call", [None, "calls"])
def test_no_status_of_an_attack_is_blamed_on_the_sandbox(sandbox, call):
    # A candidate that could fake a failure of the sandbox could stop the training.
    codes = ["import os\nos._exit(code)".replace("code", str(code)) for code in range(0, 256, 5)]
    tests = BY_VALUE if call else BY_CHECKER
    results = sandbox.run_batch([Job(code, **tests, limits=LIMITS) for code in codes])
    assert {result.status for result in results} == {"crash"}


PROBE = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from sandbox_attacks import attacks
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
limits = Limits(cpu_seconds=0.25, wall_seconds=0.5, memory_bytes=256 << 20)
tests = (Call("f", (1,), 17.25), Call("f", (2,), 34.5))
names = [n for n in attacks() if n not in {slow!r}]
with CodeSandbox() as sandbox:
    print(sandbox.info.tier, *sandbox.info.layers)
    jobs = [Job(attacks()[n][0], tests, limits=limits) for n in names]
    for name, result in zip(names, sandbox.run_batch(jobs)):
        if result.status not in attacks()[name][1]:
            print("UNEXPECTED", name, result)
    [honest] = sandbox.run_batch([Job("def f(x): return 17.25 * x", tests)])
    print("honest", honest.status)
"""
SLOW = {n for n, (_, statuses) in ATTACKS.items() if "timeout" in statuses or "memory" in statuses}


def run_probe(python=sys.executable, **options):
    code = PROBE.format(tests=str(Path(__file__).parent), root=str(ROOT), slow=SLOW)
    done = subprocess.run(
        [python, "-B", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1:] == ["honest passed"], done.stdout
    return lines[0].split()


def refuse_in_this_process(**rules):
    """Refuse system calls to this process and its children, as a container's profile does."""
    from gdpo_tune.sandbox.inside import bpf, linux
    from gdpo_tune.sandbox.inside.syscalls import MACHINES

    machine = MACHINES[os.uname().machine]
    numbers = {machine.numbers[name]: rule for name, rule in rules.items()}
    linux.forbid_new_privileges()
    linux.Filter(bpf.assemble(machine.audit, machine.first_foreign, numbers, bpf.ALLOW)).load()


def refuse_unshare():
    from gdpo_tune.sandbox.inside import bpf

    refuse_in_this_process(unshare=bpf.refuse(errno.EPERM))


def test_without_namespaces_the_rest_holds():
    tier, *layers = run_probe(preexec_fn=refuse_unshare)
    assert "namespaces" not in layers
    assert "seccomp" in layers
    assert tier in ("seccomp", "seccomp+landlock")


def test_an_ordinary_user_is_as_safe():
    user = 12345
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user: the other tests are this test")
    python = next((p for p in ("/usr/bin/python3", sys.executable) if is_readable(p, user)), None)
    if python is None or not is_readable(str(ROOT / "gdpo_tune/sandbox/launch.py"), user):
        pytest.skip("no Python, or no checkout, that an ordinary user can read")
    _, *layers = run_probe(python, user=user, group=user, extra_groups=[], env={})
    assert "nobody" not in layers
    assert "seccomp" in layers


def is_readable(path, user):
    if shutil.which(path) is None and not Path(path).exists():
        return False
    probe = "import sys; sys.exit(sys.version_info < (3, 11))"
    command = [path, "-c", probe] if "python" in Path(path).name else ["cat", path]
    try:
        done = subprocess.run(command, user=user, capture_output=True, check=False)
    except PermissionError:
        return False
    return done.returncode == 0


START = "from gdpo_tune.sandbox import CodeSandbox\nCodeSandbox()"


def refuse_seccomp():
    from gdpo_tune.sandbox.inside import bpf
    from gdpo_tune.sandbox.inside.syscalls import MACHINES

    machine = MACHINES[os.uname().machine]
    machine.numbers["prctl"] = {"x86_64": 157, "aarch64": 167}[os.uname().machine]
    rule = bpf.WhenOneOf(0, (22,), yes=bpf.refuse(errno.EINVAL), no=bpf.ALLOW)
    refuse_in_this_process(prctl=rule)


def test_without_seccomp_nothing_runs():
    done = subprocess.run(
        [sys.executable, "-c", START],
        preexec_fn=refuse_seccomp, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "SandboxUnavailable: seccomp: the kernel or the container refuses" in done.stderr


@pytest.mark.parametrize(
    ("pretend", "step"),
    [
        ("import sys; sys.platform = 'darwin'", "platform: "),
        ("import sys; sys.executable = '/nowhere/python'", "start: "),
        ("import sys; sys.executable = '/bin/false'", "start: "),
    ],
)
def test_elsewhere_nothing_runs(pretend, step):
    done = subprocess.run(
        [sys.executable, "-c", f"{pretend}\n{START}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"SandboxUnavailable: {step}" in done.stderr


def test_an_unknown_processor_is_refused(monkeypatch):
    from gdpo_tune.sandbox.inside import enclosure

    monkeypatch.setattr(enclosure, "MACHINES", {})
    with pytest.raises(enclosure.StepFailed, match="seccomp: no system call table for"):
        enclosure._build_filter()
