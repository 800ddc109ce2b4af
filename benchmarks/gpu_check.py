"""Check on one GPU that training, memory, adapters, sweeps and resuming work there.

    python benchmarks/gpu_check.py [--policy DIRECTORY_OR_HUB_ID] [--only STEP ...]
    python benchmarks/gpu_check.py --small      a minute or two, on a CPU: what a CPU can do

No network is needed: policies with random weights are made here. Adapters need `gdpo-tune[peft]`.
Nothing else may use the GPU, the first one that is visible; one step takes a second one too. The
check takes at most `--minutes`; what does not fit is not run.
Each step has its own processes, so that one that dies ends alone. A device on which nothing can be
trained ends the check early.

    device      driver, kernels, bfloat16, C compiler, versions of libraries
    adapters    seconds to the first step of a trial, and of the next one, which keeps the engine;
                engine and trainer with a small adapter; the base, bit for bit
    follows     engine and trainer after a sync of every weight, and after a change without one
    step        seconds of a step, against plain TRL with the same engine
    sleep       memory and steps of a trial whose engine sleeps, and of one whose does not
    evaluation  the untrained policy on long prompts, where a step is large
    memory      peak of a trial that trains every weight, against the bound that refuses a share
    resume      a trial from its checkpoint, on the CPU and on the GPU; generator states
    neighbour   a trial on half a GPU, beside a process that grows and shrinks
    sweep       four trials through Ray, the process of one of them killed
    shards      two processes that divide a policy, where there are two GPUs
    packing     trials an hour with 1, 1/2 and 1/4 of the GPU each

It prints a table, one row a check, and a line of JSON. Both are also in the output directory, as
`table.txt` and `figures.json`, from the first step on, beside a log of each step; where a step does
not end in time, its log has the stacks of its threads. Exit status 0: every check that was run
held; 1: one did not; 2: nothing was run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpu_check_rows import (
    Row,
    build_summary,
    compute_exit_status,
    fail,
    find_stop,
    format_table,
    skip,
)
from gpu_check_steps import STEPS, choose_vllm
from gpu_check_sweeps import (
    CheckPlan,
    Context,
    OutOfTimeError,
    Processes,
    StepError,
    describe_step_error,
)
from harness import query_gpu

from gdpo_tune.core.errors import GdpoTuneError, ResourcesError
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.spec import read_device_memory
from gdpo_tune.spec.machine import count_visible_gpus

MINUTES = 20
OUTPUT = Path("runs") / "gpu_check"
SHAPE, TINY = "qwen3-0.6b", "tiny"
WRITE_POLICY = "gpu_check_trials:write_policy"
PRELOADED = ("gdpo_tune.training.trial", "gpu_check_trials")
"""Imports of most steps, which take longer than a small step itself."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="on a CPU; ignores --policy")
    parser.add_argument(
        "--policy", help=f"default: random weights in the shape of {SHAPE}, made here"
    )
    parser.add_argument("--engine", choices=["auto", "transformers", "vllm"], default="auto")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), help="steps to run")
    parser.add_argument("--minutes", type=build_integer_type(1), default=MINUTES)
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    return parser


def prepare(options: argparse.Namespace, processes: Processes, directory: Path) -> CheckPlan:
    """Make the policies and choose the sizes of trials.

    Raises:
        StepError: a policy could not be made.
        EngineError: vLLM is asked for and cannot be used.
    """
    vllm = choose_vllm(options.engine, gpu=not options.small)
    if options.small:
        tiny = str(directory / TINY)
        processes.call("policy", WRITE_POLICY, tiny, TINY, seconds=60)
        return CheckPlan(
            small=True,
            policy="embedded",
            directory=directory,
            threads=1,
            vllm=vllm,
            tiny_policy=tiny,
            completions=16,
            micro_batch=0,
            tokens=24,
        )
    policy = options.policy
    if policy is None:
        policy = str(directory / SHAPE)
        processes.call("policy", WRITE_POLICY, policy, SHAPE, seconds=180)
    return CheckPlan(
        small=False,
        policy=policy,
        directory=directory,
        threads=count_local_cpus(),
        engine=options.engine,
        vllm=vllm,
        device_bytes=read_device_memory(),
    )


def run_steps(
    context: Context, names: Sequence[str], write: Callable[[Sequence[Row]], None]
) -> list[Row]:
    """Run steps in their order until the time is over or a check stops the rest.

    `write` gets all rows after each step, so that a check which is killed leaves what it found.
    """
    rows: list[Row] = []
    for name in names:
        if stop := find_stop(rows):
            rows.append(skip(name, "all", f"{stop.step}: {stop.check} did not hold"))
        elif context.processes.read_remaining() <= 0:
            rows.append(skip(name, "all", "the time of the whole check was over"))
        else:
            rows += run_step(context, name)
        write(rows)
    return rows


def run_step(context: Context, name: str) -> list[Row]:
    """Run one step; an error becomes a row, below those that the step has given before."""
    started = time.monotonic()
    rows: list[Row] = []
    try:
        for row in STEPS[name](context):
            rows.append(row)
    except OutOfTimeError as error:
        rows.append(skip(name, "the rest" if rows else "all", str(error)))
    except Exception as error:  # noqa: BLE001 - the rows of the other steps must not be lost
        check, stops = "the rest" if rows else "all", name == "device"
        rows.append(fail(name, check, describe_step_error(error), stops=stops))
    seconds = time.monotonic() - started
    print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def run_check(options: argparse.Namespace) -> int:
    """Run the check, print and write its output, and return the exit status.

    Raises:
        ResourcesError: there is no GPU, and the check is not small.
        EngineError: vLLM is asked for and cannot be used.
    """
    devices: tuple[str, ...] = ()
    if options.small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        devices = hide_other_gpus()
    # TRL would lower it to errors; the logs of the steps say how long an engine takes to start.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    for log in options.output.glob("*.log"):
        log.unlink()
    preload = PRELOADED if options.small else ()
    device = "cpu" if options.small else name_device()
    engine, policy = "none", "none"

    def write(rows: Sequence[Row]) -> None:
        seconds = round(time.monotonic() - started, 1)
        summary = build_summary(
            rows, small=options.small, device=device, engine=engine, policy=policy, seconds=seconds
        )
        (options.output / "table.txt").write_text(f"{format_table(rows)}\n")
        (options.output / "figures.json").write_text(f"{json.dumps(summary)}\n")

    processes = Processes(options.output.resolve(), options.minutes * 60, preload)
    with tempfile.TemporaryDirectory() as directory:
        try:
            plan = replace(prepare(options, processes, Path(directory)), devices=devices)
        except StepError as error:
            rows = [fail("policy", "all", str(error))]
        else:
            engine = "vllm" if plan.vllm else "transformers"
            policy = Path(plan.policy).name
            rows = run_steps(Context(plan, processes), options.only or list(STEPS), write)
    write(rows)
    print((options.output / "table.txt").read_text())
    print(f"logs of the steps: {options.output}")
    print((options.output / "figures.json").read_text(), end="")
    return compute_exit_status(rows)


def name_device() -> str:
    """Return the name of the GPU, or `unknown` if the driver does not answer."""
    try:
        return query_gpu("name")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main() -> None:
    """Run the check and exit with its status."""
    options = build_parser().parse_args()
    with exit_on_error():
        status = run_check(options)
    raise SystemExit(status)


def hide_other_gpus() -> tuple[str, ...]:
    """Hide all visible GPUs but the first from this process, and return all of their names.

    Raises:
        ResourcesError: there is no GPU that may be used.
    """
    count = count_visible_gpus(os.environ)
    if not count:
        raise ResourcesError(
            "this machine has 0 GPUs that may be used, and the check needs one\n"
            "    fix: --small on a CPU"
        )
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = tuple(name.strip() for name in listed.split(",")[:count])
    os.environ["CUDA_VISIBLE_DEVICES"] = names[0]
    return names


def build_integer_type(lowest: int) -> Callable[[str], int]:
    """Build the type of a command line option: whole numbers from `lowest` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return parse


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with message and exit status of an error that is meant for the user."""
    try:
        yield
    except GdpoTuneError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error


if __name__ == "__main__":
    main()
