"""What the check of a GPU trains: sizes of trials, and files of sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import build_trial

from gdpo_tune.core.engines import find_vllm, select_engine
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    TrainingSettings,
)
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.core.trial_config import TrialConfig
from tests.gpu.processes import Processes
from tests.support.paths import ROOT

FILE = ROOT / "benchmarks" / "lookup_task.py"
TASK, LONG_TASK = f"{FILE}:LookupTask", f"{FILE}:LongLookupTask"
GROUP = 4
RANK = 16
"""Rank of the adapters."""
SMALL_SWEEP_STEPS = 10
"""Steps of a trial of a sweep on a CPU, which is to be killed in the middle."""


@dataclass(frozen=True)
class Plan:
    """Sizes of the trials of a check, and where they run."""

    small: bool
    """True on a CPU."""
    policy: str
    """Name or directory of the policy of trials."""
    tiny: str
    """Directory of a policy with two layers on a CPU, for what it can do with adapters."""
    directory: Path
    """Directory of trials and sweeps."""
    processes: Processes
    engine: str = "auto"
    """`rollout.engine` of trials."""
    vllm: bool = False
    """True if trials sample with vLLM."""
    device_bytes: int = 0
    """Memory of the GPU."""
    devices: tuple[str, ...] = ()
    """GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them; all tests but one use the first
    alone."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest completion."""
        return 24 if self.small else 128

    @property
    def threads(self) -> int:
        return 1 if self.small else count_local_cpus()

    def build_training(self, **changes: Any) -> TrainingSettings:
        """Build the settings of a short trial."""
        settings = TrainingSettings(
            steps=4,
            completions_per_step=16 if self.small else 64,
            micro_batch_size=0 if self.small else 8,
            max_completion_length=self.tokens,
            length_limit=self.tokens // 2,
            train_prompts=128,
            validation_prompts=8,
            test_prompts=8,
            evaluate_every=4,
            checkpoint_every=2,
        )
        return settings.replace(**changes)

    def build_config(
        self,
        name: str,
        *,
        task: str = TASK,
        params: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> TrialConfig:
        """Build a trial in the directory `name`; `changes` are fields of the configuration."""
        config = build_trial(
            *(task, self.policy, self.directory / name),
            {"group_size": GROUP, "learning_rate": 1e-5, **(params or {})},
            seed=7,
            training=self.build_training(**(training or {})),
            threads=self.threads,
            data=DataSettings(max_prompt_length=2048),
            model=ModelSettings(),
            rollout=RolloutSettings(engine=self.engine),
        )
        return replace(config, **changes)

    def write_space(self, name: str, **sections: Any) -> Path:
        """Write the file of a sweep; a section's keys are added to those of the check."""
        goal = {"direction": "maximize", "reference": 0}
        space: dict[str, Any] = {
            "name": name,
            "task": TASK,
            "policy": self.policy,
            "objectives": {"correctness": goal, "format": goal},
            "space": {
                "group_size": [GROUP],
                "reward_weights": {
                    "correctness": 1,
                    "format": {"log": [0.05, 2]},
                    "length": {"log": [0.05, 2]},
                },
                "learning_rate": {"log": [1e-6, 1e-5]},
            },
            "training": vars(self.build_training()),
            "data": {"max_prompt_length": 2048},
            "rollout": {"engine": self.engine},
            "search": {
                # Random proposals do not depend on the order in which trials end.
                "sampler": "random",
                "scheduler": {"type": "fifo"},
                "replicates": {"max_runs": 0},
                # The check counts trials that train.
                "merges": {"budget": 0},
                "checkpoints": {"budget": 0},
            },
            "tracking": {"uri": f"sqlite:///{self.directory / 'mlflow.db'}"},
            "storage": str(self.directory / "sweeps"),
        }
        for section, content in sections.items():
            space[section] = {**space.get(section, {}), **content}
        file = self.directory / f"{name}.yaml"
        file.write_text(json.dumps(space, indent=2))  # YAML contains JSON
        return file

    def write_sweep(
        self, name: str, share: float, trials: int, rank: int, **resources: int
    ) -> Path:
        """Write the file of a sweep of `trials` trials that train, each on a share of the device.

        Every sweep evaluates the untrained policy too, which trains nothing. Without a GPU the
        trials share the cores. `resources` are more keys of the section.
        """
        cpus = max(count_local_cpus() * share / resources.get("workers", 1), 0.5)
        steps = {"steps": SMALL_SWEEP_STEPS, "evaluate_every": SMALL_SWEEP_STEPS}
        return self.write_space(
            name,
            # One of the trials is the published setting.
            search={"trials": trials - 1},
            resources={"cpus": cpus, "gpus": 0 if self.small else share, **resources},
            model={"lora_rank": rank},
            training=steps if self.small else {},
        )


def choose_vllm(engine: str, *, gpu: bool) -> bool:
    """Return whether trials sample with vLLM; on a CPU, whether adapters can.

    Raises:
        EngineError: vLLM is asked for and cannot be used.
    """
    vllm = find_vllm()
    if not gpu:
        return vllm is not None and vllm.on_cpu and vllm.is_supported
    rollout = RolloutSettings(engine=engine)
    return select_engine(rollout, gpu=True, has_fast_cpu=False, vllm=vllm) == "vllm"
