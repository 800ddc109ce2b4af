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


def test_the_outputs_are_stored_and_show_no_error_and_no_directory_of_a_person(notebook):
    cells = [
        cell for cell in notebook.cells if cell.cell_type == "code" and "tags" not in cell.metadata
    ]
    assert all(cell.outputs for cell in cells)
    text = NOTEBOOK.read_text()
    assert "Traceback" not in text
    assert "/home/" not in text
    assert "image/png" in text


@pytest.mark.system
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # jupyter_client leaves its sockets
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_quickstart_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    parameters.source = SMALLER
    options = {"resources": {"metadata": {"path": str(tmp_path)}}}
    ended = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", **options).execute()
    texts = [
        "".join(output.get("text", "") for output in cell.get("outputs", ()))
        for cell in ended.cells
    ]
    assert any("all 3 configurations were tried" in text for text in texts)
    assert any(
        "<b>first</b>: finished" in output.data["text/html"]
        for cell in ended.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    )
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    (exported,) = (tmp_path / "runs").glob("first-*-trl/grpo.yaml")
    assert "normalize_then_sum" in exported.read_text() or "scale_rewards" in exported.read_text()
