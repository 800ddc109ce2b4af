"""Read access to the sweep that a person names; a sweep is never changed here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.addresses import refuse_hub_address
from gdpo_tune.core.errors import TaskFileError, UsageError
from gdpo_tune.core.files import expand_path, is_file
from gdpo_tune.core.object_store import (
    READ_PATIENCE,
    RUNS,
    SPEC,
    find_address,
    find_local_copy,
    is_url,
    list_copied_addresses,
)
from gdpo_tune.core.text import suggest

# Other imports are late: that there is no such sweep needs neither pydantic nor Optuna.
if TYPE_CHECKING:
    from gdpo_tune.analysis.effects import Dimension, Effects
    from gdpo_tune.analysis.front import Front
    from gdpo_tune.core.trials import TrialRecord
    from gdpo_tune.results.picks import PickedCandidate
    from gdpo_tune.results.wording import ResultWarning
    from gdpo_tune.spec import SweepSpec
    from gdpo_tune.spec.space import Space


@dataclass(frozen=True)
class Sweep:
    """A sweep at one moment: what every table, figure and command reads."""

    spec: SweepSpec
    records: Sequence[TrialRecord]
    sessions: Sequence[Mapping[str, Any]] = ()
    """As `Ledger.get_sessions`."""
    contents: Sequence[Mapping[str, Any]] = ()
    """What decided its results, as `Ledger.get_contents`."""
    chosen: PickedCandidate | None = None
    """Candidate that a person picked."""

    @property
    def ending(self) -> str:
        """Why nothing was left to run; empty if something was."""
        return self.sessions[-1].get("ending", "") if self.sessions else ""

    @cached_property
    def front(self) -> Front:
        """Front of its trials, on test prompts; a parameter without effect has no value in it."""
        from gdpo_tune.analysis.front import build_front

        space = self.spec.space
        shown = [replace(r, params=space.drop_inactive(r.params)) for r in self.records]
        goals = self.spec.list_objectives()
        front = build_front(shown, goals, self.chosen and self.chosen.name)
        return replace(front, missed=self._list_missed(front))

    def _list_missed(self, front: Front) -> dict[str, list[str]]:
        """Return member -> limits that it keeps on validation prompts and misses on test prompts.

        The search cannot know: it sees validation prompts alone.
        """
        limits = self.spec.constraints.items()
        missed = {
            member.name: [
                f"{name} {limit.op} {limit.limit:.3g}"
                for name, limit in limits
                if name in member.mean and not limit.holds(member.mean[name].mean)
            ]
            for member in front.members
        }
        return {name: texts for name, texts in missed.items() if texts}

    @cached_property
    def effects(self) -> Effects:
        """Effects of each dimension at the step at which most trainings were measured."""
        from gdpo_tune.analysis.effects import estimate_effects

        dimensions = list_dimensions(self.spec.space)
        return estimate_effects(self.records, self.spec.list_objectives(), dimensions)

    @cached_property
    def warnings(self) -> list[ResultWarning]:
        """Warnings about the result."""
        from gdpo_tune.results.wording import list_result_warnings

        return list_result_warnings(self.spec, self.front)

    @property
    def can_export(self) -> bool:
        """True if its trainings can be exported: those of a task with tools cannot be."""
        from gdpo_tune.core.task_files import load_task_info

        try:
            return not load_task_info(self.spec.task, self.spec.space.domains).calls_tools
        except TaskFileError:  # its file is gone
            return False

    def reload(self, changes: Sequence[str], *, to_run: bool = True) -> SweepSpec:
        """Load its file with changes, for one training: without budget and scheduler.

        Without `to_run` this machine may lack its data and packages.
        """
        from gdpo_tune.spec import load_spec
        from gdpo_tune.spec.document import dump_flow

        search = self.spec.search.model_dump(include={"merges", "checkpoints", "seed"})
        alone = dump_flow({"trials": 1, "scheduler": {"type": "fifo"}, **search})
        words = [override_storage(self.spec.storage), "search=", f"search={alone}", *changes]
        file, name = self.spec.directory / SPEC, self.spec.name
        return load_spec(file, words, name, needs=None if to_run else [])


def fetch_policy(spec: SweepSpec, policy: Path | None) -> Path | None:
    """Return the directory of a trial's checkpoint, copied to this machine from an object store."""
    if policy is None or not spec.address:
        return policy
    from gdpo_tune.ledger.sweep_store import SweepStore

    number = int(policy.parent.name)  # the copy of the sweep has the marker alone
    copies = spec.output_directory / f"{spec.name}-policies" / str(number)
    return SweepStore(spec).fetch_checkpoint(number, policy.name, copies)


def split_source(source: str, pick: str | None) -> tuple[str, str | None]:
    """Return location and pick of `LOCATION:PICK`, or of `LOCATION` and `pick`; it may be None."""
    location, _, text = source.rpartition(":")
    if pick is not None or text.startswith("//"):  # the colon of s3:// begins no pick
        return source, pick
    if is_url(source) or (location and text and not is_file(_find_directory(source) / SPEC)):
        return location, text
    return source, None


def override_storage(storage: str) -> str:
    """Return the override of `storage:`; without quotes YAML would misread some paths."""
    return f"storage={json.dumps(storage)}"


def resolve_spec_file(location: str, source: str) -> tuple[Path, str]:
    """Return a sweep's resolved file and its `override_storage`.

    `location` is a directory, or an address, whose file is downloaded. The UsageError where there
    is no sweep names `source`, what the person wrote.
    """
    missing = f"{source}: there is no sweep in {location.rstrip('/')}: it has no {SPEC}"
    if is_url(location):
        refuse_hub_address(location)

        from gdpo_tune.ledger.sweep_store import fetch_spec

        address = location.rstrip("/")
        directory = find_local_copy(address)
        if not fetch_spec(address, directory, patience=READ_PATIENCE):
            raise UsageError(missing)
        return directory / SPEC, override_storage(address.rpartition("/")[0])
    path = expand_path(location).absolute()
    if not is_file(path / SPEC):
        before, _, after = location.rpartition(":")
        if before and is_file(_find_directory(before) / SPEC):
            raise UsageError(
                f"{source}: pick once, after a single colon or with --pick: leave out :{after}"
            )
        if addresses := list_copied_addresses(path.name):
            fix = f"give its address: {', '.join(addresses)}"
        else:
            names = [found.parent.name for found in path.parent.glob(f"*/{SPEC}")]
            fix = (
                f"{suggest(path.name, names)}name the directory that a sweep has made, or its file"
            )
        raise UsageError(f"{missing}\n    fix: {fix}")
    return path / SPEC, override_storage(str(path.parent))


def read_sweep(location: str, source: str, *, with_files: bool = False) -> Sweep:
    """Read a sweep's file and records; arguments and errors are those of `resolve_spec_file`.

    With `with_files` step metrics and the names of kept checkpoints are downloaded too, if the
    sweep is on an object store.
    """
    file, storage_override = resolve_spec_file(location, source)

    from gdpo_tune.ledger import Ledger
    from gdpo_tune.spec import load_spec

    spec = load_spec(file, [storage_override], file.parent.name, to_run=False)
    if with_files:
        download_artifacts(spec)  # first: a record's policy is looked up among the downloaded names
    with Ledger.open(spec, read_only=True) as ledger:
        return Sweep(
            ledger.spec, ledger.get_records(), ledger.get_sessions(), ledger.get_contents()
        )


def list_dimensions(space: Space) -> tuple[Dimension, ...]:
    """Return the parameters with more than one value, in dependency order.

    Those whose condition on a fixed parameter never holds are left out.
    """
    from gdpo_tune.analysis.effects import Dimension
    from gdpo_tune.spec.space import Choices, is_one_of

    found: dict[str, Dimension] = {}
    for name, domain in space.searched_domains.items():
        fixed = {p: v for p, v in domain.when.items() if p in space.fixed_values}
        missing = domain.when.keys() - fixed.keys() - found.keys()
        if missing or not all(is_one_of(space.fixed_values[p], v) for p, v in fixed.items()):
            continue
        when = {p: v for p, v in domain.when.items() if p not in fixed}
        if isinstance(domain, Choices):
            found[name] = Dimension(name, domain.choices, when=when)
        else:
            low, high = float(domain.low), float(domain.high)
            found[name] = Dimension(name, (), low, high, domain.log, when)
    return tuple(found.values())


def is_space(name: str) -> bool:
    """Return whether a text names a file to search with; the file that a sweep keeps is none."""
    path = expand_path(name)
    return is_file(path) and not (path.name == SPEC and any(path.parent.glob("ledger.*")))


def locate_sweep(name: str) -> str:
    """Return the location of a sweep, which is named by location, name under `runs`, or a file."""
    if not is_space(name):
        return resolve_location(name)
    from gdpo_tune.spec import load_spec

    return load_spec(expand_path(name), to_run=False).location


def find_sweep(name: str) -> Sweep:
    """Read a sweep with its step metrics, by location, name under `runs`, or spec file.

    A UsageError says that there is no sweep, or what is wrong with the file.
    """
    return read_sweep(locate_sweep(name), name, with_files=True)


def download_artifacts(spec: SweepSpec) -> None:
    """Download the files that figures are drawn from, if the sweep is on an object store."""
    if spec.address:
        from gdpo_tune.ledger.sweep_store import SweepStore

        SweepStore(spec, patience=READ_PATIENCE).fetch()


def resolve_location(text: str) -> str:
    """Return the address or directory of the sweep that `text` names, perhaps under `runs`.

    A local copy of a sweep on an object store gives the address there.
    """
    if is_url(text):
        return text
    directory = _find_directory(text)
    return find_address(directory) or str(directory)


def _find_directory(text: str) -> Path:
    path, under_runs = expand_path(text), Path(RUNS) / text
    if path.name == SPEC and not is_space(text):
        path = path.parent
    return under_runs if not is_file(path / SPEC) and is_file(under_runs / SPEC) else path
