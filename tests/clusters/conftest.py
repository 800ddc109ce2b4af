from __future__ import annotations

import pytest

from gdpo_tune.clusters.backends import ray_jobs
from tests.support.jobs import Client, hide_tokens, serve_dashboard


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Serve the dashboard of a Ray cluster; two variables hold its address and a token."""
    hide_tokens(monkeypatch, tmp_path / "home")
    with serve_dashboard() as server:
        monkeypatch.setenv("RAY_HEAD", server.url)
        monkeypatch.setenv("RAY_TOKEN", "letmein")
        yield server


@pytest.fixture
def client(monkeypatch):
    """Return the client of jobs with which every cluster is called."""
    client = Client()

    def build_client(api):
        client.headers = api.build_headers()
        return client

    monkeypatch.setattr(ray_jobs.JobsApi, "build_client", build_client)
    return client
