"""Trackers beside MLflow: Weights & Biases, TensorBoard and Trackio, through their own clients.

Ended trials are written whole, from the ledger and their files, so that a kill costs no point of a
curve. A process of its own does it: what a client waits for, prints or breaks reaches no training.
`SENT` tells what each tracker has; a run that is written again takes the place of the earlier one.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.events import Event, SweepStarted, TrialFinished
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.locks import lock_file
from gdpo_tune.core.redaction import redact_text
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.results.open_sweep import Sweep, read_sweep
from gdpo_tune.results.wording import FRONT_FILE, REPORT_FILE
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tracking.run_content import SWEEP

SENT, LOG = "trackers.json", "trackers.log"
"""Files of a sweep: tracker -> run -> state that it shows, and what the clients have printed."""
WARNING = "warning: "
INTERVAL = 60.0
"""Seconds between two starts of the process while a sweep runs."""
CLOSING_SECONDS = 60.0


@dataclass(frozen=True)
class TrackedRun:
    """A run of a tracker: of a trial, or of the whole sweep."""

    identity: str
    """Id of the run; it does not change when the run is written again."""
    name: str
    sweep: SweepSpec
    config: Mapping[str, Any]
    values: Mapping[str, float]
    """Metrics of one value."""
    curves: Mapping[int, Mapping[str, float]]
    """Step -> metric -> value."""
    state: str
    files: Sequence[Path] = ()


class Trackers(CloseableResource):
    """Starts the process that writes the runs of ended trials. Use it as a context manager."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._due = math.inf  # until the sweep has started, and without trackers
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Write what is left, for at most `CLOSING_SECONDS`; print a warning if that fails."""
        if self._due == math.inf:
            return
        deadline, process = time.monotonic() + CLOSING_SECONDS, self._process
        try:
            if process is not None:
                process.wait(deadline - time.monotonic())
            process = self._start()
            if process.wait(deadline - time.monotonic()) == 0:
                return
            lines = (self._spec.directory / LOG).read_text(errors="replace").splitlines()
            problems = [line for line in lines if line.startswith(WARNING)] or lines[-1:]
            reason = "; ".join(line.removeprefix(WARNING) for line in problems)
        except OSError as error:
            reason = str(error)
        except subprocess.TimeoutExpired:
            reason = f"not done after {CLOSING_SECONDS:g} s; their process goes on"
        print(
            f"warning: trackers: {reason}\n  What they lack is sent by the same command, or by "
            f"python -m gdpo_tune.report {self._spec.location} --sync",
            file=sys.stderr,
        )

    def __call__(self, event: Event) -> None:
        """Take notice of an event; the end of a trial is sent at once, or with the next one."""
        match event:
            case SweepStarted():
                for name in self._spec.tracking.report_to:
                    self._due = 0.0  # there is one
                    if find_spec(name) is None:
                        print(f"warning: no {name} here: pip install {name}", file=sys.stderr)
            case TrialFinished() if time.monotonic() >= self._due:
                if self._process is None or self._process.poll() is not None:
                    with suppress(OSError):  # a full disk; the end of the sweep tries again
                        self._process = self._start()
            case _:
                pass

    def _start(self) -> subprocess.Popen[bytes]:
        self._due = time.monotonic() + INTERVAL
        command = [sys.executable, "-m", "gdpo_tune.tracking.trackers", self._spec.location]
        with (self._spec.directory / LOG).open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


def send_runs(sweep: Sweep) -> int:
    """Write the runs that the trackers of a sweep lack; return 1 if one fails, and print why."""
    status = 0
    file = sweep.spec.directory / SENT
    place = file.with_name(f".{SENT}.lock")
    with place.open("w") as lock:
        lock_file(lock.fileno(), fcntl.LOCK_EX, place)
        sent: dict[str, dict[str, str]] = {}
        with suppress(FileNotFoundError, ValueError):  # damaged: all is written again
            sent = json.loads(file.read_text())
        for name in sweep.spec.tracking.report_to:
            has = sent.setdefault(name, {})
            try:
                write = registry.load(registry.TRACKERS[name])
                for key, run in _list_runs(sweep, has):
                    write(run)
                    has[key] = run.state
                    write_atomically(file, json.dumps(sent))
            except Exception as error:  # noqa: BLE001  each client has types of its own
                text = redact_text(f"{type(error).__name__}: {error}")
                print(f"{WARNING}{name}: {text}", file=sys.stderr)
                status = 1
    return status


def _list_runs(sweep: Sweep, has: Mapping[str, str]) -> Iterator[tuple[str, TrackedRun]]:
    """Build the runs that a tracker lacks; that of the sweep, with its front, comes last."""
    from gdpo_tune.results.front_table import summarize_front
    from gdpo_tune.tracking.desired_runs import DesiredRuns

    desired = DesiredRuns(sweep.spec)
    desired.take(SweepStarted(tuple(sweep.records)))
    spec = desired.spec
    started = int(sweep.records[0].started or 0) if sweep.records else 0
    identity = f"{sweep.spec.compute_identity()[:12]}-{started}"
    for record in sweep.records:
        key = str(record.number)
        if record.is_open or has.get(key) == record.state:
            continue
        content = desired.build_trial(key, None)
        curves: dict[int, dict[str, float]] = {}
        for metric, value, _, step in content.curves:
            curves.setdefault(step, {})[metric] = value
        params = sweep.spec.space.drop_inactive(record.params) if record.is_training else {}
        about = {key: content.tags[key] for key in ("role", "state", "reason") if content.tags[key]}
        values = {name: value for name, (value, _) in content.values.items()}
        config = {**params, "seed": record.seed, **about}
        name, end = f"{identity}-{key}", record.state
        yield key, TrackedRun(name, content.name, spec, config, values, curves, end)
    if sweep.ending:
        figures = {k: v for k, v in summarize_front(sweep.front).items() if not isinstance(v, list)}
        names = [FRONT_FILE] if spec.tracking.private else [FRONT_FILE, REPORT_FILE]
        files = [file for name in names if (file := sweep.spec.directory / name).exists()]
        end = f"{sweep.ending}; {len(sweep.records)} trials, {len(files)} figures"
        if has.get(SWEEP) != end:
            name, config = f"{identity}-front", {"task": spec.task, "policy": spec.policy}
            yield SWEEP, TrackedRun(name, "front", spec, config, figures, {}, end, files)


def write_wandb(run: TrackedRun) -> None:
    """Write a run of Weights & Biases, into the sweep's directory if `WANDB_MODE` is offline."""
    import wandb

    place = Path(os.environ.get("WANDB_DIR") or run.sweep.directory)
    for earlier in place.glob(f"wandb/offline-run-*-{run.identity}"):
        shutil.rmtree(earlier)
    # The machine is that of the driver, at another time: no measurement of it belongs to a trial.
    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, save_code=False, x_disable_machine_info=True,
        x_disable_meta=True, x_disable_stats=True, init_timeout=CLOSING_SECONDS,
    )  # fmt: skip
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or run.sweep.tracking.experiment,
        group=run.sweep.name,
        name=run.name,
        id=run.identity,
        config=dict(run.config),
        dir=place,
        resume="allow",
        settings=settings,
    )
    for step in sorted(run.curves):
        tracked.log(dict(run.curves[step]), step=step)
    tracked.summary.update(dict(run.values))
    for file in run.files:
        is_page = file.suffix == ".html"
        shown = wandb.Html(file.read_text("utf-8")) if is_page else wandb.Image(str(file))
        tracked.log({file.stem: shown})
    tracked.finish(exit_code=int(run.state == "failed"))


def write_tensorboard(run: TrackedRun) -> None:
    """Write a directory of TensorBoard below `tensorboard` in the sweep's directory."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    directory = run.sweep.directory / "tensorboard" / run.name
    shutil.rmtree(directory, ignore_errors=True)
    with SummaryWriter(str(directory)) as writer:
        for step, values in sorted(run.curves.items()):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        last = max(run.curves, default=0)
        plain = bool, int, float, str
        config = {k: v if isinstance(v, plain) else str(v) for k, v in run.config.items()}
        writer.add_hparams(config, dict(run.values), run_name=".", global_step=last)
        for file in run.files:
            if file.suffix == ".png":
                picture = np.asarray(Image.open(file).convert("RGB"))
                writer.add_image(file.stem, picture, dataformats="HWC")


def write_trackio(run: TrackedRun) -> None:
    """Write a run of Trackio, on this machine unless `TRACKIO_SPACE_ID` or a server is named."""
    import trackio

    project, name = run.sweep.tracking.experiment, f"{run.sweep.name} {run.name}"
    with suppress(ValueError):  # there is no such project yet
        for earlier in trackio.Api().runs(project):
            if earlier.name == name:
                earlier.delete()
    trackio.init(
        project,
        name=name,
        group=run.sweep.name,
        config=dict(run.config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    for step in sorted(run.curves):
        trackio.log(dict(run.curves[step]), step=step)
    last = max(run.curves, default=0)
    trackio.log(dict(run.values), step=last)
    for file in run.files:
        if file.suffix == ".png":
            trackio.log({file.stem: trackio.Image(str(file))}, step=last)
    trackio.finish()


if __name__ == "__main__":
    sys.exit(send_runs(read_sweep(sys.argv[1], sys.argv[1], with_files=True)))
