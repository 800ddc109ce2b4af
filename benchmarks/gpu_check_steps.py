"""Steps of `gpu_check.py`: each takes a context and returns the rows of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_check_judge as judgements
import gpu_step
from gpu_check_plan import LONG_TASK, RANK, Context
from gpu_check_processes import OutOfTimeError, StepError
from gpu_check_rows import Row, fail, judge, skip
from gpu_check_sharing import NO_GPU, check_packing, check_packs, check_shards
from gpu_check_sweeps import build_sweep, find_refusal, run_sweep_command
from gpu_step_plan import Plan
from peaks import Peak, measure_gpu_memory

from gdpo_tune import cli
from gdpo_tune.core.engines import find_vllm, select_engine
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.spec import load_spec

if TYPE_CHECKING:  # its module imports torch
    from gpu_check_trials import TrainedTrial

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
        "device", "gpu_check_device:check_device", context.plan.small, seconds=180
    )


def check_memory(context: Context) -> list[Row]:
    """Check the bound of a trial that trains every weight against its peak."""
    step, plan = "memory", context.plan
    if plan.small or plan.device_bytes is None:
        return [skip(step, "bound against peak", NO_GPU, judgements.MEMORY_LIMIT)]
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
    return [judgements.judge_memory(bound / 2**20, memory.highest - before)]


def check_adapters(context: Context) -> list[Row]:
    """Check that the engine samples with a small adapter, and that the base stays as it is."""
    step, plan = "adapters", context.plan
    steps, completions = (1, 8) if plan.small else (2, 16)
    config = plan.build_config(
        step,
        params={"learning_rate": 3e-6},
        training={"steps": steps, "completions_per_step": completions},
        policy=plan.tiny_policy if plan.small and plan.vllm else plan.policy,
        model=ModelSettings(
            dtype="bfloat16" if plan.small and plan.vllm else "auto", lora_rank=RANK
        ),
        rollout=RolloutSettings(engine="vllm" if plan.vllm else "transformers"),
    )
    figures = context.processes.call(
        step, "gpu_check_adapters:measure_adapter", config, UPDATE, plan.vllm, seconds=300
    )
    return judgements.judge_adapters(figures)


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
        judgements.judge_bitwise_resume(
            context.processes.call(step, "gpu_check_cpu:resume_trial", on_cpu, seconds=240)
        )
    ]
    if plan.small:
        return [
            *rows,
            skip(step, "on the GPU", NO_GPU, judgements.RESUME_LIMIT),
            skip(step, "generator states", NO_GPU, judgements.STATES_LIMIT),
        ]
    config = plan.build_config("resume_gpu")
    resumed = context.processes.call(step, "gpu_check_trials:resume_trial", config, seconds=300)
    return [*rows, *judgements.judge_device_resume(resumed)]


def check_engine(context: Context) -> list[Row]:
    """Compare the start of a trial with that of the next one, which keeps the engine."""
    step, plan = "engine", context.plan
    if not plan.vllm:
        return [skip(step, judgements.ENGINE_CHECK, "no vLLM", judgements.ENGINE_LIMIT)]
    configs = [
        plan.build_config(
            f"{step}_{number}",
            training={"steps": 2, "evaluate_every": 2},
            policy=plan.tiny_policy or plan.policy,
            model=ModelSettings(dtype="bfloat16" if plan.small else "auto", lora_rank=RANK),
            rollout=RolloutSettings(engine="vllm"),
        )
        for number in range(2)
    ]
    function = "gpu_check_trials:measure_first_steps"
    cold, reused = context.processes.call(step, function, configs, seconds=300)
    return [judgements.judge_engine(cold, reused, small=plan.small)]


def check_sleep(context: Context) -> list[Row]:
    """Compare a trial whose engine sleeps while a step is computed with one whose does not."""
    step, plan = "sleep", context.plan
    if plan.small or not plan.vllm:
        reason = NO_GPU if plan.small else "no vLLM"
        return [skip(step, judgements.SLEEP_CHECK, reason, judgements.SLEEP_LIMIT)]
    trials: list[TrainedTrial] = []
    peaks: list[float] = []
    for sleeps in (False, True):
        rollout = RolloutSettings(engine="vllm", sleep=sleeps)
        config = plan.build_config(f"{step}_{sleeps}", rollout=rollout)
        with Peak(measure_gpu_memory) as memory:
            trials.append(context.processes.call(step, TRAIN, config, seconds=240))
        peaks.append(memory.highest)
    return [judgements.judge_sleep(*trials, *peaks)]


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
    return [judgements.judge_evaluation(trial, rows, limit)]


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
    blocks = 1 if plan.small else 2
    pair = gpu_step.measure(work, blocks, blocks, context.processes, step, seconds=240)
    return judgements.judge_step(pair, small=plan.small)


def check_sweep(context: Context) -> list[Row]:
    """Check that a sweep of four trials ends with all of them after one process was killed."""
    step, plan = "sweep", context.plan
    share = 0.5 if plan.small else 0.25
    file = build_sweep(plan, "killed", share, trials=4, rank=0 if plan.small else RANK)
    if reason := find_refusal(file):
        return [skip(step, "one process killed", reason)]
    figures = run_sweep_command(file, step, context.processes, 300, small=plan.small, kill=True)
    rows = [judgements.judge_killed_sweep(figures, trials=4)]
    if plan.small:
        rows.append(judgements.judge_packing("packing", share, figures, None, unit="the cores"))
    return rows


def check_neighbour(context: Context) -> list[Row]:
    """Check that a trial on half a GPU survives a neighbour that grows and shrinks."""
    step, plan = "neighbour", context.plan
    if plan.small:
        return [skip(step, "grows and shrinks", NO_GPU, judgements.NO_FAILURE)]
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
    return [judge(step, "grows and shrinks", figure, judgements.NO_FAILURE, held)]


def find_refused_share(file: Path) -> float:
    """Find the share of a GPU below which the trials of a sweep are refused, to `RESOLUTION`.

    Raises:
        ResourcesError: they do not fit on a whole GPU.
    """
    cli.check_share(load_spec(file, ["resources.gpus=1"]))
    low, high = 0.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        try:
            cli.check_share(load_spec(file, [f"resources.gpus={middle}"]))
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
    return select_engine(RolloutSettings(engine=engine), gpu=True, lean=False, vllm=vllm) == "vllm"


Step = Callable[[Context], Iterable[Row]]
STEPS: Mapping[str, Step] = {
    "device": check_device,
    "memory": check_memory,
    "adapters": check_adapters,
    "resume": check_resume,
    "engine": check_engine,
    "sleep": check_sleep,
    "evaluation": check_evaluation,
    "step": check_step,
    "sweep": check_sweep,
    "neighbour": check_neighbour,
    "packs": check_packs,
    "shards": check_shards,
    "packing": check_packing,
}
"""In their order: what takes longest comes last."""
