"""CPU time of each part of the driver."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

PARTS: Mapping[str, tuple[str, ...]] = {
    "Ray Tune's loop": ("ray.tune.execution.tune_controller:TuneController.step",),
    "lifecycle": (
        "gdpo_tune.tuning.ray.tune:TuneSearcher.suggest",
        "gdpo_tune.tuning.lifecycle:Lifecycle.next_attempt",
        "gdpo_tune.tuning.lifecycle:Lifecycle.on_measurement",
        "gdpo_tune.tuning.lifecycle:Lifecycle.on_end",
    ),
    "plan": ("gdpo_tune.tuning.plan:find_next_step",),
    "proposals (loop)": (
        "gdpo_tune.tuning.proposals:Proposals.poll",
        "gdpo_tune.tuning.proposals:Proposals.observe",
    ),
    "proposals (thread)": ("gdpo_tune.tuning.proposals:SamplerView.propose",),
    "scheduler": (
        "gdpo_tune.tuning.ray.tune:TuneScheduler.choose_trial_to_run",
        "gdpo_tune.tuning.halving:Asha.judge",
        "gdpo_tune.tuning.halving:Asha.replay",
        "gdpo_tune.tuning.halving:Asha.explain",
        "gdpo_tune.tuning.halving:Asha.find_promotable",
    ),
    "ledger": tuple(
        f"gdpo_tune.ledger.ledger:Ledger.{name}"
        for name in ("start", "record_rung", "complete", "prune", "pause", "resume", "get_records")
    ),
    "callbacks": (
        "gdpo_tune.tuning.ray.tune:TuneCallback.on_trial_result",
        "gdpo_tune.tuning.ray.tune:TuneCallback.on_trial_complete",
    ),
    "spool": ("gdpo_tune.tracking.mlflow_sink:MlflowSink.__call__",),
    "display": ("gdpo_tune.display.live:LiveDisplay.__call__",),
    "simulation": ("scale_executor:SimulatedActors.next",),
    "simulated processes": (
        "scale_executor:SimulatedActors.add_actor",
        "scale_executor:SimulatedActors.schedule_actor_task",
        "scale_executor:SimulatedActors.remove_actor",
        "scale_executor:SimulatedActors.clear_actor_task_futures",
    ),
}
"""Name -> functions, `module:Class.method` or `module:function`."""


class Parts:
    """CPU seconds and calls of each part, without the calls that it makes to other parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._local = threading.local()

    def watch(self) -> None:
        """Wrap every function of `PARTS`; there is no way back."""
        import importlib

        for part, targets in PARTS.items():
            for target in targets:
                module, _, path = target.partition(":")
                owner: Any = importlib.import_module(module)
                *outer, name = path.split(".")
                for step in outer:
                    owner = getattr(owner, step)
                setattr(owner, name, self._time_calls(part, getattr(owner, name)))

    def _time_calls(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            local = self._local
            outer = getattr(local, "inner", 0.0)
            local.inner = 0.0
            start = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - start
                self.seconds[part] += spent - local.inner
                self.calls[part] += 1
                local.inner = outer + spent

        return timed

    def get_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each part so far."""
        return dict(self.seconds)
