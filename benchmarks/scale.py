"""A sweep that grows large: 10,000 trials on 1,000 slots, in simulated time on the real driver.

    python benchmarks/scale.py [--trials 10000] [--slots 1000] [--sampler auto] [--small]

What runs is `run_sweep` as users get it: Ray Tune's own loop, our searcher, scheduler, ledger,
tracking (its server is away) and display (lines). Only the processes are simulated, see
`scale_executor`: every slot takes a step a second, a whole trial 120, with rungs at a ninth and a
third of that. The driver is killed once half of the trials have ended, and started again. Then the
same loop with nothing of ours but a searcher that says yes: Ray Tune alone, over `--peer-trials`;
and Ray's real actor manager with as many real tasks in flight, see `scale_ray`, which the
simulation leaves out.

All costs are CPU seconds of the driver's process, not wall time; waits for the disk are no part of
them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scale_driver import resume_ours, run_peer, start_ours
from scale_end import finish_ours
from scale_ray import measure_loop

from gdpo_tune.spec import load_spec

SPACE = Path(__file__).resolve().parents[1] / "search_spaces" / "code.yaml"
NOBODY = "http://127.0.0.1:9"
"""A tracking server that never answers."""


def list_overrides(folder: str, options: argparse.Namespace) -> list[str]:
    """What makes the shipped search space a large one."""
    return [
        f"storage={folder}",
        f"search.trials={options.trials}",
        f"search.sampler={options.sampler}",
        f"training.steps={options.steps}",
        "search.scheduler.grace=0.1",
        f"tracking.uri={NOBODY}",
    ]


def run_in_process(work: Callable[..., None], folder: str, *arguments: Any) -> dict[str, Any]:
    """Do it in a process of its own, which writes down what it found and may die of it."""
    told = Path(folder) / f"{work.__name__}.json"
    process = multiprocessing.get_context("spawn").Process(target=work, args=(told, *arguments))
    process.start()
    process.join()
    if not told.exists():
        raise SystemExit(f"{work.__name__} ended with status {process.exitcode} and no word")
    found = json.loads(told.read_text())
    print(f"{work.__name__}: {json.dumps(found, indent=1)}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=1_000)
    parser.add_argument("--peer-trials", type=int, default=2_000)
    parser.add_argument("--steps", type=int, default=120, help="seconds of a whole trial")
    parser.add_argument("--sampler", default="auto")
    parser.add_argument("--small", action="store_true", help="60 trials of 30 s on 20 slots")
    options = parser.parse_args()
    if options.small:
        options.trials, options.slots, options.peer_trials, options.steps = 60, 20, 20, 30
        options.sampler = "random"
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # nobody answers, ever
    with tempfile.TemporaryDirectory() as folder:
        spec = load_spec(SPACE, list_overrides(f"{folder}/runs", options))
        first = run_in_process(start_ours, folder, spec, options.slots, options.trials // 2)
        second = run_in_process(resume_ours, folder, spec, options.slots)
        end = run_in_process(finish_ours, folder, spec)
        peer = run_in_process(run_peer, folder, spec, options.slots, options.peer_trials)
        loop = run_in_process(
            measure_loop, folder, [1, 10] if options.small else [1, 10, 100, 1000]
        )
    result = {
        "benchmark": "scale",
        "trials": options.trials,
        "slots": options.slots,
        "first_half": first,
        "second_half": second,
        "end": end,
        "ray_tune_alone": peer,
        "ray_actor_manager": loop,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
