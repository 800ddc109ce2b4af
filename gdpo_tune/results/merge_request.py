"""Request for a merge of a sweep's policies: a wish, or given weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from gdpo_tune.analysis.merge_model import Evaluated, Mixture, Policy, read_values
from gdpo_tune.analysis.wish_choice import Prediction, WishChooser, get_policy
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.text import format_estimate
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trials import Cost, Estimate, Objective, Part, TrialRecord
from gdpo_tune.ledger.trial_encoding import TRIALS
from gdpo_tune.results.kept_policies import (
    EXAMPLE,
    TrainedPolicy,
    evaluate_policies,
    find_parents,
    find_parts,
    list_policies,
)
from gdpo_tune.results.open_sweep import read_sweep, resolve_location
from gdpo_tune.results.pick_language import Bound
from gdpo_tune.results.retrain import list_decisive_settings
from gdpo_tune.results.wishes import (
    Wish,
    build_aim,
    list_conditions,
    name_directory,
    parse_shares,
    parse_wish,
)
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.text import show


@dataclass(frozen=True)
class MergeChoice:
    """A merge and what its values on validation prompts are expected to be."""

    parts: tuple[Part, ...]
    prediction: Mapping[str, Estimate]
    """Empty if a parent was not measured."""


@dataclass(frozen=True)
class MergeEvaluation:
    """A merge that was evaluated on validation prompts."""

    choice: MergeChoice
    validation: Mapping[str, Estimate]
    cost: Cost


@dataclass(frozen=True)
class MergeRequest:
    """Request for one merge, with what its sweep knows."""

    source: str
    """The sweep, as the person named it."""
    spec: SweepSpec
    policies: Mapping[Policy, TrainedPolicy]
    chooser: WishChooser
    wish: Wish | None
    """None: the parts are given."""
    given: tuple[Part, ...]
    label: str
    """Part of a directory's name."""

    @property
    def text(self) -> str:
        """The wish, or the weights, for a person."""
        return str(self.wish) if self.wish else self.format_weights(self.given)

    @property
    def conditions(self) -> tuple[Bound, ...]:
        """Conditions that the merge has to meet; none if its parts are given."""
        return list_conditions(self.wish, self.spec) if self.wish else ()

    def choose(self, evaluations: Sequence[MergeEvaluation] = ()) -> MergeChoice | None:
        """Choose the merge to evaluate next, or return the given one.

        None once all are evaluated, or no other one is expected to meet the wish.

        Raises:
            UsageError: no merge is expected to meet the wish; the message names the closest.
        """
        evaluated = [self._read(evaluation) for evaluation in evaluations]
        if self.wish is None:
            if len(self.chooser.parents) < len(self.given):
                return MergeChoice(self.given, {})
            mixture = {(part.trial, part.step): part.weight for part in self.given}
            return self._name_choice(self.chooser.predict([mixture], evaluated)[0])
        most_parts = self.spec.search.merges.most_parts
        chosen = self.chooser.choose_next(most_parts, evaluated)
        if chosen is None:
            return None
        found, is_hopeful = chosen
        choice = self._name_choice(found)
        if not is_hopeful and evaluations:
            return None
        if not is_hopeful:
            raise self.build_error("is expected to", choice, choice.prediction)
        return choice

    def find_best(self, evaluations: Sequence[MergeEvaluation]) -> int:
        """Return the index of the evaluation that best meets the wish."""
        if self.wish is None:
            return 0
        return self.chooser.find_best([self._read(evaluation) for evaluation in evaluations])

    def find_better_parent(self, evaluation: MergeEvaluation) -> TrainedPolicy | None:
        """Return the policy that alone meets the wish better on validation prompts, if any does."""
        if self.wish is None:
            return None
        parents = self.chooser.parents
        best = self.chooser.find_best([self._read(evaluation), *parents])
        return self.policies[get_policy(parents[best - 1])] if best else None

    def describe_parents(self, parts: Sequence[Part]) -> tuple[dict[str, str | int | float], ...]:
        """Return the source, trial, step, weight and path of each part, for `merge.json`."""
        parents = zip(parts, self.list_parents(parts), strict=True)
        address = self.spec.address
        return tuple(
            {
                "source": f"{self.source}:{parent.name}",
                **vars(part),
                "policy": f"{address}/{TRIALS}/{path.parent.name}/{path.name}"
                if address
                else str(path),
            }
            for part, parent in parents
            if (path := parent.checkpoint) is not None
        )

    def list_parents(self, parts: Sequence[Part]) -> list[TrainedPolicy]:
        """Return the parents of a merge."""
        return [self.policies[part.trial, part.step] for part in parts]

    def format_weights(self, parts: Sequence[Part]) -> str:
        """Return parts as `--weights` has them."""
        parents = zip(parts, self.list_parents(parts), strict=True)
        return ",".join(f"{parent.name}={show(part.weight)}" for part, parent in parents)

    def build_config(self, directory: Path, parts: Sequence[TrainedPart] = ()) -> TrialConfig:
        """Build the configuration of a trial that evaluates a merge; equal ones agree in seeds."""
        params = next(iter(self.policies.values())).record.params  # any parent's make the same task
        config = self.spec.build_trial_config(params, self.spec.search.seed, directory)
        return dataclasses.replace(config, train=False, parts=tuple(parts))

    def list_decisive_settings(self, *, adapters: bool) -> dict[str, Any]:
        """Return what decides the result, as JSON; how often merges are evaluated is no part."""
        settings = list_decisive_settings(self.build_config(Path()))
        wish = {"toward": self.wish.toward, "prefer": self.wish.prefer} if self.wish else {}
        given = {} if self.wish else {"weights": self.format_weights(self.given)}
        return {"sweep": self.spec.location, **wish, **given, "adapters": adapters, **settings}

    def _read(self, evaluation: MergeEvaluation) -> Evaluated:
        parts = evaluation.choice.parts
        record = TrialRecord(-1, "merge", "complete", {}, 0, "candidate", parts=parts)
        record = dataclasses.replace(record, validation=evaluation.validation)
        return _read_merge(record, self.chooser.aim.metrics)

    def _name_choice(self, found: Prediction) -> MergeChoice:
        parts = tuple(Part(*policy, weight) for policy, weight in sorted(found.mixture.items()))
        values = zip(self.chooser.aim.metrics, found.losses, found.errors, strict=True)
        prediction = {
            metric.name: Estimate(
                float(-loss if metric.direction == "maximize" else loss), float(error)
            )
            for metric, loss, error in values
            if loss == loss  # not NaN
        }
        return MergeChoice(parts, prediction)

    def build_error(
        self, verb: str, choice: MergeChoice, values: Mapping[str, Estimate]
    ) -> UsageError:
        """Build the error for a merge that breaks a condition with its values."""
        broken = find_broken(self.conditions, values)
        shown = {bound.metric.name: format_estimate(values[bound.metric.name]) for bound in broken}
        weights = self.format_weights(choice.parts)
        has = ", ".join(f"{name} {value}" for name, value in shown.items())
        command = f"python -m gdpo_tune.merge {quote(self.source)} --weights {weights}"
        return UsageError(
            f"{self.text!r}: no merge of the policies of {self.source} {verb} meet this: the "
            f"closest, {weights}, {verb} have {has} on validation prompts\n    fix: loosen "
            f"{' and '.join(map(str, broken))}, or search with them as `constraints:`; the closest "
            f"is written by {command}"
        )


def find_broken(conditions: Sequence[Bound], values: Mapping[str, Estimate]) -> list[Bound]:
    """Return the conditions that means do not meet."""
    return [b for b in conditions if not b.holds(values[b.metric.name].mean)]


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
        given = find_parts(shares, sweep, policies, source)
        parents = evaluate_policies([policies[p.trial, p.step] for p in given], aim.metrics)
        label = name_directory(shares)
    else:
        given, label = (), wish.label
        parents = find_parents(sweep, policies, source, aim.metrics)
    merges = [_read_merge(r, aim.metrics) for r in sweep.records if r.role == "merge"]
    measured = [merge for merge in merges if merge.is_measured]
    known = [*evaluate_policies([*policies.values()], aim.metrics), *measured]
    changes = [sweep.storage_override, "search.warm_start=[]", *overrides]
    spec = load_spec(sweep.file, changes, sweep.file.parent.name)
    chooser = WishChooser(aim, parents, known)
    return MergeRequest(source, spec, policies, chooser, wish, given, label)


def _read_merge(record: TrialRecord, metrics: Sequence[Objective]) -> Evaluated:
    mixture: Mixture = {(part.trial, part.step): part.weight for part in record.parts}
    return read_values(record, mixture, metrics)
