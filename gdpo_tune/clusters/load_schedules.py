"""From a directory of YAML files to scheduled sweeps, or to every problem of the files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gdpo_tune.clusters.schedule_spec import (
    BACKEND_SETTINGS,
    KubeRayBackend,
    LocalBackend,
    RayJobBackend,
    ScheduleSettings,
    SlurmBackend,
    resolve_path,
)
from gdpo_tune.core.addresses import find_address_problem, is_hub_address
from gdpo_tune.core.errors import SpecError, SpecProblem, UsageError
from gdpo_tune.core.files import is_directory, is_file
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.text import explain_unknown_name, suggest
from gdpo_tune.spec import SweepSpec, document, load_spec
from gdpo_tune.spec.checks import NAME
from gdpo_tune.spec.sections import read_section


@dataclass(frozen=True)
class ScheduledSweep:
    """One valid file of `sweeps/`, with the search space that it names."""

    file: Path
    root: Path
    """Absolute directory of the project, where relative paths of the file begin."""
    settings: ScheduleSettings
    """The file's keys, with its name filled in."""
    spec: SweepSpec
    """The search space with the file's overrides. Its name is that of the schedule."""
    needs: tuple[SpecProblem, ...] = ()
    """Data and packages that the search space needs and this machine lacks."""

    @property
    def name(self) -> str:
        """Name of the schedule."""
        return self.settings.name

    @property
    def storage(self) -> str:
        """Address of an object store, or absolute directory."""
        return resolve_path(self.settings.storage, self.root)

    @property
    def state_directory(self) -> Path:
        """Directory of the schedule's state: beside its runs, or in the project.

        The latter if they are in an object store, which has no locks.
        """
        parent = self.root if is_url(self.storage) else Path(self.storage)
        return parent / ".schedule" / self.name

    @property
    def active_schedule(self) -> str:
        """The schedule as one text; empty if no run starts by it."""
        when = self.settings.schedule
        return f"{when.cron} {when.timezone}" if when and self.settings.enabled else ""


@dataclass(frozen=True)
class LoadedSweeps:
    """The scheduled sweeps of a directory."""

    sweeps: tuple[ScheduledSweep, ...]
    """The valid ones; `error` has every problem of the others."""
    error: SpecError | None

    def find(self, name: str) -> ScheduledSweep:
        """Return the sweep of a name; if there is none, raise the error of the files, if any."""
        sweeps = {sweep.name: sweep for sweep in self.sweeps}
        if name in sweeps:
            return sweeps[name]
        if self.error is not None:
            raise self.error
        names = ", ".join(sorted(sweeps))
        raise UsageError(
            f"there is no sweep {name!r}\n    fix: {suggest(name, sweeps)}existing: {names}"
        )


def load_sweeps(path: Path | str) -> LoadedSweeps:
    """Read every sweep of a directory, or a single file.

    What may belong to another machine (variables, storage, data, packages) is not checked; see
    `console.find_errors` and `console.find_notes`.

    Raises:
        SpecError: there is no such directory or file, or no sweep in it.
    """
    files = [ScheduleFile(file) for file in _list_files(Path(path))]
    sweeps = [file.load() for file in files]
    problems: list[SpecProblem] = []
    for file in files:
        same = [each for each in files if each.name == file.name and each is not file]
        if file.name and same:  # they would write the same history
            others = ", ".join(str(each.problems.find(("name",))[0]) for each in same)
            reason, fix = f"also the name of {others}", "give each sweep a name of its own"
            file.problems.note("name", reason, fix, file.name)
        try:
            file.problems.raise_if_any()
        except SpecError as error:
            problems += error.problems
    valid = [s for file, s in zip(files, sweeps, strict=True) if s and not file.problems.records]
    distinct = tuple(dict.fromkeys(problems))  # several sweeps may have the same search space
    return LoadedSweeps(tuple(valid), SpecError(distinct) if distinct else None)


def list_overrides(settings: ScheduleSettings, root: Path) -> dict[str, document.KeyPath]:
    """Return the file's overrides of its search space: text for `--set` -> the key that sets it."""
    storage = json.dumps(resolve_path(settings.storage, root))
    overrides: dict[str, document.KeyPath] = {f"storage={storage}": ("storage",)}
    if settings.tracking:
        overrides[f"tracking.uri={json.dumps(settings.tracking)}"] = ("tracking",)
    for key in ("trials", "completions", "gpu_hours"):
        limit = getattr(settings.budget, key)
        if limit is not None:
            overrides[f"search.budget.{key}={limit}"] = ("budget", key)
    return overrides


def _list_files(path: Path) -> list[Path]:
    reason, fix = "there is no such file or directory", "give a directory such as sweeps/"
    if is_file(path):
        return [path]
    if is_directory(path):
        reason = "no file *.yaml in it"
        try:
            # editors keep files whose names begin with a dot beside the file that they write
            entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            entries, reason = [], str(error.strerror)
            fix = "let the user that runs this command read it"
        files = sorted(entry for entry in entries if entry.suffix in (".yaml", ".yml"))
        if files:
            return files
    raise SpecError((SpecProblem(str(path), "", "", reason, fix),))


class ScheduleFile:
    """One file, and its problems."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.project = file.absolute().parent.parent
        self.problems = document.Problems(document.Place(str(file), 1))
        self.is_read = self._read()
        self.name, value = "", self.problems.root.get("name", file.stem)
        if isinstance(value, str) and NAME.fullmatch(value):
            self.name = value
        elif isinstance(value, str):
            reason = "not a name for a directory (letters, digits, '.', '_', '-')"
            self.problems.note("name", reason, "write name: followed by such a name", value)

    def load(self) -> ScheduledSweep | None:
        """Build the sweep and note every problem; return None if too much is wrong."""
        if not self.is_read:
            return None
        self.problems.refuse_unusable()
        _, kind = self.problems.find(("backend", "kind"))
        if kind is not document.ABSENT and kind not in BACKEND_SETTINGS:
            reason, fix = explain_unknown_name("backend", kind, BACKEND_SETTINGS)
            self.problems.note(("backend", "kind"), reason, fix)
        settings = read_section(ScheduleSettings, self.problems.root, self.problems)
        if settings is None:
            return None
        settings = settings.replace(name=self.name)
        if not self.problems.has_problem("backend"):
            for path, reason, fix in find_backend_problems(settings, self.project):
                self._add(path, reason, fix)
        if is_hub_address(settings.storage):
            fix = "write a directory, or an object store such as s3://bucket/sweeps"
            self._add(("storage",), "the Hub holds no sweeps", fix)
        if re.search(r"://[^/@]*:[^@]+@|[?&](ssl)?password=", settings.tracking):
            reason = "with a password, which the list of processes would show"
            fix = "leave it out: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD hold it"
            self._add(("tracking",), reason, fix)
        needs: list[SpecProblem] = []
        spec = self._load_spec(settings, needs)
        return spec and ScheduledSweep(self.file, self.project, settings, spec, tuple(needs))

    def _read(self) -> bool:
        if self.file.exists() and not is_file(self.file):
            # reading a pipe or a device might never end
            fix = "move it out of the directory, or give it another ending"
            self.problems.add(document.Place(str(self.file)), "", None, "not a file", fix)
            return False
        try:
            root = document.parse_yaml(
                document.read_text(self.file, self.problems), str(self.file), self.problems
            )
        except document.ReportedError:
            return False
        if isinstance(root, document.YamlMap):
            self.problems.root = root
            return True
        reason = "the file is empty" if root is None else "not a mapping of keys to values"
        fix = "start from sweeps/nightly_code.yaml; a sweep needs space: and schedule:"
        self.problems.add(self.problems.origin, "", root, reason, fix)
        return False

    def _load_spec(self, settings: ScheduleSettings, needs: list[SpecProblem]) -> SweepSpec | None:
        space = self.project / settings.space
        if not is_file(space):
            fix = document.suggest_file(space) + f"the path is relative to {self.project}"
            self._add(("space",), f"there is no file {settings.space}", fix)
            return None
        overrides, limit = list_overrides(settings, self.project), settings.budget.gpu_hours_per_30d
        if settings.budget.gpu_hours is None and limit is not None:
            overrides[f"search.budget.gpu_hours={limit}"] = ("budget", "gpu_hours_per_30d")
        try:
            return load_spec(space, list(overrides), self.name or "sweep", needs=needs)
        except SpecError as error:
            keys = {redact_passwords(override): path for override, path in overrides.items()}
            for problem in error.problems:
                path = keys.get(problem.where.removeprefix("--set "))
                if problem.where == str(space):  # it cannot be read
                    self._add(("space",), f"{space}: {problem.reason}", problem.fix)
                elif path is None:
                    self.problems.records.append((document.Place(problem.where), problem))
                elif not self.problems.has_problem(document.format_path(path)):
                    mark, _ = self.problems.find(path)  # of the key in this file that causes it
                    problem = replace(problem, where=str(mark), key=document.format_path(path))
                    self.problems.records.append((mark, problem))
        return None

    def _add(self, path: document.KeyPath, reason: str, fix: str) -> None:
        _, value = self.problems.find(path)
        self.problems.note(
            path, reason, fix, redact_passwords(value) if isinstance(value, str) else None
        )


Fault = tuple[tuple[str, ...], str, str]
"""Key, reason, fix."""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which names of RayJobs must meet: RFC 1123 without a digit at the start."""
MULTI_JOB_OPTIONS = re.compile(r"(?<!\S)(-a|--ar|-W|--wait(?!-)|:(?!\S))")
"""Options of sbatch for an array, a heterogeneous job, and to stay until the job has ended."""
MAX_NAME = 47 - len("-20260329t010000z-a100")
"""Characters of a schedule's name: KubeRay allows 47 for a RayJob, time and attempt included."""


def find_backend_problems(settings: ScheduleSettings, project: Path) -> Iterator[Fault]:
    """Yield every conflict of a file's backend; relative paths begin in `project`."""
    backend = settings.backend
    match backend:
        case LocalBackend():
            pass
        case RayJobBackend():
            yield from _check_ray_job(settings, backend, project)
        case KubeRayBackend():
            yield from _check_kuberay(settings, backend)
            # links are not followed: the image has its own files
            space = Path(os.path.normpath(project / settings.space))
            if Path(settings.space).is_absolute() or not space.is_relative_to(project):
                fix = "write it relative to the directory that holds sweeps/"
                yield ("space",), "a file of this machine, which pods do not see", fix
        case SlurmBackend():
            for option in backend.options:
                fix = "write each option like --constraint=a100"
                if not option.startswith("-") or "\n" in option:
                    yield ("backend", "options"), f"{option!r} is not an option of sbatch", fix
                elif MULTI_JOB_OPTIONS.search(option):
                    reason = f"{option!r} makes several jobs, or waits: a run is one job of its own"
                    yield ("backend", "options"), reason, "remove it"


def _check_ray_job(
    settings: ScheduleSettings, backend: RayJobBackend, project: Path
) -> Iterator[Fault]:
    if bool(backend.address) == bool(backend.address_env):
        reason = "both address and address_env" if backend.address else "no address"
        fix = "write address: http://HOST:8265, or address_env: RAY_API_SERVER_ADDRESS"
        yield ("backend",), reason, fix
    reason = find_address_problem(backend.address) if backend.address else ""
    if reason:
        yield ("backend", "address"), reason, "write http://HOST:8265"
    directory = Path(resolve_path(backend.working_dir, project)).resolve()
    if not (project / settings.space).resolve().is_relative_to(directory):
        reason = f"the search space {settings.space} is not in it"
        yield ("backend", "working_dir"), reason, "write the directory that holds search_spaces/"


def _check_kuberay(settings: ScheduleSettings, backend: KubeRayBackend) -> Iterator[Fault]:
    name, storage = settings.name, settings.storage
    if name and (len(name) > MAX_NAME or not LABEL.fullmatch(name)):
        reason = "not a name of Kubernetes (RFC 1123)"
        if LABEL.fullmatch(name):
            reason = f"{len(name)} characters, too long for a name of Kubernetes here"
        rule = f"at most {MAX_NAME} lowercase letters, digits and '-'"
        yield ("name",), reason, f"write name: and {rule}, a letter first"
    if not is_url(storage) and not storage.startswith("/"):
        reason = "a directory of this machine, which pods do not see"
        yield ("storage",), reason, "write the path at which claim: is mounted, or s3://..."
    elif not is_url(storage) and not backend.claim and not backend.cluster:
        reason = f"nothing is mounted at storage: {storage}"
        yield ("backend",), reason, "write claim: and the name of a PersistentVolumeClaim"
    if is_url(storage) and backend.claim:
        reason = "storage is an object store, so nothing would be mounted"
        yield ("backend", "claim"), reason, "remove it, or write a directory as storage"
    if not is_url(backend.working_dir) and not backend.working_dir.startswith("/"):
        reason = "neither a directory of the image nor an address"
        yield ("backend", "working_dir"), reason, "write an absolute path, such as /srv/search"
    if backend.cluster and backend.queue:
        reason = "Kueue admits new clusters, and cluster: names an existing one"
        yield ("backend", "queue"), reason, "remove one of the two"
    if storage == "/":
        yield ("storage",), "nothing can be mounted there", "write a directory, such as /mnt/sweeps"
