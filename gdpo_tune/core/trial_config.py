"""Configuration of a trial: all that its training or evaluation depends on.

Importing it needs neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    StartSettings,
    TrainingSettings,
)
from gdpo_tune.core.task_info import STRICT, Scoring
from gdpo_tune.core.trials import Params, Rung


@dataclass(frozen=True)
class TrainedPart:
    """A trained policy on disk, and its weight in a merge."""

    checkpoint: Path
    weight: float


@dataclass(frozen=True)
class TrialConfig:
    """Configuration of one trial; equal ones give bitwise equal metrics on a CPU."""

    task: str
    policy: str
    seed: int
    params: Params
    """Complete: a value for every parameter of `parameters.PARAMETERS` that applies to the task;
    and the fields of TRL that the sweep sets."""
    training: TrainingSettings
    directory: Path
    """This trial's own directory: `steps.jsonl` and checkpoints."""
    train: bool = True
    """False evaluates the policy as it is (the untrained baseline)."""
    start: Path | None = None
    """Policy after its supervised start, at which the training begins in place of `policy`."""
    supervised: StartSettings | None = None
    """Demonstrations to train on in place of rewards, for the trial that makes the start."""
    threads: int = 1
    """CPU threads that torch may use."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    engine_rank: int = 0
    """Rank of the largest adapter for which vLLM has room, a merge of adapters or another trial's
    in this process; 0: that of this one."""
    gpu_share: float = 1.0
    """Share of its GPU's memory that the trial may use; no effect without a GPU."""
    needs_gpu: bool = False
    """True refuses to train where CUDA cannot use the GPU that the trial was given."""
    sharded: bool = False
    """True divides the policy among the trial's processes, False gives each a whole one."""
    evaluate_at: tuple[int, ...] = ()
    """Steps at which the trial is evaluated on validation prompts besides `evaluate_every`."""
    parts: tuple[TrainedPart, ...] = ()
    """Policies to merge and evaluate, where `train` is False; their weights sum to 1."""
    writes_whole: bool = False
    """True adds the weights below an adapter to the last checkpoint."""
    measured: Rung | None = None
    """The merge on validation prompts, where an earlier attempt has evaluated it."""
    keep_at: tuple[int, ...] = ()
    """Steps whose checkpoints stay, because each may become a candidate."""
    scoring: Scoring = STRICT
    """Functions of the task's rewards, and of the held-out metrics with their names."""
    required_metrics: tuple[str, ...] = ()
    """Held-out metrics without which the trial fails; others may have no value."""

    def __str__(self) -> str:
        return self.directory.name

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps on the samples of a step: passes times mini-batches."""
        return int(self.params.get("num_iterations", 1)) * self.training.mini_batches

    @property
    def largest_rank(self) -> int:
        """Rank of the largest adapter that vLLM can sample with."""
        return self.engine_rank or self.model.lora_rank

    def get_reward_weights(self) -> dict[str, float]:
        """Return reward name -> weight, from `reward_weights.*`."""
        prefix = "reward_weights."
        return {k[len(prefix) :]: float(v) for k, v in self.params.items() if k.startswith(prefix)}
