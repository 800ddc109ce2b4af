"""Shared worker: up to N LoRA trials in one process, each with its own adapter on a frozen base.

Each trial is `train()` as ever, in a thread of its own, with its own trainer, optimizer, schedule,
checkpoints and report. The threads compute one at a time, under the compute lock. Task, tokenized
prompts, vLLM and the weights below the adapters exist once. With Transformers a trial of a shared
worker is bitwise equal to the same one alone.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import GradientState

from gdpo_tune.core import compute_lock
from gdpo_tune.core.engines import round_up_rank
from gdpo_tune.core.errors import SharedWorkerError
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement, Outcome, Report
from gdpo_tune.training.engine import EnginePool
from gdpo_tune.training.memory import explain_out_of_memory
from gdpo_tune.training.rollout import uses_engine_in_process
from gdpo_tune.training.training_state import RandomState, read_random_state, restore_random_state
from gdpo_tune.training.trial import prepare_process, run_prepared_trial
from gdpo_tune.training.worker_cache import WorkerCache, build_worker_cache, list_shared_settings


class SharedWorker:
    """Trials that share a process; `train` is called from threads, and `close` after the last.

    A trial that stops or fails leaves the others as they are, and its place is free at once.
    """

    def __init__(self, size: int) -> None:
        """Make room for `size` trials at once; more of them wait for a place."""
        self._size = size
        self._places = threading.BoundedSemaphore(size)
        self._engine = EnginePool(size)
        self._lock = compute_lock.ComputeLock(
            read_global_state, restore_global_state, self._engine.start_batch
        )
        self._config: TrialConfig | None = None
        self._cache: WorkerCache | None = None
        self._users = 0  # trials at work with what they share; those that still wait have none
        self._building = threading.Lock()
        """Held by a trial that builds what they share, and lets others compute meanwhile."""

    def train(
        self, config: TrialConfig, *, resume: Path | None, report: Report, with_test: bool = True
    ) -> Outcome:
        """Run one trial to its end, beside those of other threads; see `training.train`.

        `config.gpu_share` and `config.threads` are those of the process. `report` is called
        while the lock is yielded, so it may wait.

        Raises:
            SharedWorkerError: this trial cannot share a process with those before it.
        """

        def report_while_yielding(measurement: Measurement, checkpoint: Path | None) -> None:
            with compute_lock.yield_lock():
                report(measurement, checkpoint)

        with self._places, self._lock.hold():
            cache = None
            try:
                prepare_process(config)
                with explain_out_of_memory(config, self._size):
                    with compute_lock.acquire_yielding(self._building):
                        cache = self._open_cache(config)
                        self._users += 1
                    return run_prepared_trial(
                        config, cache, resume, report_while_yielding, with_test
                    )
            except BaseException as error:
                # The caller may keep it, and the variables of its frames hold tensors.
                seen: BaseException | None = error
                while seen is not None:
                    traceback.clear_frames(seen.__traceback__)
                    seen = seen.__cause__ or seen.__context__
                raise
            finally:
                if cache is not None:
                    self._users -= 1
                self._engine.release()
                gc.collect()  # a trainer is part of a cycle; its memory is for the others
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def close(self) -> None:
        """End what the trials shared; idempotent. No trial may be running."""
        if self._cache is not None:
            self._cache.task.close()
        self._cache = None  # before the engine, which looks whether a GPU is free of weights
        self._engine.close()

    def _open_cache(self, config: TrialConfig) -> WorkerCache:
        """Return what the trials share, built for the first one, or refuse the trial."""
        if not config.model.lora_rank:
            raise SharedWorkerError(
                "model.lora_rank = 0: trials of every weight have no base policy to share\n"
                "    fix: set model.lora_rank: 16, or train each trial in a process of its own"
            )
        if self._config is not None:
            ours, theirs = _list_shared_settings(self._config), _list_shared_settings(config)
            different = [name for name, value in ours.items() if value != theirs[name]]
            begins_elsewhere = (config.start, config.supervised) != (
                self._config.start,
                self._config.supervised,
            )
            if begins_elsewhere and {*different} <= {"start", "training"} and not self._users:
                self.close()  # none of the trials before a start, or of it, is here any more
                self._config = None
            elif different:
                raise SharedWorkerError(
                    f"{config.directory.name} differs from the other trials of its process in "
                    f"{', '.join(different)}\n"
                    "    fix: train it in another process; trials of one may differ in parameters, "
                    "seed, lora_rank and lora_alpha"
                )
        room = (self._config or config).largest_rank
        if uses_engine_in_process(config) and config.largest_rank > round_up_rank(room):
            raise SharedWorkerError(
                f"{config.directory.name} needs adapters of rank {config.largest_rank}, and vLLM "
                f"was started for rank {round_up_rank(room)} at most\n"
                "    fix: train it in another process"
            )
        if self._cache is None:
            self._cache = build_worker_cache(config, shares_weights=True, engines=self._engine)
            self._config = config
        return self._cache


def _list_shared_settings(config: TrialConfig) -> Mapping[str, object]:
    """Return what all trials of a process have in common, by its name in a sweep file."""
    return {
        **list_shared_settings(config),
        "model": config.model.replace(lora_rank=1, lora_alpha=0.0),
        "rollout": config.rollout,
        "resources.gpus": config.gpu_share,
        "resources.cpus": config.threads,
    }


GlobalState = tuple[RandomState, dict[str, Any]]
"""Global state of one trial, as torch keeps it, and accelerate: the place in the accumulation of
gradients, which all trainers of a process share."""


def read_global_state() -> GlobalState:
    """Return the present state of the process."""
    return read_random_state(), dict(vars(GradientState()))


def restore_global_state(state: GlobalState) -> None:
    """Make a state the present one."""
    random, gradients = state
    restore_random_state(random)
    shared = vars(GradientState())  # one dictionary, which every trainer's accelerator has
    shared.clear()
    shared.update(gradients)
