"""Advantages and losses of the libraries, by their own code, against those of a trial.

NeMo-RL has no package: `GDPO_TUNE_NEMO_RL` names a checkout. The sizes of differences that the page
of an export states are measured here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
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


def compute_advantages_of(library, source, batch, *overrides):
    """Return the advantages of a library, or skip what its exporter refuses."""
    recipe = make_recipe(*SIZES, *overrides)
    try:
        exported = export_to(library, recipe)
    except ExportError as error:
        pytest.skip(str(error))
    compute, _ = CODE[library]
    return compute(source, parse_settings(exported), batch, recipe.weights)


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
    find_source, compute_own, library, mode
):
    overrides = (f"space.normalization={mode}",)
    batch = draw_batch()
    theirs = compute_advantages_of(library, find_source(library), batch, *overrides)
    difference = float((theirs - compute_own(batch, *overrides).advantages).abs().max())
    if (library, mode) not in LARGEST:
        assert difference < 1e-6
        return
    size = LARGEST[library, mode]
    assert round_like(difference, size) == size


def test_lengths_are_all_that_differs_in_the_advantages_of_verl(find_source, compute_own):
    batch = draw_batch()
    batch = dataclasses.replace(batch, lengths=torch.full_like(batch.lengths, C))
    theirs = compute_advantages_of("verl", find_source("verl"), batch)
    # Its deviation is over tokens: those of N completions, each C times.
    spread = ((N * C - 1) / (N * C) * N / (N - 1)) ** 0.5
    ours = compute_own(batch).advantages * spread
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3)


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", ["grpo", "grpo_no_std", "grpo_batch"])
def test_leave_one_out(find_source, compute_own, library, mode):
    overrides = (f"space.normalization={mode}", "space.baseline=leave_one_out")
    batch = draw_batch()
    theirs = compute_advantages_of(library, find_source(library), batch, *overrides)
    difference = float((theirs - compute_own(batch, *overrides).advantages).abs().max())
    if (library, mode) == ("nemo-rl", "grpo"):
        row = find_row(library, "standard deviation of a group", *overrides)
        assert f"up to {difference:.1f} (measured)" in row
    else:
        assert difference < 1e-6


@pytest.mark.parametrize("library", CODE)
def test_a_group_whose_rewards_are_all_equal(find_source, compute_own, library):
    overrides = (f"space.group_size={UNANIMOUS_G}",)
    batch = draw_unanimous_batch()
    theirs = compute_advantages_of(library, find_source(library), batch, *overrides)
    dead = compute_own(batch, *overrides).advantages == 0
    assert dead.sum() >= len(dead) / 2
    row = find_row(library, "zero-variance groups", *overrides)
    size = row.rpartition("up to ")[2].rstrip(")")
    assert round_like(float(theirs[dead].abs().max()), size) == size


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_is_not_scored(find_source, compute_own, library, mode):
    overrides = (f"space.normalization={mode}",)
    batch = given = draw_batch(missing=True)
    if library in ("verl", "nemo-rl"):  # whose NaN `rewards.py` keeps away
        given = dataclasses.replace(batch, rewards=batch.rewards.nan_to_num(0))
    theirs = compute_advantages_of(library, find_source(library), given, *overrides)
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
def test_the_share_of_the_gradient_that_differs(
    find_source, compute_own, library, topic, way, mode, loss
):
    batch = draw_batch(updated=way != "one update")
    beta = 0
    if "KL" in topic:  # no advantage, so that the KL is all of the loss
        batch, beta = dataclasses.replace(batch, rewards=torch.ones_like(batch.rewards)), 0.1
    overrides = (f"space.normalization={mode}", f"space.loss_type={loss}", f"space.beta={beta}")
    overrides = (*overrides, *WAYS[way])
    ours = compute_own(batch, *overrides)
    written = parse_settings(export_to(library, make_recipe(*SIZES, *overrides)))
    _, compute = CODE[library]
    theirs = compute(find_source(library), written, batch, ours.advantages)
    percent = f"{100 * measure_difference(theirs, ours):.0f} %"
    assert percent in find_row(library, topic, *overrides)


def test_a_second_clip_of_verl_would_change_the_loss(find_source, compute_own):
    batch, overrides = draw_batch(), WAYS["two passes"]
    written = parse_settings(export_to("verl", make_recipe(*SIZES, *overrides)))
    written["actor_rollout_ref"]["actor"]["clip_ratio_c"] = 3.0
    ours = compute_own(batch, *overrides)
    theirs = library_losses.compute_verl_loss(find_source("verl"), written, batch, ours.advantages)
    assert measure_difference(theirs, ours) > 1e-3


def test_small_gradients_are_clipped_alike(find_source, compute_own):
    batch = draw_batch()
    for loss in ("dapo", "cispo"):
        overrides = (f"space.loss_type={loss}", *PARTS)
        written = parse_settings(export_to("ms-swift", make_recipe(*SIZES, *overrides)))
        ours = compute_own(batch, *overrides)
        source = find_source("ms-swift")
        theirs = library_losses.compute_swift_loss(source, written, batch, ours.advantages)
        torch.testing.assert_close(2 * theirs.gradient, ours.gradient)
        assert written["max_grad_norm"] == make_recipe().spec.training.max_grad_norm / 2


VLLM = ("rollout.engine=vllm", "resources.gpus=1", "rollout.importance_sampling_cap=1.1")


@pytest.mark.parametrize("library", CODE)
@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_the_weights_of_what_vllm_rounds(find_source, compute_own, library, kind):
    batch = draw_batch(rounded=True)
    overrides = ("space.loss_type=bnpo", *PARTS, *VLLM, f"rollout.importance_sampling={kind}")
    if library == "ms-swift":  # of which bnpo differs
        overrides = (*overrides, "space.loss_type=grpo")
    ours = compute_own(batch, *overrides)
    written = parse_settings(export_to(library, make_recipe(*SIZES, *overrides)))
    _, compute = CODE[library]
    theirs = compute(find_source(library), written, batch, ours.advantages)
    is_explained = bool(find_row(library, "log-prob mismatch between vLLM and trainer", *overrides))
    assert is_explained is (library != "verl" and kind.startswith("sequence"))
    difference = measure_difference(theirs, ours)
    assert difference > 1e-2 if is_explained else difference < 1e-5
