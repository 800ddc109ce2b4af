"""What a file of `sweeps/` says: when a search space is searched, where, and for how much.

It holds no hyperparameters: those are in the search space that it names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from gdpo_tune.clusters.durations import UNITS, Duration
from gdpo_tune.spec.base import Section, written


def _not_empty(names: tuple[str, ...]) -> tuple[str, ...]:
    # NOTE: pydantic's own bound speaks up beside a wrong name, too, whose place it finds empty.
    if not names:
        raise PydanticCustomError("too_short", "empty")
    return names


EnvironmentName = Annotated[
    str,
    written(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "not the name of an environment variable",
        "write the name alone, such as GDPO_WEBHOOK, and keep the value out of the file",
    ),
]
KubernetesName = Annotated[
    str,
    written(
        r"(?=.{1,253}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?",
        "not a name of Kubernetes (RFC 1123)",
        "write small letters, digits, '-' and '.', or remove the key",
    ),
]
Image = Annotated[
    str,
    written(
        r"[!-~]+",
        "not the name of an image",
        "write it like registry.example.org/search:1",
    ),
]
Memory = Annotated[
    str,
    written(
        r"[1-9][0-9]{0,14}([KMGT]i?)?",
        "not an amount of memory",
        "write it like 512Mi or 32Gi",
    ),
]
SlurmName = Annotated[
    str,
    written(r"[!-~]+", "not one word", "write it without blanks, or remove the key"),
]
MOST = 100_000
"""Nodes, pods, CPUs and GPUs that a file may ask for: more is a slip of the finger."""
Count = Annotated[int, Ge(0), Le(MOST)]
OneOrMore = Annotated[int, Ge(1), Le(MOST)]
Place = Annotated[str, MinLen(1)]
"""A path or an address."""
Positive = Annotated[float, Gt(0), Field(allow_inf_nan=False)]
Occasion = Literal["failed", "skipped", "budget", "stopped", "finished"]
EVERY_OCCASION: tuple[Occasion, ...] = ("failed", "skipped", "budget", "stopped", "finished")


class Schedule(Section):
    """When a sweep starts."""

    cron: str
    """Minute, hour, day of the month, month and day of the week, as in a crontab."""
    timezone: str = "UTC"
    """Whose clock that is, such as `Europe/Berlin`."""


class Policy(Section):
    """What happens when things do not go to plan."""

    overlap: Literal["skip", "queue", "replace"] = "skip"
    """When a run is due while an earlier one is under way: leave the new one out, let it wait (one
    waits at most), or stop the earlier one for it."""
    missed: Literal["run_once", "skip"] = "run_once"
    """When nobody called `tick` in time: one late run stands for all that were missed, or none."""
    missed_grace: Duration = 6 * UNITS["h"]
    """With `run_once`, how late a run may still start."""
    max_runtime: Duration | None = None
    """How long after its start a run, its retries included, is stopped. It stays resumable."""
    max_attempts: Annotated[int, Ge(1), Le(100)] = 3
    """Attempts at one run; each goes on where the one before it ended."""


class Budget(Section):
    """What may be spent. What is left out has no limit of its own."""

    trials: Annotated[int, Gt(0)] | None = None
    """Trials of a run: `search.budget.trials` of the search space, which this replaces."""
    gpu_hours: Positive | None = None
    """GPU-hours of a run: `search.budget.gpu_hours`, which this replaces."""
    gpu_hours_per_30d: Positive | None = None
    """GPU-hours of all runs of this sweep within 30 days. A run gets at most what is left; once
    nothing is, runs are left out."""


class Notify(Section):
    """Who hears how runs end."""

    webhook_env: EnvironmentName
    """Environment variable with the address that gets a JSON object by POST."""
    on: Annotated[tuple[Occasion, ...], Field(strict=False), AfterValidator(_not_empty)] = (
        EVERY_OCCASION
    )
    """What is told."""


class LocalBackend(Section):
    """A process of its own on the machine on which `tick` runs."""

    kind: Literal["local"] = "local"
    """One of the backends below."""
    folder: str = ""
    """Folder of this machine for logs and process ids; default: beside the history."""


class RayJobBackend(Section):
    """A job of a Ray cluster, through its Jobs API."""

    kind: Literal["ray-job"]
    """One of the backends below."""
    address: str = ""
    """The cluster's dashboard, such as `http://head:8265`."""
    address_env: EnvironmentName | None = None
    """Environment variable with that address. Write one of the two."""
    token_env: EnvironmentName | None = None
    """Environment variable with the cluster's token, where it asks for one; default: where Ray
    finds it, in `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH` or `~/.ray/auth_token`."""
    working_dir: str = "."
    """Folder that is sent along, with the search space in it. Storage is left out."""


class Pod(Section):
    """What a pod of a Ray cluster gets."""

    cpus: OneOrMore = 2
    """CPUs."""
    gpus: Count = 0
    """GPUs (`nvidia.com/gpu`)."""
    memory: Memory = "8Gi"
    """Memory, as Kubernetes writes it."""


class KubeRayBackend(Section):
    """A Ray cluster of its own for each attempt: a RayJob, which KubeRay carries out."""

    kind: Literal["kuberay"]
    """One of the backends below."""
    image: Image
    """Image of every pod, with this package in it."""
    working_dir: str = "/srv/search"
    """Folder of the image that holds `search_spaces/` and `sweeps/`, or address of an archive of
    them, such as `s3://bucket/search.zip`, which Ray fetches."""
    namespace: KubernetesName = "default"
    """Namespace of Kubernetes."""
    head: Pod = Pod()
    """The head, on which the sweep's driver works."""
    worker: Pod = Pod()
    """Each worker."""
    workers: Count = 1
    """How many there are."""
    claim: KubernetesName = ""
    """PersistentVolumeClaim that every pod mounts at `storage`, where that is a folder."""
    secret: KubernetesName = ""
    """Secret whose keys every pod gets as environment variables, such as `PGPASSWORD`."""
    service_account: KubernetesName = ""
    """Account of the pods, where an object store asks for one."""
    queue: KubernetesName = ""
    """Queue of Kueue: jobs are created suspended, and begin when it admits them."""
    cluster: KubernetesName = ""
    """A RayCluster that is there already and takes all jobs; its pods are its own affair."""


class SlurmBackend(Section):
    """A batch job for each attempt, which starts a Ray cluster on the nodes that it gets."""

    kind: Literal["slurm"]
    """One of the backends below."""
    nodes: OneOrMore = 1
    """Nodes of a job, whole ones."""
    gpus_per_node: Count = 0
    """GPUs to ask for on each."""
    partition: SlurmName = ""
    """Partition; default: the cluster's own."""
    account: SlurmName = ""
    """Whom the hours are charged to."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More options of `sbatch`, such as `--constraint=a100`."""
    setup: str = ""
    """Shell line before the rest, such as `. /srv/search/.venv/bin/activate`."""
    folder: str = ""
    """Folder for scripts and logs that login node and compute nodes share; default: beside the
    history."""


BackendSettings = LocalBackend | RayJobBackend | KubeRayBackend | SlurmBackend
BACKEND_SETTINGS: dict[str, type[BackendSettings]] = {
    "local": LocalBackend,
    "ray-job": RayJobBackend,
    "kuberay": KubeRayBackend,
    "slurm": SlurmBackend,
}
"""Kind -> its settings. `backends.BACKENDS` has what does the work."""


class SweepFile(Section):
    """One scheduled sweep."""

    name: str = ""
    """Name of the schedule; its runs are `<name>-<UTC time>`."""
    space: Place
    """The search space, such as `search_spaces/code.yaml`."""
    schedule: Schedule | None = None
    """When; left out, a run starts by `run` alone."""
    policy: Policy = Policy()
    """What happens when things do not go to plan."""
    budget: Budget = Budget()
    """What may be spent."""
    backend: Annotated[BackendSettings, Field(discriminator="kind")] = LocalBackend()
    """Where runs work."""
    storage: Place = "runs"
    """Folder, or address of an object store such as `s3://bucket/sweeps`. A run is a sweep of its
    own in `<storage>/<run>`; the history is in `<storage>/.schedule/<name>`."""
    ledger: str = ""
    """Database of the sweeps' ledgers, where storage is an object store: a journal cannot live
    there. Without a password: that belongs into `PGPASSWORD` or `~/.pgpass`."""
    tracking: str = ""
    """Where MLflow shows the runs, instead of the search space's `tracking.uri`: on another machine
    a file would be out of reach."""
    notify: Notify | None = None
    """Who hears how runs end."""
    enabled: bool = True
    """Whether runs start by the schedule. A run under way is looked after all the same."""


def sections() -> dict[str, type[Any]]:
    """Dotted key -> the class that says what may stand below it."""
    kinds = {f"backend: {{kind: {name}}}": kind for name, kind in BACKEND_SETTINGS.items()}
    plain = {"schedule": Schedule, "policy": Policy, "budget": Budget, "notify": Notify}
    return {**plain, **kinds, "backend.head": Pod, "backend.worker": Pod}
