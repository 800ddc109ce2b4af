"""The vocabulary that every room shares: what a trial is asked, what it reports, what is kept.

Light on purpose: importing it costs neither torch nor ray nor pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gdpo_tune.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    TrainingSettings,
)

ParamValue = bool | int | float | str
Params = Mapping[str, ParamValue]
"""Parameter name as in the YAML, dotted (`reward_weights.format`) -> value."""

Direction = Literal["maximize", "minimize"]
Role = Literal["search", "replicate", "untrained", "published"]
"""Why a trial was run. `untrained` and `published` are the baselines of every front picture;
`published` is trained at full budget and may therefore be on the front itself."""
State = Literal["waiting", "running", "complete", "pruned", "failed"]
Proposer = Literal["model", "startup", "enqueued", "replicate", "baseline"]
"""Who chose a trial's parameters: the sampler's model, its random start-up, or a rule."""


@dataclass(frozen=True)
class Objective:
    """A held-out, unweighted metric that the search optimises."""

    name: str
    direction: Direction
    reference: float
    """Worst value of interest: the reference point of the hypervolume, fixed in the spec."""


@dataclass(frozen=True)
class TrialConfig:
    """Everything that decides one trial; equal configs give bitwise equal metrics on CPU."""

    task: str
    policy: str
    seed: int
    params: Params
    """Complete: a value for every parameter of `parameters.PARAMETERS` that applies to the task."""
    training: TrainingSettings
    directory: Path
    """This trial's own folder: `steps.jsonl` and checkpoints."""
    train: bool = True
    """False evaluates the policy as it is (the untrained baseline)."""
    threads: int = 1
    """CPU threads that torch may use."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Where the task runs code that the policy wrote."""
    data: DataSettings = field(default_factory=DataSettings)
    """Where the task's prompts come from."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """How the policy is loaded and trained."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """What samples completions during training."""
    gpu_share: float = 1.0
    """Of the memory of its GPU, what the trial may use; no GPU, no effect."""

    def reward_weights(self) -> dict[str, float]:
        """Reward name -> weight, from the parameters `reward_weights.*`."""
        prefix = "reward_weights."
        return {k[len(prefix) :]: float(v) for k, v in self.params.items() if k.startswith(prefix)}


@dataclass(frozen=True)
class Estimate:
    """Mean of a held-out metric and its standard error (bootstrap clustered by prompt)."""

    mean: float
    se: float


@dataclass(frozen=True)
class Cost:
    """What a trial has spent so far, summed over the attempts that its result rests on.

    An attempt that died counts up to the checkpoint that the next one went on from.
    """

    completions: int = 0
    seconds: float = 0.0
    """Wall time in `train()`."""
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """What a trial reports while it runs."""

    step: int
    metrics: Mapping[str, float]
    """`train/...` of this step; `validation/<metric>` where an evaluation took place."""
    cost: Cost

    @property
    def validated(self) -> bool:
        """Whether an evaluation took place."""
        return any(name.startswith("validation/") for name in self.metrics)


@dataclass(frozen=True)
class Outcome:
    """What a finished trial is worth."""

    validation: Mapping[str, Estimate]
    test: Mapping[str, Estimate]
    cost: Cost
    checkpoint: Path | None
    """Folder of the trained policy; None for the untrained baseline."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Provenance seen from inside the trial, such as the sandbox's tier."""


LEFT_OUT = "prompts_left_out."
"""In `Outcome.environment`, this and a split: how many of its prompts were too long, `2 of 128`."""

Report = Callable[[Measurement, Path | None], None]
"""How `train()` speaks: a measurement, and the checkpoint folder if one was just written."""


@dataclass(frozen=True)
class Replicate:
    """One configuration that is to be trained again with a fresh seed."""

    of: int
    """Number of the trial that first had these parameters."""
    params: Params


@dataclass(frozen=True)
class TrialRecord:
    """One trial as the ledger has it."""

    number: int
    role: Role
    state: State
    params: Params
    """Complete, as in `TrialConfig.params`."""
    seed: int
    proposer: Proposer
    replicate_of: int | None = None
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    test: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    feasible: bool | None = None
    """Whether every constraint holds on validation; None until measured."""
    cost: Cost = field(default_factory=Cost)
    reason: str = ""
    """Why a failed or pruned trial ended."""
    directory: Path | None = None
    checkpoint: Path | None = None
    started: float | None = None
    """Unix time in seconds."""
    finished: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


# Events: what tuning tells its listeners (tracking, display). A listener never blocks it.


@dataclass(frozen=True)
class SweepStarted:
    """The driver is up; `records` are what the ledger already holds."""

    records: tuple[TrialRecord, ...]
    planned: int
    """Trials that will exist at the end, replicates and baselines included, as far as known."""
    moved_aside: Path | None = None
    """Where an earlier sweep of this name was moved to, if one was."""


@dataclass(frozen=True)
class TrialStarted:
    """A trial began, or went on after an interruption."""

    record: TrialRecord


@dataclass(frozen=True)
class TrialProgress:
    """A running trial reported."""

    number: int
    measurement: Measurement


@dataclass(frozen=True)
class TrialFinished:
    """A trial is complete, pruned or failed; `record.state` says which."""

    record: TrialRecord


@dataclass(frozen=True)
class SweepFinished:
    """No trial is left to run, or the user stopped the sweep."""

    records: tuple[TrialRecord, ...]
    interrupted: bool


Event = SweepStarted | TrialStarted | TrialProgress | TrialFinished | SweepFinished
Listener = Callable[[Event], None]
