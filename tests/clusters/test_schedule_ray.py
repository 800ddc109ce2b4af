"""Jobs of a Ray cluster, by a fake client and a dashboard that knows its version."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

import gdpo_tune
from gdpo_tune.clusters.backends import ray_jobs
from gdpo_tune.clusters.backends.base import ScheduledJob, build_backend
from gdpo_tune.clusters.backends.ray_jobs import JobsApi, RayJobs
from gdpo_tune.clusters.load_schedules import ScheduledSweep, list_overrides
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.jobs import Client, hide_tokens, serve_dashboard
from tests.support.schedule import load_scheduled_sweep

TEXT = """space: search_spaces/code.yaml
backend: {kind: ray-job, address_env: RAY_HEAD, token_env: RAY_TOKEN}
storage: shared
"""


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    hide_tokens(monkeypatch, tmp_path / "home")
    with serve_dashboard() as server:
        monkeypatch.setenv("RAY_HEAD", server.url)
        monkeypatch.setenv("RAY_TOKEN", "letmein")
        yield server


@pytest.fixture
def client() -> Client:
    return Client()


class FakeApi(JobsApi):
    """Calls of a fake client."""

    def build_client(self) -> Client:
        self.fake.headers = self.build_headers()
        return self.fake


def backend_with(client: Client, sweep) -> RayJobs:
    made = build_backend(sweep)
    api = FakeApi(made.api.address, made.api.token, made.api.caller, made.api.token_fix)
    object.__setattr__(api, "fake", client)
    return replace(made, api=api)


@pytest.fixture
def sweep(tmp_path: Path, head: HTTPServer) -> ScheduledSweep:
    return load_scheduled_sweep(tmp_path, TEXT)


@pytest.fixture
def backend(client: Client, sweep: ScheduledSweep) -> RayJobs:
    return backend_with(client, sweep)


def job_for(sweep) -> ScheduledJob:
    words = [w for o in list_overrides(sweep.settings, sweep.root) for w in ("--set", o)]
    arguments = (sweep.settings.space, "--name", "nightly-1", *words)
    return ScheduledJob("nightly-1-a1", "nightly-1", arguments, sweep.root)


def test_a_job_is_submitted_once(tmp_path, client, sweep, backend):
    for _ in range(2):
        assert backend.submit(job_for(sweep)) == JobHandle(backend="ray-job", id="nightly-1-a1")
    (submitted,) = client.submitted
    assert submitted["submission_id"] == "nightly-1-a1"
    storage = json.dumps(str(tmp_path / "shared"))
    assert submitted["entrypoint"] == (
        "python -m gdpo_tune.sweep search_spaces/code.yaml --name nightly-1 "
        f"--set 'storage={storage}'"
    )
    environment = submitted["runtime_env"]
    assert environment["working_dir"] == str(tmp_path)
    assert "/shared" in environment["excludes"]
    assert environment["py_modules"] == [str(Path(gdpo_tune.__file__).parent)]
    assert client.headers == {"Authorization": "Bearer letmein"}


def test_the_space_is_named_as_it_is_found_in_what_is_sent(tmp_path, head, client):
    sweep = load_scheduled_sweep(
        tmp_path, TEXT.replace("RAY_TOKEN", "RAY_TOKEN, working_dir: search_spaces")
    )
    backend_with(client, sweep).submit(job_for(sweep))
    assert "gdpo_tune.sweep code.yaml --name" in client.submitted[0]["entrypoint"]


@pytest.mark.parametrize(
    ("status", "code", "running", "seen", "reason"),
    [
        ("PENDING", None, True, None, ""),
        ("RUNNING", None, True, None, ""),
        ("SUCCEEDED", 0, False, 0, ""),
        ("FAILED", 2, False, 2, "failed: Job entrypoint command failed with exit code 2"),
        ("FAILED", None, False, None, "failed: Job entrypoint command failed with exit code"),
        ("STOPPED", None, False, None, "stopped:"),
    ],
)
def test_the_state_of_a_job(client, sweep, backend, status, code, running, seen, reason):
    known = backend.submit(job_for(sweep))
    message = f"Job entrypoint command\n failed with exit code {code}"
    job = SimpleNamespace(status=status, driver_exit_code=code, message=message)
    client.jobs[known.id] = job
    state = backend.poll(known)
    assert (state.running, state.exit_status) == (running, seen)
    assert state.reason.startswith(reason)


def test_a_job_that_the_cluster_does_not_know_any_more(backend):
    state = backend.poll(JobHandle(backend="ray-job", id="gone"))
    assert not state.running
    assert state.exit_status is None
    assert "no longer knows the job" in state.reason


def test_a_state_that_is_not_understood_is_no_end(client, sweep, backend):
    """ray.job_submission.JobStatus: three of its five states are terminal; any other is new."""
    known = backend.submit(job_for(sweep))
    client.jobs[known.id].status = "HIBERNATING"
    status = backend.poll(known)
    assert status.running
    assert "is unknown ('HIBERNATING'); if it has ended, run: ray job delete" in status.reason


@pytest.mark.parametrize("status", [502, 503, 504])
def test_an_answer_of_a_proxy_is_no_refusal(client, sweep, backend, monkeypatch, status):
    """RFC 9110, 15.6.3 to 15.6.5: a gateway has no answer, so the job may have been submitted."""
    text = f"Request failed with status code {status}: <html>."

    def fail(**_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(client, "submit_job", fail)
    with pytest.raises(BackendUnreachableError, match=f"status code {status}"):
        backend.submit(job_for(sweep))


def test_digits_in_another_error_are_not_taken_for_its_status(client, sweep, backend, monkeypatch):
    """RFC 9110, 15.5.5: only the status 404 says that there is no such job."""
    known = backend.submit(job_for(sweep))

    def fail(name: str) -> None:
        raise RuntimeError("Request failed with status code 500: job nightly-20260404T020000Z-a1.")

    monkeypatch.setattr(client, "get_job_info", fail)
    with pytest.raises(BackendError, match="status code 500"):
        backend.poll(known)


def test_a_job_is_stopped(sweep, backend):
    known = backend.submit(job_for(sweep))
    backend.stop(known, 0.0)
    assert not backend.poll(known).running


def test_a_job_that_the_cluster_refuses(client, sweep, backend):

    def refuse(**_: object) -> None:
        raise ValueError("Package size (600MiB) exceeds the maximum size of 512MiB")

    client.submit_job = refuse
    with pytest.raises(BackendError, match="exceeds the maximum size"):
        backend.submit(job_for(sweep))


def test_a_call_that_hangs_is_given_up(client, backend, monkeypatch):
    monkeypatch.setattr(ray_jobs, "CALL_SECONDS", 0.1)
    client.get_job_info = lambda _: time.sleep(5)
    with pytest.raises(BackendUnreachableError, match="no answer within"):
        backend.poll(JobHandle(backend="ray-job", id="x"))


@pytest.mark.parametrize("name", ["RAY_HEAD", "RAY_TOKEN"])
def test_a_variable_that_is_not_set(tmp_path, head, monkeypatch, name):
    monkeypatch.delenv(name)
    with pytest.raises(BackendError, match=f"= {name}, and that variable is not set"):
        build_backend(load_scheduled_sweep(tmp_path, TEXT))


def test_an_address_without_a_token(tmp_path, head):
    head.token = "another"
    text = TEXT.replace(", token_env: RAY_TOKEN", "")
    with pytest.raises(BackendError, match=r"asks for a token \(401\)\n.*token_env"):
        build_backend(load_scheduled_sweep(tmp_path, text)).check()
    with pytest.raises(BackendError, match=r"does not take the token \(403\)"):
        build_backend(load_scheduled_sweep(tmp_path, TEXT)).check()
    head.token = "letmein"
    build_backend(load_scheduled_sweep(tmp_path, TEXT)).check()


def test_a_token_that_ray_finds_by_itself_is_sent_too(tmp_path, head, monkeypatch):
    head.token = "of the file"
    (tmp_path / "token").write_text("of the file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    build_backend(
        load_scheduled_sweep(tmp_path, TEXT.replace(", token_env: RAY_TOKEN", ""))
    ).check()


def test_an_address_that_does_not_answer(tmp_path, head, monkeypatch):
    monkeypatch.setenv("RAY_HEAD", "http://127.0.0.1:9")
    backend = build_backend(load_scheduled_sweep(tmp_path, TEXT))
    with pytest.raises(BackendUnreachableError, match=r"127.0.0.1:9 does not answer \(.*refused"):
        backend.check()


@pytest.mark.parametrize("address", ["head:8265", "ray://head:10001", "http://"])
def test_an_address_that_is_not_valid(tmp_path, head, monkeypatch, address):
    monkeypatch.setenv("RAY_HEAD", address)
    with pytest.raises(BackendError, match="write http://HOST:8265"):
        build_backend(load_scheduled_sweep(tmp_path, TEXT))


def test_an_address_of_something_else(tmp_path, head):
    head.says = b"<html>"
    with pytest.raises(BackendError, match="is not the dashboard of a Ray cluster"):
        build_backend(load_scheduled_sweep(tmp_path, TEXT)).check()


@pytest.mark.parametrize(
    "says", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"]
)
def test_an_address_of_another_protocol(tmp_path, head, monkeypatch, says):
    def answer(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(9999)
            connection.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_HEAD", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        with pytest.raises(BackendError, match="is not the dashboard of a Ray cluster"):
            build_backend(load_scheduled_sweep(tmp_path, TEXT)).check()
        thread.join()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RAY_HEAD", "http://me:secret@127.0.0.1:9", "it has a user or a password"),
        ("RAY_HEAD", "http://127.0.0.1:9/?token=secret", "it has something behind . or #"),
        ("RAY_HEAD", "http://127.0.0.1:9#secret", "it has something behind . or #"),
        ("RAY_TOKEN", "sec\nret", "the token has characters that cannot be sent"),
        ("RAY_TOKEN", "secret\u20ac", "the token has characters that cannot be sent"),
    ],
)
def test_secrets_that_cannot_be_sent_are_not_shown(
    tmp_path, head, monkeypatch, name, value, message
):
    monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=message) as caught:
        build_backend(load_scheduled_sweep(tmp_path, TEXT))
    assert "sec" not in str(caught.value).replace("such as", "")
