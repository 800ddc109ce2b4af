"""Ways to a service, many jobs on their way at once, and how all of that ends."""

import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time

import pytest

from gdpo_tune.core.errors import SandboxInfraError, SandboxUnavailable
from gdpo_tune.sandbox import Call, Job, external
from gdpo_tune.sandbox.external import ExternalSandbox
from tests.sandbox.service_double import (
    GOOD,
    build_answer,
    hang,
    run_and_hang_up,
    run_one_job,
    serve_double,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_long_pauses")]


# Ways to the service ----------------------------------------------------------------------


def test_credentials_are_sent_and_never_shown(double):
    url = double.url.replace("http://", "http://me:s%40crets@") + "/run_code?token=geheim"
    with ExternalSandbox(url, 1) as sandbox:
        assert sandbox.info.tier == "external"
        assert sandbox.info.layers == (double.url,)
        double.faults.extend([build_answer({}, 500)] * 3)
        with pytest.raises(SandboxInfraError) as caught:
            sandbox.run_batch([GOOD])
    assert double.headers[0]["Authorization"] == "Basic bWU6c0BjcmV0cw=="
    assert double.paths[0] == "/run_code?token=geheim"
    for secret in ("crets", "geheim"):
        assert secret not in str(caught.value) + repr(sandbox.info)


def test_a_proxy_of_the_environment_is_used_except_for_this_machine(double, monkeypatch):
    monkeypatch.setenv("http_proxy", double.url.replace("http://", "http://u:p@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ExternalSandbox("http://sandbox.invalid:81") as sandbox:
        assert sandbox.info.layers == ("http://sandbox.invalid:81",)
    assert double.paths == ["http://sandbox.invalid:81/run_code"]
    assert double.headers[0]["Host"] == "sandbox.invalid:81"
    assert double.headers[0]["Proxy-Authorization"] == "Basic dTpw"
    with serve_double() as other, ExternalSandbox(other.url):
        assert other.paths == ["/run_code"]


def test_tls_is_checked(tmp_path, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key}"
    options += f" -out {certificate} -addext subjectAltName=DNS:localhost"
    subprocess.run(["openssl", *options.split()], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve_double(context) as double:
        with pytest.raises(SandboxUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            ExternalSandbox(double.url)
        assert double.bodies == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with ExternalSandbox(double.url) as sandbox:
            assert run_one_job(sandbox, GOOD).passed


def test_a_connection_is_kept_and_replaced_when_it_has_been_closed(double, monkeypatch):
    monkeypatch.setattr(external, "_ATTEMPTS", 1)
    with ExternalSandbox(double.url, 1) as sandbox:
        for _ in range(3):
            assert run_one_job(sandbox, GOOD).passed
        assert len(double.connections) == 1
        double.faults.append(run_and_hang_up)
        assert run_one_job(sandbox, GOOD).passed
        wait_until(lambda: double.closed)
        assert run_one_job(sandbox, GOOD).passed
        assert len(double.connections) == 2


# Many jobs and one end --------------------------------------------------------------------


def test_results_come_in_the_order_of_the_jobs_whichever_is_done_first(double):
    gate = threading.Event()

    def wait(handler):
        gate.wait()
        handler.answer({}, 500)

    def open_gate(handler):
        gate.set()
        handler.answer({}, 500)

    with ExternalSandbox(double.url, 2) as sandbox:
        jobs = [Job(f"def f(x): return x + {n}", (Call("f", (1,), 2),)) for n in range(9)]
        double.faults.extend([wait, *[None] * 6, open_gate])
        results = sandbox.run_batch(jobs)
    assert [r.status for r in results] == ["failed", "passed", *["failed"] * 7]


def test_a_refused_job_ends_a_batch_whose_first_job_hangs(double, monkeypatch):
    monkeypatch.setattr(external, "_GRACE_SECONDS", 120.0)
    with ExternalSandbox(double.url, 2) as sandbox:
        double.faults.extend([hang, build_answer({}, 422)])
        start = time.monotonic()
        with pytest.raises(SandboxUnavailable, match="HTTP 422"):
            sandbox.run_batch([GOOD] * 2)
        assert time.monotonic() - start < 60


def test_closing_ends_what_is_under_way_and_can_be_repeated(double):
    sandbox = ExternalSandbox(double.url, 2)
    double.faults.extend([hang] * 2)
    errors = []

    def run():
        try:
            sandbox.run_batch([GOOD] * 5)
        except SandboxInfraError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: not double.faults)
    sandbox.close()
    sandbox.close()
    thread.join()
    assert len(errors) == 1
    assert not sandbox._thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        sandbox.run_batch([GOOD])


def test_an_empty_batch_has_no_results(shared):
    assert shared.run_batch([]) == []


def test_an_interrupt_ends_a_program_whose_service_hangs(double):
    double.faults.extend([None, hang, hang])
    # Who started the tests in the background of a shell has them ignore interrupts.
    program = f"""
import signal
from gdpo_tune.sandbox import Call, Job, external
from gdpo_tune.sandbox.external import ExternalSandbox
signal.signal(signal.SIGINT, signal.default_int_handler)
with ExternalSandbox({double.url!r}, 2) as sandbox:
    sandbox.run_batch([Job("", (Call("f", (), 1),))] * 5)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(double.bodies) == 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        # Less than the service would be waited for.
        _, errors = process.communicate(timeout=25)
    assert "KeyboardInterrupt" in errors
