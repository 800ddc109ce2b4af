"""Trainings as one process and as a group of several; the processes run this file as a script."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from gdpo_tune.core import registry
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import distributed, memory, rollout, train, trial
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.paths import ROOT
from tests.support.training import SETTINGS, TARGET, build_trial_config


def launch(
    work: str, directory: Path, *arguments: object, processes: int, script: str = __file__
) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    group = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    whole = [
        sys.executable,
        *(group if processes > 1 else ()),
        *map(str, (script, work, directory, *arguments)),
    ]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def leave_group() -> None:
    """End a process of a group, once all of them are here.

    Not by the end of the script: with other work on the machine, a thread of Gloo now and then
    outlives its group, and then torch aborts the interpreter while it ends.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


ROWS, GROUP = 24, 8


def draw_column(seed: int, missing: int):
    values = (6 * torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) - 3).tolist()
    values[GROUP : 2 * GROUP] = [0.7] * GROUP  # the group in the middle is dead in this reward
    return [None if row == missing else value for row, value in enumerate(values)]


TABLE = {"one": draw_column(1, missing=3), "two": draw_column(2, missing=21)}
TABLE["two"][9] = 1.9


def build_reward(name: str):
    def look_up(row, **_):
        return [TABLE[name][index] for index in row]

    look_up.__name__ = name
    return look_up


def build_trainer(mode: str, directory: Path) -> GDPOTrainer:
    model, tokenizer = load_policy("embedded")
    arguments = GRPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=ROWS // distributed.count_processes(),
        num_generations=GROUP,
        reward_weights=[1.0, 0.3],
        max_completion_length=2,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return GDPOTrainer(
        normalization=mode,
        reward_funcs=[build_reward("one"), build_reward("two")],
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["f"] * ROWS}),
        processing_class=tokenizer,
    )


def write_advantages(directory: Path) -> None:
    """Write `advantages-<processes>.json`: mode -> 24 advantages.

    Every process scores its part of one generation batch, in which a group straddles the processes,
    and the first one writes everyone's advantages for each mode.
    """
    distributed.join_process_group()
    result, processes = {}, distributed.count_processes()
    for mode in NORMALIZATIONS:
        trainer = build_trainer(mode, directory)
        trainer.model.train()
        count = ROWS // processes
        first = trainer.accelerator.process_index * count
        rows = [{"prompt": "f", "row": row} for row in range(first, first + count)]
        part = trainer._generate_and_score_completions(rows)["advantages"]
        assert trainer.accelerator.num_processes == processes
        result[mode] = trainer.accelerator.gather(part).tolist()
        assert all(math.isfinite(value) for value in result[mode])
    if distributed.is_first():
        (directory / f"advantages-{processes}.json").write_text(json.dumps(result))
    leave_group()


LETTERS = list(range(2, 28))


def sample_fixed_completions(prompts, trainer, *, fast=True):
    places: Counter[str] = Counter()
    completions = []
    for prompt in prompts:
        key = f"{prompt}/{places[prompt]}/{trainer.state.global_step}"
        places[prompt] += 1
        digest = hashlib.sha256(key.encode()).digest()
        length = 2 + digest[0] % 6
        completions.append([LETTERS[byte % 26] for byte in digest[1:length]] + [1])
    tokens = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": None}


def run_trial(config, resume=None, stop=None):
    reports = []

    def report(measurement, checkpoint):
        reports.append([measurement.step, dict(measurement.metrics)])
        if measurement.step == stop:
            raise SystemExit

    try:
        outcome = train(config, resume=resume, report=report)
    except SystemExit:
        return reports, None
    return reports, {name: [e.mean, e.se] for name, e in outcome.test.items()}


def sum_weights(checkpoint: Path) -> float:
    tensors = load_policy(str(checkpoint))[0].state_dict().values()
    return float(sum(tensor.double().abs().sum() for tensor in tensors))


def train_trials(directory: Path, policy: str) -> None:
    """Train the toy task with completions that depend on the prompt alone.

    So any number of processes sees the same rewards. Each process writes what it reported.
    """
    registry.TASKS["toy"] = TARGET
    settings = SETTINGS.replace(steps=4)
    result = {
        "sampled": run_trial(build_trial_config(policy, directory / "sampled", settings=settings))
    }
    cut = build_trial_config(policy, directory / "cut", settings=settings)
    first, _ = run_trial(cut, stop=3)
    # As tuning does: the checkpoint is chosen once, before the processes start.
    resume = distributed.broadcast_from_first(find_newest_checkpoint(cut.directory))
    rest, outcome = run_trial(cut, resume=resume)
    result["resumed"] = [first + rest, outcome]
    rollout.sample_for_trainer = sample_fixed_completions
    choose_limit = memory.choose_limit
    # Losses that are means over tokens, of all workers (dapo) and of each worker (bnpo).
    for name, loss_type, size in (
        ("fixed", "dapo", 0),
        ("selected", "dapo", 0),
        ("parts", "dapo", 2),
        ("each", "bnpo", 0),
        ("each_parts", "bnpo", 2),
        ("auto_parts", "dapo", "auto"),
    ):
        if size == "auto":  # as many as the process with the longest completions needs
            limit = MicroBatchLimit(30, counts_tokens=True)
            memory.choose_limit = lambda *_, limit=limit: limit
        parts = settings.replace(micro_batch_size=size)
        selection = "informative" if name == "selected" else "uniform"
        config = build_trial_config(
            *(policy, directory / name),
            settings=parts,
            loss_type=loss_type,
            beta=0.01,
            prompt_selection=selection,
        )
        result[name] = run_trial(config)
        result[f"{name}_weights"] = sum_weights(directory / name / "checkpoint-4")
    memory.choose_limit = choose_limit
    # Each process draws its part of a mini-batch from its own completions.
    parts = settings.replace(mini_batch_size=8, micro_batch_size=2)
    result["minis"] = run_trial(
        build_trial_config(policy, directory / "minis", settings=parts, beta=0.01)
    )
    ends = (directory / name / "checkpoint-4" for name in ("fixed", "each"))
    merged = dataclasses.replace(
        build_trial_config(policy, directory / "merged", settings=settings),
        train=False,
        parts=tuple(TrainedPart(end, 0.5) for end in ends),
    )
    result["merged"] = run_trial(merged)
    result["merged_weights"] = sum_weights(directory / "merged" / "checkpoint-0")
    result["again"] = run_trial(merged, resume=directory / "merged" / "checkpoint-0")
    (directory / f"seen-{distributed.get_rank()}.json").write_text(json.dumps(result))
    leave_group()


STEPS = SETTINGS.replace(steps=4)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "parts": {"training": STEPS.replace(micro_batch_size=2)},
    "adapters": {"model": ModelSettings(lora_rank=2)},
    "eight": {"training": STEPS.replace(optimizer="adamw_8bit")},
}
ENGINES = {"fast_cpu", "transformers"}
"""Names of trials that sample for themselves, each with the engine of that name."""


def sample_greedily(model, prompts, decoding, generator):
    return rollout.generate(
        model, prompts, dataclasses.replace(decoding, temperature=None), generator
    )


def resume_trial(config: TrialConfig):
    # As tuning does: the checkpoint is chosen once, before the processes start.
    return run_trial(
        config, resume=distributed.broadcast_from_first(find_newest_checkpoint(config.directory))
    )


def train_sharded_trials(directory: Path, policy: str, names: str, *earlier: str) -> None:
    """Train into `directory` with processes that share the policy.

    Held-out completions depend on the policy alone. Each process writes what it reported, and goes
    on with the trials that ended early in the `earlier` directories.
    """
    others = list(map(Path, earlier))
    registry.TASKS["toy"] = TARGET
    distributed.join_process_group()
    result: dict[str, Any] = {}

    def build(name: str, **changes: Any) -> TrialConfig:
        plain = build_trial_config(
            policy, directory / name, settings=STEPS, beta=0.01, learning_rate=1e-3
        )
        return dataclasses.replace(plain, sharded=distributed.count_processes() > 1, **changes)

    for name in sorted(ENGINES & {*names.split(",")}):  # in the same order in every process
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "choose_engine", lambda *_, engine=name: engine)
            result[name] = run_trial(build(name))
            first, _ = run_trial(build(f"{name}-cut"), stop=3)
            rest, outcome = resume_trial(build(f"{name}-cut"))
            result[f"{name}-cut"] = [first + rest, outcome]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "choose_engine", lambda *_: "fast_cpu")
        patch.setattr(rollout, "sample_for_trainer", sample_fixed_completions)
        patch.setattr(rollout, "choose_held_out_sampler", lambda _: sample_greedily)
        for name in (name for name in VARIANTS if name in names.split(",")):
            if name == "adapters":  # the sampler that is named above knows none
                patch.setattr(trial, "check_first_batch", lambda *_, **__: None)
            result[name] = run_trial(build(name, **VARIANTS[name]))
            result[f"{name}-cut"] = run_trial(build(f"{name}-cut", **VARIANTS[name]), stop=2)
            for other in others:
                goal = f"{name}-after-{other.name}"
                if distributed.is_first():
                    shutil.copytree(other / f"{name}-cut", directory / goal)
                distributed.broadcast_from_first(None)
                result[goal] = resume_trial(build(goal, **VARIANTS[name]))
    (directory / f"seen-{distributed.get_rank()}.json").write_text(json.dumps(result))
    leave_group()


WORK: dict[str, Callable[..., None]] = {
    "advantages": write_advantages,
    "trials": train_trials,
    "sharded": train_sharded_trials,
}


if __name__ == "__main__":
    WORK[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
