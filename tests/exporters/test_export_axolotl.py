"""Advantages and losses of the TRL that Axolotl pins, in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
import torch

from tests.support.export import export_to, make_recipe, parse_settings
from tests.support.export_batch import SIZES, StepResult, draw_batch
from tests.support.export_comparison import LOSSES, WAYS, assert_same_or_explained
from tests.support.paths import ROOT
from tests.support.training import write_policy

pytestmark = pytest.mark.slow

MODES = ("gdpo", "grpo", "grpo_no_std", "grpo_batch")


@pytest.fixture(scope="module")
def axolotl_cases(source, compute_own, tmp_path_factory):
    """For each case its export, our result and that of TRL 1.9 from the exported file."""
    directory = tmp_path_factory.mktemp("axolotl")
    given, cases = [], {}
    for mode, loss, beta, way in itertools.product(MODES, LOSSES, (0, 0.1), WAYS):
        overrides = (f"space.normalization={mode}", f"space.loss_type={loss}", *WAYS[way])
        overrides = (*overrides, f"space.beta={beta}")
        exported = export_to("axolotl", make_recipe(*SIZES, *overrides))
        # Under GDPO TRL treats a reward that is not scored as here.
        batch = draw_batch(missing=mode == "gdpo", updated=way != "one update")
        written = parse_settings(exported)
        settings = {**written, **written["trl"], "model": None, "use_vllm": False}
        settings["per_device_train_batch_size"] = written["micro_batch_size"]
        given.append((settings, dataclasses.asdict(batch)))
        cases[mode, loss, beta, way] = (exported, compute_own(batch, *overrides))
    policy = write_policy(directory / "policy")
    torch.save((policy, given), directory / "in.pt")
    path = os.pathsep.join(map(str, (source("trl"), ROOT)))
    words = [sys.executable, "-m", "tests.support.export_batch"]
    files = [str(directory / name) for name in ("in.pt", "out.pt")]
    done = subprocess.run(
        [*words, *files],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [StepResult(**result) for result in torch.load(directory / "out.pt")]
    return {case: (*cases[case], theirs) for case, theirs in zip(cases, results, strict=True)}


def test_axolotl_computes_our_advantages_and_losses(axolotl_cases):
    for (_, loss, _, way), (exported, ours, theirs) in axolotl_cases.items():
        torch.testing.assert_close(theirs.advantages, ours.advantages, rtol=0, atol=1e-6)
        if loss in ("dapo", "cispo") and way == "two parts":
            torch.testing.assert_close(2 * theirs.gradient, ours.gradient)
            assert parse_settings(exported)["max_grad_norm"] == 0.5
        assert_same_or_explained(theirs, ours, exported)
