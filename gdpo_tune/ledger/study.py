"""Optuna studies: the sweep's own in its journal, and quiet ones elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage

from gdpo_tune.core.errors import IdentityError, SpecError, UsageError
from gdpo_tune.core.files import write_whole
from gdpo_tune.spec import SweepSpec, load_spec, shown_yaml
from gdpo_tune.spec.identity import differences, meaning
from gdpo_tune.spec.model import SPEC

STUDY = "sweep"
SHOWN = 4
"""At most so many differences between two sweeps are told."""


def open_study(storage: JournalStorage, spec: SweepSpec, *, writable: bool) -> optuna.Study:
    """Load the study that a journal holds, or create it.

    Raises:
        IdentityError: it holds another sweep.
        UsageError: it holds none and may not be written.
    """
    known = {study.study_name for study in storage.get_all_studies()}
    sampler = optuna.samplers.RandomSampler()  # proposals come from elsewhere: this one never asks
    if STUDY not in known and writable:
        study = create_study(storage, STUDY, spec, sampler)
    elif STUDY in known:
        study = optuna.load_study(storage=storage, study_name=STUDY, sampler=sampler)
    else:
        raise UsageError(f"there is no sweep in {spec.place} yet")
    identity = study.user_attrs.get("identity")
    if identity is None and writable:
        study.set_user_attr("identity", spec.identity())
    elif identity != spec.identity():
        raise IdentityError(
            f"{spec.place} holds another sweep: {what_differs(spec)}\n"
            "    fix: choose another --name, or --fresh to move that one aside"
        )
    return study


def what_differs(spec: SweepSpec) -> str:
    """The first keys in which the sweep in the folder of `spec` is another one."""
    found: list[str] = []
    try:
        there = load_spec(spec.directory / SPEC, name=spec.name, to_run=False)
    except SpecError:
        pass  # it was moved, or written by another version; that the sweeps differ is known
    else:
        found = differences(meaning(there), meaning(spec))
    if not found:
        return "another task, policy, space or training, or other objectives"
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def create_study(
    storage: BaseStorage, name: str, spec: SweepSpec, sampler: BaseSampler
) -> optuna.Study:
    """A study over the sweep's objectives."""
    with quiet_optuna():
        return optuna.create_study(
            storage=storage,
            study_name=name,
            directions=[objective.direction for objective in spec.objective_list()],
            sampler=sampler,
        )


def copied(study: optuna.Study) -> optuna.Study:
    """The same study in memory, so that it outlives its ledger, and nobody writes through it."""
    with quiet_optuna():
        copy = optuna.create_study(study_name=study.study_name, directions=study.directions)
        copy.add_trials(study.get_trials(deepcopy=False))
    return copy


def write_spec(spec: SweepSpec) -> None:
    """Keep the resolved file, for everyone whom the umask allows, unless it holds a password."""
    content = spec.dump_yaml()
    mode = 0o644 if content == shown_yaml(spec) else 0o600
    write_whole(spec.directory / SPEC, content, mode=mode)


@contextmanager
def quiet_optuna() -> Generator[None]:
    """Keep Optuna's notes off the screen, which belongs to the display of the sweep."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
