"""Candidates on a service: judged here, whatever a candidate sends back."""

from dataclasses import replace

import pytest

from gdpo_tune.sandbox import Call, Job, Limits, Stream
from gdpo_tune.sandbox.external import ExternalSandbox
from tests.sandbox.service_double import GOOD, run_one_job

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_long_pauses")]

# Long enough for a slow or busy machine to start Python, short enough to wait for.
SHORT = Limits(wall_seconds=3.0)
PATIENT = Limits(wall_seconds=60.0)
ENDING_BY_THE_CLOCK = (
    "loops",
    "sleeps",
    "floods",
    "flooded",
    "returns_more_than_allowed",
    "returns_more_than_the_service_reads",
)


# Honest programs --------------------------------------------------------------------------

RIGHT = {
    "plain": ("def f(x): return x + 1", "assert f(1) == 2"),
    "prints": ("def f(x):\n    print('noise')\n    return x", "assert f(1) == 1"),
    "float": ("def f(x): return sum([0.1] * x)", "assert f(3) == 0.3"),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(x): return P(x).x",
        "assert f(3) == 3",
    ),
    "text": ("def f(s): return s[::-1]", "assert f('ä€\\n\\0😀') == '😀\\0\\n€ä'"),
    "surrogate": ("def f(): return chr(0xd800)", "assert f() == '\\ud800'"),
    "long_value": ("def f(n): return 'x' * n", f"assert f(100000) == '{'x' * 100000}'"),
    "seeded": (
        "import random\ndef f(): return random.random()",
        "assert f() == 0.8444218515250481",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(shared, name):
    code, test = RIGHT[name]
    once = name in ("seeded", "long_value")
    result = run_one_job(shared, Job(code, asserts=(test,) if once else (test, test)))
    assert (result.status, set(result.verdicts)) == ("passed", {"passed"}), result


WRONG = {
    "value": ("def f(x): return x", "failed"),
    "exits_hard": ("import os\ndef f(x): os._exit(0)", "crash"),
    "loops": ("def f(x):\n    while True: pass", "timeout"),
    "memory": ("def f(x): return [0] * 10**10", "memory"),
    "killed": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)", "memory"),
    "prints": ("def f(x): print('x' * 10**7)", "output"),
    "returns_more_than_allowed": ("def f(x): return 'x' * 120000", "output"),
    "returns_more_than_the_service_reads": ("def f(x): return 'x' * 10**6", "output"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_get_their_reason(shared, name):
    code, status = WRONG[name]
    limits = SHORT if name in ENDING_BY_THE_CLOCK else PATIENT
    if name == "returns_more_than_allowed":
        limits = replace(limits, output_bytes=100_000)
    result = run_one_job(shared, Job(code, (Call("f", (1,), 2), Call("f", (2,), 3)), limits=limits))
    assert result.status == status, result
    assert "passed" not in result.verdicts
    assert len(result.verdicts) == 2


def test_a_job_goes_on_after_a_test_that_failed_and_stops_after_the_last_answer(shared):
    code = "import os\ndef f(x):\n    if x == 3: os._exit(0)\n    return x if x < 2 else 0"
    calls = tuple(Call("f", (x,), x) for x in range(6))
    result = run_one_job(shared, Job(code, calls))
    verdicts = ("passed", "passed", "failed", "error", "not_run", "not_run")
    assert (result.status, result.verdicts) == ("crash", verdicts)


# Programs on their standard streams -------------------------------------------------------

STREAMS = {
    "right": ("print(int(input()) * 2)", ("passed", "passed"), "passed"),
    "descriptor": ("import os\nos.write(1, b'%d' % (int(os.read(0, 9)) * 2))",
                   ("passed", "passed"), "passed"),
    "thread": ("import threading\n"
               "threading.Thread(target=lambda: print(int(input()) * 2)).start()",
               ("passed", "passed"), "passed"),
    "at_exit": ("import atexit\natexit.register(lambda: print(int(input()) * 2))",
                ("passed", "passed"), "passed"),
    "wrong": ("print(2)", ("passed", "failed"), "failed"),
    "raises": ("print(2)\nprint(2 // (int(input()) - 1))", ("error", "failed"), "error"),
    "return_code": ("print(int(input()) * 2)\nraise SystemExit(1)", ("error", "error"), "error"),
    "loops": ("while True: pass", ("error", "not_run"), "timeout"),
    "floods": ("print('x' * 10**7)", ("error", "not_run"), "output"),
    "not_text": ("import os\nos.write(1, b'2\\xff')", ("failed", "failed"), "failed"),
    "aborts": ("import os\nos.abort()", ("error", "not_run"), "crash"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_streams(shared, name):
    code, verdicts, status = STREAMS[name]
    streams = (Stream("1\n", "2"), Stream("2\n", "4\n"))
    limits = SHORT if name in ENDING_BY_THE_CLOCK else PATIENT
    result = run_one_job(shared, Job(code, streams=streams, limits=limits))
    assert (result.verdicts, result.status) == (verdicts, status), result


def test_numbers_of_a_stream_may_be_off_by_their_tolerance(shared):
    job = Job("print(0.3333)", streams=(Stream("", "0.33333", 1e-3), Stream("", "0.33333")))
    assert run_one_job(shared, job).verdicts == ("passed", "failed")


# Attacks ----------------------------------------------------------------------------------

# Finds the channel and the nonce, as a candidate can that knows this repository.
FIND = """
import gc, os, sys
channel = next(o for o in gc.get_objects() if type(o).__name__ == "_Channel")
nonce = channel._prefix
def forge(*frames):
    for frame in frames: os.write(channel._stream.fileno(), nonce + frame + b"\\n")
"""
ATTACKS = {
    "exit_in_the_call": "import os\ndef f(x): os._exit(0)",
    "forged_values": FIND + "forge(b'[\"value\",0]', b'[\"value\",0]')\nos._exit(0)",
    "forged_verdicts": FIND + 'forge(b\'["test","passed"]\', b\'["passed"]\')\nos._exit(0)',
    "forged_extra": FIND + "def f(x):\n    forge(*[b'[\"value\",0]'] * 50)\n    return 0",
    "forged_tags": FIND + 'forge(b\'["value",{"expected":0}]\')\nos._exit(0)',
    "forged_depth": FIND + "forge(b'[' * 100000)\nos._exit(0)",
    "forged_number": FIND + "forge(b'[\"value\",' + b'9' * 100000 + b']')\nos._exit(0)",
    "forged_no_text": FIND + "forge(b'\\xff\\xfe')\nos._exit(0)",
    "forged_begin": FIND + "forge(b'[\"begin\"]', b'[\"end\"]', b'[\"output\"]')\nos._exit(0)",
    "forged_two_keys": FIND + 'forge(b\'["value",{"int":"2","set":[]}]\')\nos._exit(0)',
    "flooded": FIND + "os.write(channel._stream.fileno(), b'x' * 10**6)\ndef f(x): return 0",
    "channel_closed": FIND + "channel._stream.close()\ndef f(x): return 0",
    "reads_the_job": (
        "import sys\nsource = open(sys.argv[0]).read()\n"
        "def f(x): return next((n + 1 for n in (1234566, 7654320) if str(n + 1) in source), 0)"
    ),
    "scans_memory": (
        "import gc\ndef f(x):\n    found = [o for o in gc.get_objects() if type(o) is list"
        " and 1234566 + 1 in o[:50]]\n    return found[0] if found else 0"
    ),
    "patched_encoder": (
        "import sys, json\nsys.modules['sandbox_inside.protocol'].encode = lambda *a, **k: True\n"
        "json.dumps = lambda *a, **k: '[\"value\",true]'\ndef f(x): return 0"
    ),
    "printed_sign": "print('begin')\nprint('[\"value\",1234567]'.replace('7', '8'))\ndef f(x): 0",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_do_not_pass(shared, name):
    calls = (Call("f", (1,), 1234567), Call("f", (2,), 7654321))
    limits = SHORT if name in ENDING_BY_THE_CLOCK else PATIENT
    result = run_one_job(shared, Job(ATTACKS[name], calls, limits=limits))
    assert result.status != "passed", result
    assert "passed" not in result.verdicts
    assert run_one_job(shared, GOOD).passed


def test_what_replaces_undecodable_output_is_no_fault_of_the_service(shared):
    code = FIND + "os.write(channel._stream.fileno(), b'\\xff' * 9)\ndef f(x): return 2"
    assert run_one_job(shared, Job(code, (Call("f", (1,), 2),))).status == "violation"


def test_expected_values_never_leave(double):
    secrets = (918273645, "a-secret-string", {"deep": [564738291]})
    jobs = [
        Job("def f(x): return x", tuple(Call("f", (1,), secret) for secret in secrets)),
        Job("def f(x): return x", asserts=("assert f(2) == 192837465", "assert 'hidden' == f(3)")),
        Job("print(input())", streams=(Stream("4", "the printed secret"), Stream("5", "5"))),
    ]
    with ExternalSandbox(double.url) as sandbox:
        results = sandbox.run_batch(jobs)
    assert [r.status for r in results] == ["failed"] * 3
    sent = b"".join(double.bodies)
    assert b"print(input())" in sent
    for part in (b"918273645", b"a-secret", b"564738291", b"192837465", b"hidden", b"printed sec"):
        assert part not in sent
    assert b"assert f" not in sent


def test_tests_that_need_a_checker_are_refused_before_anything_is_sent(double):
    with ExternalSandbox(double.url) as sandbox:
        before = len(double.bodies)
        with pytest.raises(ValueError, match=r"assert f\(literals\) == literal.*local sandbox"):
            sandbox.run_batch([GOOD, Job("", asserts=("assert sorted(f(1)) == [1]",))])
        with pytest.raises(TypeError):
            sandbox.run_batch([Job("", (Call("f", (object(),), 1),))])
        with pytest.raises(TypeError):
            sandbox.run_batch([Job("", (Call("f", (1,), object()),))])
        assert len(double.bodies) == before
