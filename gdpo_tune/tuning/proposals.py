"""Proposals of a sampler: what it sees of the ledger's trials, and the thread in which it computes.

A sampler must not read the ledger itself: pruned trials would be invisible to it, it would draw
conditional parameters uniformly, and replicates would look like new points. So each proposal comes
from a new in-memory study with one entry for each configuration:

    complete         the mean over its seeds, on validation prompts
    stopped early    its last rung plus the median change from there to the end
    waiting          as stopped early, also after its promotion
    running          as stopped early from its first rung on, before that pending
    failed           pending for good
    untrained        left out: its parameters had no effect
    out of space     left out (the published baseline may be)

The Gaussian process and TPE keep away from pending points. So they neither propose what runs, nor
return to a configuration that failed. A sampler without a model reads no trial. No configuration is
proposed twice while a new one is near. Every entry has a value in every dimension; a parameter
without effect has its domain's middle.

A proposal is computed in a thread, so that Ray's loop keeps running, when a slot is free. If
results arrive meanwhile, it is computed once more with them. So a slow sampler misses no result,
and quick trials cannot delay it twice. A few results beside many known ones do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from optuna import Study
from optuna.samplers import RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState, create_trial

from gdpo_tune.core import registry
from gdpo_tune.core.content import Fact, describe_changes, list_changes
from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.files import expand_path
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.trials import Estimate, Params, ParamValue, Proposer, TrialRecord
from gdpo_tune.core.trl_fields import TRL_FIELDS, is_default
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.opening import create_study
from gdpo_tune.ledger.trial_encoding import convert_to_distribution
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.earlier_results import TABLE, read_results
from gdpo_tune.spec.first_trials import draw_point, draw_startup_point
from gdpo_tune.spec.gpu import choose_sampler
from gdpo_tune.spec.model import list_decisive_values
from gdpo_tune.tuning.plan import derive_seed
from gdpo_tune.tuning.samplers import SamplerFactory

BUSY_WAIT_SECONDS = 0.02
"""Time that the loop waits for a proposal; enough for a quick sampler."""
IDLE_WAIT_SECONDS = 0.5
"""Time that the loop waits when no trial runs."""
NEGLIGIBLE_SHARE = 0.01
"""Share of the known records up to which results that arrive meanwhile do not count."""

MAX_TRIES = 64
"""Number of points tried in place of a configuration that was proposed before."""
Point = tuple[ParamValue, ...]
"""Configuration as one value for each dimension."""


class Proposals(CloseableResource):
    """Proposals of a `SamplerView`, computed in one thread; one other thread calls the methods."""

    def __init__(self, view: SamplerView) -> None:
        self._view = view
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="proposals")
        self._future: Future[Suggestion] | None = None
        self._repeated = False  # True if the computation was repeated because results arrived
        self._missed = 0  # number of records that arrived during the computation

    def observe(self, record: TrialRecord) -> None:
        """Take in a record that is new or has changed; a computation under way does not see it."""
        self._view.observe(record)
        self._missed += 1

    def poll(self, *, idle: bool) -> Suggestion | None:
        """Return a proposal, or None if it is not ready. `observe` its record before the next call.

        An error of the sampler is raised. `idle` says that no trial runs: wait longer.
        """
        if self._future is None:
            self._missed = 0
            self._future = self._thread.submit(self._view.propose)
        wait([self._future], IDLE_WAIT_SECONDS if idle else BUSY_WAIT_SECONDS)
        if not self._future.done():
            return None
        suggestion, self._future = self._future.result(), None
        limit = NEGLIGIBLE_SHARE * self._view.record_count
        self._repeated = not self._repeated and self._missed > limit
        return self.poll(idle=idle) if self._repeated else suggestion

    def close(self, *, wait: bool = True) -> None:
        """End the thread; `wait` for a computation that still runs, or let it end by itself."""
        self._thread.shutdown(wait, cancel_futures=True)


@dataclass(frozen=True)
class Suggestion:
    """Proposal of a configuration, with complete parameters."""

    params: Params
    proposer: Proposer


class SamplerView:
    """Trials as the sampler sees them; pass every new or changed record to `observe`."""

    def __init__(self, spec: SweepSpec, slots: int | None = None) -> None:
        """Create an empty view; `slots`: trials side by side, for `auto`, if known."""
        self._spec = spec
        self.sampler = choose_sampler(spec, slots)
        target = registry.SAMPLERS[self.sampler.value].target
        self._factory: SamplerFactory = registry.load(target)(spec)
        # Without a model, nothing would leave the corners again.
        self._draw = draw_startup_point if self._factory.has_model else draw_point
        self._domains = spec.space.searched_domains
        self._distributions = {n: convert_to_distribution(d) for n, d in self._domains.items()}
        self._trials: dict[int, tuple[Point, TrialRecord]] = {}
        """Those of this sweep that a sampler may learn from."""
        self._baselines: list[TrialRecord] = []  # to which constraints may refer
        self._earlier: dict[Point, list[TrialRecord]] = {}  # trials of earlier sweeps

    @property
    def record_count(self) -> int:
        """Number of trials of this sweep that a sampler may learn from."""
        return len(self._trials)

    def observe(self, record: TrialRecord) -> None:
        """Take in a record that is new or has changed."""
        if record.role not in ("search", "replicate"):
            self._baselines.append(record)
        point = self._find_point(record.params) if record.is_training else None
        if point is not None:
            self._trials[record.number] = point, record

    def load_earlier(self, records: Iterable[TrialRecord]) -> None:
        """Take in complete trials of earlier sweeps.

        Each counts until this sweep has values of its configuration, which may be proposed again.
        """
        for record in records:
            point = self._find_point(record.params)
            if point is not None:
                self._earlier.setdefault(point, []).append(record)

    def load(self, records: Iterable[TrialRecord]) -> None:
        """Take in the records of a ledger."""
        for record in records:
            self.observe(record)

    @property
    def study(self) -> Study:
        """Study that the sampler would read now."""
        return self.build_study(list(self._trials.values()))

    def propose(self) -> Suggestion:
        """Propose a configuration; trials that arrive meanwhile do not count.

        A new process with the same records proposes the same.
        """
        trials = list(self._trials.values())
        known = {point for point, _ in trials}
        drawn = sum(record.proposer == "startup" for _, record in trials)
        if not self._domains:
            return Suggestion(self._spec.space.complete({}), "startup")
        study = self.build_study(trials)
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        is_startup = len(finished) < self._factory.startup
        if is_startup and self._factory.quasi_random:
            repeated = self._complete(self._draw(self._spec, drawn), "startup")
            return self._propose_unseen(known, drawn) or repeated
        # a new one for each proposal: a restart would lose its memory
        study.sampler = self._factory.build(derive_seed(self._spec, len(trials)))
        trial = study.ask(self._distributions)
        made = self._complete(trial.params, "startup" if is_startup else "model")
        if self._find_point(made.params) not in known:
            return made
        # A converged sampler repeats itself; the plan decides about replicates. A new point near
        # it has one parameter of a quasi-random point.
        names = tuple(self._domains)
        for index in range(len(trials), len(trials) + MAX_TRIES):
            name = names[index % len(names)]
            fresh = draw_point(self._spec, index)[name]
            near = self._complete({**made.params, name: fresh}, made.proposer)
            if self._find_point(near.params) not in {*known, None}:  # None: one lacks a value
                return near
        return self._propose_unseen(known, drawn) or made

    def build_study(self, trials: Sequence[tuple[Point, TrialRecord]]) -> Study:
        """Build the study that the sampler reads, with one entry for each configuration."""
        spec = self._spec.resolve_constraints(self._baselines)
        study = create_study(InMemoryStorage(), "projection", spec, RandomSampler())
        if not self._factory.has_model:
            return study
        seeds: dict[Point, list[TrialRecord]] = {point: [] for point in self._earlier}
        for point, record in trials:
            seeds.setdefault(point, []).append(record)
        complete = [record for _, record in trials if record.state == "complete"]
        for point, own in seeds.items():
            values = list_seed_values(own, complete, spec.required_metrics)
            if not values:
                values = list_seed_values(self._earlier.get(point, []), (), spec.required_metrics)
            mean = (
                {name: fmean(seed[name] for seed in values) for name in values[0]} if values else {}
            )
            bounds = spec.constraints.items() if values else ()
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if values else TrialState.RUNNING,
                    values=[mean[name] for name in spec.objectives] if values else None,
                    params=dict(zip(self._distributions, point, strict=True)),
                    distributions=self._distributions,
                    constraints={n: bound.compute_violation(mean[n]) for n, bound in bounds},
                )
            )
        return study

    def _find_point(self, params: Params) -> Point | None:
        """Return the point of a configuration, or None if it is outside of the space."""
        space = self._spec.space
        if not all(name in space.domains or is_default(params, name) for name in TRL_FIELDS):
            return None  # an earlier sweep set what this one does not know
        defaults = {name: TRL_FIELDS[name].default for name in TRL_FIELDS if name in space.domains}
        params = space.align({**defaults, **params})
        active = space.select_active(params)
        if not all(domain.contains(params[name]) for name, domain in active.items()):
            return None
        return tuple(
            params[name] if name in active else domain.find_middle()
            for name, domain in self._domains.items()
        )

    def _complete(self, values: Params, proposer: Proposer) -> Suggestion:
        return Suggestion(self._spec.space.complete(values), proposer)

    def _propose_unseen(self, known: Collection[Point], first: int) -> Suggestion | None:
        """Propose the next new point of the quasi-random sequence; None if none is near."""
        for index in range(first, first + MAX_TRIES):
            suggestion = self._complete(self._draw(self._spec, index), "startup")
            if self._find_point(suggestion.params) not in known:
                return suggestion
        return None


def list_seed_values(
    records: Sequence[TrialRecord], complete: Sequence[TrialRecord], metrics: Iterable[str]
) -> list[dict[str, float]]:
    """Return the values of each complete seed of a point, or estimates; empty without a rung.

    An estimate is the last rung and the median change of the `complete` trials since there: a
    sampler that does not see stopped trials proposes them again, and values at a rung are not
    comparable with final ones.
    """
    if ended := [record for record in records if record.state == "complete"]:
        return [{name: e.mean for name, e in record.validation.items()} for record in ended]
    values: list[dict[str, float]] = []
    for rung in [r.rungs[-1] for r in records if r.rungs and r.state != "failed"]:
        pairs = [
            (end.validation, then.validation)
            for end in complete
            for then in end.rungs
            if then.completions == rung.completions
        ]
        changes = {n: median([e[n].mean - t[n].mean for e, t in pairs] or [0.0]) for n in metrics}
        values.append({name: rung.validation[name].mean + c for name, c in changes.items()})
    return values


def load_earlier_trials(spec: SweepSpec) -> list[TrialRecord]:
    """Load the usable trials of the sweeps and tables of `search.warm_start`, by their order.

    A usable trial trained a policy, is complete and has every judged metric. An earlier sweep
    may still run.

    Raises:
        SpecError: the file of an earlier sweep is not valid any more.
        UsageError, IdentityError: a directory holds no ledger, or one of another sweep.
    """
    trials: list[TrialRecord] = []
    for directory in map(expand_path, spec.search.warm_start):
        if directory.suffix == TABLE:
            for number, (params, values) in enumerate(read_results(directory, spec)):
                measured = {name: Estimate(value, 0.0) for name, value in values.items()}
                made = number, "search", "complete", params, 0, "enqueued"
                trials.append(TrialRecord(*made, validation=measured))
            continue
        with _open_earlier(directory) as ledger:
            records = ledger.get_records()
        for record in records:
            trained = record.state == "complete" and record.is_training
            if trained and record.validation.keys() >= set(spec.required_metrics):
                trials.append(record)
    return trials


def refuse_other_content(spec: SweepSpec, content: Mapping[str, Fact]) -> None:
    """Refuse to learn from a sweep that measured by other content, such as an edited reward.

    What this sweep names differently, such as its policy, it changes on purpose, and versions
    decide numbers and not their meaning.

    Raises:
        IdentityError: a file of an earlier sweep's task, data or policy has changed since then.
        SpecError, UsageError: as `load_earlier_trials`.
    """
    for directory in map(expand_path, spec.search.warm_start):
        if directory.suffix == TABLE:
            continue
        with _open_earlier(directory) as ledger:
            earlier, newest = ledger.spec, ledger.get_contents()[-1:]
        ours, theirs = list_decisive_values(spec), list_decisive_values(earlier)
        differ = {k.partition(".")[0] for k in ours | theirs if ours.get(k) != theirs.get(k)}
        others = ["version", "hub", *differ & {"data", "policy", "task"}]
        others += ["file"] if "task" in differ else []
        for recorded in newest:
            if changes := list_changes(recorded["digests"], content, without=others):
                raise IdentityError(
                    f"search.warm_start: {describe_changes(changes, directory, recorded['time'])}\n"
                    "    fix: restore it, or take that sweep out of search.warm_start"
                )


@contextmanager
def _open_earlier(directory: Path) -> Generator[Ledger]:
    earlier = load_spec(directory / SPEC, to_run=False)
    # the directory may have moved since the sweep ran
    location = {"storage": str(directory.absolute().parent), "name": directory.absolute().name}
    with Ledger.open(earlier.model_copy(update=location), read_only=True) as ledger:
        yield ledger
