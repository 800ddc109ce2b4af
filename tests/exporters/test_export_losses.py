"""Advantages and losses of the libraries, by their own code, against those of a trial.

NeMo-RL has no package: `GDPO_TUNE_NEMO_RL` names a checkout. The sizes of differences that the page
of an export states are measured here.
"""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdpo_tune.core.errors import ExportError
from tests.exporters import library_losses
from tests.support.export import export_to, make_recipe, parse_settings
from tests.support.export_batch import (
    PARTS,
    SIZES,
    UNANIMOUS_G,
    C,
    N,
    StepResult,
    draw_batch,
    draw_unanimous_batch,
)
from tests.support.export_comparison import (
    LOSSES,
    WAYS,
    assert_same_or_explained,
    find_row,
    measure_difference,
)
from tests.support.paths import ROOT
from tests.support.training import write_policy

pytestmark = pytest.mark.slow

MODES = ("gdpo", "gdpo_no_std", "grpo", "grpo_no_std", "grpo_batch")
CODE = {
    "ms-swift": (library_losses.compute_swift_advantages, library_losses.compute_swift_loss),
    "verl": (library_losses.compute_verl_advantages, library_losses.compute_verl_loss),
    "nemo-rl": (library_losses.compute_nemo_advantages, library_losses.compute_nemo_loss),
}
NEMO = "GDPO_TUNE_NEMO_RL"


@pytest.fixture(scope="session")
def find_source(source):
    def find(library: str) -> Path:
        if library != "nemo-rl":
            return source(library)
        if NEMO not in os.environ:
            pytest.skip(f"NeMo-RL is not on PyPI: set {NEMO} to a checkout of it")
        return Path(os.environ[NEMO])

    return find


@pytest.fixture
def compute_advantages(find_source):
    """A function that returns the advantages of a library, or skips what its exporter refuses."""

    def compute(library, batch, *overrides):
        recipe = make_recipe(*SIZES, *overrides)
        source = find_source(library)
        try:
            exported = export_to(library, recipe)
        except ExportError as error:
            pytest.skip(str(error))
        return CODE[library][0](source, parse_settings(exported), batch, recipe.weights)

    return compute


@pytest.fixture
def compute_loss(find_source, compute_own):
    """A function that returns the losses of a library and of a trial, and what was written."""

    def compute(library, batch, *overrides, **actor):
        written = parse_settings(export_to(library, make_recipe(*SIZES, *overrides)))
        if actor:
            written["actor_rollout_ref"]["actor"] |= actor
        ours = compute_own(batch, *overrides)
        theirs = CODE[library][1](find_source(library), written, batch, ours.advantages)
        return theirs, ours, written

    return compute


# Advantages

LARGEST = {  # other modes: rounding
    ("ms-swift", "gdpo"): "0.0003",
    ("verl", "gdpo"): "0.35",
    ("verl", "grpo"): "0.0005",
    ("nemo-rl", "gdpo"): "0.0003",
    ("nemo-rl", "gdpo_no_std"): "0.0004",
    ("nemo-rl", "grpo"): "0.0005",
}
"""Largest difference of the advantages, whose standard deviation is 1 under GDPO."""


def round_like(value: float, text: str) -> str:
    """Return a number with as many decimals as another one."""
    return f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", MODES)
def test_the_advantages_are_ours_but_for_a_size_that_is_stated(
    compute_advantages, compute_own, library, mode
):
    overrides = (f"space.normalization={mode}",)
    batch = draw_batch()
    theirs = compute_advantages(library, batch, *overrides)
    difference = float((theirs - compute_own(batch, *overrides).advantages).abs().max())
    if (library, mode) not in LARGEST:
        assert difference < 1e-6
        return
    size = LARGEST[library, mode]
    assert round_like(difference, size) == size


def test_lengths_are_all_that_differs_in_the_advantages_of_verl(compute_advantages, compute_own):
    batch = draw_batch()
    batch = dataclasses.replace(batch, lengths=torch.full_like(batch.lengths, C))
    theirs = compute_advantages("verl", batch)
    # Its deviation is over tokens: those of N completions, each C times.
    spread = ((N * C - 1) / (N * C) * N / (N - 1)) ** 0.5
    ours = compute_own(batch).advantages * spread
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3)


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", ["grpo", "grpo_no_std", "grpo_batch"])
def test_leave_one_out(compute_advantages, compute_own, library, mode):
    overrides = (f"space.normalization={mode}", "space.baseline=leave_one_out")
    batch = draw_batch()
    theirs = compute_advantages(library, batch, *overrides)
    difference = float((theirs - compute_own(batch, *overrides).advantages).abs().max())
    if (library, mode) == ("nemo-rl", "grpo"):
        row = find_row(library, "standard deviation of a group", *overrides)
        assert f"up to {difference:.1f} (measured)" in row
    else:
        assert difference < 1e-6


@pytest.mark.parametrize("library", CODE)
def test_a_group_whose_rewards_are_all_equal(compute_advantages, compute_own, library):
    overrides = (f"space.group_size={UNANIMOUS_G}",)
    batch = draw_unanimous_batch()
    theirs = compute_advantages(library, batch, *overrides)
    dead = compute_own(batch, *overrides).advantages == 0
    assert dead.sum() >= len(dead) / 2
    row = find_row(library, "zero-variance groups", *overrides)
    size = row.rpartition("up to ")[2].rstrip(")")
    assert round_like(float(theirs[dead].abs().max()), size) == size


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_is_not_scored(compute_advantages, compute_own, library, mode):
    overrides = (f"space.normalization={mode}",)
    batch = given = draw_batch(missing=True)
    if library in ("verl", "nemo-rl"):  # whose NaN `rewards.py` keeps away
        given = dataclasses.replace(batch, rewards=batch.rewards.nan_to_num(0))
    theirs = compute_advantages(library, given, *overrides)
    difference = float((theirs - compute_own(batch, *overrides).advantages).abs().max())
    row = find_row(library, "missing reward (`None`)", *overrides)
    if not row:
        assert difference < 1e-3
    else:
        assert "counts as a raw 0" in row
        assert 0.2 < difference < 0.75


# Losses


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_ours_or_its_difference_is_explained(
    find_source, compute_own, library, mode, loss
):
    source = find_source(library)
    for beta, way in itertools.product((0, 0.1), WAYS):
        overrides = (f"space.normalization={mode}", f"space.loss_type={loss}", *WAYS[way])
        overrides = (*overrides, f"space.beta={beta}")
        batch = draw_batch(updated=way != "one update")
        try:
            exported = export_to(library, make_recipe(*SIZES, *overrides))
        except ExportError:
            continue
        ours = compute_own(batch, *overrides)
        _, compute = CODE[library]
        theirs = compute(source, parse_settings(exported), batch, ours.advantages)
        assert_same_or_explained(theirs, ours, exported)


SHARES = [
    ("ms-swift", "gradient of the KL", "one update", "grpo_no_std", "dr_grpo"),
    ("verl", "gradient of the KL", "two passes", "grpo_no_std", "dr_grpo"),
    ("verl", "loss_type dapo divides by", "two parts", "gdpo", "dapo"),
    ("nemo-rl", "loss_type dapo divides by", "two parts", "gdpo", "dapo"),
    ("nemo-rl", "loss_type cispo divides by", "two parts", "gdpo", "cispo"),
    ("ms-swift", "loss_type bnpo averages over", "two parts", "gdpo", "bnpo"),
]


@pytest.mark.parametrize(("library", "topic", "way", "mode", "loss"), SHARES)
def test_the_share_of_the_gradient_that_differs(compute_loss, library, topic, way, mode, loss):
    batch = draw_batch(updated=way != "one update")
    beta = 0
    if "KL" in topic:  # no advantage, so that the KL is all of the loss
        batch, beta = dataclasses.replace(batch, rewards=torch.ones_like(batch.rewards)), 0.1
    overrides = (f"space.normalization={mode}", f"space.loss_type={loss}", f"space.beta={beta}")
    overrides = (*overrides, *WAYS[way])
    theirs, ours, _ = compute_loss(library, batch, *overrides)
    percent = f"{100 * measure_difference(theirs, ours):.0f} %"
    assert percent in find_row(library, topic, *overrides)


def test_a_second_clip_of_verl_would_change_the_loss(compute_loss):
    theirs, ours, _ = compute_loss("verl", draw_batch(), *WAYS["two passes"], clip_ratio_c=3.0)
    assert measure_difference(theirs, ours) > 1e-3


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_small_gradients_are_clipped_alike(compute_loss, loss):
    overrides = (f"space.loss_type={loss}", *PARTS)
    theirs, ours, written = compute_loss("ms-swift", draw_batch(), *overrides)
    torch.testing.assert_close(2 * theirs.gradient, ours.gradient)
    assert written["max_grad_norm"] == make_recipe().spec.training.max_grad_norm / 2


VLLM = ("rollout.engine=vllm", "resources.gpus=1", "rollout.importance_sampling_cap=1.1")


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_the_weights_of_what_vllm_rounds(compute_loss, library, kind):
    overrides = ("space.loss_type=bnpo", *PARTS, *VLLM, f"rollout.importance_sampling={kind}")
    if library == "ms-swift":  # of which bnpo differs
        overrides = (*overrides, "space.loss_type=grpo")
    theirs, ours, _ = compute_loss(library, draw_batch(rounded=True), *overrides)
    is_explained = bool(find_row(library, "log-prob mismatch between vLLM and trainer", *overrides))
    assert is_explained is (library != "verl" and kind.startswith("sequence"))
    difference = measure_difference(theirs, ours)
    assert difference > 1e-2 if is_explained else difference < 1e-5


# Axolotl: the TRL that it pins, in a process of its own

AXOLOTL_MODES = ("gdpo", "grpo", "grpo_no_std", "grpo_batch")


@pytest.fixture(scope="module")
def axolotl_cases(source, compute_own, tmp_path_factory):
    """For each case its export, our result and that of TRL 1.9 from the exported file."""
    directory = tmp_path_factory.mktemp("axolotl")
    given, cases = [], {}
    for mode, loss, beta, way in itertools.product(AXOLOTL_MODES, LOSSES, (0, 0.1), WAYS):
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
    files = [str(directory / name) for name in ("in.pt", "out.pt")]
    command = [sys.executable, "-m", "tests.support.export_batch", *files]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
