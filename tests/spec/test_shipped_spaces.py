"""Search spaces by name."""

import shlex
import subprocess

import pytest

from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.spec import load_spec, starter
from gdpo_tune.spec.starter import find_space, list_spaces
from tests.support.paths import ROOT

FILES = sorted((ROOT / "search_spaces").glob("*.yaml"))


def test_every_search_space_has_a_name():
    assert list_spaces() == {file.stem: file for file in FILES}


def test_an_installed_package_has_them_inside(tmp_path, monkeypatch):
    inside = tmp_path / "gdpo_tune" / "search_spaces"
    inside.mkdir(parents=True)
    (inside / "code.yaml").touch()
    monkeypatch.setattr(starter, "DIRECTORIES", (tmp_path / "search_spaces", inside))
    assert list_spaces() == {"code": inside / "code.yaml"}
    assert 'force-include = { "search_spaces" = "gdpo_tune/search_spaces" }' in (
        ROOT / "pyproject.toml"
    ).read_text(encoding="utf-8")


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_space("code", "--recipe").parent == ROOT / "search_spaces"
    (tmp_path / "code").touch()
    assert str(find_space("code", "--recipe")) == "code"


def test_an_unknown_name_is_refused_with_close_ones():
    with pytest.raises(UsageError, match=r"--recipe tols: no such file.*\n.*did you mean 'tools'"):
        find_space("tols", "--recipe")


def test_a_file_that_ships_with_a_wheel_is_named_where_its_directory_is_missing(
    tmp_path, monkeypatch
):
    """README's `search_spaces/code.yaml` after `pip install`, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec("search_spaces/code.yaml")
    fix = str(caught.value).partition("fix: ")[2]
    command = fix.removeprefix("copy the one that ships: ").partition(";")[0]
    subprocess.run(shlex.split(command), check=True)
    assert load_spec("code.yaml", needs=[]).task == "code"
    assert "gdpo-tune init" in fix
