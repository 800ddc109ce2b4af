"""A real sweep in MLflow in a real browser: its link opens a scatter plot of all trials.

The content of a view is documented nowhere, so this shows that the installed MLflow reads it.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from mlflow import MlflowClient

from gdpo_tune.core.events import SweepFinished, SweepStarted
from gdpo_tune.figures.front_png import write_front_png
from gdpo_tune.figures.report_page import write_report
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from gdpo_tune.tracking.server import create_database
from tests.support.browser import WEBGL, open_browser, wait
from tests.support.figures import add_candidates, make_records, make_spec, write_steps
from tests.support.mlflow_servers import PATIENCE, MlflowServer
from tests.support.paths import ROOT

SENT_WITHIN = 240.0


def send_sweep(directory, uri, trials, *, steps=True):
    """Send a finished sweep with a report; return its spec, its records and its link."""
    spec = make_spec(directory / "runs")
    spec = spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"uri": uri})})
    records = add_candidates(make_records(spec, trials, replicates=4, failed=(4,)))
    for record in records if steps else []:
        if record.is_training:
            write_steps(record)
    sink = MlflowTracker(spec)
    sink(SweepStarted(tuple(records)))
    sink(SweepFinished(tuple(records), interrupted=False))
    write_report(Sweep(spec, records))
    write_front_png(Sweep(spec, records))
    sink.log_figures()
    warning = sink.close(SENT_WITHIN)
    assert warning == "", warning
    return spec, records, sink.get_front_link()


pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]

SHORT = (
    "search.trials=4",
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.replicates={per_point: 1, max_runs: 1}",
    "search.merges.budget=0",
    "search.checkpoints.budget=0",
    "training.steps=4",
    "training.validation_prompts=16",
    "training.test_prompts=16",
    "constraints={}",
)
FIGURES = """
[...document.querySelectorAll('.js-plotly-plot')].map(figure => ({
  type: figure.data[0].type,
  count: (figure.data[0].x || figure.data[0].dimensions[0].values).length,
  colors: [].concat(figure.data[0].marker ? figure.data[0].marker.color : []),
  names: (figure.data[0].text || []),
}))
"""


@pytest.fixture(scope="module")
def page():
    with open_browser(WEBGL) as browser:
        yield browser.new_page(viewport={"width": 1900, "height": 1300})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    create_database(directory / "mlflow.db")
    server = MlflowServer(directory, f"sqlite:///{directory / 'mlflow.db'}")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, server):
    """Run a short sweep of the embedded policy and return what it printed."""
    directory = tmp_path_factory.mktemp("sweep")
    space = ROOT / "search_spaces" / "code.yaml"
    changes = [*SHORT, f"storage={directory}", f"tracking.uri={server.uri}"]
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(space), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_figures(page, address, kind, at_least=1):
    """Open a page and return its figures of a kind, once it has enough of them."""
    page.goto("about:blank")  # else a new fragment would not load the page again
    page.goto(address)

    def find_figures():
        figures = page.evaluate(FIGURES)
        figures = [figure for figure in figures if figure["type"] == kind]
        return figures if len(figures) >= at_least else None

    return wait(find_figures, PATIENCE)


def test_the_link_in_the_console_opens_a_scatter_of_every_trial(page, server, sweep):
    (link,) = re.findall(rf"in MLflow +({server.uri}/#\S+)", sweep)
    scatters = open_figures(page, link, "scatter", at_least=2)
    client = MlflowClient(server.uri)
    runs = client.search_runs(["1"], "tags.trial != ''")
    assert len(runs) >= 6  # both baselines and four of the search
    assert all("test/correctness" in run.data.metrics for run in runs)
    for scatter in scatters:
        assert sorted(scatter["names"]) == sorted(run.info.run_name for run in runs)
    colors = {run.info.run_name: run.data.tags["mlflow.runColor"] for run in runs}
    assert dict(zip(scatters[0]["names"], scatters[0]["colors"], strict=True)) == colors


def test_the_report_opens_among_the_artifacts_of_the_sweeps_run(page, server, sweep):
    client = MlflowClient(server.uri)
    (parent,) = client.search_runs(["1"], "tags.role = 'sweep'")
    page.goto("about:blank")
    page.goto(f"{server.uri}/#/experiments/1/runs/{parent.info.run_id}/artifacts/report.html")
    frame = wait(lambda: page.query_selector("iframe"), PATIENCE).content_frame()
    drawn = "document.querySelectorAll('.js-plotly-plot .main-svg').length"
    wait(lambda: frame.evaluate(drawn), PATIENCE)
    assert "Pareto front" in frame.title()


def test_views_of_many_trials_hold_the_front(page, server, tmp_path):
    _, records, link = send_sweep(tmp_path, server.uri, 150, steps=False)
    (scatter, *_) = open_figures(page, link, "scatter", at_least=3)
    client = MlflowClient(server.uri)
    front = client.search_runs(["1", "2"], "tags.pareto = 'true' and tags.sweep = 'made_up'")
    assert len(records) > 150
    assert scatter["count"] >= 99
    assert {run.info.run_name for run in front} <= set(scatter["names"])

    members = open_figures(page, link.replace("-trials", "-front"), "scatter", at_least=3)[0]
    assert sorted(members["names"]) == sorted(run.info.run_name for run in front)
    trace = open_figures(page, link.replace("-trials", "-progress"), "scatter")[0]
    assert trace["count"] > 1
