"""Requests to a service and the verdicts on its answers, without a service."""

import ast
import email.utils
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.sandbox import Call, Job, Limits, Stream, external
from gdpo_tune.sandbox.external import (
    STALL_BYTES,
    Execution,
    RemoteJob,
    Service,
    ServiceFault,
    quote,
)

CALLS = (Call("f", (1,), 2), Call("f", (2,), 3))
ADDRESSES = [
    ("http://host", "http://host:80", "/run_code"),
    ("https://host/", "https://host:443", "/run_code"),
    ("http://host:8080/run_code/", "http://host:8080", "/run_code"),
    ("http://host/a/b?key=1", "http://host:80", "/a/b/run_code?key=1"),
    ("http://me:pw@[::1]:8080", "http://[::1]:8080", "/run_code"),
    ("HTTP://HOST.", "http://host.:80", "/run_code"),
]


@pytest.mark.parametrize(("url", "shown", "target"), ADDRESSES)
def test_addresses(url, shown, target):
    assert (Service(url).shown, Service(url)._url) == (shown, shown + target)


@pytest.mark.parametrize(
    "url",
    [
        "me:geheim@host", "http://me:geheim/x@host", "ftp://me:geheim@host",
        "http://me:geheim@", "http://me:geheim@:80", "http://me:geheim@host:99999",
        "http://me:geheim@host:0", "http://me:geheim@host:-1", "http://me:geheim@h\u00f6st",
        "http://me:geheim@host/\u00f6", f"http://me:geheim@{'h' * 64}",
        f"http://me:geheim@{'h.' * 127}h", "http://me:geheim@a..b", "http://me:geheim@.a",
        "http://me:geheim@[::1", "http://me:geheim@[::g]", "http://me:geheim@ho%73t",
        " http://me:geheim@host", "http://me:geheim@host ", "http://me:geheim@ho st",
        "http://me:geheim@host/a b", "http://me:geheim@host/a\r\nX: y", "http://me:geheim@ho\tst",
        "http://me:geheim@host\n", "\x00http://me:geheim@host", "",
    ],
)  # fmt: skip
def test_a_malformed_address_is_refused_and_does_not_show_its_password(url):
    with pytest.raises(SandboxUnavailable, match=r"^url: the service's address") as caught:
        Service(url)
    assert "geheim" not in str(caught.value)


def test_proxies_are_for_other_machines(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("https_proxy", "http://a:b@proxy")
    monkeypatch.setenv("no_proxy", "inner.example")
    assert external._find_proxy("http", "host", 80) == "http://proxy:3128"
    assert external._find_proxy("https", "host", 443) == "http://a:b@proxy"
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "inner.example"):
        assert external._find_proxy("http", host, 8080) is None


@pytest.mark.parametrize("proxy", ["http://me:geheim@proxy:port", "http://[::1", "http://:3128"])
def test_a_malformed_proxy_is_refused_at_once_and_not_shown(proxy, monkeypatch):
    for name in ("HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(SandboxUnavailable) as caught:
        Service("http://host")
    assert str(caught.value) == "url: the environment's proxy is malformed"
    assert Service("http://localhost").shown == "http://localhost:80"


def test_seconds_to_wait():
    soon = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert external._read_seconds("7") == 7
    assert 0 < external._read_seconds(soon) <= 30
    for text in ("", "soon", "-3", "nan", "inf", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert external._read_seconds(text) == 0


def test_quotes_are_short_and_printable():
    assert quote(b"a\n\tb\x00\xffc") == "a b �c"
    assert quote("x" * 300) == "x" * 200 + "..."


def answered(*frames, code=0, timed_out=False, tests=CALLS, limit=1000, after=""):
    job = RemoteJob(Job("", tests, limits=Limits(output_bytes=limit)))
    lines = [f"{job.nonce} {frame}\n" for frame in ('["begin"]', *frames)]
    stdout = "".join(lines) + after.replace("NONCE", job.nonce)
    job.add(None, Execution(timed_out, code, 0.25, stdout, ""))
    return job.conclude()


TWO, THREE = '["value",2]', '["value",3]'
LONG = f'["value","{"x" * STALL_BYTES}"]'
ANSWERS = {
    "right": (answered(TWO, THREE), "passed", ["passed", "passed"]),
    "more_than_asked": (answered(TWO, THREE, TWO, "nonsense"), "passed", ["passed", "passed"]),
    "wrong": (answered(TWO, TWO), "failed", ["passed", "failed"]),
    "raised": (answered('["raise","E","t"]', TWO), "error", ["error", "failed"]),
    "out_of_memory": (answered('["raise","MemoryError",""]', THREE), "memory", ["error", "passed"]),
    "not_loaded": (answered('["load","E","t"]'), "error", ["error", "not_run"]),
    "printed_too_much": (answered(TWO, '["output"]'), "output", ["passed", "error"]),
    "ended": (answered(TWO), "crash", ["passed", "error"]),
    "cut": (answered(TWO, after='NONCE ["val'), "crash", ["passed", "error"]),
    "code_after_all": (answered(TWO, THREE, code=3), "crash", ["passed", "passed"]),
    "abort": (answered(TWO, code=-6), "crash", ["passed", "error"]),
    "abort_in_a_shell": (answered(TWO, code=134), "crash", ["passed", "error"]),
    "killed": (answered(TWO, code=-9), "memory", ["passed", "error"]),
    "killed_in_a_shell": (answered(TWO, code=137), "memory", ["passed", "error"]),
    "killed_after_all": (answered(TWO, THREE, code=-9), "memory", ["passed", "passed"]),
    "clock_of_the_kernel": (answered(TWO, code=-24), "timeout", ["passed", "error"]),
    "time": (answered(TWO, timed_out=True), "timeout", ["passed", "error"]),
    "time_after_all": (answered(TWO, THREE, timed_out=True), "timeout", ["passed", "passed"]),
    "stalled": (answered(LONG, timed_out=True, limit=1 << 20), "output", ["failed", "error"]),
    "too_long": (answered(LONG), "output", ["error", "not_run"]),
    "altogether_too_long": (answered(TWO, THREE, limit=15), "output", ["passed", "error"]),
    "forged": (answered('["test","passed"]'), "violation", ["error", "not_run"]),
    "no_json": (answered("passed"), "violation", ["error", "not_run"]),
    "deep": (answered("[" * 10**5, limit=10**6), "violation", ["error", "not_run"]),
    "long_number": (answered(f'["value",{"9" * 10**5}]', limit=10**6), "violation",
                    ["error", "not_run"]),
    "no_ascii": (answered('["value","ä"]'), "violation", ["error", "not_run"]),
    "lone_surrogate": (answered('["value","\ud800"]'), "violation", ["error", "not_run"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    result, status, verdicts = ANSWERS[name]
    assert (result.status, list(result.verdicts)) == (status, verdicts)
    assert result.cpu_seconds == 0.25


def test_an_answer_without_the_sign_says_nothing():
    job = RemoteJob(Job("", CALLS))
    for stdout in ("", TWO, f'0000 ["begin"]\n{job.nonce} {TWO}\n'):
        with pytest.raises(ServiceFault, match="not started"):
            job.add(None, Execution(False, 0, 0.1, stdout, ""))
    assert job.report.verdicts == []


def test_programs_hold_inputs_and_no_expected_value():
    jobs = [
        Job("code", (Call("f", (1717,), 918273645),), ("assert f(1818) == 192837465",)),
        Job("code", streams=(Stream("1919", "918273645"), Stream("1919", "192837465"))),
    ]
    for job in jobs:
        program = RemoteJob(job).program
        assert ("1717" in program) == (not job.streams)
        assert "918273645" not in program
        assert "192837465" not in program
        assert program.isascii()
        ast.parse(program)


def test_each_job_has_a_nonce_of_its_own():
    nonces = {RemoteJob(Job("", CALLS)).nonce for _ in range(20)}
    assert len(nonces) == 20
    assert all(len(nonce) == 32 for nonce in nonces)


def test_a_program_needs_nothing_of_this_package(tmp_path):
    job = RemoteJob(Job("def f(x):\n    print('noise')\n    return x + 1", CALLS))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", job.program],
        capture_output=True,
        cwd=tmp_path,
        text=True,
    )
    job.add(None, Execution(False, done.returncode, 0.0, done.stdout, done.stderr))
    assert job.conclude().passed


def test_programs_are_text_for_python_3_10():
    for name in external.SENT_MODULES:
        source = Path(external.__file__).with_name("guest") / f"{name}.py"
        ast.parse(source.read_text("utf-8"), feature_version=(3, 10))


def test_no_module_of_linux_alone_is_needed():
    """The package's own start imports the local sandbox; here it is left out."""
    program = f"""
import sys, types
for name in ("fcntl", "resource", "pwd", "grp"): sys.modules[name] = None
import gdpo_tune
package = types.ModuleType("gdpo_tune.sandbox")
package.__path__ = [{str(Path(external.__file__).parent)!r}]
sys.modules["gdpo_tune.sandbox"] = package
import gdpo_tune.sandbox.external
"""
    subprocess.run([sys.executable, "-c", program], check=True)
