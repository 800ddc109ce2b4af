"""What every trial of a run has in common: how it trains, on what, and where it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.tuning.ray.folder import Folder


@dataclass(frozen=True)
class Group:
    """Several processes for each trial."""

    workers: int
    cpus: float
    """CPU cores of each."""
    gpus: float
    """GPUs of each."""
    folder: Path
    """Where Ray Train keeps what it wants to keep; on a disk that every node sees."""


@dataclass(frozen=True)
class Store:
    """Where trials are kept that share no disk with the driver."""

    address: str
    """Of the sweep."""
    window: str
    """Name of the actor that looks for what asks trials to end: see `tuning.window`."""


@dataclass(frozen=True)
class Setup:
    """What every trial of a run has in common."""

    train: str
    """`module:function`, `gdpo_tune.training:train` except in tests."""
    stop: Path
    """File that asks running trials to stop; on a disk that every node sees."""
    cpus: float
    """CPU cores of a process."""
    group: Group | None = None
    """None: a trial is one process, this one."""
    pace: float = 0.0
    """Least seconds between two results of a trial on which nothing is decided."""
    store: Store | None = None
    """None: trials have their folders on a disk that every node sees."""
    folder: Folder | None = None
    """That of the sweep on this disk; None: there is none that could go away."""

    def __deepcopy__(self, memo: object) -> Setup:
        """Itself, since nothing in it ever changes: Ray copies the config of every trial."""
        return self

    def __str__(self) -> str:
        """Short: Ray makes a label of it."""
        return self.train
