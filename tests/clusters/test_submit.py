"""`--submit`: a sweep as a job, by a fake client; and what `--address` means."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path

import pytest

import gdpo_tune
from gdpo_tune import sweep
from gdpo_tune.clusters.backends import ray_jobs, submit
from gdpo_tune.core.errors import BackendError, BackendUnreachableError, UsageError
from tests.support.jobs import Client, hide_tokens, serve_dashboard
from tests.support.paths import ROOT

SPACES = ROOT / "search_spaces"


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    hide_tokens(monkeypatch, tmp_path / "home")
    project = tmp_path / "project"
    project.mkdir()
    (project / "code.yaml").write_text((SPACES / "code.yaml").read_text())
    monkeypatch.chdir(project)
    with serve_dashboard() as server:
        yield server


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(ray_jobs.JobsApi, "build_client", lambda _: made)
    return made


def job_of(client: Client) -> str:
    (name,) = client.jobs
    return name


def test_a_sweep_is_sent_with_its_directory_and_the_package(head, client, capsys):
    options = ["--set", "search.trials=3", "--set", "tracking.uri=http://mlflow:5000", "--fresh"]
    assert sweep.main(["code.yaml", "--submit", head.url, "--detach", *options]) == 0
    (sent,) = client.submitted
    here = Path.cwd()
    storage = json.dumps(str(here / "runs"))
    assert sent["entrypoint"] == (
        "python -m gdpo_tune.sweep code.yaml --name code --fresh --set search.trials=3 "
        f"--set tracking.uri=http://mlflow:5000 --set 'storage={storage}'"
    )
    assert sent["submission_id"].startswith("code-2")
    assert sent["metadata"] == {"gdpo_tune_sweep": f"{here}/runs/code"}
    assert sent["runtime_env"] == {
        "working_dir": str(here),
        "excludes": [*ray_jobs.NEVER_SENT, "/runs"],
        "env_vars": {"PYTHONUNBUFFERED": "1"},
        "py_modules": [str(Path(gdpo_tune.__file__).parent)],
    }
    printed = capsys.readouterr()
    assert f"kept in {here}/runs/code, as the nodes of the cluster see it" in printed.out
    assert f"ray job stop --address {head.url} {job_of(client)}" in printed.out
    assert printed.err == ""


def test_a_tracking_file_that_ray_would_delete_is_warned_of(head, client, capsys):
    sweep.main(["code.yaml", "--submit", head.url, "--detach"])
    assert (
        "sqlite:///mlflow.db of the search space lies in the job's own" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "override",
    [
        "tracking.uri=http://me:secret@mlflow:5000",
        "tracking.uri=postgresql://me:sec/ret@db/mlflow",
        "tracking.uri=postgresql://me@db/mlflow?password=secret",
    ],
)
def test_no_password_is_sent(head, client, override):
    with pytest.raises(UsageError) as caught:
        sweep.main(["code.yaml", "--submit", head.url, "--detach", "--set", override])
    assert "sec" not in str(caught.value).replace("tracking", "")
    assert client.submitted == []


@pytest.mark.parametrize("option", ["--address", "--submit"])
def test_an_address_that_is_empty_starts_no_sweep_here(head, option, monkeypatch):
    monkeypatch.setattr(sweep, "print_environment", lambda *_, **__: pytest.fail("it runs here"))
    with pytest.raises(UsageError, match=r"address|--address"):
        sweep.main(["code.yaml", f"{option}="])


def test_the_same_command_finds_its_job_again_while_it_runs(head, client, capsys):
    for _ in range(2):
        assert sweep.main(["code.yaml", "--submit", head.url, "--detach"]) == 0
    assert f"code is active already, as job {job_of(client)}" in capsys.readouterr().out
    client.end_job(job_of(client), "FAILED", 1)
    assert submit.find_active_job(client, f"{Path.cwd()}/runs/code") is None
    assert submit.find_active_job(client, f"{Path.cwd()}/runs/another") is None


def test_a_log_is_printed_once_although_the_connection_breaks(head, client, monkeypatch, capsys):
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    client.logs = [["one\n", "two\n", ""], ["one\ntwo\nth", ""], ["one\ntwo\nthree\n"]]
    tail = client.tail_job_logs

    async def last(name: str):
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
    polls: list[float] = []

    def hang(*_: object) -> None:
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


def test_ctrl_c_leaves_the_job_alone(head, client, monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(["code.yaml", "--submit", head.url])
    assert "The job keeps running: run the same command to follow it" in capsys.readouterr().err
    assert client.jobs[job_of(client)].status == "RUNNING"


def test_a_cluster_that_asks_for_a_token(head, client, monkeypatch, tmp_path):
    head.token = "letmein"
    asked = pytest.raises(BackendError, match=r"asks for a token \(401\)\n.*RAY_AUTH_TOKEN_PATH")
    with asked:
        sweep.main(["code.yaml", "--submit", head.url, "--detach"])
    (tmp_path / "token").write_text("letmein")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert sweep.main(["code.yaml", "--submit", head.url, "--detach"]) == 0


def test_a_directory_that_is_not_sent(head, client, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    with pytest.raises(BackendError, match="holds far more than a project"):
        sweep.main(["code.yaml", "--submit", head.url, "--detach"])
    (tmp_path / "empty").mkdir()
    elsewhere = ["--working-dir", str(tmp_path / "empty")]
    unfit = r"^--submit: the search space code.yaml is not in .*empty"
    with pytest.raises(BackendError, match=unfit):
        sweep.main(["code.yaml", "--submit", head.url, "--detach", *elsewhere])
    nowhere = ["--working-dir", str(tmp_path / "no")]
    with pytest.raises(BackendError, match="is not a directory"):
        ray_jobs.build_runtime_env(tmp_path / "no", "s3://x", "x")
    with pytest.raises(BackendError, match="is not in"):
        sweep.main(["code.yaml", "--submit", head.url, "--detach", *nowhere])


def test_a_checkout_contains_the_package():
    root = Path(gdpo_tune.__file__).parents[1]
    assert "py_modules" not in ray_jobs.build_runtime_env(root, "s3://bucket", "x")


def test_storage_that_is_the_sent_directory_is_not_excluded(tmp_path):
    assert ray_jobs.list_excludes(str(tmp_path), tmp_path) == ray_jobs.NEVER_SENT
    assert ray_jobs.list_excludes("s3://bucket/runs", tmp_path) == ray_jobs.NEVER_SENT


def test_rays_client_gets_the_address_that_was_given(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    seen = []
    import ray.job_submission

    def client(address: str, headers: dict[str, str]) -> str:
        seen.append((address, os.environ.get("RAY_ADDRESS")))
        return "client"

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", client)
    assert submit.build_jobs_api("http://head:8265/").build_client() == "client"
    assert seen == [("http://head:8265", None)]
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"


@pytest.mark.parametrize("option", ["--detach", "--working-dir=x"])
def test_options_of_submit_alone_are_refused(option: str):
    with pytest.raises(UsageError, match=r"requires --submit"):
        sweep.main(["code.yaml", option])


def test_an_address_becomes_that_of_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sweep.parse_arguments(["code.yaml", "--address", "auto"])
    assert os.environ["RAY_ADDRESS"] == "auto"
    sweep.parse_arguments(["code.yaml", "--address", "head:6379"])
    assert os.environ["RAY_ADDRESS"] == "head:6379"
    sweep.parse_arguments(["code.yaml", "--address", "auto"])
    assert os.environ["RAY_ADDRESS"] == "head:6379"
    with pytest.raises(UsageError, match="--address = ray://head:10001"):
        sweep.parse_arguments(["code.yaml", "--address", "ray://head:10001"])
    with pytest.raises(SystemExit):
        sweep.parse_arguments(["code.yaml", "--address", "auto", "--submit", "http://head:8265"])
