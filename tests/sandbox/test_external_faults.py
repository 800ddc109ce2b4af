"""Services that fail, refuse, or are none: retried, raised, and never a candidate's fault."""

import json
import socket

import pytest

from gdpo_tune.core.errors import SandboxInfraError, SandboxUnavailable
from gdpo_tune.sandbox import Job, Limits, external
from gdpo_tune.sandbox.external import ExternalSandbox
from tests.sandbox.service_double import (
    GOOD,
    build_answer,
    build_response,
    build_run_answer,
    hang,
    hang_up,
    run_one_job,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_long_pauses")]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(external, "_ATTEMPTS", 2)
    monkeypatch.setattr(external, "_GRACE_SECONDS", 0.3)


def hang_up_in_the_middle(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"status": "Succ')
    handler.close_connection = True


FAULTS = {
    "error": (build_answer({"detail": "oops"}, 500), "HTTP 500"),
    "busy": (build_answer({}, 429), "HTTP 429"),
    "hangs_up": (hang_up, "disconnected without sending a response"),
    "hangs_up_in_the_middle": (hang_up_in_the_middle, "received 16 bytes, expected 1000"),
    "no_json": (build_answer(b'{"status": '), "not JSON"),
    "deep_json": (build_answer(b"[" * 10**5), "not JSON"),
    "huge_html": (build_answer(b"x" * (10 << 20), kind="text/html"), "more than"),
    "list": (build_answer([]), "another form"),
    "null_result": (build_answer(build_response("Success", None)), "failed: Success"),
    "sandbox_error": (
        build_answer(build_response("SandboxError", None, "no disk")),
        "failed: no disk",
    ),
    "run_error": (
        build_answer(build_run_answer(status="Error", stderr="exception")),
        "failed: exception",
    ),
    "wrong_types": (build_answer(build_run_answer(stdout=[1])), "another form"),
    "endless_return_code": (
        build_answer(json.dumps(build_run_answer(code=7)).replace("7", "1e400").encode()),
        "another form",
    ),
    "wrong_nonce": (
        build_answer(build_run_answer('0000 ["begin"]\n0000 ["value",2]\n')),
        "not started",
    ),
    "old_python": (
        build_answer(build_run_answer(code=1, stderr="a\nSyntaxError: x\n")),
        "SyntaxError: x",
    ),
    "slow_start": (
        build_answer(build_run_answer(status="TimeLimitExceeded")),
        "not started: timed out",
    ),
    "no_content": (build_answer(b"", 204), "instead of 200"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_retried_and_then_raised(double, name):
    fault, reason = FAULTS[name]
    with ExternalSandbox(double.url, 1) as sandbox:
        before = len(double.bodies)
        double.faults.extend([fault, fault])
        assert run_one_job(sandbox, GOOD).passed
        double.faults.extend([fault] * 9)
        with pytest.raises(SandboxInfraError, match="no verdict in 3 attempts") as caught:
            sandbox.run_batch([GOOD])
        assert reason in str(caught.value)
        assert double.url in str(caught.value)
        assert len(double.bodies) - before == 6
        double.faults.clear()
        assert run_one_job(sandbox, GOOD).passed


def test_a_service_that_hangs_is_a_fault(double, impatient):
    with ExternalSandbox(double.url, 1) as sandbox:
        double.faults.extend([hang] * 2)
        with pytest.raises(SandboxInfraError, match="2 attempts: no response in time"):
            sandbox.run_batch([Job(GOOD.code, GOOD.calls, limits=Limits(wall_seconds=0.1))])


def trickle(*lines):
    """Answer one line after the other, and never the last."""

    def fault(handler):
        handler.wfile.write(b"HTTP/1.1 " + lines[0])
        while not handler.server.released.wait(0.02):
            handler.wfile.write(b"".join(lines[1:]))

    return fault


@pytest.mark.parametrize(
    "lines",
    [
        (b"200 OK\r\nX: ", b"x"),
        (b"100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"200 OK\r\nContent-Length: 9999\r\n\r\n", b"x"),
        (b"200 OK\r\nConnection: close\r\n\r\n", b"x"),
    ],
    ids=["header", "continue", "body", "body_to_the_end"],
)
def test_an_answer_that_never_ends_is_a_fault_in_time(double, impatient, lines):
    limits = Limits(wall_seconds=0.1)
    with ExternalSandbox(double.url, 1) as sandbox:
        double.faults.extend([trickle(*lines)] * 2)
        with pytest.raises(SandboxInfraError, match="2 attempts: no response in time"):
            sandbox.run_batch([Job(GOOD.code, GOOD.calls, limits=limits)])
        assert run_one_job(sandbox, GOOD).passed


def test_a_handshake_that_never_ends_is_a_fault_in_time(impatient, monkeypatch):
    monkeypatch.setattr(external, "_CHECK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"https://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(SandboxUnavailable, match="2 attempts: no response in time"):
            ExternalSandbox(url, 1)


def test_an_output_that_has_no_end_is_the_programs_and_not_the_services_fault(double):
    with ExternalSandbox(double.url, 1) as sandbox:
        double.faults.append(build_answer(build_run_answer("x" * (20 << 20))))
        assert run_one_job(sandbox, GOOD).status == "output"
        assert run_one_job(sandbox, GOOD).passed


def test_retry_after_is_respected(double, monkeypatch):
    with ExternalSandbox(double.url, 1) as sandbox:
        pauses = []

        async def note_pause(seconds):
            pauses.append(seconds)

        monkeypatch.setattr(external, "sleep", note_pause)
        double.faults.append(build_answer({}, 429, [("Retry-After", "7")]))
        double.faults.append(
            build_answer({}, 503, [("Retry-After", "Wed, 21 Oct 2015 07:28:00 GMT")])
        )
        assert run_one_job(sandbox, GOOD).passed
        double.faults.append(build_answer({}, 429, [("Retry-After", "86400")]))
        double.faults.append(build_answer({}, 429, [("Retry-After", "soon")]))
        assert run_one_job(sandbox, GOOD).passed
    assert (pauses[0], pauses[2]) == (7, 60)
    assert pauses[1] < 1
    assert pauses[3] < 1


REFUSALS = {
    "bad_request": (
        build_answer({"detail": "no  field " + "x" * 999}, 422),
        "422.*no field x+\\.\\.\\.",
    ),
    "forbidden": (build_answer(b"who are you?", 401), "401 Unauthorized: who are you\\?"),
    "redirect": (build_answer(b"", 307, [("Location", "http://elsewhere/")]), "redirects are not"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_final(double, name):
    fault, reason = REFUSALS[name]
    with ExternalSandbox(double.url, 1) as sandbox:
        before = len(double.bodies)
        double.faults.append(fault)
        with pytest.raises(SandboxUnavailable, match=reason):
            sandbox.run_batch([GOOD])
        assert len(double.bodies) == before + 1
        assert run_one_job(sandbox, GOOD).passed


# Before any work --------------------------------------------------------------------------


def test_a_dead_port_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(SandboxUnavailable, match=f"127.0.0.1:{port}: .*ConnectionRefused"):
            ExternalSandbox(f"http://127.0.0.1:{port}")


def test_a_wrong_path_is_refused(double):
    # The double knows `/run_code` under any path, as behind a gateway, and nothing else.
    double.faults.append(build_answer({"detail": "Not Found"}, 404))
    with pytest.raises(SandboxUnavailable, match=r"404 Not Found.*Not Found"):
        ExternalSandbox(double.url + "/elsewhere")
    assert double.paths == ["/elsewhere/run_code"]


def test_a_service_that_does_not_run_what_it_is_sent_is_refused(double):
    def repeat(handler):
        code = json.loads(double.bodies[-1])["code"]
        nonce = code.partition("run_remotely(\n'[\"")[2][:32]
        handler.answer(build_run_answer(f'{nonce} ["begin"]\n{nonce} ["value",4]\n'))

    double.faults.append(repeat)
    with pytest.raises(SandboxUnavailable, match="came back as failed"):
        ExternalSandbox(double.url)


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_what_is_no_address_is_refused_without_being_shown(url):
    with pytest.raises(SandboxUnavailable, match="url: the service's address"):
        ExternalSandbox(url)


def test_no_worker_can_do_nothing():
    with pytest.raises(ValueError, match="must be positive"):
        ExternalSandbox("http://127.0.0.1:1", 0)
