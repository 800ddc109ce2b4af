"""One trial: `train(config)` trains or merges a policy, then evaluates it on held-out prompts.

A plain function that knows neither Ray nor Optuna. Equal configs give bitwise equal metrics on a
CPU, in a fresh process or a reused one, uninterrupted or resumed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import append_step, read_steps
from gdpo_tune.core.trials import UNCHANGED, Cost, Measurement, Outcome, Report, parse_step
from gdpo_tune.policies.load_policy import keep_form, load_policy
from gdpo_tune.tasks.base import Problem, Task
from gdpo_tune.training import distributed, memory
from gdpo_tune.training.build import build_trainer
from gdpo_tune.training.checkpoints import (
    Checkpoint,
    create_draft,
    read_checkpoint,
    write_checkpoint,
)
from gdpo_tune.training.engine import OF_PROCESS
from gdpo_tune.training.evaluation import Evaluator, build_decoding, derive_seed
from gdpo_tune.training.lora import load_adapter
from gdpo_tune.training.memory import explain_out_of_memory
from gdpo_tune.training.merging import check_parts, write_merge
from gdpo_tune.training.rollout import Generate, choose_held_out_sampler, uses_engine_in_process
from gdpo_tune.training.step_reporter import Clock, StepReporter, TrialWriterToken
from gdpo_tune.training.trl_arguments import choose_weights_dtype
from gdpo_tune.training.worker_cache import WorkerCache, build_worker_cache, open_worker_cache


def train(
    config: TrialConfig, *, resume: Path | None, report: Report, with_test: bool = True
) -> Outcome:
    """Run one trial to its end.

    It writes `steps.jsonl`, `completions.jsonl` and checkpoints to `config.directory`; during
    training the two newest checkpoints stay. It calls `report` once a step, with the checkpoint's
    directory if one was just written. `report` may end the trial by raising. `SystemExit` passes
    through once a checkpoint of the step just done is on disk.

    With `config.parts` and without `config.train`, it merges these policies and evaluates the merge
    on validation prompts. `report` gets that as step 0 and may end the trial, of which no policy
    then stays. Otherwise the merge is kept as `checkpoint-0` and evaluated on test prompts.

    Without `with_test`, nothing is evaluated on test prompts; a run that resumes may do so later.

    A run that resumes from a checkpoint of the same trial first reports its evaluation, if any,
    again, without step metrics.

    Several processes that were launched as one group (see `ranks`) train one policy together. Each
    calls this function with the same arguments, samples and scores its part of every step and of
    every held-out split, and gets the same outcome. The first one writes. `report` is called in all
    of them and has to raise `SystemExit` in all or none.

    Step metrics are those of `step_reporter.select_metrics` and `memory.read_gpu_metrics`, and
    `validation/<metric>` every `evaluate_every` steps, at `evaluate_at` and at the last one.

    Raises:
        TrialFailure: the trial cannot continue, as for `NonFiniteError`; its message is the reason.
        DiskFullError: there is no room for a checkpoint or a measurement.
        PolicyError, SandboxUnavailable, SandboxInfraError: from the policy or the task.
        EngineError: the configuration asks for vLLM, which is not available.
        EngineMemoryError: only a new process has the memory that the trial needs.
    """
    prepare_process(config)
    with explain_out_of_memory(config), open_worker_cache(config) as cache:
        return run_trial(config, cache, resume, report, with_test)


def prepare_process(config: TrialConfig) -> None:
    """Set what a trial needs of its process and thread, before anything is loaded."""
    torch.set_num_threads(config.threads)
    distributed.join_process_group()
    memory.limit_gpu_memory(config.gpu_share)
    memory.free_garbage()
    # Progress bars and notes about checkpoints would disturb the display of a sweep.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)


def run_trial(
    config: TrialConfig, cache: WorkerCache, resume: Path | None, report: Report, with_test: bool
) -> Outcome:
    """Run one trial in a process that is prepared for it; see `train`."""
    # Rewards of a task file may draw from the global generators, also where nothing is trained.
    set_seed(config.seed + distributed.get_rank())
    keeps_policy = config.train or config.parts
    start = read_checkpoint(resume) if resume is not None and keeps_policy else None
    steps = config.training.steps if config.train else 0
    before = Cost() if start is None else start.cost
    clock = Clock(before, config.training.completions_per_step)
    if start is not None and start.validation:
        # An earlier process may have been killed before its report arrived.
        report(Measurement(start.step, {}, start.cost, start.validation), start.path)
    if config.train and (start is None or start.step < steps):
        trainer, sampler = build_trainer(config, cache)
        evaluator = Evaluator(config, cache, sampler)
        reporter = StepReporter(config, trainer, evaluator, clock, report)
        trainer.add_callback(reporter)
        trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
        model, validation = trainer.policy, reporter.validation
        checkpoint = reporter.checkpoint
    elif config.parts and start is None:
        OF_PROCESS.close()  # its memory serves the evaluation
        evaluator = Evaluator(config, cache, choose_held_out_sampler(config))
        model, merged = merge_and_validate(config, evaluator, clock, report)
        validation, checkpoint = merged.validation, merged.path
    else:
        model, sampler = _load_without_training(config, cache, start)
        evaluator = Evaluator(config, cache, sampler)
        if start is None or not start.validation:
            validation = evaluator.evaluate(model, "validation", 0 if start is None else start.step)
        else:
            cache.load_split("validation")  # counts the prompts that are left out
            validation = start.validation
        checkpoint = None if start is None else start.path
    unchanged = {UNCHANGED: "every gradient was 0"} if _had_no_gradient(config) else {}
    return Outcome(
        validation=validation,
        test=evaluator.evaluate_test(model, steps) if with_test else {},
        cost=clock.read(steps, evaluator.sampled),
        checkpoint=checkpoint,
        # after the evaluations, which load prompts
        environment={**cache.environment, **unchanged},
    )


def sample_policy(
    config: TrialConfig, count: int
) -> tuple[Task, list[tuple[Problem, str, list[int]]]]:
    """Sample `count` completions as a trial's first evaluation does, each of another prompt.

    Where there are fewer validation prompts, the first ones come again.

    Returns:
        The task, which the caller closes; and problems, completions and their tokens.

    Raises:
        PolicyError, DataError, SandboxUnavailable: from the policy, the data or the task.
    """
    prepare_process(config)
    set_seed(config.seed)
    cache = build_worker_cache(config)
    held_out = cache.load_split("validation")
    rows = [row % len(held_out.prompts) for row in range(count)]
    model, sampler = _load_without_training(config, cache, None)
    completions = sampler(
        model,
        [held_out.prompts[row] for row in rows],
        build_decoding(config.training, model, cache.tokenizer),
        torch.Generator().manual_seed(derive_seed(config.seed, "validation", 0)),
    )
    texts: list[str] = cache.tokenizer.batch_decode(completions, skip_special_tokens=True)
    problems = [held_out.problems[row] for row in rows]
    return cache.task, list(zip(problems, texts, completions, strict=True))


def _had_no_gradient(config: TrialConfig) -> bool:
    """Return whether the training, or that of every part, left the policy's weights as they were.

    A member of a population has not recorded the steps that it took over.
    """
    if config.schedule or not (config.train or config.parts):
        return False
    ends = [(p.checkpoint.parent, parse_step(p.checkpoint.name) or 0) for p in config.parts]
    for directory, last in ends or [(config.directory, config.training.steps)]:
        norms = [s.metrics.get("train/grad_norm") for s in read_steps(directory) if s.step <= last]
        if len(norms) < max(last, 1) or any(norm != 0 for norm in norms):
            return False
    return True


def _load_without_training(
    config: TrialConfig, cache: WorkerCache, start: Checkpoint | None
) -> tuple[PreTrainedModel, Generate]:
    """Load the untrained policy, or the policy of a finished trial as it was in memory.

    The second result samples its held-out completions. For the untrained policy it is the engine of
    a training, if that runs in this process; TRL starts it with a trainer, which then trains
    nothing.
    """
    if start is None and uses_engine_in_process(config):
        # Nor is the policy divided, because nothing is computed with it.
        plain = replace(config, params={**config.params, "beta": 0.0}, sharded=False)
        trainer, sampler = build_trainer(plain, cache)
        return trainer.policy, sampler
    OF_PROCESS.close()
    model: Any
    if start is None:
        model = cache.take_policy()
    elif config.parts:
        model = load_merge(config, start.path)
    elif config.model.lora_rank:
        model = load_adapter(cache.take_policy(), start.path)
    else:
        model = load_policy(str(start.path))[0]
    model = model.to("cuda") if torch.cuda.is_available() else model
    return model, choose_held_out_sampler(config)


def merge_and_validate(
    config: TrialConfig, evaluator: Evaluator, clock: Clock, report: Report
) -> tuple[PreTrainedModel, Checkpoint]:
    """Merge the parts of a trial, evaluate the merge on validation prompts, and report it.

    If `report` returns, the merge is kept as `checkpoint-0`; if it raises, nothing of it stays. The
    weights that are evaluated are those that `from_pretrained` reads from the checkpoint.

    Raises:
        TrialFailure: the parts cannot be merged.
        DiskFullError: there is no room for the merge.
    """
    check_parts(config.parts, evaluator.cache.initial)
    token = TrialWriterToken(config.directory) if distributed.is_first() else None
    with create_draft(config.directory, is_writer=token is not None) as draft:
        if token is not None:
            write_merge(config.parts, draft, evaluator.cache.take_policy)
            with explain_full_disk(config.directory, "the settings of a merge"):
                keep_form(draft, config.policy, config.model.revision)
        distributed.broadcast_from_first(None)  # it is written
        model = load_merge(config, draft)
        validation = evaluator.evaluate(model, "validation", 0)
        metrics = {f"validation/{name}": estimate.mean for name, estimate in validation.items()}
        cost = clock.read(0, evaluator.sampled)
        measurement = Measurement(0, metrics, cost, validation, time.time())
        if token is not None:
            token.check()
            with explain_full_disk(config.directory, "the measurement of a merge"):
                append_step(config.directory, measurement)
        report(measurement, None)
        checkpoint = None
        if token is not None:

            def fill(target: Path) -> None:
                for path in draft.iterdir():
                    path.rename(target / path.name)

            checkpoint = write_checkpoint(config.directory, 0, cost, fill, validation)
    checkpoint = distributed.broadcast_from_first(checkpoint)
    assert checkpoint is not None, "the first process has written it, or has raised"
    return model, checkpoint


def load_merge(config: TrialConfig, directory: Path) -> PreTrainedModel:
    """Load a merge as a trial of this configuration loads a policy."""
    model: Any = load_policy(str(directory), choose_weights_dtype(config.model))[0]
    return model.to("cuda") if torch.cuda.is_available() else model
