"""The keys of a file in `sweeps/`: when and where a search space is searched, and its budget.

The file holds no hyperparameters: those are in the search space that it names. The docstring of a
key is its line in docs/schedule.md.

Fire times of a cron expression in a time zone follow the rules of Debian's cron. A line with fixed
hours and minutes follows the wall clock: a time in the hour that spring skips is due right after
it, and a time in the hour that autumn repeats is due once, the first time. A line whose minute or
hour begins with `*` follows real time: it skips the missing hour and runs in both repeated ones.
"""

from __future__ import annotations

import itertools
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BeforeValidator, Field

from gdpo_tune.core.files import expand_path, find_path_problem
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.settings import Section, build_refusal
from gdpo_tune.core.text import suggest
from gdpo_tune.spec.model import EnvironmentName, WebhookSettings
from gdpo_tune.spec.sections import require_pattern

MARGIN = timedelta(hours=3)
"""The search begins this much earlier: in a repeated hour the wall clock is behind."""
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
"""Words of some crontabs -> the five fields that they mean."""


def check_line(line: str) -> str:
    """Return a cron line that can be used; refuse others with reason and fix."""
    if line.strip() in NICKNAMES:
        raise build_refusal("not five fields", f'write cron: "{NICKNAMES[line.strip()]}"')
    example = 'such as "0 2 * * *" for two at night'
    count = len(line.split())
    if count != 5:
        fix = f"write minute, hour, day of the month, month, day of the week, {example}"
        raise build_refusal(f"{count} field{'s' if count != 1 else ''}, not five", fix)
    numbers = f"write numbers, *, lists, ranges and steps, {example}"
    if re.search(r"[0-9]{9}", line):
        raise build_refusal("a number of too many digits", numbers)
    error = _find_line_error(line)
    if not error:
        return line
    minute, hour, day, month, weekday = line.split()
    parts = (f"{minute} {hour} {day} * {weekday}", f"{minute} {hour} * {month} {weekday}")
    if any(map(_find_line_error, parts)):
        raise build_refusal(error, numbers)
    raise build_refusal("there is no such day", "write a day that exists")


def check_zone(name: str) -> str:
    """Return the name of a time zone that exists; refuse others with a similar name."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # `../x`, and `Europe`
        zones = {zone.lower(): zone for zone in sorted(zoneinfo.available_timezones())}
        suggestion = suggest(name, zones)
        for lower, zone in zones.items():
            suggestion = suggestion.replace(repr(lower), repr(zone))
        fix = f"{suggestion}write a name such as Europe/Berlin or UTC"
        raise build_refusal("unknown time zone", fix) from None
    return name


class CronSchedule(Section):
    """When a sweep starts."""

    cron: Annotated[str, AfterValidator(check_line)]
    """Minute, hour, day of the month, month and day of the week, as in a crontab."""
    timezone: Annotated[str, AfterValidator(check_zone)] = "UTC"
    """Time zone of the line, such as `Europe/Berlin`."""

    def iterate_times(self, after: datetime) -> Iterator[datetime]:
        """Yield every instant after `after`, in UTC, each once and in order, for 50 years."""
        start = (after - MARGIN).astimezone(zoneinfo.ZoneInfo(self.timezone))
        latest = after
        for local in CronSim(self.cron, start):
            instant = local.astimezone(UTC)
            if instant > latest:
                latest = instant
                yield instant

    def list_times(self, after: datetime, until: datetime) -> list[datetime]:
        """Return every instant after `after` and up to `until`, in UTC."""
        return list(itertools.takewhile(lambda time: time <= until, self.iterate_times(after)))

    def find_last_time(self, until: datetime) -> datetime | None:
        """Return the last instant up to `until`, in UTC; None if there was none for 8 years."""
        for days in (1, 8, 40, 400, 3000):
            times = self.list_times(until - timedelta(days=days), until)
            if times:
                return times[-1]
        return None


def _find_line_error(line: str) -> str:
    """Return what is wrong with five fields, in a few words; empty if nothing is."""
    try:
        next(CronSim(line, datetime(2000, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        return f"{error}".lower()
    except StopIteration:
        return "no such day"
    return ""


UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
DURATION = re.compile("".join(f"(?:([0-9]{{1,9}}){unit})?" for unit in UNITS))
MIN_PERIOD, MAX_PERIOD = UNITS["m"], 366 * UNITS["d"]
"""Limits of a duration in seconds: `tick` may be called every minute, not every second."""


def parse_duration(text: Any) -> int:
    """Return the seconds that a text such as `1d12h` means; refuse other values."""
    match = DURATION.fullmatch(text) if isinstance(text, str) and text else None
    if match is None:
        raise build_refusal("not a length of time", "write it like 90m, 6h or 1d12h")
    counts = zip(match.groups(), UNITS.values(), strict=True)
    seconds = sum(int(count or 0) * size for count, size in counts)
    if not MIN_PERIOD <= seconds <= MAX_PERIOD:
        bounds = f"{format_period(MIN_PERIOD)} to {format_period(MAX_PERIOD)}"
        raise build_refusal(f"must be {bounds}", f"write a length of time of {bounds}")
    return seconds


def format_period(seconds: float) -> str:
    """Return seconds as a text such as `1d12h`; `0s` for none."""
    rest, parts = round(seconds), ""
    for unit, size in UNITS.items():
        count, rest = divmod(rest, size)
        parts += f"{count}{unit}" if count else ""
    return parts or "0s"


def resolve_path(path: str, root: Path) -> str:
    """Return a path of the file as an absolute one, and an address as it is."""
    return path if is_url(path) else str((root / expand_path(path)).absolute())


def check_location(path: str) -> str:
    """Return an address or a path; refuse one that no disk can hold."""
    problem = "" if is_url(path) else find_path_problem(path)
    if problem:
        raise build_refusal(problem, "write another path, such as one that begins with /")
    return path


def check_directory(path: str) -> str:
    """Return a path that can be a directory of this machine; refuse others."""
    if is_url(path):
        raise build_refusal("an address, not a directory", "write a directory of this machine")
    return check_location(path)


DURATION_VALIDATOR = BeforeValidator(parse_duration)
Duration = Annotated[int, DURATION_VALIDATOR]
"""Seconds, written as text in the file."""
KubernetesName = Annotated[
    str,
    require_pattern(
        r"(?=.{1,253}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?",
        "not a name of Kubernetes (RFC 1123)",
        "write lowercase letters, digits, '-' and '.', or remove the key",
    ),
]
Image = Annotated[
    str,
    require_pattern(
        r"[!-~]+", "not the name of an image", "write it like registry.example.org/search:1"
    ),
]
AMOUNT = r"[1-9][0-9]{0,14}([KMGT]i?)?"
MEMORY_ERROR = ("not an amount of memory", "write it like 512Mi or 32Gi")
Memory = Annotated[str, require_pattern(AMOUNT, *MEMORY_ERROR)]
OptionalMemory = Annotated[str, require_pattern(f"({AMOUNT})?", *MEMORY_ERROR)]
SlurmName = Annotated[
    str, require_pattern(r"[!-~]+", "not one word", "write it without blanks, or remove the key")
]
MAX_COUNT = 100_000
"""Most nodes, pods, CPUs or GPUs: a larger number is a typing error."""
Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
OneOrMore = Annotated[int, Ge(1), Le(MAX_COUNT)]
Storage = Annotated[str, MinLen(1), AfterValidator(check_location)]
Directory = Annotated[str, AfterValidator(check_directory)]
Positive = Annotated[float, Gt(0), Field(allow_inf_nan=False)]
Occasion = Literal["failed", "skipped", "budget", "stopped", "finished"]
EVERY_OCCASION: tuple[Occasion, ...] = ("failed", "skipped", "budget", "stopped", "finished")


class RunPolicy(Section):
    """Rules for runs that overlap, are missed, fail or take too long."""

    overlap: Literal["skip", "queue", "replace"] = "skip"
    """If a run is due while another one is active: skip the new one, queue it (one at most), or
    stop the active one for it."""
    missed: Literal["run_once", "skip"] = "run_once"
    """If `tick` was not called in time: start one late run for all missed times, or none."""
    missed_grace: Duration = 6 * UNITS["h"]
    """With `run_once`, how late a run may still start."""
    max_runtime: Duration | None = None
    """Time after its start at which a run, its retries included, is stopped. It stays resumable."""
    max_attempts: Annotated[int, Ge(1), Le(100)] = 3
    """Attempts at one run; each continues where the one before it ended."""


class ScheduleBudget(Section):
    """How much may be spent. A key that is left out sets no limit."""

    trials: Annotated[int, Gt(0)] | None = None
    """Trials of a run; replaces `search.budget.trials` of the search space."""
    completions: Annotated[int, Gt(0)] | None = None
    """Completions of a run in training; replaces `search.budget.completions` of the search
    space."""
    gpu_hours: Positive | None = None
    """GPU-hours of a run; replaces `search.budget.gpu_hours`."""
    gpu_hours_per_30d: Positive | None = None
    """GPU-hours of all runs of this sweep within 30 days. A run gets at most the rest; once there
    is none, runs are skipped."""


class NotifySettings(WebhookSettings):
    """Webhook that is notified when runs end."""

    on: Annotated[tuple[Occasion, ...], Field(strict=False), MinLen(1)] = EVERY_OCCASION
    """Occasions for a notification."""


class LocalBackend(Section):
    """A separate process on the machine on which `tick` runs."""

    kind: Literal["local"] = "local"
    """One of the backends below."""
    folder: Directory = ""
    """Directory of this machine for logs and process ids; default: beside the state."""


class RayJobBackend(Section):
    """A job of a Ray cluster, through its Jobs API."""

    kind: Literal["ray-job"]
    """One of the backends below."""
    address: str = ""
    """The cluster's dashboard, such as `http://head:8265`."""
    address_env: EnvironmentName | None = None
    """Environment variable with that address. Write one of the two."""
    token_env: EnvironmentName | None = None
    """Environment variable with the cluster's token, if it asks for one; default: where Ray finds
    it, in `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`."""
    working_dir: Directory = "."
    """Directory that is sent along, with the search space in it. Storage is not sent."""


class PodSettings(Section):
    """Resources of a pod of a Ray cluster."""

    cpus: OneOrMore = 2
    """CPUs."""
    gpus: Count = 0
    """GPUs (`nvidia.com/gpu`)."""
    memory: Memory = "8Gi"
    """Memory, as Kubernetes writes it."""


class Toleration(Section):
    """A taint that pods tolerate; fields are those of Kubernetes."""

    key: str = ""
    """Key of the taint; empty with `Exists`: every one."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Exists` takes every value."""
    value: str = ""
    """Value of the taint."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint; empty: every one."""


class KubeRayBackend(Section):
    """A separate Ray cluster for each attempt: a RayJob, which KubeRay runs."""

    kind: Literal["kuberay"]
    """One of the backends below."""
    image: Image
    """Image of every pod, with this package in it."""
    working_dir: str = "/srv/search"
    """Directory of the image that holds `search_spaces/` and `sweeps/`, or address of an archive of
    them, such as `s3://bucket/search.zip`, which Ray fetches."""
    namespace: KubernetesName = "default"
    """Namespace of Kubernetes."""
    head: PodSettings = PodSettings()
    """The head, on which the sweep's driver runs."""
    worker: PodSettings = PodSettings()
    """Each worker."""
    workers: Count = 1
    """Number of workers."""
    claim: KubernetesName = ""
    """PersistentVolumeClaim that every pod mounts at `storage`, if that is a directory."""
    secret: KubernetesName = ""
    """Secret whose keys are variables of every pod, such as `MLFLOW_TRACKING_PASSWORD`."""
    service_account: KubernetesName = ""
    """Service account of the pods, if an object store needs one."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes on which pods may be placed, such as `{gpu: h100}`."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Taints of nodes on which pods may be placed all the same, as Kubernetes writes them."""
    image_pull_secrets: Annotated[tuple[KubernetesName, ...], Field(strict=False)] = ()
    """Secrets with which the image is fetched from a private registry."""
    shared_memory: OptionalMemory = ""
    """Size of /dev/shm in each pod, such as `8Gi`, a part of its memory; empty: 64 MiB, as
    containers have it, too little for several processes of one training."""
    queue: KubernetesName = ""
    """Queue of Kueue: jobs are created suspended, and begin when Kueue admits them."""
    cluster: KubernetesName = ""
    """Existing RayCluster that takes all jobs; its pods are not changed."""


class SlurmBackend(Section):
    """A batch job for each attempt, which starts a Ray cluster on its nodes."""

    kind: Literal["slurm"]
    """One of the backends below."""
    nodes: OneOrMore = 1
    """Number of whole nodes of a job."""
    gpus_per_node: Count = 0
    """GPUs to ask for on each node."""
    partition: SlurmName = ""
    """Partition; default: that of the Slurm cluster."""
    account: SlurmName = ""
    """Account that pays for the hours."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More options of `sbatch`, such as `--constraint=a100`."""
    setup: str = ""
    """Shell line before the rest, such as `. /srv/search/.venv/bin/activate`."""
    folder: Directory = ""
    """Directory for scripts and logs that login node and compute nodes share; default: beside the
    state."""


BackendSettings = LocalBackend | RayJobBackend | KubeRayBackend | SlurmBackend
BACKEND_SETTINGS: dict[str, type[BackendSettings]] = {
    "local": LocalBackend,
    "ray-job": RayJobBackend,
    "kuberay": KubeRayBackend,
    "slurm": SlurmBackend,
}
"""Kind -> its settings. `backends.base.BACKENDS` has the code."""


class ScheduleSettings(Section):
    """One scheduled sweep."""

    name: str = ""
    """Name of the schedule; its runs are `<name>-<UTC time>`."""
    space: Annotated[str, MinLen(1), AfterValidator(check_location)]
    """The search space, such as `search_spaces/code.yaml`."""
    schedule: CronSchedule | None = None
    """When runs start; without it, only `run` starts them."""
    policy: RunPolicy = RunPolicy()
    """Rules for runs that overlap, are missed, fail or take too long."""
    budget: ScheduleBudget = ScheduleBudget()
    """How much may be spent."""
    backend: Annotated[BackendSettings, Field(discriminator="kind")] = LocalBackend()
    """Where runs are executed."""
    storage: Storage = "runs"
    """Directory, or address of an object store such as `s3://bucket/sweeps`. Each run is a sweep in
    `<storage>/<run>`; the state is in `<storage>/.schedule/<name>`, or in `.schedule/<name>` of the
    project if storage is an object store."""
    tracking: str = ""
    """MLflow's address for the runs, instead of `tracking.uri` of the search space: another machine
    cannot reach a file of this one."""
    notify: NotifySettings | None = None
    """Webhook that is notified when runs end."""
    enabled: bool = True
    """True if runs start by the schedule. An active run is monitored in any case."""


def list_sections() -> dict[str, type[Any]]:
    """Return dotted key -> model of the mapping below it."""
    kinds = {f"backend: {{kind: {name}}}": kind for name, kind in BACKEND_SETTINGS.items()}
    sections = {"schedule": CronSchedule, "policy": RunPolicy, "budget": ScheduleBudget}
    pods = {"backend.head": PodSettings, "backend.worker": PodSettings}
    return {**sections, "notify": NotifySettings, **kinds, **pods}
