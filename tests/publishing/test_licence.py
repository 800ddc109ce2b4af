"""Licence and base of a published policy."""

from __future__ import annotations

import shutil
import tomllib

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.publishing.publication import PACKAGE_LICENCE, find_licence
from tests.support.paths import ROOT


def test_policies_that_ship_have_the_licence_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"].lower() == PACKAGE_LICENCE
    assert find_licence("embedded_math", "", None).identifier == PACKAGE_LICENCE


def test_the_card_of_a_base_on_the_hub_has_its_licence(hub):
    card = "---\nlicense: other\nlicense_name: open-1\nlicense_link: LICENSE\n---\n# Base\n"
    hub.add("model:org/base", {"README.md": card.encode()})
    found = find_licence("org/base", "", None)
    assert (found.identifier, found.name, found.link) == ("other", "open-1", "LICENSE")
    assert found.source == "that of org/base"


@pytest.mark.parametrize("card", [b"# no metadata", b"---\nlicense: unknown\n---\n", None])
def test_an_unknown_licence_is_asked_for(hub, card):
    hub.add("model:org/base", {} if card is None else {"README.md": card})
    with pytest.raises(UsageError, match=r"licence of org/base is unknown.*\n.*--license ID"):
        find_licence("org/base", "", None)
    assert find_licence("org/base", "", "mit").identifier == "mit"


def test_a_directory_has_the_licence_of_its_card(tmp_path):
    shutil.copytree(POLICIES["embedded"], tmp_path / "own")
    with pytest.raises(UsageError, match=r"it has no README\.md"):
        find_licence(str(tmp_path / "own"), "", None)
    (tmp_path / "own" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    assert find_licence(str(tmp_path / "own"), "", None).identifier == "cc-by-4.0"


def test_a_licence_of_a_wrong_form_is_refused():
    with pytest.raises(UsageError, match="--license Apache 2: not an identifier"):
        find_licence("embedded", "", "Apache 2")
