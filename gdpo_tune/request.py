"""One training that a person asks for: a file with fixed values, or a trial of a sweep again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.analysis.front import build_front
from gdpo_tune.analysis.lineage import stretched, training_of
from gdpo_tune.errors import Problem, SpecError, UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.settings import INDIFFERENT_TRAINING
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.notation import describe
from gdpo_tune.spec.problems import did_you_mean, one_of, show
from gdpo_tune.trials import Params, Segment, TrialConfig, TrialRecord

KNEE = "knee"
BEST = "max_"
"""Before the name of an objective: the front's best in it, whichever direction that is."""
SPEC = "spec.yaml"
"""In a sweep's folder: its resolved file."""
INDIFFERENT = ("directory", "threads", "gpu_share", "rollout", "sandbox", "evaluate_at")
"""Parts of a config that may change while a training is interrupted: where and how, not what. So
may `INDIFFERENT_TRAINING`."""


@dataclass(frozen=True)
class Request:
    """What is to be trained."""

    spec: SweepSpec
    """What it shares with a sweep: task, policy, objectives, settings."""
    params: Params
    seed: int
    label: str
    """For a folder's name, such as `knee`."""
    note: str
    """Where the parameters are from, for a person."""
    schedule: tuple[Segment, ...] = ()
    """What of the parameters changes on the way."""


def from_file(path: Path | str, overrides: Sequence[str]) -> Request:
    """The training that a file describes.

    Raises:
        SpecError: the file is wrong, or leaves a parameter open; every one of them is listed.
    """
    spec = load_spec(path, overrides)
    if spec.space.dimensions:
        raise SpecError(tuple(_open_dimension(spec, str(path), n) for n in spec.space.dimensions))
    return Request(spec, spec.space.complete({}), spec.search.seed, "train", str(path))


def from_sweep(source: str, overrides: Sequence[str]) -> Request:
    """The training of a trial of a sweep, to be repeated at another budget.

    Of a member of a population it is the one training that its policy comes from: parameters, seed
    and schedule of its lineage.

    Args:
        source: `FOLDER:knee`, `FOLDER:max_<objective>` or `FOLDER:<trial number>`.
        overrides: of the sweep's file; the parameters are the trial's.

    Raises:
        UsageError: there is no such sweep or trial, or an override is about the space.
    """
    folder, colon, pick = source.rpartition(":")
    if not (colon and folder and pick):
        raise UsageError(
            f"--from {source}: write the sweep's folder, a colon and what to take, such as "
            f"runs/code:{KNEE}, runs/code:{BEST}correctness or runs/code:12"
        )
    if any(override.lstrip().startswith(("space.", "space=")) for override in overrides):
        raise UsageError("--from takes the parameters of a trial, so --set space. has no effect")
    sweep = Path(folder).expanduser().absolute()
    if not (sweep / SPEC).is_file():
        raise UsageError(f"--from {source}: there is no sweep in {folder}: it has no {SPEC}")
    place = f"storage={json.dumps(str(sweep.parent))}"
    with Ledger.open(load_spec(sweep / SPEC, [place], sweep.name), read_only=True) as ledger:
        records, steps = ledger.records(), ledger.spec.training.steps
        number = _picked(records, ledger.spec, pick, source).number
    spec = load_spec(sweep / SPEC, [place, *overrides], sweep.name)
    training = training_of(records, number)
    schedule = stretched(training.schedule, spec.training.steps / steps)
    label = f"trial-{pick}" if pick.isdecimal() else pick
    note = f"trial {number} of {folder}"
    if schedule:
        note += f", with other values from step {one_of(segment.step for segment in schedule)} on"
    return Request(spec, training.params, training.seed, label, note, schedule)


def trial_config(
    request: Request, *, seed: int | None, out: Path | None, threads: int | None
) -> TrialConfig:
    """The trial that `train()` is asked for.

    Args:
        request: what is to be trained.
        seed: None: the request's own.
        out: its folder; None: one beside the sweeps.
        threads: of torch; None: those of a sweep's trial.

    Raises:
        UsageError: the file asks for several processes a trial, which only a sweep starts.
    """
    spec = request.spec
    if spec.resources.workers > 1:
        raise UsageError(
            f"resources.workers = {spec.resources.workers}: a training without a search is one "
            "process; several are started by gdpo_tune.sweep alone\n"
            "    fix: --set resources.workers=1"
        )
    chosen_seed = request.seed if seed is None else seed
    name = f"{spec.name}-{request.label}-{spec.training.steps}"
    name += "" if seed is None else f"-seed{seed}"
    directory = (out or spec.storage / name).expanduser().absolute()
    config = spec.trial_config(request.params, chosen_seed, directory)
    config = dataclasses.replace(config, schedule=request.schedule)
    return config if threads is None else dataclasses.replace(config, threads=threads)


def meaning(config: TrialConfig) -> dict[str, Any]:
    """What decides the result of a training, as JSON with dotted keys."""
    parts = {k: v for k, v in dataclasses.asdict(config).items() if k not in INDIFFERENT}
    if not config.schedule:
        del parts["schedule"]  # trainings from before there were schedules go on
    for name in INDIFFERENT_TRAINING:
        del parts["training"][name]
    return json.loads(json.dumps(dict(_flat(parts))))


def _flat(parts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in parts.items():
        key = f"{prefix}{name}"
        found += _flat(value, f"{key}.") if isinstance(value, dict) else [(key, value)]
    return found


def _open_dimension(spec: SweepSpec, path: str, name: str) -> Problem:
    domain = spec.space.domains[name]
    middle = domain.middle()
    shown = f"{middle:.3g}" if isinstance(middle, float) else show(middle)
    return Problem(
        where=path,
        key=f"space.{name}",
        value=describe(domain),
        reason="open: one training needs one value",
        fix=f"--set space.{name}={shown}, or search it with gdpo_tune.sweep",
    )


def _picked(records: Sequence[TrialRecord], spec: SweepSpec, pick: str, source: str) -> TrialRecord:
    if pick.isdecimal():
        return _numbered(records, int(pick), source)
    front = build_front(records, spec.objective_list())
    picks = {KNEE: front.knee, **{f"{BEST}{name}": best for name, best in front.extremes.items()}}
    known = [KNEE, *(f"{BEST}{name}" for name in spec.objectives)]
    if pick not in known:
        raise UsageError(
            f"--from {source}: {did_you_mean(pick, known)}what can be taken is {one_of(known)}, "
            "or the number of a trial"
        )
    member = picks.get(pick)
    if member is None:
        raise UsageError(f"--from {source}: nothing is on the front of that sweep yet")
    return records[member.first]


def _numbered(records: Sequence[TrialRecord], number: int, source: str) -> TrialRecord:
    if number >= len(records):
        last = f"the last one is {len(records) - 1}" if records else "it has none"
        raise UsageError(f"--from {source}: that sweep has no trial {number}; {last}")
    if records[number].role == "untrained":
        raise UsageError(f"--from {source}: trial {number} is the untrained policy")
    return records[number]
