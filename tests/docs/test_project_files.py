"""Files that hosts and citation managers read: workflows, issue forms, CITATION.cff."""

from __future__ import annotations

import subprocess
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from ruamel.yaml import YAML

from gdpo_tune import __version__

ROOT = Path(__file__).parents[2]


def read_yaml(path: str):
    return YAML(typ="safe").load(ROOT / path)


def list_commands(path: str) -> list[str]:
    jobs = read_yaml(path)["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_ci_of_the_host_is_the_script_of_this_directory():
    assert list_commands(".github/workflows/ci.yml") == [".ci/run"]
    assert list_commands(".github/workflows/newest.yml")[-1] == ".ci/run"


def test_the_weekly_job_bounds_no_library_from_above(tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run(list_commands(".github/workflows/newest.yml")[0], cwd=tmp_path, shell=True)
    names = tomllib.loads(project.read_text())["project"]
    texts = chain(names["dependencies"], *names["optional-dependencies"].values())
    bounds = {text: {s.operator for s in Requirement(text).specifier} for text in texts}
    assert len(bounds) > 30
    assert not {text for text, operators in bounds.items() if operators & {"<", "<="}}


def test_the_citation_has_this_version_and_its_format_is_the_published_one():
    """Keys that `citation-file-format` 1.2.0 requires: its schema guide, "Required keys"."""
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert str(citation["version"]) == __version__


def test_issue_forms_have_what_the_host_requires():
    """Keys that GitHub requires of a form: "Syntax for issue forms", top-level syntax."""
    for form in ("fault", "wish"):
        content = read_yaml(f".github/ISSUE_TEMPLATE/{form}.yml")
        assert {"name", "description", "body"} <= content.keys()
        inputs = [part for part in content["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in inputs}) == len(inputs) > 0


def test_the_wheel_has_every_file_that_is_read_at_run_time():
    """Hatch leaves out what git ignores: templates, tables and pages have to be none of that."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert packages["targets"]["wheel"]["packages"] == ["gdpo_tune"]
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "gdpo_tune"]
    ignored = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert {Path(file).suffix for file in ignored} <= {".pyc"}
    for name in ("exporters/differences.md", "figures/templates/report.html.jinja"):
        assert (ROOT / "gdpo_tune" / name).is_file()
