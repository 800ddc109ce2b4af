"""One training step of ours and of plain `trl.GRPOTrainer` on a GPU, in seconds.

    python benchmarks/gpu_step.py [--policy DIRECTORY_OR_HUB_ID] [--engine transformers] ...
    python benchmarks/gpu_step.py --small      seconds, on a CPU: shows that it runs

Ours is a trial as a sweep runs it, without held-out evaluation and checkpoints. Both sides train
every weight of the same policy on the same prompts, in bfloat16 with recomputed activations. Both
use the same engine (vLLM in the trainer's process where it is installed, else Transformers) and
rewards that cost nothing. Blocks of steps alternate. Each block has its own process, as trials on a
GPU have, because the memory of engines adds up in one process. The defaults are for one GPU of
80 GB.

The last line is JSON: the median, lowest and highest ratio over all pairs of blocks, seconds a
step, and the most MiB that PyTorch allocated, including a colocated engine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from alternation import Block, Side, alternate
from gpu_options import build_integer_type, exit_on_error, require_gpu
from gpu_step_plan import Plan

from gdpo_tune.core.engines import find_vllm, select_engine
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.policies.load_policy import check_policy_available
from gdpo_tune.spec import count_local_cpus

LIKE_A_GPU = ModelSettings(dtype="bfloat16", gradient_checkpointing="on")
"""Meaning of `auto` on a GPU, so that `--small` computes the same way."""
SMALL = Plan(
    policy="embedded",
    engine="transformers",
    prompts=4,
    group_size=4,
    tokens=16,
    steps=2,
    warm_up=1,
    threads=1,
    model=LIKE_A_GPU,
)
IMPORTED_ONCE = ["transformers.trainer"]
"""Most of a block's imports, which take longer than a small block itself."""


def measure(plan: Plan, blocks: int, most: int, preload: Sequence[str] = ()) -> dict[str, object]:
    """Measure both trainers in turns, each block in its own process.

    Args:
        plan: work of both trainers.
        blocks: least number of blocks of each side.
        most: largest number of blocks of each side.
        preload: modules that all processes inherit from one; they must not touch a GPU, because
            CUDA does not survive a fork.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        pair = alternate(
            lambda ours, seed: processes.submit(run_block, plan, ours, seed).result(), blocks, most
        )
    return {
        "benchmark": "gpu_step",
        "device": pair.ours.blocks[0].device,
        "engine": plan.engine,
        "policy": plan.policy,
        **pair.build_figures("seconds"),
        "ours_peak_mib": find_peak(pair.ours),
        "trl_peak_mib": find_peak(pair.plain),
        "completions_per_step": plan.prompts * plan.group_size,
        "max_completion_length": plan.tokens,
        "steps_per_block": plan.steps,
    }


def run_block(plan: Plan, ours: bool, seed: int) -> Block:
    """Run one block in this process, which alone imports torch."""
    from gpu_step_block import run

    return run(plan, ours, seed)


def find_peak(side: Side) -> int | None:
    """Return the most MiB of a GPU that a block allocated; None on a CPU."""
    peaks = [one.peak_mib for one in side.blocks if one.peak_mib is not None]
    return round(max(peaks)) if peaks else None


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="on a CPU; ignores other options")
    parser.add_argument("--policy", default="Qwen/Qwen2.5-1.5B-Instruct")
    parser.add_argument("--engine", choices=["auto", "transformers", "vllm"], default="auto")
    parser.add_argument(
        "--prompts", type=build_integer_type(1), default=16, help="prompts of a step"
    )
    parser.add_argument("--group-size", type=build_integer_type(2), default=8)
    parser.add_argument(
        "--tokens", type=build_integer_type(1), default=256, help="most tokens of a completion"
    )
    parser.add_argument(
        "--blocks", type=build_integer_type(1), default=3, help="least number for each side"
    )
    parser.add_argument(
        "--steps", type=build_integer_type(1), default=8, help="counted steps of a block"
    )
    return parser


def build_full_plan(options: argparse.Namespace) -> Plan:
    """Build the plan from the options.

    Raises:
        ResourcesError: there is not exactly one GPU.
        EngineError: vLLM is requested and not installed.
        PolicyError: the policy is not available.
    """
    require_gpu()
    vllm = find_vllm()
    engine = select_engine(RolloutSettings(engine=options.engine), gpu=True, lean=False, vllm=vllm)
    check_policy_available(options.policy)
    return replace(
        SMALL,
        policy=options.policy,
        engine=engine,
        prompts=options.prompts,
        group_size=options.group_size,
        tokens=options.tokens,
        steps=options.steps,
        warm_up=2,
        threads=count_local_cpus(),
    )


def main() -> None:
    """Measure; print a line of text and a line of JSON."""
    options = build_parser().parse_args()
    with exit_on_error():
        if options.small:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            figures = measure(SMALL, blocks=2, most=2, preload=IMPORTED_ONCE)
        else:
            figures = measure(build_full_plan(options), options.blocks, 2 * options.blocks)
    print(
        f"ours {figures['ours_seconds']} s, TRL {figures['trl_seconds']} s a step on "
        f"{figures['device']} with {figures['engine']}: ratio {figures['ratio']}"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
