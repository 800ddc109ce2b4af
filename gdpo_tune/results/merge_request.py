"""A merge that a person asks for: the wish, the policies that a sweep kept, and `merge.json`.

    --toward "length >= 0.6, format >= 0.8"    conditions, as in a pick
    --prefer correctness=2,length=1            weights of objectives in what is maximised
    --weights 7=0.3,12@40=0.7                  the merge itself

Conditions and preferences may stand together. Without preferences, the objectives that no condition
names count equally; if conditions name all, all count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

from gdpo_tune.analysis.merge_choice import (
    MAX_PARENTS,
    Aim,
    Merge,
    MergeChooser,
    Policy,
    read_merge,
    select_parents,
)
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.metrics import Condition
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import format_estimate, join_names, show, suggest
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trial_files import TRIALS
from gdpo_tune.core.trials import (
    CHECKPOINT_PREFIX,
    TOLERANCE,
    Cost,
    Estimate,
    Objective,
    Part,
    TrialRecord,
    find_start,
    format_parts,
    title_candidate,
)
from gdpo_tune.ledger.trial_encoding import decode_estimates, encode_estimates
from gdpo_tune.results.open_sweep import Sweep, fetch_policy, read_sweep, resolve_location
from gdpo_tune.results.picks import Extreme, parse_conditions, parse_pick, pick_trial
from gdpo_tune.results.retrain import list_decisive_settings
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import list_differences

MERGE_FILE = "merge.json"
EXAMPLE = "7=0.3,12@40=0.7"
WORDS = {">=": "ge", "<=": "le", ">": "gt", "<": "lt"}
"""Comparison -> what it is in the name of a directory."""


# Wishes


@dataclass(frozen=True)
class Wish:
    """Conditions that a merge has to meet, and what it maximises beyond them."""

    toward: str
    prefer: str
    conditions: tuple[Condition, ...]
    """Those of `toward`."""
    preferences: Mapping[str, float]
    """Objective -> weight, as `prefer` states them."""

    def __str__(self) -> str:
        return " and ".join(filter(None, [self.toward, self.prefer and f"prefer {self.prefer}"]))

    @property
    def label(self) -> str:
        """Part of a directory's name: `length-ge-0.6`."""
        words = [f"{c.metric}-{WORDS[c.op]}-{show(c.limit)}" for c in self.conditions]
        words += [f"{name}-{show(weight)}" for name, weight in self.preferences.items()]
        return "-".join(words)


def parse_wish(toward: str, prefer: str) -> Wish:
    """Parse a wish; either text may be empty, and a wrong one raises a UsageError."""
    preferences = parse_shares(prefer, "--prefer", "correctness=2,length=1") if prefer else {}
    return Wish(toward, prefer, parse_conditions(toward) if toward else (), preferences)


def parse_shares(text: str, option: str, example: str) -> dict[str, float]:
    """Parse `name=number,name=number`, all above 0; a wrong text raises a UsageError."""
    shares: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not name or not 0 < share < math.inf:
            reason = "a name, = and a number above 0 are expected"
            raise UsageError(f"{option} {text!r}: {entry!r}: {reason}\n    fix: write {example}")
        if name in shares:
            raise UsageError(f"{option} {text!r}: {name} stands twice\n    fix: write it once")
        shares[name] = share
    return shares


def build_aim(wish: Wish, spec: SweepSpec) -> Aim:
    """Return a wish in numbers; the constraints of the sweep count among its conditions.

    Training costs are ignored; a merge has none. A relative constraint without a measured baseline
    limits nothing. A UsageError names an unknown metric, or a preference that is no objective.
    """
    measured = load_task_info(spec.task, spec.space.domains).metrics
    goals = {goal.name: goal for goal in spec.list_objectives() if goal.name in measured}
    names = [*goals, *sorted(measured.keys() - goals)]
    for condition in wish.conditions:
        if condition.metric not in names:
            guess = suggest(condition.metric, names)
            reason = f"{condition.metric!r}: {guess}a merge has no such metric"
            fix = f"the metrics of this task are {join_names(names)}"
            raise PickError(wish.toward, condition.position, reason, fix)
    for name in wish.preferences:
        if name not in goals:
            raise UsageError(
                f"--prefer {wish.prefer!r}: {name!r}: {suggest(name, goals)}this is no objective\n"
                f"    fix: name some of {join_names(goals)}"
            )
    own = {condition.metric for condition in wish.conditions}
    constraints = (
        Condition(name, constraint.op, constraint.limit)
        for name, constraint in spec.constraints.items()
        if name in names and constraint.is_known
    )
    limits = (*wish.conditions, *constraints)
    others = sorted({limit.metric for limit in limits} - goals.keys(), key=names.index)
    metrics = [*goals.values(), *(Objective(n, measured[n].direction, 0.0) for n in others)]
    free = [name for name in goals if name not in own]
    preferences = wish.preferences or dict.fromkeys(free or goals, 1.0)
    return Aim(tuple(metrics), limits, tuple(preferences.get(m.name, 0.0) for m in metrics))


# Policies that the trainings of a sweep have left


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy after some steps of a training."""

    policy: Policy
    record: TrialRecord
    """Its training, or the trial that evaluated it, with the estimates of this policy."""
    checkpoint: Path | None
    """Its directory; of a sweep on an object store, where its marker is copied to."""
    is_end: bool

    @property
    def name(self) -> str:
        """Name of the candidate: `7`, `7@40`."""
        trial, step = self.policy
        return f"{trial}" if self.is_end else f"{trial}@{step}"


Policies = Mapping[Policy, TrainedPolicy]


def list_policies(records: Sequence[TrialRecord]) -> dict[Policy, TrainedPolicy]:
    """List the policies at which the trainings of a sweep were evaluated, kept or not."""
    result: dict[Policy, TrainedPolicy] = {}
    for record in records:
        is_usable = record.is_training and record.state == "complete" and record.is_comparable
        if not is_usable or record.last_step is None:
            continue
        for rung in record.rungs:
            policy, early = (record.number, rung.step), replace(record, test={})
            early = replace(early, validation=rung.validation)
            path = record.directory and record.directory / f"{CHECKPOINT_PREFIX}{rung.step}"
            path = path if path and path.is_dir() else None
            result[policy] = TrainedPolicy(policy, early, path, is_end=False)
        end = (record.number, record.last_step)
        result[end] = TrainedPolicy(end, record, record.checkpoint, is_end=True)
    for record in records:
        key = (record.parts[0].trial, record.parts[0].step) if record.parts else None
        if record.role == "checkpoint" and key in result and (record.validation or record.rungs):
            path = result[key].checkpoint or record.checkpoint
            result[key] = TrainedPolicy(key, record, path, is_end=False)
    return result


# Requests


@dataclass(frozen=True)
class MergeStep:
    """A merge that was chosen, and evaluated once it has `validation` values."""

    parts: tuple[Part, ...]
    prediction: Mapping[str, Estimate]
    """Expected values on validation prompts; empty if a parent was not measured."""
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class MergeRequest:
    """Request for one merge, with what its sweep knows."""

    source: str
    """The sweep, as the person named it."""
    spec: SweepSpec
    policies: Policies
    chooser: MergeChooser
    wish: Wish | None
    """None: the parts are given."""
    given: tuple[Part, ...]
    label: str
    """Part of a directory's name."""
    start: Path | None = None
    """Policy after the supervised start of the sweep, see `fetch_policy`."""

    @property
    def text(self) -> str:
        """The wish, or the weights, for a person."""
        return str(self.wish) if self.wish else self.format_weights(self.given)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions that the merge has to meet; none if its parts are given."""
        return self.chooser.aim.limits if self.wish else ()

    def choose(self, done: Sequence[MergeStep] = ()) -> MergeStep | None:
        """Choose the merge to evaluate next, or return the given one.

        None once all are evaluated, or no other one is expected to meet the wish. If none ever is,
        a UsageError names the closest.
        """
        evaluated = [self._read(step) for step in done]
        if self.wish is None:
            if len(self.chooser.parents) < len(self.given):
                return MergeStep(self.given, {})
            mixture = {(part.trial, part.step): part.weight for part in self.given}
            return self._name_parts(self.chooser.predict([mixture], evaluated)[0])
        chosen = self.chooser.choose_next(self.spec.search.merges.most_parts, evaluated)
        if chosen is None:
            return None
        found, is_hopeful = chosen
        step = self._name_parts(found)
        if not is_hopeful and not done:
            raise self.build_error("is expected to", step, step.prediction)
        return step if is_hopeful else None

    def find_best(self, done: Sequence[MergeStep]) -> int:
        """Return the index of the evaluated merge that best meets the wish."""
        return self.chooser.find_best([self._read(step) for step in done]) if self.wish else 0

    def find_broken(self, values: Mapping[str, Estimate]) -> list[Condition]:
        """Return the conditions that means do not meet."""
        return [c for c in self.conditions if not c.holds(values[c.metric].mean)]

    def find_better_parent(self, step: MergeStep) -> TrainedPolicy | None:
        """Return the policy that alone meets the wish better on validation prompts, if any."""
        if self.wish is None:
            return None
        parents = self.chooser.parents
        best = self.chooser.find_best([self._read(step), *parents])
        return self.policies[parents[best - 1].policy] if best else None

    def describe_parents(self, parts: Sequence[Part]) -> tuple[dict[str, str | int | float], ...]:
        """Return the source, trial, step, weight and path of each part, for `merge.json`."""
        described: list[dict[str, str | int | float]] = []
        for part, parent in zip(parts, self.list_parents(parts), strict=True):
            path, address = parent.checkpoint, self.spec.address
            assert path is not None, "a merge is chosen among the policies that exist"
            place = f"{address}/{TRIALS}/{path.parent.name}/{path.name}" if address else str(path)
            source = f"{self.source}:{parent.name}"
            described.append({"source": source, **vars(part), "policy": place})
        return tuple(described)

    def list_parents(self, parts: Sequence[Part]) -> list[TrainedPolicy]:
        """Return the parents of a merge."""
        return [self.policies[part.trial, part.step] for part in parts]

    def format_weights(self, parts: Sequence[Part]) -> str:
        """Return parts as `--weights` names them."""
        parents = zip(parts, self.list_parents(parts), strict=True)
        return ",".join(f"{parent.name}={show(part.weight)}" for part, parent in parents)

    def build_config(
        self, directory: Path, parts: Sequence[TrainedPart] = (), *, whole: bool = False
    ) -> TrialConfig:
        """Build the configuration of a trial that evaluates a merge; equal ones agree in seeds."""
        params = next(iter(self.policies.values())).record.params  # any parent's make the same task
        config = self.spec.build_trial_config(params, self.spec.search.seed, directory)
        start = fetch_policy(self.spec, self.start) if parts else None
        return replace(config, train=False, parts=tuple(parts), start=start, writes_whole=whole)

    def list_decisive_settings(self, *, adapters: bool) -> dict[str, Any]:
        """Return what decides the result, as JSON; how often merges are evaluated is no part."""
        asked = {"weights": self.format_weights(self.given)}
        if self.wish:
            asked = {"toward": self.wish.toward, "prefer": self.wish.prefer}
        settings = list_decisive_settings(self.build_config(Path()))
        return {"sweep": self.spec.location, **asked, "adapters": adapters, **settings}

    def _read(self, step: MergeStep) -> Merge:
        record = TrialRecord(-1, "merge", "complete", {}, 0, "candidate", parts=step.parts)
        record = replace(record, validation=step.validation)
        return _read_merge(record, self.chooser.aim.metrics)

    def _name_parts(self, found: Merge) -> MergeStep:
        parts = tuple(Part(*policy, weight) for policy, weight in sorted(found.mixture.items()))
        values = zip(self.chooser.aim.metrics, found.losses, found.errors, strict=True)
        prediction = {
            m.name: Estimate(float(-x if m.direction == "maximize" else x), float(error))
            for m, x, error in values
            if x == x  # not NaN
        }
        return MergeStep(parts, prediction)

    def build_error(self, verb: str, step: MergeStep, values: Mapping[str, Estimate]) -> UsageError:
        """Build the error for a merge that breaks a condition with its values."""
        broken, weights = self.find_broken(values), self.format_weights(step.parts)
        names = dict.fromkeys(condition.metric for condition in broken)
        has = ", ".join(f"{name} {format_estimate(values[name])}" for name in names)
        command = f"python -m gdpo_tune.merge {quote(self.source)} --weights {weights}"
        return UsageError(
            f"{self.text!r}: no merge of the policies of {self.source} {verb} meet this: the "
            f"closest, {weights}, {verb} have {has} on validation prompts\n    fix: loosen "
            f"{' and '.join(map(str, broken))}, or search with them as `constraints:`; the closest "
            f"is written by {command}"
        )


def build_merge_request(
    source: str, toward: str, prefer: str, weights: str, overrides: Sequence[str]
) -> MergeRequest:
    """Build a request: `weights`, or a wish of `toward` and `prefer`.

    `source` names the sweep, by directory, name or address; `overrides` change its file.

    Raises:
        UsageError: there is no such sweep, its policies were not kept, or the wish or the weights
            name something that it does not have.
    """
    if any(override.lstrip().startswith(("space.", "space=")) for override in overrides):
        raise UsageError("a merge takes the policies of trials, so --set space. has no effect")
    wish = None if weights else parse_wish(toward, prefer)
    shares = parse_shares(weights, "--weights", EXAMPLE) if weights else {}
    sweep = read_sweep(resolve_location(source), source, with_files=True)
    aim = build_aim(wish or parse_wish("", ""), sweep.spec)
    policies = list_policies(sweep.records)
    if wish is None:
        given = _find_parts(shares, sweep, policies, source)
        parents = _measure([policies[p.trial, p.step] for p in given], aim.metrics)
        label = "-".join(f"{name}-{show(weight)}" for name, weight in shares.items())
        label = re.sub(r"[^\w.@-]", "-", label)
    else:
        given, label = (), wish.label
        parents = _find_parents(sweep, policies, source, aim.metrics)
    merges = [_read_merge(r, aim.metrics) for r in sweep.records if r.role == "merge"]
    measured = [merge for merge in merges if merge.is_measured]
    known = [*_measure([*policies.values()], aim.metrics), *measured]
    spec = sweep.reload(overrides)
    return MergeRequest(
        *(source, spec, policies, MergeChooser(aim, parents, known), wish, given, label),
        start=find_start(sweep.records),
    )


def _read_merge(record: TrialRecord, metrics: Sequence[Objective]) -> Merge:
    return read_merge(record, {(p.trial, p.step): p.weight for p in record.parts}, metrics)


def _measure(policies: Sequence[TrainedPolicy], metrics: Sequence[Objective]) -> list[Merge]:
    values = (
        read_merge(replace(p.record, checkpoint=p.checkpoint), {p.policy: 1.0}, metrics)
        for p in policies
    )
    return [entry for entry in values if entry.is_measured]


def _find_parts(
    shares: Mapping[str, float], sweep: Sweep, policies: Policies, source: str
) -> tuple[Part, ...]:
    parts: dict[Policy, Part] = {}
    for name, weight in shares.items():
        pick = parse_pick(name)
        if isinstance(pick.rule, Extreme | str):
            raise pick.error(1, "a part is the end of a trial or a checkpoint", f"write {EXAMPLE}")
        record = pick_trial(sweep, pick).record
        if len(record.parts) > 1:
            reason = f"{name} is a merge: {format_parts(record.parts)}"
            raise pick.error(1, reason, "write its parents, with products of the weights")
        if not record.parts and (record.state != "complete" or record.last_step is None):
            raise pick.error(1, f"trial {name} is {record.state}", "write a trial that is complete")
        key = record.number, record.last_step or 0
        if record.parts:
            key = record.parts[0].trial, record.parts[0].step
        if key in parts:
            raise UsageError(f"--weights: {name} stands twice\n    fix: add up its weights")
        if key not in policies or policies[key].checkpoint is None:
            raise UsageError(
                f"--weights: the policy of {title_candidate(name)} was not kept\n    fix: train it "
                f"again: python -m gdpo_tune.train --from {quote(f'{source}:{name}')}"
            )
        parts[key] = Part(*key, weight)
    total = sum(shares.values())
    if abs(total - 1) > TOLERANCE:
        scaled = ",".join(f"{name}={weight / total:.10g}" for name, weight in shares.items())
        raise UsageError(
            f"--weights: the weights of a merge must sum to 1, and these sum to {total:g}\n"
            f"    fix: divide each by their sum: --weights {scaled}"
        )
    if len(parts) < 2:
        raise UsageError(f"--weights: a merge has two parts or more\n    fix: write {EXAMPLE}")
    return tuple(sorted(parts.values(), key=lambda part: (part.trial, part.step)))


def _find_parents(
    sweep: Sweep, policies: Policies, source: str, metrics: Sequence[Objective]
) -> list[Merge]:
    """Find the policies that a wished merge may consist of: those that exist, near the front."""
    firsts = [policy for policy in policies.values() if policy.record.role != "replicate"]
    kept = _measure([p for p in firsts if p.checkpoint is not None], metrics)
    if len(kept) < 2:
        gone = [policy.name for policy in firsts if policy.is_end and policy.checkpoint is None]
        fix = "let the sweep continue"
        if gone:
            commands = [f"python -m gdpo_tune.train --from {quote(f'{source}:{n}')}" for n in gone]
            fix = "search with keep: front, or train again: " + "; ".join(commands[:2])
        raise UsageError(
            f"{source}: a merge has two parts or more, and that sweep (keep: {sweep.spec.keep}) "
            f"has {'one policy' if kept else 'no policies'}\n    fix: {fix}"
        )
    selected = select_parents(kept)
    return selected if len(selected) > 1 else kept[:MAX_PARENTS]


# merge.json


@dataclass(frozen=True)
class MergeResult:
    """The merge that was chosen, evaluated on test prompts."""

    index: int
    """Its place among the evaluations."""
    test: Mapping[str, Estimate]
    cost: Cost
    """Cost of all evaluations."""
    policy: str
    """Name of the directory of the policy, or of the adapters."""
    parents: tuple[Mapping[str, str | int | float], ...]
    """As `MergeRequest.describe_parents`."""
    environment: Mapping[str, str]
    most_evaluations: int = 0
    """Evaluations that were asked for; there may be fewer, if no other merge could be better."""


@dataclass(frozen=True)
class MergeProgress:
    """Content of `merge.json` beside the request; it is written after each evaluation."""

    evaluations: tuple[MergeStep, ...] = ()
    result: MergeResult | None = None


def read_progress(directory: Path, request: Mapping[str, Any]) -> MergeProgress:
    """Read the progress of a request; a UsageError names another merge or a damaged file."""
    file = directory / MERGE_FILE
    if not file.exists():
        return MergeProgress()
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        changed = list_differences(stored["request"], request)
        evaluations = tuple(
            MergeStep(
                tuple(Part(**part) for part in entry["parts"]),
                decode_estimates(entry["prediction"]),
                decode_estimates(entry["validation"]),
                Cost(**entry["cost"]),
            )
            for entry in stored["evaluations"]
        )
        result = None
        if found := stored["result"]:
            read: dict[str, Any] = {each.name: found[each.name] for each in fields(MergeResult)}
            read |= {"test": decode_estimates(found["test"]), "cost": Cost(**found["cost"])}
            read["parents"] = tuple(found["parents"])
            result = MergeResult(**read)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it is damaged, or of another version ({error!r})"
        raise UsageError(f"{file}: {reason}\n    fix: choose another --out") from error
    if changed:
        raise UsageError(
            f"{directory} holds another merge: {'; '.join(changed)}\n"
            "    fix: choose another --out, or ask for the same"
        )
    return MergeProgress(evaluations, result)


def write_progress(directory: Path, request: Mapping[str, Any], progress: MergeProgress) -> None:
    """Replace the file in one step."""
    result = progress.result and vars(progress.result) | {
        "test": encode_estimates(progress.result.test),
        "cost": vars(progress.result.cost),
        "environment": dict(progress.result.environment),
    }
    evaluations = [
        {
            "parts": [vars(part) for part in step.parts],
            "prediction": encode_estimates(step.prediction),
            "validation": encode_estimates(step.validation),
            "cost": vars(step.cost),
        }
        for step in progress.evaluations
    ]
    stored = {"request": request, "evaluations": evaluations, "result": result}
    write_atomically(directory / MERGE_FILE, json.dumps(stored, indent=1))
