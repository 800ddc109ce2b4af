"""`resources.pack`: trials of LoRA that share a process, its base policy and its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gdpo_tune.core.policy_size import PolicySize
from gdpo_tune.spec.gpu_memory import count_trials_that_fit, format_bytes
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import Problems
from gdpo_tune.spec.sampler_choice import count_affordable_trials

MOST = 8
"""Trials that `auto` puts into a process: they compute their updates one after another, so more
of them wait longer for each other."""


class PackChoice(NamedTuple):
    """How many trials share a process, and the reason for it."""

    trials: int
    why: str

    def __str__(self) -> str:
        return f"{self.trials} ({self.why})"


def check_pack(spec: SweepSpec, problems: Problems) -> None:
    """Refuse trials that cannot share a process."""
    resources, key = spec.resources, "resources.pack"
    if resources.pack in (1, "auto"):
        return
    if not spec.model.lora_rank:
        reason = "every weight is trained, so the trials have no base policy to share"
        problems.refuse(key, reason, "add model.lora_rank: 16, or write pack: 1", "model.lora_rank")
    if resources.workers > 1:
        reason = f"a trial has {resources.workers} processes, and cannot share one with others"
        problems.refuse(key, reason, "write pack: 1, or workers: 1", "resources.workers")
    if not spec.rollout.reuse_engine:
        reason = "trials that share a process share its engine, too"
        fix = "remove the key, or write resources.pack: 1"
        problems.refuse("rollout.reuse_engine", reason, fix, key)


def choose_pack(
    spec: SweepSpec, size: PolicySize | None, read_device: Callable[[], int | None]
) -> PackChoice:
    """Return the requested number of trials a process; for `auto` as many as fit, up to `MOST`.

    `read_device` is only called if the answer depends on it. It returns the bytes of the smallest
    GPU that trials may get. They and `size` are None while they are unknown: one trial then.
    """
    resources = spec.resources
    if resources.pack != "auto":
        return PackChoice(resources.pack, "as requested")
    if not spec.model.lora_rank:
        return PackChoice(1, "every weight is trained, so trials have no base policy to share")
    if resources.workers > 1:
        return PackChoice(1, f"a trial has {resources.workers} processes of its own")
    if spec.rollout.sleep or not spec.rollout.reuse_engine:
        key = "sleep: true" if spec.rollout.sleep else "reuse_engine: false"
        return PackChoice(1, f"rollout.{key} asks for an engine of its own")
    if not resources.gpus:
        return PackChoice(1, "on a CPU one trial keeps its cores busy")
    if size is None:
        return PackChoice(1, "the size of the policy is unknown until it is on this machine")
    device = read_device()
    if device is None:
        return PackChoice(1, "the memory of the GPUs is unknown: write a number")
    most = min(MOST, count_affordable_trials(spec))
    room = int(resources.gpus * device)
    fit = count_trials_that_fit(spec, size, room, most)
    if fit == most:
        reason = f"at most {MOST}" if most == MOST else "all trials of the sweep"
        return PackChoice(most, f"{reason}; they fit in {format_bytes(room)}")
    return PackChoice(max(1, fit), f"{fit} fit in {format_bytes(room)}, computed")


def settle_pack(spec: SweepSpec, trials: int) -> SweepSpec:
    """Return a spec with so many trials a process, such as those that `auto` stands for."""
    resources = spec.resources.model_copy(update={"pack": trials})
    return spec.model_copy(update={"resources": resources})
