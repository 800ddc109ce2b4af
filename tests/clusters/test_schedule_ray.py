"""Jobs of a Ray cluster, by a fake client and a dashboard that knows its version."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

import gdpo_tune
from gdpo_tune import sweep
from gdpo_tune.clusters.backends import ray_jobs, submit
from gdpo_tune.clusters.backends.base import build_backend
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.core.errors import BackendError, BackendUnreachableError, UsageError
from tests.support.render import RAY
from tests.support.schedule import load_scheduled_sweep
from tests.support.schedulers import RUN, build_job
from tests.support.tuning import SPACE

TOKEN = ", token_env: RAY_TOKEN"


@pytest.fixture
def scheduled(tmp_path, head):
    return load_scheduled_sweep(tmp_path, RAY)


@pytest.fixture
def backend(scheduled, client):
    return build_backend(scheduled)


def test_what_is_submitted(tmp_path, client, scheduled, backend):
    backend.submit(build_job(scheduled))
    (submitted,) = client.submitted
    assert submitted["submission_id"] == f"{RUN}-a1"
    storage = json.dumps(str(tmp_path / "shared"))
    assert submitted["entrypoint"] == (
        f"python -m gdpo_tune.sweep search_spaces/code.yaml --name {RUN} --set 'storage={storage}'"
    )
    environment = submitted["runtime_env"]
    assert environment["working_dir"] == str(tmp_path)
    assert "/shared" in environment["excludes"]
    assert environment["py_modules"] == [str(Path(gdpo_tune.__file__).parent)]
    assert client.headers == {"Authorization": "Bearer letmein"}


def test_the_space_is_named_as_it_is_found_in_what_is_sent(tmp_path, head, client):
    text = RAY.replace(TOKEN, f"{TOKEN}, working_dir: search_spaces")
    scheduled = load_scheduled_sweep(tmp_path, text)
    build_backend(scheduled).submit(build_job(scheduled))
    assert "gdpo_tune.sweep code.yaml --name" in client.submitted[0]["entrypoint"]


@pytest.mark.parametrize(
    ("method", "text", "error"),
    [
        # RFC 9110, 15.6.3 to 15.6.5: a gateway has no answer, so the job may have been submitted
        *(
            ("submit_job", f"status code {n}: <html>.", BackendUnreachableError)
            for n in (502, 503, 504)
        ),
        # RFC 9110, 15.5.5: only the status 404 says that there is no such job
        ("get_job_info", "status code 500: job nightly-20260404T020000Z-a1.", BackendError),
    ],
)
def test_an_answer_of_a_proxy_is_no_refusal(client, scheduled, backend, method, text, error):
    def fail(*_, **__):
        raise RuntimeError(f"Request failed with {text}")

    setattr(client, method, fail)
    job = JobHandle(backend="ray-job", id="x")
    with pytest.raises(error, match=text[:15]):
        backend.submit(build_job(scheduled)) if method == "submit_job" else backend.poll(job)


def test_a_call_that_hangs_is_given_up(client, backend, monkeypatch):
    monkeypatch.setattr(ray_jobs, "CALL_SECONDS", 0.1)
    client.get_job_info = lambda _: time.sleep(5)
    with pytest.raises(BackendUnreachableError, match="no answer within"):
        backend.poll(JobHandle(backend="ray-job", id="x"))


HIDDEN = "the token has characters that cannot be sent"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RAY_HEAD", None, "= RAY_HEAD, and that variable is not set"),
        ("RAY_TOKEN", None, "= RAY_TOKEN, and that variable is not set"),
        *(("RAY_HEAD", each, "write http://HOST:8265") for each in ("head:8265", "http://")),
        ("RAY_HEAD", "ray://head:10001", "write http://HOST:8265"),
        ("RAY_HEAD", "http://me:secret@127.0.0.1:9", "it has a user or a password"),
        ("RAY_HEAD", "http://127.0.0.1:9/?token=secret", "it has something behind . or #"),
        ("RAY_HEAD", "http://127.0.0.1:9#secret", "it has something behind . or #"),
        ("RAY_TOKEN", "sec\nret", HIDDEN),
        ("RAY_TOKEN", "secret\u20ac", HIDDEN),
    ],
)
def test_an_address_or_a_token_that_cannot_be_used(scheduled, monkeypatch, name, value, message):
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=message) as caught:
        build_backend(scheduled)
    assert "sec" not in str(caught.value).replace("such as", "")


def test_a_token_is_asked_for_and_checked(tmp_path, head, scheduled, monkeypatch):
    head.token = "another"
    with pytest.raises(BackendError, match=r"does not take the token \(403\)"):
        build_backend(scheduled).check()
    head.token = "letmein"
    build_backend(scheduled).check()
    without = load_scheduled_sweep(tmp_path, RAY.replace(TOKEN, ""))
    with pytest.raises(BackendError, match=r"asks for a token \(401\)\n.*token_env"):
        build_backend(without).check()
    (tmp_path / "token").write_text("letmein\n")  # one that Ray finds by itself
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    build_backend(without).check()


def test_an_address_that_does_not_answer(scheduled, monkeypatch):
    monkeypatch.setenv("RAY_HEAD", "http://127.0.0.1:9")
    with pytest.raises(BackendUnreachableError, match=r"127.0.0.1:9 does not answer \(.*refused"):
        build_backend(scheduled).check()


@pytest.mark.parametrize(
    "says",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    ],
)
def test_an_address_of_something_else(scheduled, monkeypatch, says):
    def answer(server):
        with server.accept()[0] as connection:
            connection.recv(9999)
            connection.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_HEAD", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=answer, args=[server])
        thread.start()
        with pytest.raises(BackendError, match="is not the dashboard of a Ray cluster"):
            build_backend(scheduled).check()
        thread.join()


# `--submit`: a sweep as a job, and what `--address` means


@pytest.fixture
def project(head, tmp_path, monkeypatch):
    """Begin in the directory of a project, with a dashboard that asks for no token."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "code.yaml").write_text(SPACE.read_text())
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def send(project, head, client):
    """Return a function that sends the sweep of the project, and leaves the job alone."""
    return lambda *options: sweep.main(["code.yaml", "--submit", head.url, "--detach", *options])


def job_of(client):
    (name,) = client.jobs
    return name


def test_a_sweep_is_sent_with_its_directory_and_the_package(send, project, head, client, capsys):
    options = ["--set", "search.trials=3", "--set", "tracking.uri=http://mlflow:5000", "--fresh"]
    assert send(*options) == 0
    (sent,) = client.submitted
    storage = json.dumps(str(project / "runs"))
    assert sent["entrypoint"] == (
        "python -m gdpo_tune.sweep code.yaml --name code --fresh --set search.trials=3 "
        f"--set tracking.uri=http://mlflow:5000 --set 'storage={storage}'"
    )
    assert sent["submission_id"].startswith("code-2")
    assert sent["metadata"] == {"gdpo_tune_sweep": f"{project}/runs/code"}
    assert sent["runtime_env"] == {
        "working_dir": str(project),
        "excludes": [*ray_jobs.NEVER_SENT, "/runs"],
        "env_vars": {"PYTHONUNBUFFERED": "1"},
        "py_modules": [str(Path(gdpo_tune.__file__).parent)],
    }
    printed = capsys.readouterr()
    assert f"kept in {project}/runs/code, as the nodes of the cluster see it" in printed.out
    assert f"ray job stop --address {head.url} {job_of(client)}" in printed.out
    assert printed.err == ""


def test_a_tracking_file_that_ray_would_delete_is_warned_of(send, capsys):
    send()
    warning = "sqlite:///mlflow.db of the search space lies in the job's own"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:secret@mlflow:5000",
        "postgresql://me:sec/ret@db/mlflow",
        "postgresql://me@db/mlflow?password=secret",
    ],
)
def test_no_password_is_sent(send, client, uri):
    with pytest.raises(UsageError) as caught:
        send("--set", f"tracking.uri={uri}")
    assert "sec" not in str(caught.value).replace("tracking", "")
    assert client.submitted == []


@pytest.mark.parametrize("option", ["--address", "--submit"])
def test_an_address_that_is_empty_starts_no_sweep_here(project, option, monkeypatch):
    monkeypatch.setattr(sweep, "print_environment", lambda *_, **__: pytest.fail("it runs here"))
    with pytest.raises(UsageError, match=r"address|--address"):
        sweep.main(["code.yaml", f"{option}="])


def test_the_same_command_finds_its_job_again_while_it_runs(send, project, client, capsys):
    assert [send(), send()] == [0, 0]
    assert f"code is active already, as job {job_of(client)}" in capsys.readouterr().out
    client.end_job(job_of(client), "FAILED", 1)
    assert submit.find_active_job(client, f"{project}/runs/code") is None
    assert submit.find_active_job(client, f"{project}/runs/another") is None


def test_a_log_is_printed_once_although_the_connection_breaks(
    project, head, client, monkeypatch, capsys
):
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    client.logs = [["one\n", "two\n", ""], ["one\ntwo\nth", ""], ["one\ntwo\nthree\n"]]
    tail = client.tail_job_logs

    async def last(name):
        if len(client.logs) == 1:
            client.end_job(name, "SUCCEEDED", 0)
        async for part in tail(name):
            yield part

    client.tail_job_logs = last
    assert sweep.main(["code.yaml", "--submit", head.url]) == 0
    assert capsys.readouterr().out.endswith("one\ntwo\nthree\n")


@pytest.mark.parametrize(
    ("status", "code", "exit_status"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", None, 1), ("STOPPED", None, 1)],
)
def test_the_exit_status_is_that_of_the_job(head, client, status, code, exit_status, capsys):
    client.submit_job(submission_id="x")
    client.end_job("x", status, code)
    client.logs = [["hello\n"]]
    assert submit.follow_job(submit.build_jobs_api(head.url), "x") == exit_status
    ended = capsys.readouterr().err
    assert ended.startswith("the job ended: ") is (status != "SUCCEEDED")


def test_a_cluster_that_was_restarted_does_not_know_the_job(head, client, capsys):
    client.logs = [[]]
    assert submit.follow_job(submit.build_jobs_api(head.url), "gone") == 1
    assert "the cluster no longer knows the job" in capsys.readouterr().err


def test_a_cluster_that_stops_answering_is_given_up_after_a_while(monkeypatch, capsys):
    polls = []

    def hang(*_):
        polls.append(time.monotonic())
        time.sleep(0.2)
        raise BackendUnreachableError("no answer")

    monkeypatch.setattr(ray_jobs.JobsApi, "ask", hang)
    monkeypatch.setattr(submit, "OUTAGE_SECONDS", 1.0)
    monkeypatch.setattr(submit, "RETRY_SECONDS", 0.05)
    with pytest.raises(BackendUnreachableError):
        submit.follow_job(submit.build_jobs_api("http://127.0.0.1:9"), "x")
    assert polls[-1] - polls[0] < 1.0  # patience counts the time of hanging calls too
    assert 1 < len(polls) <= 5
    assert capsys.readouterr().err.count("waiting for the cluster") == 1


def test_ctrl_c_leaves_the_job_alone(project, head, client, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(["code.yaml", "--submit", head.url])
    assert "The job keeps running: run the same command to follow it" in capsys.readouterr().err
    assert client.jobs[job_of(client)].status == "RUNNING"


def test_a_cluster_that_asks_for_a_token(send, head, monkeypatch, tmp_path):
    head.token = "letmein"
    with pytest.raises(BackendError, match=r"asks for a token \(401\)\n.*RAY_AUTH_TOKEN_PATH"):
        send()
    (tmp_path / "token").write_text("letmein")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert send() == 0


def test_a_directory_that_is_not_sent(send, project, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(BackendError, match="holds far more than a project"):
        send()
    (tmp_path / "empty").mkdir()
    unfit = r"^--submit: the search space code.yaml is not in .*empty"
    with pytest.raises(BackendError, match=unfit):
        send("--working-dir", str(tmp_path / "empty"))
    with pytest.raises(BackendError, match="is not a directory"):
        ray_jobs.build_runtime_env(tmp_path / "no", "s3://x", "x")
    with pytest.raises(BackendError, match="is not in"):
        send("--working-dir", str(tmp_path / "no"))


def test_a_checkout_contains_the_package():
    root = Path(gdpo_tune.__file__).parents[1]
    assert "py_modules" not in ray_jobs.build_runtime_env(root, "s3://bucket", "x")


def test_storage_that_is_the_sent_directory_is_not_excluded(tmp_path):
    assert ray_jobs.list_excludes(str(tmp_path), tmp_path) == ray_jobs.NEVER_SENT
    assert ray_jobs.list_excludes("s3://bucket/runs", tmp_path) == ray_jobs.NEVER_SENT


def test_rays_client_gets_the_address_that_was_given(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    seen, module = [], pytest.importorskip("ray.job_submission")

    def client(address, headers):
        seen.append((address, os.environ.get("RAY_ADDRESS")))
        return "client"

    monkeypatch.setattr(module, "JobSubmissionClient", client)
    assert submit.build_jobs_api("http://head:8265/").build_client() == "client"
    assert seen == [("http://head:8265", None)]
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"


@pytest.mark.parametrize("option", ["--detach", "--working-dir=x"])
def test_options_of_submit_alone_are_refused(option):
    with pytest.raises(UsageError, match=r"requires --submit"):
        sweep.main(["code.yaml", option])


def test_an_address_becomes_that_of_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # `auto` is one that is given already
    for given, used in (("auto", "auto"), ("head:6379", "head:6379"), ("auto", "head:6379")):
        sweep.parse_arguments(["code.yaml", "--address", given])
        assert os.environ["RAY_ADDRESS"] == used
    with pytest.raises(UsageError, match="--address = ray://head:10001"):
        sweep.parse_arguments(["code.yaml", "--address", "ray://head:10001"])
    with pytest.raises(SystemExit):
        sweep.parse_arguments(["code.yaml", "--address", "auto", "--submit", "http://head:8265"])
