"""What a sweep file says, complete and frozen. `load.load_spec` is the way from YAML to here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field

from gdpo_tune.core.object_store import is_url, joined, local_folder
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    TrainingSettings,
)
from gdpo_tune.core.trials import Direction, Objective, Params, ParamValue, TrialConfig
from gdpo_tune.spec.base import Finite, Section
from gdpo_tune.spec.problems import show
from gdpo_tune.spec.schedulers import AshaSettings, SchedulerSettings
from gdpo_tune.spec.space import Space

RUNS = "runs"
"""Where sweeps are kept if their files do not say otherwise."""
SPEC = "spec.yaml"
"""In a sweep's folder: its resolved file."""
JOURNAL = "ledger.journal"
"""In a sweep's folder, unless it has a `ledger:`: its trials."""
FARTHEST = 1e30
"""Beyond this, products over objectives would leave what a float can hold."""
Keep = Literal["front", "all", "none"]


class ObjectiveSpec(Section):
    """A held-out, unweighted metric that the search optimises."""

    direction: Direction
    """Which way is better."""
    reference: Annotated[Finite, Ge(-FARTHEST), Le(FARTHEST)]
    """The worst value of interest: the hypervolume's reference point, the same for every sweep."""


class Constraint(Section):
    """A bound on a held-out metric: trials that break it are never on the front."""

    op: Literal[">=", "<="]
    """Which side is allowed."""
    bound: Finite
    """The limit, itself allowed."""

    def holds(self, value: float) -> bool:
        """Whether `value` respects the bound; NaN does not."""
        return value >= self.bound if self.op == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.op} {show(self.bound)}"


class Replicates(Section):
    """How front configurations are trained again with fresh seeds before the front is claimed."""

    per_point: Annotated[int, Ge(0), Le(10**6)] = 2
    """Fresh seeds for each front configuration, besides the first run."""
    max_runs: Annotated[int, Ge(0), Le(10**6)] = 8
    """Most replicate trainings in all; 0 leaves every front point provisional."""

    @property
    def most(self) -> int:
        """Replicate trainings that there may be, if the front is large."""
        return self.max_runs if self.per_point else 0


class Budget(Section):
    """What a sweep may spend. Once any of it is spent no trial starts; others run to their end."""

    trials: Annotated[int, Ge(0), Le(10**9)] = 0
    """Trials of any kind, baselines and replicates included; 0: no limit, as for all of these."""
    completions: Annotated[int, Ge(0), Le(10**15)] = 0
    """Completions sampled in training, over all trials."""
    gpu_hours: Annotated[float, Ge(0), Field(allow_inf_nan=False)] = 0.0
    """Hours of training times the GPUs of a trial, over all trials."""
    hours: Annotated[float, Ge(0), Field(allow_inf_nan=False)] = 0.0
    """Hours in which the sweep ran, interruptions aside."""


class Search(Section):
    """How the space is searched, and for how long. May change and extend a finished sweep."""

    trials: Annotated[int, Ge(1), Le(10**6)] = 16
    """Configurations to train, baselines and replicates aside."""
    sampler: str = "auto"
    """One of the samplers below."""
    scheduler: Annotated[SchedulerSettings, Field(discriminator="type")] = AshaSettings()
    """What stops a trial before its end."""
    replicates: Replicates = Replicates()
    """How the front is trained again before it is claimed."""
    budget: Budget = Budget()
    """What the sweep may spend."""
    patience: Annotated[int, Ge(0), Le(10**6)] = 0
    """Propose nothing more once so many trials in a row did not move the validation hypervolume
    by more than 1 % and its noise; 0: never stop for that."""
    warm_start: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Folders of earlier sweeps over this task and these objectives, such as `runs/code`: the
    sampler learns from their trials, which are never on this sweep's front. Refused where nothing
    learns: with `random`, `qmc` and a population."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of the sampler; the seeds of trials follow from it."""


LEAST_RESOURCE = 0.0001
"""What Ray can tell from nothing."""


class Resources(Section):
    """What one worker of a trial occupies. As many trials run side by side as fit."""

    cpus: Annotated[float, Ge(LEAST_RESOURCE), Le(100_000), Field(allow_inf_nan=False)] = 1.0
    """CPU cores; also the threads of torch, rounded down to at least 1."""
    gpus: Annotated[float, Ge(0), Le(100_000), Field(allow_inf_nan=False)] = 0.0
    """GPUs: a fraction below 1 shares one, above 1 a whole number."""
    workers: Annotated[int, Ge(1)] = 1
    """Training processes of a trial, each with these `cpus` and `gpus`."""

    @property
    def in_all(self) -> float:
        """GPUs of a trial, over its workers."""
        return self.gpus * self.workers


TRACKING_URI = (
    r"^(sqlite(\+\w+)?:///|(https?|(postgresql|mysql|mssql)(\+\w+)?)://).|^databricks(://.*)?$"
)


class Tracking(Section):
    """Where MLflow shows the sweep."""

    uri: Annotated[str, Field(min_length=1, pattern=TRACKING_URI)] = "sqlite:///mlflow.db"
    """MLflow tracking URI."""
    experiment: str = ""
    """MLflow experiment; default: the sweep's name."""
    required: bool = False
    """Whether a server that does not answer is an error, not a warning with everything kept."""


class SweepSpec(BaseModel):
    """One sweep: what is searched, on what, for how long, and where it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of the sweep: letters, digits, `.`, `_`, `-`. Another sweep needs another name."""
    task: str
    """One of the tasks below, or a class of your own: `path/to/file.py:MyTask`."""
    policy: str
    """The policy that ships for the task, a Hub id, or a folder."""
    objectives: dict[str, ObjectiveSpec]
    """Metric -> direction and reference."""
    constraints: dict[str, Constraint] = {}
    """Metric -> bound, such as `">= 0.2"`."""
    space: Space
    """Parameter -> domain."""
    enqueue: tuple[dict[str, ParamValue], ...] = ()
    """Points of the space to try first; a parameter left out comes from the start-up. The word
    `published` stands for those that the method's paper compares, besides the baseline."""
    keep: Keep = "front"
    """Whose checkpoints stay at the end: the front's (all, if nothing is on it), all, or none."""
    training: TrainingSettings = TrainingSettings()
    """What every trial has in common."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where code that the policy wrote runs."""
    data: DataSettings = DataSettings()
    """Where prompts come from."""
    model: ModelSettings = ModelSettings()
    """How the policy is loaded and trained."""
    rollout: RolloutSettings = RolloutSettings()
    """What samples completions during training."""
    search: Search = Search()
    """How the space is searched, and for how long."""
    resources: Resources = Resources()
    """What one trial occupies."""
    tracking: Tracking = Tracking()
    """Where MLflow shows the sweep."""
    storage: str = RUNS
    """Folder of all sweeps, or address of an object store such as `s3://bucket/sweeps`, which needs
    `ledger`; this one lives in `<storage>/<name>`."""
    ledger: str = ""
    """Database of the record of all trials, `postgresql+psycopg2://USER@HOST/DATABASE`; default: a
    file in the sweep's folder. The password belongs into `PGPASSWORD` or `~/.pgpass`."""

    @property
    def directory(self) -> Path:
        """Where this sweep lives on this machine; of one on an object store that is a copy of what
        is small, and may be lost."""
        storage = local_folder(self.storage) if is_url(self.storage) else Path(self.storage)
        return storage / self.name

    @property
    def address(self) -> str:
        """Where this sweep lives on an object store; empty: it lives in its folder alone."""
        return joined(self.storage, self.name) if is_url(self.storage) else ""

    @property
    def place(self) -> str:
        """Where this sweep lives, for a person."""
        return self.address or str(self.directory)

    @property
    def beside(self) -> Path:
        """Folder for what a person makes of trials of this sweep."""
        return Path(RUNS) if self.address else Path(self.storage)

    def objective_list(self) -> tuple[Objective, ...]:
        """The objectives in the file's order."""
        return tuple(
            Objective(name, objective.direction, objective.reference)
            for name, objective in self.objectives.items()
        )

    @property
    def judged(self) -> tuple[str, ...]:
        """Metrics that objectives and constraints name."""
        return (
            *self.objectives,
            *(name for name in self.constraints if name not in self.objectives),
        )

    def trial_config(self, params: Params, seed: int, directory: Path) -> TrialConfig:
        """What `train()` is asked for one trial.

        Args:
            params: complete.
            seed: of the training.
            directory: the trial's own.
        """
        return TrialConfig(
            task=self.task,
            policy=self.policy,
            seed=seed,
            params=params,
            training=self.training,
            directory=directory,
            threads=max(1, int(self.resources.cpus)),
            sandbox=self.sandbox,
            data=self.data,
            model=self.model,
            rollout=self.rollout,
            gpu_share=min(1.0, self.resources.gpus) or 1.0,
        )

    def identity(self) -> str:
        """Short hash of what decides a trial's meaning: see `identity.identity`."""
        from gdpo_tune.spec.identity import identity

        return identity(self)

    def dump_yaml(self) -> str:
        """The resolved file, every default written out; loading it gives an equal spec."""
        from gdpo_tune.spec.dump import dump_yaml

        return dump_yaml(self)
