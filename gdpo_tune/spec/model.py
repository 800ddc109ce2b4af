"""The YAML of a sweep as one tree of frozen models. `load.load_spec` reads one from a file."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from gdpo_tune.core import registry
from gdpo_tune.core.engines import ADAPTER_RANKS
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.files import expand_path
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.object_store import RUNS, find_local_copy, is_url, join_address
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    Section,
    Sharding,
    StartSettings,
    TrainingSettings,
    build_refusal,
)
from gdpo_tune.core.task_info import STRICT, Scoring
from gdpo_tune.core.text import format_count, join_names, show, suggest
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Direction, Estimate, Objective, Params, ParamValue, TrialRecord
from gdpo_tune.core.trl_fields import TRL_FIELDS
from gdpo_tune.spec.document import PROJECT, dump_yaml
from gdpo_tune.spec.sections import require_pattern
from gdpo_tune.spec.space import Fixed, Space, convert_to_notation

LEAST_RESOURCE = 0.0001
"""Smallest share of a resource that Ray can count."""
LARGEST_VALUE = 1e30
"""Largest size of a reference: products over objectives stay within the range of a float."""
MERGES_PER_TRAINING = 5
"""Most merges for each training that has ended: a small sweep has few parents."""
MERGED = 0.08
"""Completions of evaluating merges on validation prompts for each one in training, under
`halving`."""
FULL_TRAININGS = 5
"""Trainings of full length that a budget pays for, where `training.steps` is not given: four that
train on after the wide rung, and that rung, which costs about as much as one."""
MORE_TRIALS, MORE = 8, 2
"""Further trials, and factor of a budget, that are proposed to extend a sweep."""
AUTO_REPLICATES = 4
"""Most replicates under `halving`: a fresh seed of each long training but one."""
CONSTRAINT = re.compile(
    r"\s*(?P<op>>=|<=)\s*(?P<baseline>[a-z]+)?"
    r"\s*(?P<number>[-+]?\s*(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)?\s*"
)
TRACKING_VARIABLES = {"uri": "MLFLOW_TRACKING_URI", "experiment": "MLFLOW_EXPERIMENT_NAME"}
"""Key of `tracking` -> variable of MLflow that stands in where a file does not have the key."""
Baseline = Literal["start", "untrained", "published"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Roles of the first trials of every sweep, in order; `start` only where a file has `start:`."""
SweepOccasion = Literal["finished", "failed", "interrupted", "trial_failed"]
EVERY_SWEEP_OCCASION: tuple[SweepOccasion, ...] = get_args(SweepOccasion)
Text = Annotated[str, require_pattern(r"(?s).*\S.*", "empty", "write a word, or remove the key")]
TrackingUri = Annotated[
    str,
    MinLen(1),
    require_pattern(
        r"(sqlite(\+\w+)?:///|(https?|(postgresql|mysql|mssql)(\+\w+)?)://).(?s:.*)"
        r"|databricks(://.*)?",
        "not the address of a tracking server or database",
        "write sqlite:///mlflow.db, http://HOST:PORT, or the URL of a database",
    ),
]
EnvironmentName = Annotated[
    str,
    require_pattern(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "not the name of an environment variable",
        "write the name alone, such as GDPO_WEBHOOK, and keep the value out of the file",
    ),
]

OWN_SETTINGS = ("halving",)
"""Schedulers with more settings than their name."""
if TYPE_CHECKING:
    PlainScheduler = Literal["fifo"]
    TrackerName = Literal["tensorboard", "trackio", "wandb"]
else:  # also those that a line of the registry adds
    PlainScheduler = Literal[tuple(n for n in registry.SCHEDULERS if n not in OWN_SETTINGS)]
    TrackerName = Literal[tuple(registry.TRACKERS)]


class FifoSettings(Section):
    """First in, first out: `search.trials` configurations train for `training.steps` each."""

    type: PlainScheduler = "fifo"
    """One of the schedulers below."""


class HalvingSettings(Section):
    """Divides `search.budget`: many configurations to a short first rung, then few of them long.

    `search.trials`, if it is written, is the number of the many.
    """

    type: Literal["halving"] = "halving"
    """One of the schedulers below."""
    wide_share: Annotated[float, Gt(0), Lt(1)] = 0.25
    """Share of the budget that the first rungs of all configurations may cost together."""


SchedulerSettings = FifoSettings | HalvingSettings


class Replicates(Section):
    """Trainings of front configurations with fresh seeds, which confirm the front."""

    per_point: Annotated[int, Ge(0), Le(10**6)] = 2
    """Fresh seeds for each front configuration, besides the first run."""
    max_runs: Annotated[int, Ge(0), Le(10**6)] = 8
    """Most replicate trainings in all; 0 leaves every front point provisional. Under `halving` by
    default 4, for which the budget is reserved."""

    @property
    def max_trainings(self) -> int:
        """Most replicate trainings, if the front is large."""
        return self.max_runs if self.per_point else 0


class Merges(Section):
    """Weighted means of the weights of trained policies, which all begin as one policy.

    A merge costs an evaluation instead of a training. Off under `keep: none`.
    """

    budget: Annotated[int, Ge(0), Le(10**6)] = 40
    """Most merges that are evaluated, spread over the sweep as its trainings end, and at most five
    for each training; 0: none. Under `halving` the most that are evaluated on test prompts."""
    most_parts: Annotated[int, Ge(2), Le(16)] = 3
    """Most policies of one merge."""


class Checkpoints(Section):
    """Policies from before the end of a trial, at steps at which it was evaluated.

    Off under `keep: none`.
    """

    budget: Annotated[int, Ge(0), Le(10**6)] = 4
    """Most checkpoints that are evaluated on test prompts: those that no other policy dominates on
    validation prompts; 0: none, and only the ends of trials count."""


class Budget(Section):
    """Limits of a sweep. Once it reaches one, no trial starts; running trials end normally."""

    trials: Annotated[int, Ge(0), Le(10**9)] = 0
    """Trainings, baselines and replicates included; 0: no limit, as for all of these. Merges and
    checkpoints have budgets of their own."""
    completions: Annotated[int, Ge(0), Le(10**15)] = 0
    """Completions sampled in training, over all trials."""
    gpu_hours: Annotated[float, Ge(0)] = 0.0
    """Hours of training times the GPUs of a trial, over all trials."""
    hours: Annotated[float, Ge(0)] = 0.0
    """Hours in which the sweep worked: without interruptions, and without a stopped process, a
    sleeping machine or a clock that was set. After them no trial starts; those that run go on to
    the step at which they would wait, and are evaluated. Where `completions` is there too, it
    decides how many configurations there are and how long they train."""


class Constraint(Section):
    """A bound on a held-out metric: trials that break it are never on the front.

    A bound may refer to a baseline: `>= untrained - 0.02`. Until the baseline has a value on
    validation prompts, every value meets it.
    """

    op: Literal[">=", "<="]
    """Allowed side of the limit."""
    bound: float
    """The limit, itself allowed; with a baseline, its difference to the baseline's value."""
    baseline: Baseline | None = None
    value: float | None = None
    """Value of the baseline, once it was measured."""

    @property
    def is_known(self) -> bool:
        """True if the limit is a number by now."""
        return self.baseline is None or self.value is not None

    @property
    def limit(self) -> float:
        """The limit as a number; one that every value meets while it is not known."""
        if not self.is_known:
            return -LARGEST_VALUE if self.op == ">=" else LARGEST_VALUE
        return self.bound + (self.value or 0.0)

    @property
    def text(self) -> str:
        """The constraint as a file has it."""
        if self.baseline is None:
            return f"{self.op} {show(self.bound)}"
        sign = "-" if self.bound < 0 else "+"
        return f"{self.op} {self.baseline}" + (
            f" {sign} {show(abs(self.bound))}" if self.bound else ""
        )

    def holds(self, value: float) -> bool:
        """Return whether `value` respects the limit; NaN does not."""
        return value >= self.limit if self.op == ">=" else value <= self.limit

    def compute_violation(self, value: float) -> float:
        """Return how far a value is beyond the limit; 0 or less, as in Optuna, if it holds."""
        if not self.is_known:
            return 0.0
        return self.limit - value if self.op == ">=" else value - self.limit

    def __str__(self) -> str:
        known = self.baseline is not None and self.is_known
        return self.text + (f" ({self.limit:.3g})" if known else "")


def read_constraint(data: object) -> Constraint:
    """Return a constraint, which a file has as a text such as `>= 0.2` or `>= untrained - 0.02`."""
    if isinstance(data, Constraint):
        return data
    match = CONSTRAINT.fullmatch(data) if isinstance(data, str) else None
    number = float((match["number"] or "0").replace(" ", "")) if match else math.inf
    baseline = match["baseline"] if match else None
    if match is None or not math.isfinite(number) or not (baseline or match["number"]):
        fix = 'write ">= 0.2", "<= 0.2" or ">= untrained - 0.02", with the quotes'
        raise build_refusal("not a bound", fix)
    if baseline not in (None, *BASELINES):
        fix = f"{suggest(baseline, BASELINES)}write one of {join_names(BASELINES)}"
        raise build_refusal(f"{baseline} is no baseline of a sweep", fix)
    if baseline and match["number"] and match["number"][0] not in "+-":
        raise build_refusal("not a bound", f'write "{match["op"]} {baseline} - 0.02"')
    return Constraint.model_validate({"op": match["op"], "bound": number, "baseline": baseline})


class Search(Section):
    """Search of the space, and its limits. May change and extend a finished sweep."""

    trials: Annotated[int, Ge(0), Le(10**6)] = 16
    """Configurations to train, without baselines and replicates. Under `halving` the number that
    begins, where 0, the default, lets the budget decide."""
    sampler: str = "auto"
    """One of the samplers below."""
    scheduler: Annotated[SchedulerSettings, Field(discriminator="type")] = FifoSettings()
    """Rule that decides how long each trial trains. Default: `halving` for a budget in completions
    or hours without `trials`."""
    replicates: Replicates = Replicates()
    """Repeated training of the front, to confirm it."""
    merges: Merges = Merges()
    """Merges of trained policies."""
    checkpoints: Checkpoints = Checkpoints()
    """Checkpoints as candidates of the front."""
    budget: Budget = Budget()
    """Limits on the cost of the sweep."""
    patience: Annotated[int, Ge(0), Le(10**6)] = 0
    """Stop proposing once this many consecutive trials did not improve the validation hypervolume
    by more than 1 % and its noise; 0: never stop for that."""
    target: dict[str, Annotated[Constraint, BeforeValidator(read_constraint)]] = {}
    """Metric -> limit, such as `{correctness: ">= 0.6", length: ">= 0.8"}`: a training that meets
    all on validation prompts where it waits is tested, and the search stops once a policy meets
    them there and on test prompts."""
    warm_start: tuple[str, ...] = ()
    """Directories of earlier sweeps over this task and these objectives, such as `runs/code`, and
    CSV tables of trainings elsewhere, with columns for searched parameters and metrics: the sampler
    learns from them, and none is on this sweep's front. Refused with `random` and `qmc`, which do
    not learn."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seed of the sampler; the seeds of trials follow from it."""

    @property
    def is_divided(self) -> bool:
        """True if the scheduler divides a budget: it decides how many trials train, how long."""
        return self.scheduler.type == "halving"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_scheduler(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not divides_budget(data):
            return data
        settings = {"scheduler": {"type": "halving"}, "trials": 0, **data}
        replicates = settings.get("replicates", {})
        if isinstance(replicates, Mapping):
            settings["replicates"] = {"max_runs": AUTO_REPLICATES, **replicates}
        return settings


def _count_replicates(search: Mapping[str, Any]) -> int:
    """Return the most replicate trainings of a file with a divided budget; 0 if it is invalid."""
    written = search.get("replicates", {})
    try:
        return Replicates(**{"max_runs": AUTO_REPLICATES, **written}).max_trainings
    except (TypeError, ValidationError):
        return 0


def divides_budget(search: Mapping[str, Any]) -> bool:
    """Return whether the scheduler of a file's `search` is `halving`, written or by default."""
    scheduler, budget = search.get("scheduler"), search.get("budget")
    if scheduler is not None:
        kind = scheduler.get("type") if isinstance(scheduler, Mapping) else scheduler
        return kind == "halving" or isinstance(kind, HalvingSettings)
    is_limited = isinstance(budget, Mapping) and any(
        budget.get(name) for name in ("completions", "gpu_hours", "hours")
    )
    return is_limited and not search.get("trials")


def read_variables(data: Any) -> Any:
    """Return entries of `resources.env` from a list, or from a mapping of names to values."""
    if isinstance(data, str):
        raise build_refusal("not a list", f"write it in brackets: [{data.partition('=')[0]}]")
    if not isinstance(data, Mapping):
        return data
    wrong = [name for name, value in data.items() if not isinstance(value, str)]
    if wrong:
        reason = f"the value of {join_names(wrong)} is no text"
        raise build_refusal(reason, 'write one value a name, and quote it: {NCCL_DEBUG: "INFO"}')
    return tuple(f"{name}={value}" for name, value in data.items())


class Resources(Section):
    """Resources of one process of a trial. As many trials as fit run in parallel."""

    cpus: Annotated[float, Ge(LEAST_RESOURCE), Le(100_000)] = 1.0
    """CPU cores; also the threads of torch, rounded down to at least 1."""
    gpus: Annotated[float, Ge(0), Le(100_000)] = 0.0
    """GPUs: 1, a fraction below 1 to share one, or 0. A training process computes on one GPU."""
    workers: Annotated[int, Ge(1)] = 1
    """Training processes of a trial, each with these `cpus` and `gpus`."""
    sharding: Sharding = "auto"
    """`full` divides weights, gradients and the optimizer's moments among the workers of a trial
    (FSDP2). `none` gives each worker all of them. `auto` is `full` for several workers."""
    env: Annotated[tuple[str, ...], BeforeValidator(read_variables)] = ()
    """Environment variables of every training process, on every node: `[HF_TOKEN, NCCL_DEBUG=INFO]`
    or `{NCCL_DEBUG: INFO}`. A name alone takes the value that the command has; a secret must be
    given so, because what is written here is stored and shown."""

    @property
    def shards_policy(self) -> bool:
        """True if the workers of a trial share one copy of its policy."""
        return self.workers > 1 and self.sharding != "none"

    @property
    def share_text(self) -> str:
        """CPUs and GPUs of one process in words: `1 CPU and 0.5 GPUs`."""
        return f"{format_count(self.cpus, 'CPU')} and {format_count(self.gpus, 'GPU')}"

    @property
    def total_gpus(self) -> float:
        """GPUs of a trial, over its workers."""
        return self.gpus * self.workers

    def reduce_workers(self, most: int) -> int:
        """Return the most workers, from 1 to `most`, that can share what these ones can."""
        fewer = range(min(most, self.workers), 1, -1)
        return next((count for count in fewer if self.workers % count == 0), 1)

    @property
    def written_variables(self) -> dict[str, str]:
        """Environment variables whose values the file has."""
        parted = (entry.partition("=") for entry in self.env)
        return {name: value for name, sign, value in parted if sign}

    def collect_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of a trial; those that are only named come from `environment`.

        One that is named and not set raises a `ResourcesError`.
        """
        names = [entry for entry in self.env if "=" not in entry]
        missing = [name for name in names if name not in environment]
        if missing:
            raise ResourcesError(
                f"resources.env = {show(names)}: not set here: {join_names(missing)}\n"
                f"    fix: export {missing[0]}=..., or remove the name from the file"
            )
        return {name: environment[name] for name in names} | self.written_variables


class Tracking(Section):
    """MLflow server and experiment that show the sweep, and other trackers that do."""

    uri: TrackingUri = "sqlite:///mlflow.db"
    """MLflow tracking URI; without the key, `MLFLOW_TRACKING_URI` comes before the default."""
    experiment: str = ""
    """MLflow experiment; default: `MLFLOW_EXPERIMENT_NAME`, or the sweep's name."""
    required: bool = False
    """True to stop if MLflow takes no test run; else warn, and keep everything to send later."""
    private: bool = False
    """True to send no free text, path, host or user."""
    report_to: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()
    """Trackers that get each ended trial, and the front at the end, through their own packages: the
    `experiment` is the project, and the sweep's name the group. They stop nothing."""

    @cached_property
    def origins(self) -> dict[str, str]:
        """Key -> its file and line, option or variable; a default has none. No part of equality."""
        return {}


class WebhookSettings(Section):
    """Webhook that gets a JSON object by POST."""

    webhook_env: EnvironmentName
    """Environment variable with the address that gets a JSON object by POST."""


class SweepNotify(WebhookSettings):
    """Webhook that is notified when the sweep ends, and when its first trial fails."""

    on: Annotated[tuple[SweepOccasion, ...], Field(strict=False), MinLen(1)] = EVERY_SWEEP_OCCASION
    """Occasions for a notification: `finished`; `failed`, by an error or because nothing is on the
    front; `interrupted`, which the same command resumes; `trial_failed`, the first since a start.
    """


class ObjectiveSpec(Section):
    """A held-out, unweighted metric that the search optimises."""

    direction: Direction
    """Direction of improvement."""
    reference: Annotated[float, Ge(-LARGEST_VALUE), Le(LARGEST_VALUE)]
    """The worst value of interest: the hypervolume's reference point, the same for every sweep."""


class SweepSpec(Section):
    """One sweep: its task, objectives, search space, budget and storage."""

    other_keys: ClassVar = ("extends",)

    name: str
    """Name of the sweep: letters, digits, `.`, `_`, `-`. Another sweep needs another name."""
    task: str
    """One of the tasks below, or a class of your own: `path/to/file.py:MyTask`."""
    policy: Text = ""
    """The policy that ships for the task, a Hub id, or a directory."""
    scoring: Scoring = STRICT
    """How completions are scored, in training and held out: `strict` as this package describes the
    rewards, `released` as the authors' code does, for a task that offers it."""
    objectives: dict[str, ObjectiveSpec] = {}
    """Metric -> direction and reference."""
    constraints: dict[str, Annotated[Constraint, BeforeValidator(read_constraint)]] = {}
    """Metric -> bound on validation prompts, such as `">= 0.2"`. A bound may refer to the untrained
    policy, the supervised start or the published setting: `">= untrained"`, `">= start - 0.02"`."""
    space: Space
    """Parameter -> domain."""
    enqueue: tuple[dict[str, ParamValue], ...] = ()
    """Points of the space to try first; a missing parameter gets a quasi-random value. The word
    `published` stands for those that the method's paper compares, besides the baseline."""
    keep: Literal["front", "all", "none"] = "front"
    """Trials whose checkpoints stay at the end: the front (if empty, all), all, or none. A sweep
    that is extended later merges these alone."""
    training: TrainingSettings = TrainingSettings()
    """Settings that all trials share."""
    start: StartSettings | None = None
    """Supervised training before all trials, for a policy that earns nothing at first."""
    sandbox: SandboxSettings = SandboxSettings()
    """Isolation and limits of the code that the policy writes."""
    data: DataSettings = DataSettings()
    """Source of the prompts."""
    model: ModelSettings = ModelSettings()
    """Loading and training of the policy."""
    rollout: RolloutSettings = RolloutSettings()
    """Engine that samples completions during training."""
    search: Search = Search()
    """Sampler, scheduler and budget of the search."""
    resources: Resources = Resources()
    """CPUs, GPUs and workers of one trial."""
    tracking: Tracking = Tracking()
    """MLflow server and experiment that show the sweep."""
    notify: SweepNotify | None = None
    """Webhook that is notified when the sweep ends, and when its first trial fails."""
    storage: Annotated[
        Text, AfterValidator(lambda text: text if is_url(text) else str(expand_path(text)))
    ] = RUNS
    """Directory of all sweeps, or address of an object store such as `s3://bucket/sweeps`; this
    sweep is in `<storage>/<name>`."""
    _written: dict[str, str] = PrivateAttr(default_factory=dict[str, str])
    """Path that `resolve_paths` has changed -> the text of the file, see `set_written`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_length(cls, data: Any) -> Any:
        """Fill in the bound of a training's length, which follows from a budget to divide."""
        search = data.get("search") if isinstance(data, Mapping) else None
        if not isinstance(search, Mapping) or not divides_budget(search):
            return data
        training, budget = data.get("training") or {}, search.get("budget") or {}
        if not isinstance(training, Mapping) or not isinstance(budget, Mapping):
            return data
        settings = dict(training)
        each = settings.get("completions_per_step", TrainingSettings().completions_per_step)
        limit, count = budget.get("completions"), FULL_TRAININGS + _count_replicates(search)
        if isinstance(limit, int) and isinstance(each, int) and limit > 0 and each > 0:
            settings.setdefault("steps", max(1, limit // (count * each)))
        if isinstance(settings.get("steps"), int):  # trainings are measured where they wait
            settings.setdefault("evaluate_every", settings["steps"])
        return {**data, "training": settings}

    def __hash__(self) -> int:  # quick: the plan looks up what it drew from a sweep again and again
        return hash((self.storage, self.name))

    @property
    def directory(self) -> Path:
        """Local directory of this sweep; on an object store, of a copy of its small files."""
        storage = find_local_copy(self.storage) if is_url(self.storage) else Path(self.storage)
        return storage / self.name

    @property
    def address(self) -> str:
        """Address of this sweep on an object store; empty for a sweep in a directory."""
        return join_address(self.storage, self.name) if is_url(self.storage) else ""

    @property
    def location(self) -> str:
        """Directory or address of this sweep, for messages."""
        return self.address or str(self.directory)

    @property
    def output_directory(self) -> Path:
        """Directory for files that commands create from trials of this sweep."""
        return Path(RUNS) if self.address else Path(self.storage)

    def list_objectives(self) -> tuple[Objective, ...]:
        """Return the objectives in the file's order."""
        return tuple(
            Objective(name, objective.direction, objective.reference)
            for name, objective in self.objectives.items()
        )

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """Metrics that objectives, constraints and a target name."""
        names = [*self.objectives, *self.constraints, *self.search.target]
        return tuple(dict.fromkeys(names))

    def meets_constraints(self, means: Mapping[str, float]) -> bool:
        """Return whether metrics meet every constraint; one that was not measured meets none."""
        return all(n in means and bound.holds(means[n]) for n, bound in self.constraints.items())

    def meets_target(self, estimates: Mapping[str, Estimate]) -> bool:
        """Return whether measured metrics meet `search.target`; no, if there is none."""
        target = self.search.target
        return bool(target) and all(
            name in estimates and limit.holds(estimates[name].mean)
            for name, limit in target.items()
        )

    def resolve_constraints(self, records: Iterable[TrialRecord]) -> SweepSpec:
        """Return a spec whose bounds have the values of the baselines among the records."""
        if all(constraint.baseline is None for constraint in self.constraints.values()):
            return self
        measured = {r.role: r.validation for r in records if r.state == "complete"}
        resolved = {
            name: constraint.model_copy(update={"value": measured[constraint.baseline][name].mean})
            if constraint.baseline in measured and name in measured[constraint.baseline]
            else constraint
            for name, constraint in self.constraints.items()
        }
        return self.model_copy(update={"constraints": resolved})

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Roles of the first trials, in order."""
        return tuple(role for role in BASELINES if role != "start" or self.start is not None)

    @property
    def has_candidates(self) -> bool:
        """True if merges and checkpoints may join the front.

        They are policies of trials, which have to be kept. Their own cost is that of an evaluation,
        so they do not join a front on which costs are judged.
        """
        return self.keep != "none" and not COST_METRICS.keys() & {*self.required_metrics}

    @property
    def search_completions(self) -> int:
        """Completions in training that a budget leaves beside replicates; 0: it has no limit.

        Each replicate may train as long as the longest training.
        """
        longest = self.training.steps * self.training.completions_per_step
        limit = self.search.budget.completions
        return max(1, limit - self.search.replicates.max_trainings * longest) if limit else 0

    @property
    def extension(self) -> str:
        """An override that extends a finished sweep, as text for `--set`."""
        search, budget = self.search, self.search.budget
        if not search.is_divided:
            return f"search.trials={search.trials + MORE_TRIALS}"
        if budget.completions:
            return f"search.budget.completions={MORE * budget.completions}"
        name = "gpu_hours" if budget.gpu_hours else "hours"
        return f"search.budget.{name}={MORE * getattr(budget, name):g}"

    @property
    def most_merges(self) -> int:
        """Most merges that are evaluated on validation prompts."""
        search, most = self.search, self.search.merges.budget
        if not search.is_divided:
            return min(most, MERGES_PER_TRAINING * search.trials)
        return self.count_merges(self.search_completions) if self.search_completions else most

    def count_merges(self, completions: int) -> int:
        """Return how many merges `halving` evaluates after so many completions in training.

        Those that join the front are as many as `search.merges.budget` at most.
        """
        affordable = int(MERGED * completions / self.training.validation_completions)
        return affordable if self.search.merges.budget else 0

    def build_trial_config(self, params: Params, seed: int, directory: Path) -> TrialConfig:
        """Return the input of `train()` for one trial, in a directory of its own."""
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
            engine_rank=self.engine_rank,
            gpu_share=min(1.0, self.resources.gpus) or 1.0,
            needs_gpu=self.resources.gpus > 0,
            sharded=self.resources.shards_policy,
            scoring=self.scoring,
            required_metrics=self.required_metrics,
        )

    @property
    def engine_rank(self) -> int:
        """Rank of the largest adapter for which vLLM makes room: of a merge of most parts, if any.

        A merge above the largest rank of vLLM is sampled without it.
        """
        rank, merges = self.model.lora_rank, self.search.merges
        parts = merges.most_parts if self.has_candidates and merges.budget else 1
        return max(rank, min(rank * parts, ADAPTER_RANKS[-1]))

    def count_steps(self, record: TrialRecord) -> int:
        """Return the most steps that a trial trains; 0 for one that only evaluates."""
        if record.role == "start" and self.start is not None:
            return self.start.steps
        return self.training.steps if record.is_training else 0

    def build_start_config(self, params: Params, seed: int, directory: Path) -> TrialConfig:
        """Return the input of `train()` for the supervised start; `params` only build the task."""
        config, own = self.build_trial_config(params, seed, directory), self.start
        assert own is not None, "the file has a section start:"
        changes = {"steps": own.steps, "completions_per_step": own.completions_per_step}
        training = self.training.replace(**changes, mini_batch_size=0, dead_steps=0)
        return replace(config, supervised=own, training=training)

    def compute_identity(self) -> str:
        """Return a short hash of all settings that decide the result of a trial.

        Order and notation of the file do not count, nor do budgets, resources, constraints,
        tracking, `notify`, the name, and what is marked as `INDIFFERENT`.
        """
        decisive = list_decisive_values(self)
        if self.search.is_divided:  # a bound, which moves with the budget
            del decisive["training.steps"], decisive["training.evaluate_every"]
        text = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def restore_written(self, value: Any) -> Any:
        """Return a value of JSON with paths as the sweep's file has them."""
        if isinstance(value, Mapping):
            return {key: self.restore_written(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.restore_written(child) for child in value]
        return self._written.get(value, value) if isinstance(value, str) else value

    def set_written(self, written: dict[str, str]) -> None:
        """Note the paths that differ from the file, as `resolve_paths` returns them."""
        self._written = written

    def dump_stored_yaml(self) -> str:
        """Return the file that the sweep's directory keeps: `dump_yaml`, and where its paths begin.

        Such a file may hold a password.
        """
        project = next((path for path, text in self._written.items() if text == "."), Path.cwd())
        return self.dump_yaml() + dump_yaml({PROJECT: str(project)})

    def dump_yaml(self) -> str:
        """Return the resolved file, every default written out; loading it gives an equal spec."""
        plain = self.restore_written(self.model_dump(mode="json"))
        for name in ("notify", "start"):  # a key without a value is refused
            if plain[name] is None:
                del plain[name]
        if self.tracking.origins.get("uri") == TRACKING_VARIABLES["uri"]:
            plain["tracking"]["uri"] = redact_passwords(self.tracking.uri)  # no file may have it
        plain["constraints"] = {name: limit.text for name, limit in self.constraints.items()}
        plain["search"]["target"] = {n: limit.text for n, limit in self.search.target.items()}
        # `reward_weights` and its like stay together, because a key may be written only once.
        grouped = sorted(self.space.domains.items(), key=lambda item: item[0].rpartition(".")[0])
        plain["space"] = {name: convert_to_notation(domain) for name, domain in grouped}
        plain["enqueue"] = self.enqueue
        return dump_yaml(plain)


def dump_public_yaml(spec: SweepSpec, *, stored: bool = False) -> str:
    """Return the file of `dump_yaml`, or with `stored` of `dump_stored_yaml`, without secrets."""
    tracking = spec.tracking.replace(uri=redact_passwords(spec.tracking.uri))
    public = spec.replace(tracking=tracking)
    return public.dump_stored_yaml() if stored else public.dump_yaml()


def list_decisive_values(spec: SweepSpec) -> dict[str, Any]:
    """Return the settings that decide the result of a trial: dotted key -> value as in a file."""
    names = ("training", "sandbox", "data", "model", "rollout")
    sections: dict[str, dict[str, Any]] = {
        "objectives": {name: goal.model_dump() for name, goal in spec.objectives.items()},
        "space": {
            name: convert_to_notation(domain)
            for name, domain in spec.space.domains.items()
            if name not in TRL_FIELDS or domain != Fixed(value=TRL_FIELDS[name].default)
        },
        **{name: getattr(spec, name).list_decisive() for name in names},
        "start": spec.start.list_decisive() if spec.start else {},
    }
    flat = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.items()}
    named = {"task": spec.task, "policy": spec.policy, "scoring": spec.scoring, **flat}
    return {key: spec.restore_written(value) for key, value in named.items()}


_UNSET = "unset"


def list_differences(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for each key whose values differ, with both values."""
    return [
        f"{key} = {show(earlier.get(key, _UNSET))}, not {show(current.get(key, _UNSET))}"
        for key in dict.fromkeys([*current, *earlier])
        if earlier.get(key) != current.get(key)
    ]
