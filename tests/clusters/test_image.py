"""The recipe of the image agrees with the package."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from tests.support.paths import ROOT

RECIPE = (ROOT / "docker" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_base_image_has_a_ray_that_the_package_accepts():
    (ray,) = [Requirement(each) for each in PROJECT["dependencies"] if each.startswith("ray[")]
    (version,) = re.findall(r"^FROM rayproject/ray:([0-9.]+)-py311$", RECIPE, re.M)
    assert version in ray.specifier


def test_copied_paths_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY --chown=ray (.*) \S+$", RECIPE, re.M)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored


def test_extras_and_directory():
    (extras,) = re.findall(r'pip install --no-cache-dir "\.\[(.*)\]"', RECIPE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert f"WORKDIR {KubeRayBackend.model_fields['working_dir'].default}\n" in RECIPE
