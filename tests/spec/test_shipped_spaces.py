"""Search spaces by name."""

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.spec import starter
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
