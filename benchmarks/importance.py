"""Measures of the importance of parameters, where the true importance is known.

    python benchmarks/importance.py [--seeds 10] [--first 0] [--trials 40] [--sampler auto]

A case is one objective of a simulated sweep of `--trials` trials, which the product's sampler
proposed, see `importance_problems.py`. The truth is the total Sobol index: the share of the
variance of a trial, over the whole space, that involves a parameter. A ranking agrees with the
truth if no parameter stands above another that is truly more important by `RANK_TOLERANCE`.

The benchmark prints for each measure the share of cases whose ranking agrees, by kind of problem,
and the mean of Kendall's tau. Of the package's own measure it also prints how many cases are shown
(the others are found unreliable from the data alone), the agreement of those, the coverage of the
intervals, and how often a parameter with and without effect counts as clear. The last line is JSON.

An objective is a sum of terms, each the product of one standardised shape for each of its
parameters. Shares of the variance are random, and at least one parameter has no effect. Each
measure returns parameter -> importance for one objective; only ranks count.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from harness import print_table, run
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.importance import (
    BaseImportanceEvaluator,
    FanovaImportanceEvaluator,
    PedAnovaImportanceEvaluator,
    get_param_importances,
)
from scipy.stats import kendalltau
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.inspection import permutation_importance

from gdpo_tune.analysis.comparison import compute_interval
from gdpo_tune.analysis.importance import (
    MIN_CROWDED,
    NOISE_ALONE,
    RANK_TOLERANCE,
    RELIABLE,
    RELIABLE_CROWDED,
    Dimension,
    Encoder,
    compute_reliability,
    compute_total_indices,
    ranks_agree,
    sample_surfaces,
)
from gdpo_tune.core.registry import SAMPLERS
from gdpo_tune.core.trials import Estimate, Params, TrialRecord
from gdpo_tune.results.open_sweep import list_dimensions
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import ObjectiveSpec, Search
from gdpo_tune.spec.space import Choices, Domain, Space, Uniform
from gdpo_tune.tuning.proposals import SamplerView

OWN = "gdpo_tune"


@dataclass(frozen=True)
class Result:
    """One objective of one case, by every measure."""

    kind: str
    truth: Floats
    """Importances `[D]`."""
    rankings: Mapping[str, Floats]
    """Measure -> its values `[D]`."""
    reliability: float
    least: float
    """Reliability from which the report would show the importances."""
    intervals: Floats
    """Of the package's measure, `[D, 2]`."""

    @property
    def is_shown(self) -> bool:
        """True if the report would show the importances."""
        return self.reliability >= self.least

    def agrees(self, measure: str) -> bool:
        """Return whether the ranking by a measure agrees with the truth."""
        return ranks_agree(self.truth, self.rankings[measure])


def measure_case(case: Case, objective: str, least: float) -> Result:
    encoder = Encoder(list_dimensions(case.spec.space))
    names = [dimension.name for dimension in encoder.dimensions]
    places = np.stack([encoder.convert(record.params) for record in case.records])
    values = np.array([record.test[objective].mean for record in case.records])
    surfaces = sample_surfaces(encoder, places, values, np.ones(len(values)))
    shares = compute_total_indices(encoder, surfaces.weights, surfaces.noise)
    intervals = [compute_interval(row) for row in shares]
    found = {name: measure(case, objective) for name, measure in MEASURES.items()}
    rankings = {name: np.array([of.get(n, 0.0) for n in names]) for name, of in found.items()}
    return Result(
        kind=case.kind,
        truth=np.array([case.truth[objective][name] for name in names]),
        rankings={**rankings, OWN: shares.mean(axis=1)},
        reliability=compute_reliability(shares),
        least=least,
        intervals=np.array([(interval.low, interval.high) for interval in intervals]),
    )


def summarise_measure(results: list[Result], measure: str) -> dict[str, float]:
    """Return the shares of cases with an agreeing ranking, and the mean of Kendall's tau."""
    by_kind = {
        kind: float(np.mean([r.agrees(measure) for r in results if r.kind == kind]))
        for kind in dict.fromkeys(r.kind for r in results)
    }
    taus = [kendalltau(r.truth, r.rankings[measure]).statistic for r in results]
    every = float(np.mean([r.agrees(measure) for r in results]))
    return {**by_kind, "all": every, "tau": float(np.nanmean(taus))}


def summarise_own(results: list[Result]) -> dict[str, float | None]:
    """Return how often the package's measure is shown, and how right it is then."""
    shown = [r for r in results if r.is_shown]
    truth = np.concatenate([r.truth for r in results])
    low, high = np.vstack([r.intervals for r in results]).T
    clear = low > NOISE_ALONE
    # A drawn share is never exactly 0, so an interval holds 0 if it reaches what noise gives.
    held = ((low <= truth) | (low <= NOISE_ALONE)) & (truth <= high)
    return {
        "cases": len(results),
        "shown": len(shown) / len(results),
        "agree_of_shown": _mean([r.agrees(OWN) for r in shown]),
        "coverage": _mean(held),
        "clear_without_effect": _mean(clear[truth == 0]),
        "clear_from_0.1": _mean(clear[truth >= 0.1]),
        "clear_from_0.2": _mean(clear[truth >= 0.2]),
    }


def _mean(values: list[bool] | Floats) -> float | None:
    return float(np.mean(values)) if len(values) else None


Floats = NDArray[np.float64]
Shape = Callable[[Floats], Floats]

KINDS = ("additive", "interacting", "conditional")
GOALS = ("correctness", "length")
CENTRE, DEVIATION = 0.5, 0.12
"""Mean and standard deviation of an objective over the space."""
NOISE_SHARES = (0.02, 0.1)
"""Share of the variance of a trial that is noise; 2 to 10 % in a finished sweep of `code.yaml`."""
PAIRS = 3
PAIR_SHARES = (0.3, 0.6)
"""Share of the variance that comes from pairs of parameters, where they interact."""
POINTS = 4096
"""Points of the space for the true importances."""
PLAIN: dict[str, Domain] = {
    "normalization": Choices(choices=("gdpo", "grpo", "grpo_no_std")),
    "group_size": Choices(choices=(4, 8)),
    "reward_weights.format": Uniform(low=0.05, high=2.0, log=True),
    "reward_weights.length": Uniform(low=0.05, high=2.0, log=True),
    "learning_rate": Uniform(low=3e-5, high=3e-4, log=True),
    "temperature": Uniform(low=0.7, high=1.1),
}
CONDITIONAL: dict[str, Domain] = {
    "normalization": Choices(choices=("gdpo", "grpo")),
    "gamma": Uniform(low=0.0, high=1.0, when={"normalization": ("gdpo",)}),
    "length_shape": Choices(choices=("step", "overlong")),
    "length_cache": Uniform(low=0.05, high=1.0, when={"length_shape": ("overlong",)}),
    "reward_weights.length": Uniform(low=0.05, high=2.0, log=True),
    "learning_rate": Uniform(low=3e-5, high=3e-4, log=True),
}


@dataclass(frozen=True)
class Term:
    """A part of an objective."""

    parameters: tuple[int, ...]
    shapes: tuple[Shape, ...]
    share: float
    """Of the variance."""


@dataclass(frozen=True)
class Surface:
    """One objective over the space."""

    encoder: Encoder
    terms: tuple[Term, ...]
    parts: Floats
    """Share of the space in which each parameter acts, `[D]`."""

    def compute(self, places: Floats) -> Floats:
        """Return the objective at places `[R, D]`, without noise, before it is scaled."""
        active = self.encoder.find_active(places) > 0
        total = np.zeros(len(places))
        for term in self.terms:
            value = np.full(len(places), math.sqrt(term.share))
            for i, shape in zip(term.parameters, term.shapes, strict=True):
                value *= np.where(active[:, i], shape(places[:, i]), 0) / math.sqrt(self.parts[i])
            total += value
        return total


@dataclass(frozen=True)
class Case:
    """A simulated sweep, and the true importance of each parameter for each objective."""

    kind: str
    spec: SweepSpec
    records: tuple[TrialRecord, ...]
    truth: dict[str, dict[str, float]]
    """Objective -> parameter -> share of the variance of a trial: its total Sobol index."""


def simulate_case(kind: str, seed: int, trials: int, sampler: str = "auto") -> Case:
    """Simulate a sweep on a random problem of a kind."""
    rng = np.random.default_rng((seed, KINDS.index(kind)))
    spec = SweepSpec(
        name=kind,
        task="simulated",
        policy="simulated",
        objectives={n: ObjectiveSpec(direction="maximize", reference=0.0) for n in GOALS},
        space=Space(domains=CONDITIONAL if kind == "conditional" else PLAIN),
        search=Search(trials=trials, sampler=sampler, seed=seed),
    )
    encoder = Encoder(list_dimensions(spec.space))
    noise = float(rng.uniform(*NOISE_SHARES))
    points = encoder.draw_points(POINTS)
    parts = encoder.find_active(points[:, : len(encoder.dimensions)]).mean(axis=0)
    worth: dict[str, Callable[[Params], float]] = {}
    truth: dict[str, dict[str, float]] = {}
    for goal in GOALS:
        surface = Surface(encoder, _draw_terms(kind, encoder.dimensions, rng), parts)
        worth[goal], shares = _scale(surface, points)
        truth[goal] = {name: (1 - noise) * share for name, share in shares.items()}
    deviation = DEVIATION * math.sqrt(noise / (1 - noise))
    return Case(kind, spec, _run_sweep(spec, worth, deviation, rng), truth)


def _draw_terms(
    kind: str, dimensions: Sequence[Dimension], rng: np.random.Generator
) -> tuple[Term, ...]:
    count = len(dimensions)
    acting = rng.permutation(count)[: count - int(rng.integers(1, 3))]
    wanted = PAIRS if kind == "interacting" else 0
    pairs = [tuple(int(i) for i in rng.choice(acting, 2, replace=False)) for _ in range(wanted)]
    crossed = float(rng.uniform(*PAIR_SHARES)) if pairs else 0.0
    mains = rng.dirichlet(np.full(len(acting), 0.8)) * (1 - crossed)
    products = rng.dirichlet(np.ones(len(pairs))) * crossed if pairs else ()
    members = [*((int(i),) for i in acting), *pairs]
    return tuple(
        Term(term, tuple(_draw_shape(dimensions[i], rng) for i in term), float(share))
        for term, share in zip(members, [*mains, *products], strict=True)
    )


def _draw_shape(dimension: Dimension, rng: np.random.Generator) -> Shape:
    """Draw a slope, a peak or a cliff, or a value for each name; standardised over the range."""
    if dimension.choices:
        levels = rng.standard_normal(len(dimension.choices))
        levels = (levels - levels.mean()) / levels.std()
        return lambda places: levels[places.astype(int)]
    form, centre, sign = rng.integers(3), rng.uniform(-0.6, 0.6), rng.choice([-1.0, 1.0])

    def compute(places: Floats) -> Floats:
        if form == 0:
            return sign * places
        if form == 1:
            return -((places - centre) ** 2)
        return sign / (1 + np.exp((places - centre) / 0.15))

    grid = compute(np.linspace(-1, 1, 2001))
    return lambda places: (compute(places) - grid.mean()) / grid.std()


def _scale(surface: Surface, points: Floats) -> tuple[Callable[[Params], float], dict[str, float]]:
    """Return the objective of a configuration, and the total Sobol index of each parameter."""
    size = points.shape[1] // 2
    left, right = points[:, :size], points[:, size:]
    values = surface.compute(left)
    centre, deviation = float(values.mean()), float(values.std())
    shares: dict[str, float] = {}
    for i, dimension in enumerate(surface.encoder.dimensions):
        moved = left.copy()
        moved[:, i] = right[:, i]
        change = values - surface.compute(moved)
        shares[dimension.name] = float((change**2).mean() / 2 / deviation**2)

    def compute_worth(params: Params) -> float:
        value = float(surface.compute(surface.encoder.convert(params)[None])[0])
        return CENTRE + DEVIATION * (value - centre) / deviation

    return compute_worth, shares


def _run_sweep(
    spec: SweepSpec,
    worth: dict[str, Callable[[Params], float]],
    deviation: float,
    rng: np.random.Generator,
) -> tuple[TrialRecord, ...]:
    """Run a sweep with the product's sampler; nothing is trained."""
    projection = SamplerView(spec)
    records: list[TrialRecord] = []
    for number in range(spec.search.trials):
        suggestion = projection.propose()
        values = {
            goal: Estimate(compute(suggestion.params) + rng.normal(0, deviation), deviation)
            for goal, compute in worth.items()
        }
        record = TrialRecord(
            number=number,
            role="search",
            state="complete",
            params=suggestion.params,
            seed=number,
            proposer=suggestion.proposer,
            validation=values,
            test=values,
            feasible=True,
        )
        projection.observe(record, suggestion.sampler_state)
        records.append(record)
    return tuple(records)


Measure = Callable[[Case, str], dict[str, float]]
SAMPLED_POINTS = 512


def measure_linear(case: Case, objective: str) -> dict[str, float]:
    """Measure partial eta squared of a linear model with squares: the measure until 2026."""
    dimensions = list_dimensions(case.spec.space)
    blocks = [_build_linear_columns(dimension, case.records) for dimension in dimensions]
    values = _list_values(case.records, objective)
    whole = _fit_residual(np.hstack(blocks), values)
    shares: dict[str, float] = {}
    for i, dimension in enumerate(dimensions):
        without = _fit_residual(np.hstack(blocks[:i] + blocks[i + 1 :]), values)
        shares[dimension.name] = 1 - whole / without
    return shares


def _build_linear_columns(dimension: Dimension, records: Sequence[TrialRecord]) -> Floats:
    places = np.array([dimension.convert(record.params[dimension.name]) for record in records])
    if dimension.choices:
        return (places[:, None] == np.arange(1, len(dimension.choices))).astype(float)
    return np.column_stack([places, places**2])


def _fit_residual(columns: Floats, values: Floats) -> float:
    columns = np.column_stack([np.ones(len(values)), columns])
    rest = values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
    return float(rest @ rest)


def measure_optuna(
    evaluator: BaseImportanceEvaluator, case: Case, objective: str
) -> dict[str, float]:
    """Measure with an evaluator of Optuna, as `optuna.importance` is used."""
    dimensions = list_dimensions(case.spec.space)
    distributions = {d.name: _build_distribution(d) for d in dimensions}
    study = optuna.create_study(direction="maximize")
    for record in case.records:
        trial = optuna.create_trial(
            params={name: record.params[name] for name in distributions},
            distributions=distributions,
            value=record.test[objective].mean,
        )
        study.add_trial(trial)
    return dict(get_param_importances(study, evaluator=evaluator))


def _build_distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def measure_sobol(case: Case, objective: str) -> dict[str, float]:
    """Measure total Sobol indices of the mean of one Gaussian process, fitted by scikit-learn."""
    dimensions = list_dimensions(case.spec.space)
    encoder = Encoder(dimensions)
    rows = np.array([encoder.convert(record.params) for record in case.records])
    values = _list_values(case.records, objective)
    features = _build_forest_features(encoder, rows)
    kernel = ConstantKernel(1.0) * Matern(np.ones(features.shape[1]), (0.1, 100.0), nu=2.5)
    process = GaussianProcessRegressor(
        kernel + WhiteKernel(0.1, (1e-4, 1.0)),
        normalize_y=True,
        n_restarts_optimizer=2,
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(features, values)
    points = encoder.draw_points(SAMPLED_POINTS)
    left, right = points[:, : len(dimensions)], points[:, len(dimensions) :]
    base = process.predict(_build_forest_features(encoder, left))
    shares: dict[str, float] = {}
    for i, dimension in enumerate(dimensions):
        moved = left.copy()
        moved[:, i] = right[:, i]
        change = base - process.predict(_build_forest_features(encoder, moved))
        shares[dimension.name] = float((change**2).mean())
    return shares


def measure_permutation(case: Case, objective: str) -> dict[str, float]:
    """Measure the loss of a random forest's fit when a parameter's values are shuffled."""
    dimensions = list_dimensions(case.spec.space)
    encoder = Encoder(dimensions)
    rows = np.array([encoder.convert(record.params) for record in case.records])
    values = _list_values(case.records, objective)
    forest = RandomForestRegressor(200, random_state=0, min_samples_leaf=2).fit(rows, values)
    found = permutation_importance(forest, rows, values, n_repeats=20, random_state=0)
    return {d.name: float(v) for d, v in zip(dimensions, found.importances_mean, strict=True)}


def _build_forest_features(encoder: Encoder, rows: Floats) -> Floats:
    """Return a column for each number and name, 0 where a parameter has no effect."""
    active = encoder.find_active(rows)
    columns: list[Floats] = []
    for i, dimension in enumerate(encoder.dimensions):
        if dimension.choices:
            names = np.arange(len(dimension.choices))
            columns.append((rows[:, i, None] == names) * active[:, i, None])
        else:
            columns.append((rows[:, i] * active[:, i])[:, None])
    return np.hstack(columns)


def _list_values(records: Sequence[TrialRecord], objective: str) -> Floats:
    return np.array([record.test[objective].mean for record in records])


MEASURES: dict[str, Measure] = {
    "linear model (until 2026)": measure_linear,
    "optuna fanova": lambda c, o: measure_optuna(FanovaImportanceEvaluator(seed=0), c, o),
    "optuna ped-anova": lambda c, o: measure_optuna(PedAnovaImportanceEvaluator(), c, o),
    "forest, permuted": measure_permutation,
    "process, total sobol": measure_sobol,
}


def measure(seeds: int = 10, first: int = 0, trials: int = 40, sampler: str = "auto"):
    """Simulate all cases of some sweeps of each kind, from the seed `first` on."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    least = RELIABLE
    if SAMPLERS[sampler].crowds:
        least = RELIABLE_CROWDED if trials >= MIN_CROWDED else 1.01
    results = [
        measure_case(case, goal, least)
        for seed in range(first, first + seeds)
        for kind in KINDS
        for case in [simulate_case(kind, seed, trials, sampler)]
        for goal in GOALS
    ]
    rows = {name: summarise_measure(results, name) for name in (*MEASURES, OWN)}
    print_table(
        ("measure", *KINDS, "all", "tau"), *((name, *r.values()) for name, r in rows.items())
    )
    own = summarise_own(results)
    print(f"\n{OWN}:", ", ".join(f"{name} {value}" for name, value in own.items()))
    return {"gap": RANK_TOLERANCE, "sampler": sampler, "trials": trials, **own, "rows": rows}


if __name__ == "__main__":
    run(measure, {"seeds": 1, "sampler": "tpe"})
