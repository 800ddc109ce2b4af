"""The quickstart notebook runs from its first to its last cell, with a smaller sweep."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
SMALLER = "trials, steps = 3, 4"
SECONDS = 600


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def find_parameters(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return cell


def join_outputs(notebook):
    """Join what the cells printed, and the HTML of their values."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.get("data", {}).get("text/html", "") for output in outputs]
    return "".join([*(output.get("text", "") for output in outputs), *shown])


def test_outputs_are_stored_without_errors_and_without_the_live_table(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells if cell is not find_parameters(notebook))
    text = join_outputs(notebook)
    assert "<b>first</b>: finished" in text
    assert "Traceback" not in text
    assert text.count("running, ") < 20
    assert "image/png" in NOTEBOOK.read_text()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # jupyter_client leaves its sockets
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_quickstart_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    find_parameters(notebook).source = SMALLER
    options = {"resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", **options).execute()
    text = join_outputs(notebook)
    assert "finished (all 3 configurations were tried)" in text
    assert "Traceback" not in text
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert len(list((tmp_path / "runs").glob("first-*-trl/grpo.yaml"))) == 1
