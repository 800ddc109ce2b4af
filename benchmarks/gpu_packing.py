"""Trials per hour when several trials share one GPU, through an ordinary sweep.

    python benchmarks/gpu_packing.py [--policy DIRECTORY_OR_HUB_ID] [--set KEY=VALUE] ...
    python benchmarks/gpu_packing.py --small      on a CPU, with shares of its cores

The same trials run once for every share: with `resources.gpus` 1 one at a time, with 1/2 two and
with 1/4 four side by side. The CPU cores are divided in the same way.

trials per hour = trials that trained / hours from the first trial's start to the last one's end

This time includes the start of processes, imports and engines, held-out evaluation, and the end of
the sweep, when fewer trials are left than fit. It leaves out the start of Ray. The defaults train
adapters of a policy of half a billion parameters. That a quarter of an 80 GB GPU holds them is
computed, not measured. `--set` changes the trials: policy, lengths, engine.

The benchmark prints one line of JSON for each share, then one for all: trials per hour, their ratio
to one at a time, and the peak MiB in use, of the GPU, or on a CPU of all processes of the sweep.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_options import build_integer_type, exit_on_error, require_gpu
from peaks import Peak, measure_gpu_memory, measure_process_memory, query_gpu
from utilisation import measure as measure_sweep

from gdpo_tune import cli
from gdpo_tune.core.engines import find_vllm, select_engine
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import SweepSpec, check_resources, count_local_cpus, load_spec

SPACE = Path(__file__).resolve().parents[1] / "search_spaces" / "math.yaml"
SHARES = (1.0, 0.5, 0.25)
HOUR = 3600
"""Seconds."""


@dataclass(frozen=True)
class Plan:
    """Trials of the benchmark, equal for every share."""

    trials: int
    steps: int
    on_gpu: bool
    shares: Sequence[float] = SHARES
    overrides: Sequence[str] = field(default_factory=list)

    def load_sweep(self, share: float, directory: str) -> SweepSpec:
        """Load the sweep in which every trial has this share of the GPU, or of the cores."""
        return load_spec(
            SPACE,
            [
                *self.overrides,
                # The sweep also trains the published setting, which is one of the trials.
                f"search.trials={self.trials - 1}",
                # Random proposals do not depend on the order in which trials end.
                "search.sampler=random",
                "search.replicates.max_runs=0",
                f"training.steps={self.steps}",
                f"training.evaluate_every={self.steps}",
                f"training.checkpoint_every={self.steps}",
                f"storage={directory}",
                f"resources.cpus={count_local_cpus() * share:g}",
                f"resources.gpus={share if self.on_gpu else 0:g}",
            ],
            f"packing_{share:g}",
        )


SMALL = Plan(
    trials=2,
    steps=1,
    on_gpu=False,
    shares=(1.0, 0.5),
    overrides=[
        "training.completions_per_step=16",
        "training.train_prompts=16",
        "training.validation_prompts=4",
        "training.test_prompts=4",
    ],
)


def measure(plan: Plan) -> dict[str, object]:
    """Measure every share, one after the other, after a check that all of them fit.

    Raises:
        SystemExit: a trial failed, or two shares did not train the same trials.
    """
    shares: dict[str, dict[str, object]] = {}
    trained = []
    with tempfile.TemporaryDirectory() as directory:
        specs = [plan.load_sweep(share, directory) for share in plan.shares]
        for spec in specs:
            check_resources(spec)
            cli.probe_environment(spec, tracked=False)
        for share, spec in zip(plan.shares, specs, strict=True):
            figures, records = run(
                spec, measure_gpu_memory if plan.on_gpu else measure_process_memory
            )
            shares[f"{share:g}"] = figures
            trained.append([(record.params, record.seed) for record in records])
            print(json.dumps({"share": share, **figures}), flush=True)
    if any(trials != trained[0] for trials in trained):
        raise SystemExit("the shares trained different trials: their figures cannot be compared")
    first = shares[f"{plan.shares[0]:g}"]["trials_per_hour"]
    for figures in shares.values():
        figures["ratio"] = round(figures["trials_per_hour"] / first, 3)
    return {
        "benchmark": "gpu_packing",
        "device": query_gpu("name") if plan.on_gpu else "cpu",
        "engine": choose_engine(spec, on_gpu=plan.on_gpu),
        "policy": spec.policy,
        "trials": plan.trials,
        "steps": spec.training.steps,
        "shares": shares,
    }


def run(
    spec: SweepSpec, read: Callable[[], float]
) -> tuple[dict[str, object], Sequence[TrialRecord]]:
    """Run one sweep; return its figures and its trials that trained.

    Raises:
        SystemExit: the sweep was interrupted, or a trial failed.
    """
    from gdpo_tune.tuning.runner import run_sweep

    with Peak(read) as memory:
        result = run_sweep(spec)
    if result.interrupted:
        raise SystemExit(cli.INTERRUPTED)
    if failed := [record for record in result.records if record.state != "complete"]:
        raise SystemExit(
            f"trial {failed[0].number} failed, so there are no figures: {failed[0].reason}"
        )
    trained = [record for record in result.records if record.role != "untrained"]
    usage = measure_sweep(spec)
    figures = {
        "side_by_side": usage["slots"][0],
        "trials_per_hour": round(compute_trials_per_hour(result.records), 1),
        "utilisation": usage["utilisation"],
        "peak_mib": round(memory.highest),
    }
    return figures, trained


def compute_trials_per_hour(records: Sequence[TrialRecord]) -> float:
    """Divide the trials that trained by the hours in which any trial ran.

    The hours include those of the untrained trial.
    """
    trained = sum(record.role != "untrained" for record in records)
    started = min(record.started for record in records)
    finished = max(record.finished for record in records)
    return trained / (finished - started) * HOUR


def choose_engine(spec: SweepSpec, *, on_gpu: bool) -> str:
    """Choose the engine that samples completions; on a CPU it is our own sampler."""
    return select_engine(spec.rollout, gpu=on_gpu, lean=not on_gpu, vllm=find_vllm())


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="on a CPU; ignores other options")
    parser.add_argument("--policy", default="Qwen/Qwen2.5-0.5B-Instruct")
    shares = {"nargs": "+", "type": float, "choices": SHARES, "default": SHARES}
    parser.add_argument("--shares", **shares, help="ratios are to the first one")
    parser.add_argument(
        "--trials", type=build_integer_type(2), default=8, help="trials that train, for each share"
    )
    parser.add_argument("--steps", type=build_integer_type(1), default=20)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    return parser


def build_full_plan(options: argparse.Namespace) -> Plan:
    """Build the plan from the options.

    Raises:
        ResourcesError: there is not exactly one GPU.
    """
    require_gpu()
    defaults = [
        f"policy={options.policy}",
        "model.lora_rank=16",
        "training.completions_per_step=32",
        "training.max_completion_length=128",
        "training.length_limit=64",
        "training.validation_prompts=32",
        "training.test_prompts=32",
    ]
    overrides = [*defaults, *options.overrides]
    return Plan(options.trials, options.steps, True, options.shares, overrides)


def main() -> None:
    """Measure every share and print the figures."""
    options = build_parser().parse_args()
    with exit_on_error():
        figures = measure(SMALL if options.small else build_full_plan(options))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
