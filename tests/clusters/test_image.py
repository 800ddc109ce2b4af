"""The recipe of the image agrees with the package."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from gdpo_tune.clusters.schedule_spec import KubeRayBackend
from tests.support.paths import ROOT

CHECK = ROOT / "docker" / "check_image.py"
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
    # Everything that a sweep may need at run time, so all but the tools of developers.
    assert {*extras.split(","), "test", "bench", "docs", "dev"} == set(
        PROJECT["optional-dependencies"]
    )
    assert f'"gdpo-tune[{extras}]"' in RECIPE  # the line for projects of their own
    assert f"WORKDIR {KubeRayBackend.model_fields['working_dir'].default}\n" in RECIPE


def test_the_image_has_a_c_compiler_before_it_gives_up_root():
    instructions = RECIPE.replace("\\\n", " ").splitlines()
    (installed,) = [line for line in instructions if "apt-get install" in line]
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    users = [line for line in instructions[: instructions.index(installed)] if "USER" in line]
    assert users[-1] == "USER root"


def run_check(path):
    words, environment = (
        [sys.executable, "-"],
        {"PATH": str(path)},
    )  # as `make image-check` calls it
    script = CHECK.read_text()
    return subprocess.run(words, input=script, capture_output=True, text=True, env=environment)


COMPILER = "#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("", "no C compiler (CC, gcc or clang): apt-get install gcc libc6-dev"),
        (COMPILER, "gcc does not work (fatal error: Python.h"),
    ],
    ids=["none", "without headers"],
)
def test_an_image_without_a_compiler_is_refused(tmp_path, compiler, message):
    if compiler:
        (tmp_path / "gcc").write_text(compiler)
        (tmp_path / "gcc").chmod(0o755)
        message = f"{tmp_path}/{message}"
    done = run_check(tmp_path)
    assert done.returncode == 1
    assert message in done.stdout


def test_the_check_names_the_package_of_every_missing_module(tmp_path):
    space = importlib.util.spec_from_file_location("check_image", CHECK)
    module = importlib.util.module_from_spec(space)
    space.loader.exec_module(module)
    (extras,) = re.findall(r'"\.\[(.*)\]"', RECIPE)
    brought = {name.partition("[")[2].rstrip("]") for name in module.MODULES.values()} - {""}
    assert brought == set(extras.split(","))
    lines = run_check(tmp_path).stdout.splitlines()
    if importlib.util.find_spec("vllm") is None:
        assert "no module vllm: pip install 'gdpo-tune[vllm]'" in lines


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_a_compiler_that_works_is_accepted(tmp_path):
    (tmp_path / "gcc").symlink_to(shutil.which("gcc"))
    for tool in ("as", "ld"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    assert "compiler" not in run_check(tmp_path).stdout
