"""One training that a person asks for: a file with fixed values, or a trial of a sweep again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.analysis.lineage import stretch_schedule, training_of
from gdpo_tune.core.errors import Problem, SpecError, UsageError
from gdpo_tune.core.settings import INDIFFERENT_TRAINING
from gdpo_tune.core.trials import Params, Segment, TrialConfig
from gdpo_tune.results.open_sweep import split_source
from gdpo_tune.results.picking import load_and_pick, told_of
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.notation import describe
from gdpo_tune.spec.problems import one_of, show

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
    told: tuple[str, ...] = ()
    """What is known of the trial that they are from, line by line."""


def from_file(path: Path | str, overrides: Sequence[str]) -> Request:
    """The training that a file describes.

    Raises:
        SpecError: the file is wrong, or leaves a parameter open; every one of them is listed.
    """
    spec = load_spec(path, overrides)
    if spec.space.dimensions:
        raise SpecError(tuple(_open_dimension(spec, str(path), n) for n in spec.space.dimensions))
    return Request(spec, spec.space.complete({}), spec.search.seed, "train", str(path))


def from_sweep(
    source: str,
    overrides: Sequence[str],
    pick: str | None = None,
    option: str = "--from",
    *,
    to_run: bool = True,
) -> Request:
    """The training of a trial of a sweep, to be repeated at another budget.

    Of a member of a population it is the one training that its policy comes from: parameters, seed
    and schedule of its lineage.

    Args:
        source: `FOLDER:WHICH`, or `FOLDER` if `pick` says which; see `picks`.
        overrides: of the sweep's file; the parameters are the trial's.
        pick: the choice, or None if `source` has it.
        option: what `source` was given as, for the messages.
        to_run: whether it is to be trained on this machine.

    Raises:
        UsageError: there is no such sweep or trial, or an override is about the space.
    """
    if any(override.lstrip().startswith(("space.", "space=")) for override in overrides):
        raise UsageError(f"{option} takes the parameters of a trial, so --set space. has no effect")
    sweep, chosen = load_and_pick(source, pick, option)
    spec = sweep.respecified(overrides, to_run=to_run)
    number = chosen.record.number
    training = training_of(sweep.records, number)
    schedule = stretch_schedule(training.schedule, spec.training.steps / sweep.spec.training.steps)
    note = f"trial {number} of {sweep.spec.address or split_source(source, pick)[0]}"
    if schedule:
        note += f", with other values from step {one_of(segment.step for segment in schedule)} on"
    told = tuple(told_of(chosen, sweep.spec))
    return Request(spec, training.params, training.seed, chosen.label, note, schedule, told)


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
    directory = (out or spec.beside / name).expanduser().absolute()
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
