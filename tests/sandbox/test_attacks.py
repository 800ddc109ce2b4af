"""Every attack ends as expected, by calls and by free-form tests, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from gdpo_tune.sandbox import CodeSandbox, Job, Stream
from tests.support.paths import ROOT
from tests.support.sandbox_attacks import (
    CALLS,
    HONEST,
    LIMITS,
    PATIENT,
    TESTS,
    load_attacks,
    sample_attacks,
)

pytestmark = pytest.mark.integration

ATTACK = "tests.support.sandbox_attacks"
ATTACKS = load_attacks()
CATEGORIES = sorted({name.partition("/")[0] for name in ATTACKS})
SAMPLE = sample_attacks()
# Environment -> arguments of the script. The default tests run three attacks of each category.
CONTAINER = ("refuse_namespaces",)
ENVIRONMENTS = {
    "sample": ("sample",),
    "here": (),
    "user": (),
    "container": CONTAINER,
    "container_without_landlock": (*CONTAINER, "refuse_landlock"),
}
USER = 12345
SECRET = {"SANDBOX_TEST_SECRET": "hunter2"}
NOT_COPIED = ("__pycache__", "site-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3")
MARKS = {"sample": (), "here": pytest.mark.system}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in ENVIRONMENTS],
)
def environment(request):
    return request.param


@pytest.fixture(scope="module")
def report(environment):
    """Outcomes of the attacks in this environment; one run for all tests."""
    if environment == "user":
        if os.getuid() != 0:
            pytest.skip("this is an ordinary user already: the environment `here` is this one")
        return run_as_user()
    return run_script([sys.executable, "-B", "-m", ATTACK, *ENVIRONMENTS[environment]], ROOT)


def run_script(command, package, **options):
    variables = {**os.environ, **SECRET, "PYTHONPATH": str(package)}
    options = {"env": variables | options.pop("env", {}), "timeout": 1200, **options}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run_as_user():
    """Run as an ordinary user, for whom this checkout and this Python may be unreadable."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        copied = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(ROOT / "gdpo_tune", directory / "gdpo_tune", ignore=copied)
        for part in ("support", "sandbox/attacks"):
            shutil.copytree(ROOT / "tests" / part, directory / "tests" / part, ignore=copied)
        python, variables = readable_python(directory)
        options = {"user": USER, "group": USER, "extra_groups": [], "cwd": directory}
        return run_script([python, "-B", "-m", ATTACK], directory, env=variables, **options)


def readable_python(directory):
    """This Python if the user can start it, else a copy of its installation."""
    if can_start(sys.executable, {}):
        return sys.executable, {}
    copy = directory / "python"
    library = Path(sysconfig.get_path("stdlib"))
    copied = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(library, copy / "lib" / library.name, ignore=copied)
    (copy / "bin").mkdir()
    python = shutil.copy(os.path.realpath(sys.executable), copy / "bin")
    shared = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY"))
    if shared.suffix != ".a" and shared.exists():
        shutil.copy(shared, copy / "lib")
        soname = sysconfig.get_config_var("INSTSONAME")
        if not (copy / "lib" / soname).exists():
            shutil.copy(shared, copy / "lib" / soname)
    variables = {"PYTHONHOME": str(copy), "LD_LIBRARY_PATH": str(copy / "lib")}
    if not can_start(python, variables):
        pytest.skip(f"another user cannot start {sys.executable}, nor a copy of it in {directory}")
    return python, variables


def can_start(python, variables):
    probe = "import ctypes, json, socket"
    options = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/", "env": variables}
    with suppress(PermissionError):
        return not subprocess.run(
            [python, "-c", probe], stderr=-1, check=False, **options
        ).returncode
    return False


@pytest.mark.parametrize("category", CATEGORIES)
def test_attacks_end_as_expected(report, category):
    surprises = {}
    for name in report["outcomes"]:
        if name.startswith(f"{category}/"):
            by_calls, honest, by_tests, again = report["outcomes"][name]
            if (
                by_calls[0] not in ATTACKS[name].by_calls
                or by_tests[0] not in ATTACKS[name].by_tests
                or "passed" in (*by_calls[1], *by_tests[1])
                or (honest[0], again[0]) != ("passed", "passed")
            ):
                surprises[name] = report["outcomes"][name]
    assert surprises == {}


def test_attacks_leave_nothing_behind(report, environment):
    assert report["harmed"] == []
    assert report["visitors"] == 0
    assert report["outcomes"].keys() == (SAMPLE if environment == "sample" else ATTACKS).keys()


def test_attacks_ran_under_the_layers_of_their_environment(environment, report):
    tier, layers = report["tier"], report["layers"]
    assert "seccomp" in layers
    if environment == "user":
        assert "nobody" not in layers
    if environment == "container":
        assert tier in ("seccomp", "seccomp+landlock")
    if environment == "container_without_landlock":
        assert tier == "seccomp"


def test_there_are_attacks_of_every_category():
    assert len(ATTACKS) >= 300
    assert len(CATEGORIES) == 17
    assert len(SAMPLE) == 3 * 17


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox(workers=2) as sandbox:
        yield sandbox


@pytest.mark.system
def test_no_attack_passes_as_a_program_on_streams(sandbox):
    codes = [attack.code + "\nprint(f(int(input())))" for attack in ATTACKS.values()]
    streams = (Stream("1", "17.25"), Stream("2", "34.5"))
    honest = Job(HONEST + "\nprint(f(int(input())))", streams=streams, limits=PATIENT)
    jobs = [Job(code, streams=streams, limits=LIMITS) for code in codes]
    results = sandbox.run_batch([job for attack in jobs for job in (attack, honest)])
    passed = [name for name, result in zip(ATTACKS, results[::2], strict=True) if result.passed]
    assert passed == []
    assert {result.status for result in results[1::2]} == {"passed"}


def test_a_dead_candidate_does_not_pass_a_test_that_catches_everything(run):
    test = "try:\n    f(1)\n    assert False\nexcept BaseException:\n    pass"
    assert run("import os\ndef f(x): os._exit(0)", test).status == "crash"


@pytest.mark.parametrize("tests", [{"calls": CALLS}, {"asserts": TESTS}])
def test_no_status_of_an_attack_is_blamed_on_the_sandbox(sandbox, tests):
    # A candidate that could fake a failure of the sandbox could stop the training.
    codes = [f"import os\nos._exit({status})" for status in range(0, 256, 5)]
    results = sandbox.run_batch([Job(code, **tests, limits=PATIENT) for code in codes])
    assert {result.status for result in results} == {"crash"}


RESTRICT = "from tests.support import sandbox_containers; sandbox_containers."
START = "from gdpo_tune.sandbox import CodeSandbox\nCodeSandbox()"


@pytest.mark.parametrize(
    ("pretend", "step"),
    [
        (f"{RESTRICT}refuse_seccomp()", "seccomp: the kernel or the container refuses"),
        (f"{RESTRICT}refuse_files_in_memory()", "memfd: Permission denied; code runs only"),
        ("import sys; sys.platform = 'darwin'", "platform: "),
        ("import sys; sys.executable = '/nowhere/python'", "start: "),
        ("import sys; sys.executable = '/bin/false'", "start: "),
    ],
)
def test_nothing_runs_where_isolation_is_impossible(pretend, step):
    command = [sys.executable, "-c", f"{pretend}\n{START}"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"SandboxUnavailable: {step}" in done.stderr


def test_an_unknown_processor_is_refused(monkeypatch):
    from gdpo_tune.sandbox.guest import lockdown

    monkeypatch.setattr(lockdown, "MACHINES", {})
    with pytest.raises(lockdown.LockdownError, match="seccomp: no system call table for"):
        lockdown._build_filter()
