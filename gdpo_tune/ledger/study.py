"""Optuna studies: the study of a sweep, and copies in memory."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage

from gdpo_tune.core.errors import IdentityError, SpecError, UsageError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.spec import SweepSpec, dump_public_yaml, load_spec
from gdpo_tune.spec.model import list_decisive_values, list_differences

SWEEP_ID = "sweep_id"
"""Attribute of the study: a random id, by which MLflow's runs of this ledger are found."""
MOST_DIFFERENCES = 4
"""Number of differences between two sweeps that a message lists."""


def open_study(storage: JournalStorage, spec: SweepSpec, *, writable: bool) -> optuna.Study:
    """Load the study that a journal holds, or create it.

    Raises:
        IdentityError: the journal holds another sweep.
        UsageError: the journal holds no sweep and may not be written.
    """
    stored = storage.get_all_studies()  # one at most, whatever its name: a sweep may be renamed
    sampler = optuna.samplers.RandomSampler()  # never used: the searcher proposes
    if stored:
        name = stored[0].study_name
        study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
    elif writable:
        study = create_study(storage, spec.name, spec, sampler)
        study.set_user_attr(SWEEP_ID, uuid.uuid4().hex)
    else:
        raise UsageError(f"there is no sweep in {spec.location} yet")
    earlier = _find_earlier_id(spec.directory) if stored and writable else ""
    if earlier and SWEEP_ID not in study.user_attrs:
        study.set_user_attr(SWEEP_ID, earlier)
    if writable and study.metric_names is None:
        name_objectives(study, list(spec.objectives))
    identity = study.user_attrs.get("identity")
    if identity is None and writable:
        study.set_user_attr("identity", spec.compute_identity())
    elif identity != spec.compute_identity():
        raise IdentityError(
            f"{spec.location} holds another sweep: {describe_differences(spec)}\n"
            "    fix: choose another --name, or --fresh to move that one aside"
        )
    return study


def _find_earlier_id(directory: Path) -> str:
    """Return the id that earlier versions kept with what they sent to MLflow; empty if none."""
    try:
        with (directory / "spool.jsonl").open(encoding="utf-8") as file:
            return str(json.loads(file.readline())["tags"][SWEEP_ID])
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        return ""


def pin_template_date(study: optuna.Study, spec: SweepSpec, *, writable: bool) -> SweepSpec:
    """Return the spec with the date for chat templates that the sweep recorded at its first start.

    A sweep that recorded none is given one if it is `writable`, and else keeps that of its file.

    Raises:
        IdentityError: the spec names another date.
    """
    named = spec.model.template_date
    recorded: str = study.user_attrs.get("template_date", "")
    if not recorded and not writable:
        return spec
    if not recorded:
        recorded = named or date.today().isoformat()
        study.set_user_attr("template_date", recorded)
    if named not in ("", recorded):
        raise IdentityError(
            f"{spec.location} was started with model.template_date = {recorded}, not {named}\n"
            "    fix: remove that key, choose another --name, or --fresh to move that sweep aside"
        )
    return spec.replace(model=spec.model.replace(template_date=recorded))


def describe_differences(spec: SweepSpec) -> str:
    """Return the first keys in which the sweep in the directory of `spec` differs from `spec`."""
    keys: list[str] = []
    with suppress(SpecError):  # the file was moved, or another version wrote it
        stored = load_spec(spec.directory / SPEC, name=spec.name, to_run=False)
        keys = list_differences(list_decisive_values(stored), list_decisive_values(spec))
    if not keys:
        return "another task, policy, space or training, or other objectives"
    hidden = len(keys) - MOST_DIFFERENCES
    return "; ".join(keys[:MOST_DIFFERENCES]) + (f"; {hidden} more" if hidden > 0 else "")


def create_study(
    storage: BaseStorage, name: str, spec: SweepSpec, sampler: BaseSampler
) -> optuna.Study:
    """Create a study over the sweep's objectives."""
    with silence_optuna():
        return optuna.create_study(
            storage=storage,
            study_name=name,
            directions=[objective.direction for objective in spec.list_objectives()],
            sampler=sampler,
        )


def copy_study(study: optuna.Study) -> optuna.Study:
    """Return a copy in memory, which stays usable after the ledger is closed."""
    with silence_optuna():
        copy = optuna.create_study(study_name=study.study_name, directions=study.directions)
        if study.metric_names is not None:
            name_objectives(copy, study.metric_names)
        copy.add_trials(study.get_trials(deepcopy=False))
    return copy


def name_objectives(study: optuna.Study, names: list[str]) -> None:
    """Store the names of a study's values, which Optuna's plots and its dashboard show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(names)


def write_spec(spec: SweepSpec) -> None:
    """Write the resolved spec, readable by its owner alone if it contains a password."""
    content = spec.dump_stored_yaml()
    mode = 0o644 if content == dump_public_yaml(spec, stored=True) else 0o600
    write_atomically(spec.directory / SPEC, content, mode=mode)


@contextmanager
def silence_optuna() -> Generator[None]:
    """Suppress Optuna's messages, which would disturb the display of the sweep."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
