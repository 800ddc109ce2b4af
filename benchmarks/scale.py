"""A large sweep: 10,000 trials on 1,000 slots, in simulated time on the real driver.

    python benchmarks/scale.py [--trials 10000] [--slots 1000] [--sampler auto] [--small]

The benchmark runs `run_sweep` as users get it: Ray Tune's own loop, our searcher, scheduler,
ledger, tracking (its server is down) and display (lines). Only the processes are simulated, see
`scale_executor`: every slot does a step a second, and a whole trial has 120 steps, with rungs at a
ninth and a third of that. The driver is killed once half of the trials have ended, and started
again. Two runs follow without our parts. Ray Tune alone runs `--peer-trials` trials, with a
searcher that always proposes. Ray's real actor manager, which the simulation replaces, runs with as
many real tasks in flight, see `scale_ray`.

All costs are CPU seconds of the driver's process, not wall time, so they leave out waits for the
disk. The last line is JSON.
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


def list_overrides(directory: str, options: argparse.Namespace) -> list[str]:
    """Return overrides that make the shipped search space a large sweep."""
    return [
        f"storage={directory}",
        f"search.trials={options.trials}",
        f"search.sampler={options.sampler}",
        f"training.steps={options.steps}",
        "search.scheduler.grace=0.1",
        f"tracking.uri={NOBODY}",
    ]


def run_in_process(work: Callable[..., None], directory: str, *arguments: Any) -> dict[str, Any]:
    """Run `work` in a new process, which writes its figures to a file and may be killed."""
    output = Path(directory) / f"{work.__name__}.json"
    process = multiprocessing.get_context("spawn").Process(target=work, args=(output, *arguments))
    process.start()
    process.join()
    if not output.exists():
        raise SystemExit(f"{work.__name__} ended with status {process.exitcode} and no figures")
    figures = json.loads(output.read_text())
    print(f"{work.__name__}: {json.dumps(figures, indent=1)}", flush=True)
    return figures


def main() -> None:
    """Measure every part in its own process and print the figures."""
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
    scripts = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [scripts, os.environ.get("PYTHONPATH")])
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the server never answers
    with tempfile.TemporaryDirectory() as directory:
        spec = load_spec(SPACE, list_overrides(f"{directory}/runs", options))
        first = run_in_process(start_ours, directory, spec, options.slots, options.trials // 2)
        second = run_in_process(resume_ours, directory, spec, options.slots)
        end = run_in_process(finish_ours, directory, spec)
        peer = run_in_process(run_peer, directory, spec, options.slots, options.peer_trials)
        loop = run_in_process(
            measure_loop, directory, [1, 10] if options.small else [1, 10, 100, 1000]
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
