"""From a folder of YAML files to scheduled sweeps, and to every problem in the others at once."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gdpo_tune.clusters import cron
from gdpo_tune.clusters.backends import backend_checks
from gdpo_tune.clusters.places import placed, why_no_folder
from gdpo_tune.clusters.schedule_spec import BACKEND_SETTINGS, SweepFile
from gdpo_tune.core.errors import Problem, SpecError, UsageError
from gdpo_tune.core.files import is_file, is_folder
from gdpo_tune.core.object_store import is_url
from gdpo_tune.spec import SweepSpec, load_spec, without_password
from gdpo_tune.spec.checks import check_name
from gdpo_tune.spec.load import NAME
from gdpo_tune.spec.problems import (
    KeyPath,
    Mark,
    Node,
    Problems,
    Unreadable,
    did_you_mean,
    dotted,
)
from gdpo_tune.spec.sections import section
from gdpo_tune.spec.source import missing_file_fix, parse, read_text

SUFFIXES = (".yaml", ".yml")
PASSWORD = re.compile(r"://[^/@]*:[^@]+@|[?&](ssl)?password=")


@dataclass(frozen=True)
class ScheduledSweep:
    """One file of `sweeps/` that is sound, with the search space that it names."""

    file: Path
    root: Path
    """Folder of the project, absolute: relative paths of the file begin here."""
    settings: SweepFile
    """What the file says, its name filled in."""
    spec: SweepSpec
    """The search space with what the file lays over it. Its name is that of the schedule."""

    @property
    def name(self) -> str:
        """Of the schedule."""
        return self.settings.name

    @property
    def storage(self) -> str:
        """Address of an object store, or absolute folder."""
        return placed(self.settings.storage, self.root)

    @property
    def schedule_in_force(self) -> str:
        """The schedule as one text; empty if no run starts by it."""
        when = self.settings.schedule
        return f"{when.cron} {when.timezone}" if when and self.settings.enabled else ""


@dataclass(frozen=True)
class Loaded:
    """What a folder of sweeps holds."""

    sweeps: tuple[ScheduledSweep, ...]
    """Those that are sound."""
    error: SpecError | None
    """Every problem of the others."""

    def named(self, name: str) -> ScheduledSweep:
        """The sweep of a name.

        Raises:
            SpecError: its file, or another one, is wrong.
            UsageError: there is none.
        """
        known = {sweep.name: sweep for sweep in self.sweeps}
        if name in known:
            return known[name]
        if self.error is not None:
            raise self.error
        names = ", ".join(sorted(known))
        raise UsageError(
            f"there is no sweep {name!r}\n"
            f"    fix: {did_you_mean(name, known)}those that exist: {names}"
        )


def load_sweeps(place: Path | str) -> Loaded:
    """Read every sweep of a folder, or a single file.

    Of the machine only its files are looked at: variables, storage and backend may belong to
    another one. See `reach.problems`.

    Raises:
        SpecError: there is no such folder or file, or nothing in it.
    """
    files = files_in(Path(place))
    documents = [Document(file) for file in files]
    sweeps = [(document, document.sweep()) for document in documents]
    refuse_doubles(documents)
    found: list[Problem] = []
    for document in documents:
        try:
            document.problems.raise_if_any()
        except SpecError as error:
            found += error.problems
    sound = tuple(sweep for document, sweep in sweeps if sweep and not document.problems.found)
    return Loaded(sound, SpecError(tuple(found)) if found else None)


def files_in(place: Path) -> list[Path]:
    """The YAML files of a folder, by name; or the file itself.

    Raises:
        SpecError: there is none.
    """
    if is_folder(place):
        # what begins with a dot is what editors keep beside a file that is being written
        visible = (path for path in entries(place) if not path.name.startswith("."))
        files = sorted(path for path in visible if path.suffix in SUFFIXES)
        if files:
            return files
    elif is_file(place):
        return [place]
    reason = "no file *.yaml in it" if is_folder(place) else "there is no such file or folder"
    fix = "give a folder of scheduled sweeps, such as sweeps/"
    raise SpecError((Problem(str(place), "", "", reason, fix),))


def entries(folder: Path) -> list[Path]:
    """What is in a folder.

    Raises:
        SpecError: it cannot be read.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        fix = "let the user that runs this command read it"
        raise SpecError((Problem(str(folder), "", "", str(error.strerror), fix),)) from error


def refuse_doubles(documents: Sequence[Document]) -> None:
    """Note every name that several files have: they would write one history."""
    places: dict[str, list[tuple[Document, Mark]]] = {}
    for document in documents:
        mark = document.root.find(("name",)).mark
        places.setdefault(document.name, []).append((document, mark))
    places.pop("", None)
    for name, same in places.items():
        for document, mark in same:
            others = ", ".join(str(other) for _, other in same if other != mark)
            if others:
                fix = "give each sweep a name of its own"
                document.problems.add(mark, "name", name, f"also the name of {others}", fix)


class Document:
    """One file, and what turned out to be wrong with it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.project = file.absolute().parent.parent
        self.problems = Problems(Mark(str(file), 1))
        self.root = self._read()
        self.name = self._name()

    def sweep(self) -> ScheduledSweep | None:
        """What the file says; None if too much of it is wrong."""
        if self.root.entries is None:
            return None
        self.problems.refuse_empty(self.root)
        self.problems.refuse_unprintable(self.root)
        self._check_kind()
        settings = section(SweepFile, self.root, (), self.problems)
        if settings is None:
            return None
        settings = settings.model_copy(update={"name": self.name})
        self._check_schedule(settings)
        self._check_backend(settings)
        self._check_storage(settings)
        spec = self._spec(settings)
        return spec and ScheduledSweep(self.file, self.project, settings, spec)

    def _read(self) -> Node:
        nothing = Node(Mark(str(self.file), 1))
        if self.file.exists() and not is_file(self.file):
            # reading a pipe or a device might never end
            reason, fix = "not a file", "move it out of the folder, or give it another ending"
            self.problems.add(Mark(str(self.file)), "", None, reason, fix)
            return nothing
        try:
            root = parse(read_text(self.file, self.problems), str(self.file), self.problems)
        except Unreadable:
            return nothing
        if root.entries is None:
            reason = "the file is empty" if root.is_empty() else "not a mapping of keys to values"
            fix = "start from sweeps/nightly_code.yaml; a sweep needs space: and schedule:"
            self.problems.at(root, (), reason, fix)
        return root

    def _name(self) -> str:
        node = self.root.find(("name",))
        value = self.file.stem if node is self.root else node.value
        if isinstance(value, str) and NAME.fullmatch(value):
            return value
        if isinstance(value, str):
            reason = "not a name that a folder can have (letters, digits, '.', '_', '-')"
            self.problems.at(node, ("name",), reason, "write name: followed by such a name")
        return ""

    def _check_kind(self) -> None:
        path = ("backend", "kind")
        node = self.root.find(path)
        if "kind" in (self.root.find(("backend",)).entries or {}):
            check_name(node, path, "backend", BACKEND_SETTINGS, self.problems)

    def _check_schedule(self, settings: SweepFile) -> None:
        when = settings.schedule
        if when is None:
            return
        wrong = cron.why_not(when.cron)
        if wrong is not None:
            self._at(("schedule", "cron"), *wrong)
        if not cron.is_zone(when.timezone):
            fix = f"{cron.similar_zones(when.timezone)}write a name such as Europe/Berlin or UTC"
            self._at(("schedule", "timezone"), "unknown time zone", fix)

    def _check_backend(self, settings: SweepFile) -> None:
        if not self.problems.about("backend"):
            for path, reason, fix in backend_checks.problems(settings, self.project):
                self._at(path, reason, fix)

    def _check_storage(self, settings: SweepFile) -> None:
        if is_url(settings.storage) and not settings.ledger:
            reason = "an object store, where no journal can live"
            fix = "write ledger: postgresql+psycopg2://USER@HOST/DATABASE, or a folder as storage"
            self._at(("storage",), reason, fix)
        elif not is_url(settings.storage) and (wrong := why_no_folder(settings.storage)):
            self._at(("storage",), *wrong)
        self._refuse_password("ledger", settings.ledger, "PGPASSWORD or ~/.pgpass")
        tracking = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        self._refuse_password("tracking", settings.tracking, tracking)

    def _refuse_password(self, key: str, address: str, instead: str) -> None:
        if PASSWORD.search(address):
            mark, fix = self.root.find((key,)).mark, f"leave it out, and give it in {instead}"
            reason = "with a password, which the list of processes would show"
            self.problems.add(mark, key, without_password(address), reason, fix)

    def _spec(self, settings: SweepFile) -> SweepSpec | None:
        """The search space; its problems, and those of what is laid over it, are noted."""
        space = self.project / settings.space
        if not is_file(space):
            fix = missing_file_fix(space) + f"the file is looked for in {self.project}"
            self._at(("space",), f"there is no file {settings.space}", fix)
            return None
        changes = overrides(settings, self.project)
        if settings.budget.gpu_hours is None and settings.budget.gpu_hours_per_30d is not None:
            limit = settings.budget.gpu_hours_per_30d
            changes[f"search.budget.gpu_hours={limit}"] = ("budget", "gpu_hours_per_30d")
        try:
            return load_spec(space, list(changes), self.name or "sweep")
        except SpecError as error:
            for problem in error.problems:
                self._note(problem, changes)
        return None

    def _note(self, problem: Problem, changes: dict[str, KeyPath]) -> None:
        """A problem of the search space, at the key of this file where that is to blame."""
        shown = {without_password(change): path for change, path in changes.items()}
        path = shown.get(problem.where.removeprefix("--set "))
        mark = Mark(problem.where)
        if path is not None and self.problems.about(dotted(path)):
            return  # said already, in words of this file
        if path is not None:
            mark = self.root.find(path).mark
            problem = replace(problem, where=str(mark), key=dotted(path))
        self.problems.found.append((mark, problem))

    def _at(self, path: KeyPath, reason: str, fix: str) -> None:
        node = self.root.find(path)
        value = without_password(node.value) if isinstance(node.value, str) else node.plain()
        self.problems.add(node.mark, dotted(path), value, reason, fix)


def overrides(settings: SweepFile, root: Path) -> dict[str, KeyPath]:
    """What a file lays over its search space, as for `--set`, and which of its keys says so."""
    changes: dict[str, KeyPath] = {
        f"storage={json.dumps(placed(settings.storage, root))}": ("storage",)
    }
    if settings.tracking:
        changes[f"tracking.uri={json.dumps(settings.tracking)}"] = ("tracking",)
    if settings.ledger:
        changes[f"ledger={json.dumps(settings.ledger)}"] = ("ledger",)
    for key in ("trials", "gpu_hours"):
        limit = getattr(settings.budget, key)
        if limit is not None:
            changes[f"search.budget.{key}={limit}"] = ("budget", key)
    return changes
