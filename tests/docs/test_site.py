"""The documentation site builds, and a broken link anywhere ends `make docs` with an error."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("mkdocs", reason="the site needs the extra `docs`, which `dev` has")
pytestmark = [pytest.mark.system, pytest.mark.integration]

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
COPIED = ("mkdocs.yml", "Makefile", *PAGES)
LINKED = ("gdpo_tune", "benchmarks", "experiments", "docker", "AGENTS.md", "CITATION.cff")


@pytest.fixture
def copy(tmp_path):
    """Copy what the site is made of; what it only mentions is linked."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in COPIED:
        shutil.copy(ROOT / name, tmp_path)
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def build(directory):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["make", "-C", str(directory), "docs"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_site_builds_and_loads_nothing_from_elsewhere(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr
    for page in (copy / "site").glob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?://", page.read_text()
        )
        assert loaded == [], page
    assert {page.stem for page in (copy / "docs").glob("*.md")} <= {
        page.stem for page in (copy / "site").glob("*.html")
    }


def test_every_kind_of_broken_link_is_an_error(copy):
    with (copy / "docs" / "ledger.md").open("a") as page:
        page.write("[a](nowhere.md) [b](noise.md#nowhere) [c](../gdpo_tune/nowhere.py)\n")
    with (copy / "README.md").open("a") as page:
        page.write("[d](docs/absent.md)\n")
    notebook = copy / "docs" / "quickstart.ipynb"
    notebook.write_text(notebook.read_text().replace("(own_task.md)", "(own_nowhere.md)"))
    (copy / "docs" / "forgotten.md").write_text("# A page without a place in the navigation\n")
    done = build(copy)
    assert done.returncode != 0
    for part in (
        "nowhere.md",
        "#nowhere",
        "nowhere.py",
        "absent.md",
        "own_nowhere.md",
        "forgotten.md",
    ):
        assert part in done.stderr, part
