"""Types that every room shares: what a trial reports, its record, and candidates of a front.

Candidates are final policies of trainings, checkpoints of them, and merges of several policies. One
that nobody trained is made of parts: of one for a checkpoint, of several for a merge. Their names
are `7` (the final policy of trial 7), `7@40` (trial 7 after 40 steps) and `merge-27`, where 27 is
the number of the trial that evaluates the merge.

Importing this needs neither torch nor ray nor pydantic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

from gdpo_tune.core.errors import NO_SIGNAL

ParamValue = bool | int | float | str
Params = Mapping[str, ParamValue]
"""Parameter name as in the YAML, dotted (`reward_weights.format`) -> value."""
Direction = Literal["maximize", "minimize"]
Role = Literal["search", "replicate", "untrained", "start", "published", "checkpoint", "merge"]
"""Why a trial was run. `untrained`, `start` and `published` are the baselines of every front
figure; `published` is trained at full budget, so it may be on the front itself. `start` is trained
on demonstrations. A `checkpoint` or `merge` evaluates what other trials have trained."""
INITIAL: tuple[Role, ...] = ("untrained", "start")
"""Roles of the policies at which trainings may begin: no parameter of the space made them."""
State = Literal["running", "paused", "complete", "pruned", "failed"]
"""`paused`: it reached a rung, its process ended with a checkpoint, and it waits to go on."""
Proposer = Literal["model", "startup", "corner", "enqueued", "replicate", "baseline", "candidate"]
"""Source of a trial's parameters: the sampler's model, its start-up, or a rule. A `corner` of the
reward weights begins with the settings that the wide rung favours."""


@dataclass(frozen=True)
class Objective:
    """A held-out, unweighted metric that the search optimises."""

    name: str
    direction: Direction
    reference: float
    """Worst value of interest: the reference point of the hypervolume, fixed in the spec."""


Z_95 = 1.96
"""Standard errors that an interval at 95 % of a normal distribution reaches to each side."""


@dataclass(frozen=True)
class Estimate:
    """Mean of a held-out metric, its standard error and its interval at 95 %."""

    mean: float
    se: float
    low: float = math.nan
    high: float = math.nan
    """NaN: `Z_95` standard errors from the mean."""
    is_constant: bool = False
    """True if all completions have the same value, so that `se` follows from their number."""
    df: int = 0
    """Degrees of freedom of the spread between seeds that `se` includes; 0: it includes none."""

    def __post_init__(self) -> None:
        if math.isnan(self.low):
            object.__setattr__(self, "low", self.mean - Z_95 * self.se)
            object.__setattr__(self, "high", self.mean + Z_95 * self.se)


EVALUATED_WORK = 0.3
"""Time of a completion in an evaluation, as a share of that of one in training."""


@dataclass(frozen=True)
class Cost:
    """Cost of a trial so far, summed over the attempts that its result depends on.

    An attempt that died counts up to the checkpoint from which the next one continued.
    """

    completions: int = 0
    """Completions sampled in training."""
    seconds: float = 0.0
    """Wall time in `train()`."""
    cpu_seconds: float = 0.0
    evaluation_completions: int = 0
    """Completions sampled in evaluations, which `completions` does not count."""

    @property
    def work(self) -> float:
        """Completions in training, and those of evaluations for the share of time they take."""
        return self.completions + EVALUATED_WORK * self.evaluation_completions


def sum_costs(costs: Iterable[Cost]) -> Cost:
    """Return the costs of several trials together."""
    sums = [sum(values) for values in zip(*map(astuple, costs), strict=True)]
    return Cost(*sums) if sums else Cost()


@dataclass(frozen=True)
class Measurement:
    """A report of a running trial."""

    step: int
    metrics: Mapping[str, float]
    """`train/...` of this step; `validation/<metric>` where an evaluation took place."""
    cost: Cost
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """Estimates of the evaluation; empty if none took place."""
    time: float | None = field(default=None, compare=False)
    """Unix time in seconds; None: unknown."""

    @property
    def has_validation(self) -> bool:
        """True if an evaluation took place."""
        return bool(self.validation)


@dataclass(frozen=True)
class Rung:
    """Validation metrics of a trial after a part of its budget."""

    step: int
    validation: Mapping[str, Estimate]
    """A standard error of NaN is unknown."""
    cost: Cost
    recorded: float | None = field(default=None, compare=False)
    """Unix time in seconds; None: unknown."""

    @property
    def completions(self) -> int:
        """Completions sampled by then: the same for equal rungs of different trials."""
        return self.cost.completions


CHECKPOINT_PREFIX = "checkpoint-"
_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}(\d+)")


def parse_step(name: str) -> int | None:
    """Return the steps that the checkpoint in a directory of that name contains; None: no name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Outcome:
    """Result of a finished trial."""

    validation: Mapping[str, Estimate]
    test: Mapping[str, Estimate]
    cost: Cost
    checkpoint: Path | None
    """Directory of the trained policy; None for the untrained baseline."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Provenance seen from inside the trial, such as the sandbox's tier."""


PROMPTS_LEFT_OUT = "prompts_left_out."
"""Prefix of a split's key in `Outcome.environment`: how many prompts were too long, `2 of 128`."""

UNCHANGED = "unchanged"
"""Key of `Outcome.environment` for a training in which every gradient was 0."""
HALVED = "micro_batches"
"""Key of `Outcome.environment`: the limit of micro-batches, once memory had run out."""
DEVICE, VERSIONS = "device", "versions"
"""Keys of `Outcome.environment`: what the trial computed on, in which number format, with which
packages and driver. Nodes may differ."""
RUNNER = "vllm_runner"
"""Key of `Outcome.environment`: the model runner of the vLLM that has sampled, V1 or V2. They draw
from seeds in different ways; the version is among `VERSIONS`."""
DEMONSTRATIONS = "demonstrations"
"""Key of `Outcome.environment` of a supervised start: how many it had, and were left out."""
UNSHARED = "unshared_prompts"
"""Key of `Outcome.environment`: why each prompt was computed with every of its completions."""
WITHOUT_ENGINE = "without_engine"
"""Key of `Outcome.environment`: why vLLM has not sampled a merge, but the trainings."""

Report = Callable[[Measurement, Path | None], None]
"""Callback of `train()`: a measurement, and the checkpoint's directory if one was just written."""


@dataclass(frozen=True)
class Replicate:
    """A configuration to train again with a fresh seed."""

    original: int
    """Number of the trial that first had these parameters, or parts."""
    params: Params
    parts: tuple[Part, ...] = ()
    """Trained policies of a fresh seed of a checkpoint or a merge, which needs no training."""


class Provenance:
    """Role and parts of a policy: base of `TrialRecord` and of `Configuration`."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def is_training(self) -> bool:
        """True if it trains a policy with its parameters: neither initial nor made of parts."""
        return not self.is_initial and not self.parts

    @property
    def is_initial(self) -> bool:
        """True for a policy at which trainings may begin, which is on no front."""
        return self.role in INITIAL


@dataclass(frozen=True)
class TrialRecord(Provenance):
    """One trial as the ledger records it."""

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
    """True if every constraint is satisfied on validation; None until measured at full budget."""
    rungs: tuple[Rung, ...] = ()
    """By step; the last one of a trial that is complete is at full budget."""
    paused_at: int = 0
    """Completions of the rung at which it waits, or was last promoted from; 0: it never waited."""
    ends_at: int | None = None
    """Steps at which its training ends before the most that it could have; None: it has them."""
    cost: Cost = field(default_factory=Cost)
    reason: str = ""
    """Why a failed or pruned trial ended, or a training before its last step."""
    directory: Path | None = None
    checkpoint: Path | None = None
    address: str = ""
    """URL of its directory on an object store, of which `directory` is a copy; may be empty."""
    started: float | None = None
    """Unix time in seconds."""
    finished: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    parts: tuple[Part, ...] = ()
    """Trained policies that a checkpoint, a merge or a replicate of them consists of."""
    kept_steps: tuple[int, ...] = ()
    """Steps of a complete trial, before its end, at which it was evaluated and whose checkpoints
    exist."""

    request: str = ""
    """Id of the request that added it to the running sweep; empty for all others."""
    content: str = ""
    """Accepted changes of content before and after it, for a person; empty without such changes."""

    @property
    def times(self) -> list[float]:
        """Unix times of its start, its rungs and its end, as far as they are known."""
        times = (self.started, *(rung.recorded for rung in self.rungs), self.finished)
        return [time for time in times if time is not None]

    @property
    def policy_steps(self) -> tuple[int, ...]:
        """Steps of its training whose policies exist, the last one of a complete trial included."""
        has_end = self.checkpoint is not None and self.is_training and self.rungs
        return (*self.kept_steps, *([self.rungs[-1].step] if has_end else ()))

    @property
    def had_no_signal(self) -> bool:
        """True if it was a training that a `NoSignalError` ended."""
        return self.state == "failed" and self.reason.startswith(NO_SIGNAL)

    @property
    def is_unchanged(self) -> bool:
        """True if it was a training that did not move the policy's weights."""
        return UNCHANGED in self.environment

    @property
    def trained_params(self) -> Params:
        """Parameters that it trains with; empty if it trains nothing, whatever `params` says."""
        return self.params if self.is_training else {}

    @property
    def name(self) -> str:
        """Name of the candidate, for a person: `7`, `7@40` or `merge-27`."""
        if self.role == "checkpoint":
            return f"{self.parts[0].trial}@{self.parts[0].step}"
        return f"{MERGE_PREFIX}{self.number}" if self.role == "merge" else str(self.number)

    @property
    def last_step(self) -> int | None:
        """Steps of training at the end of a complete training; None if nothing records them."""
        if self.rungs:
            return self.rungs[-1].step
        return None if self.checkpoint is None else parse_step(self.checkpoint.name)

    @property
    def is_open(self) -> bool:
        """True if it runs or waits."""
        return self.state in ("running", "paused")

    @property
    def policy(self) -> str:
        """Path or URL of the policy that it trained, for a person; empty if it was not kept."""
        if self.checkpoint is None:
            return ""
        return f"{self.address}/{self.checkpoint.name}" if self.address else str(self.checkpoint)


def find_start(records: Sequence[TrialRecord]) -> Path | None:
    """Return the policy after the supervised start; None if no trial has made one."""
    starts = (r.checkpoint for r in records if r.role == "start")
    return next(filter(None, starts), None)


MERGE_PREFIX = "merge-"
TOLERANCE = 1e-9
"""Largest distance from 1 of the sum of the weights of a candidate's parts."""


@dataclass(frozen=True)
class Part:
    """A trained policy and its weight in a candidate."""

    trial: int
    """Number of the trial that trained it."""
    step: int
    """Steps of training that it has had."""
    weight: float
    """Share in the weighted mean of weights; a candidate's parts sum to 1."""


def find_main_part(parts: Sequence[Part]) -> Part:
    """Return the part with the largest weight; of equal ones, that of the latest trial."""
    return max(parts, key=lambda part: (part.weight, part.trial, part.step))


def check_part_weights(weights: Sequence[float]) -> None:
    """Raise `ValueError` for weights of parts that do not sum to 1."""
    if not weights or not abs(sum(weights) - 1) <= TOLERANCE:
        terms = " + ".join(f"{weight:g}" for weight in weights) or "no weight"
        raise ValueError(
            f"the weights of a merge must sum to 1: {terms} = {sum(weights):g}; divide each by "
            "their sum"
        )


def title_candidate(name: str) -> str:
    """Return a candidate's name for a sentence: `trial 7`, `checkpoint 7@40`, `merge-27`."""
    kind = "trial " if name.isdecimal() else "checkpoint " if "@" in name else ""
    return f"{kind}{name}"


def format_parts(parts: Sequence[Part], digits: str = ".3g") -> str:
    """Format parts: `0.5 x 7@60 + 0.5 x 12@60`, `7@40` for a checkpoint; "" keeps all `digits`."""
    if len(parts) == 1:
        return f"{parts[0].trial}@{parts[0].step}"
    return " + ".join(f"{part.weight:{digits}} x {part.trial}@{part.step}" for part in parts)
