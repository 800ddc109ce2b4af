"""One trial: `train(config)` trains or merges a policy, then evaluates it on held-out prompts.

A plain function that knows neither Ray nor Optuna. Equal configs give bitwise equal metrics on a
CPU, in a fresh process or a reused one, uninterrupted or resumed.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback
from transformers.utils import logging as transformers_logging
from trl.trainer.sft_config import SFTConfig

from gdpo_tune.core import task_files
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.parameters import build_shaping
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import find_adapter, read_steps
from gdpo_tune.core.trials import (
    DEMONSTRATIONS,
    HALVED,
    RUNNER,
    UNCHANGED,
    UNSHARED,
    WITHOUT_ENGINE,
    Cost,
    Estimate,
    Measurement,
    Outcome,
    Report,
    parse_step,
)
from gdpo_tune.policies.adapters import load_adapter
from gdpo_tune.policies.load_policy import resolve_policy, restore_base_files
from gdpo_tune.tasks.base import Problem, Task
from gdpo_tune.training import distributed, memory, rollout, vllm_engine
from gdpo_tune.training.checkpoints import (
    Checkpoint,
    create_draft,
    read_checkpoint,
    write_checkpoint,
)
from gdpo_tune.training.demonstrations import collect_demonstrations
from gdpo_tune.training.devices import describe_device, require_gpu
from gdpo_tune.training.distributed import prepare_sharding, set_precision
from gdpo_tune.training.engine import PROCESS_ENGINE
from gdpo_tune.training.evaluation import (
    Evaluator,
    build_decoding,
    build_early_scoring,
    build_reward_functions,
    derive_evaluation_seed,
    sample_completions,
)
from gdpo_tune.training.lora import build_adapter_config, fill_adapter, read_form
from gdpo_tune.training.memory import explain_out_of_memory
from gdpo_tune.training.merging import check_parts, write_merge
from gdpo_tune.training.progress import TRAINING
from gdpo_tune.training.prompt_selection import PromptSelection
from gdpo_tune.training.rollout import Generate, choose_held_out_sampler, uses_engine_in_process
from gdpo_tune.training.self_check import check_first_batch, check_following
from gdpo_tune.training.step_reporter import Clock, StepReporter, TrialWriterToken
from gdpo_tune.training.trainer import GDPOTrainer, StartTrainer
from gdpo_tune.training.trl_arguments import (
    build_common_arguments,
    build_trainer_arguments,
    count_prompts_per_step,
)
from gdpo_tune.training.worker_cache import (
    WorkerCache,
    build_worker_cache,
    load_initial_policy,
    open_worker_cache,
)
from gdpo_tune.training.written_policy import check_written_policy

WARMUP_SHARE = 0.1
"""Share of the steps of a supervised start over which the learning rate rises."""
_IGNORED = -100  # label of a token without a loss


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run one trial to its end.

    It writes `steps.jsonl`, `completions.jsonl` and checkpoints to `config.directory`, of which the
    two newest stay during training. It calls `report` once a step, with the checkpoint's directory
    if one was just written. `report` may end the trial by raising. `SystemExit` passes through once
    a checkpoint of the step just done is on disk.

    The last checkpoint of a trial that trains an adapter is the adapter, unless
    `config.writes_whole`. A merge of adapters is an adapter.

    With `config.parts` and without `config.train`, it merges these policies and evaluates the merge
    on validation prompts. `report` gets that as step 0 and may end the trial, of which no policy
    then stays. Otherwise the merge is kept as `checkpoint-0` and evaluated on test prompts.

    With `config.supervised`, it trains on demonstrations, keeps a whole policy, and evaluates it.

    A run that resumes from a checkpoint of the same trial first reports its evaluation, if any,
    again, without step metrics.

    Several processes that were launched as one group train one policy together. Each calls this
    function with the same arguments, samples and scores its part of every step and of every
    held-out split, and gets the same outcome. The first one writes. `report` is called in all of
    them and has to raise `SystemExit` in all or none.

    Step metrics are those of `step_reporter.select_metrics` and `devices.read_gpu_metrics`, and
    `validation/<metric>` every `evaluate_every` steps, at `evaluate_at` and at the last one.

    Raises:
        TrialFailure: the trial cannot continue, as for `NonFiniteError`; its message is the reason.
        DiskFullError: there is no room for a checkpoint or a measurement.
        PolicyError, SandboxUnavailable, SandboxInfraError: from the policy or the task.
        EngineError: the configuration asks for vLLM, which is not available.
        ResourcesError: CUDA cannot use the GPU that the configuration asks for.
        EngineMemoryError: only a new process has the memory that the trial needs.
    """
    _prepare_process(config)
    with explain_out_of_memory(config), open_worker_cache(config) as cache:
        return _run(config, cache, resume, report)


def _prepare_process(config: TrialConfig) -> None:
    """Set what a trial needs of its process, before anything is loaded."""
    if config.needs_gpu:
        require_gpu()
    torch.set_num_threads(config.threads)
    distributed.join_process_group()
    memory.limit_gpu_memory(config.gpu_share)
    memory.free_garbage()
    if torch.cuda.is_initialized():  # by an earlier trial in this process
        torch.cuda.reset_peak_memory_stats()
    # Progress bars and notes about checkpoints would disturb the display of a sweep.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)


def _run(config: TrialConfig, cache: WorkerCache, resume: Path | None, report: Report) -> Outcome:
    # Rewards of a task file may draw from the global generators, also where nothing is trained.
    set_seed(config.seed + distributed.get_rank())
    keeps_policy = config.train or config.parts
    start = read_checkpoint(resume) if resume is not None and keeps_policy else None
    steps = config.training.steps if config.train else 0
    earlier = start or config.measured
    before = Cost() if earlier is None else earlier.cost
    sampled = 0 if config.supervised else config.training.completions_per_step
    clock = Clock(before, sampled)
    if start is not None and start.validation:
        # An earlier process may have been killed before its report arrived.
        report(Measurement(start.step, {}, start.cost, start.validation), start.path)
    notes: dict[str, str] = {}
    if config.supervised and (start is None or start.step < steps):
        start, notes[DEMONSTRATIONS] = _train_start(config, cache, clock, report, start)
    if config.train and (start is None or start.step < steps):
        trainer, sampler = build_trainer(config, cache)
        evaluator = Evaluator(config, cache, sampler)
        reporter = StepReporter(config, trainer, evaluator, clock, report)
        trainer.add_callback(reporter)
        with TRAINING.watch():
            trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
        model, validation, checkpoint = trainer.model, reporter.validation, reporter.checkpoint
        if trainer.unshared and config.model.shared_prompts == "auto":
            notes[UNSHARED] = trainer.unshared
        if trainer.ran_out_of_memory:
            notes[HALVED] = f"at most {trainer.limit}"
    elif config.parts and start is None:
        model, evaluator, merged = merge_and_validate(config, cache, clock, report)
        validation, checkpoint = merged.validation, merged.path
    else:
        model, sampler = load_for_evaluation(config, cache, None if start is None else start.path)
        evaluator = Evaluator(config, cache, sampler)
        if start is None or not start.validation:
            validation = evaluator.evaluate(model, "validation", 0 if start is None else start.step)
        else:
            cache.load_split("validation")  # counts the prompts that are left out
            validation = start.validation
        checkpoint = None if start is None else start.path
    adapter = find_adapter(checkpoint) if checkpoint and config.parts else None
    rank = read_form(adapter, config.model).lora_rank if adapter else 0
    if uses_engine_in_process(config) and not config.supervised:
        if rank > config.largest_rank:
            notes[WITHOUT_ENGINE] = f"of rank {rank}, and vLLM has room for {config.largest_rank}"
        elif PROCESS_ENGINE.runner:
            notes[RUNNER] = PROCESS_ENGINE.runner
    if _had_no_gradient(config):
        notes[UNCHANGED] = "every gradient was 0"
    test = evaluator.evaluate_test(model, steps)
    notes |= {name: text for name, text in evaluator.unscored.items() if text}
    return Outcome(
        validation=validation,
        test=test,
        cost=clock.read(steps, evaluator.sampled),
        checkpoint=checkpoint,
        # after the evaluations, which load prompts
        environment={**cache.environment, **notes, **describe_device(config)},
    )


def evaluate_policy(config: TrialConfig, checkpoint: Path | None, step: int) -> dict[str, Estimate]:
    """Estimate every metric of a policy on test prompts, as a trial does at its end.

    `checkpoint` holds a policy that began as that of the configuration, after `step` steps of
    training; with None, it is that of the configuration. Seed and step decide what is sampled.
    A few completions are written to `config.directory`. Errors are those of `train`.
    """
    _prepare_process(config)
    with explain_out_of_memory(config), open_worker_cache(config) as cache:
        set_seed(config.seed)
        model, sampler = load_for_evaluation(config, cache, checkpoint)
        return Evaluator(config, cache, sampler).evaluate_test(model, step)


def sample_policy(
    config: TrialConfig, count: int
) -> tuple[Task, list[tuple[Problem, Any, list[int], int]]]:
    """Sample `count` completions as a trial's first evaluation does, each of another prompt.

    Where there are fewer validation prompts, the first ones come again.

    Returns:
        The task, which the caller closes; and problems with completions as in `SampledBatch`.

    Raises:
        PolicyError, DataError, SandboxUnavailable: from the policy, the data or the task.
    """
    _prepare_process(replace(config, needs_gpu=False))  # a CPU samples a few texts, too
    set_seed(config.seed)
    cache = build_worker_cache(config)
    held_out = cache.load_split("validation")
    rows = [row % len(held_out.prompts) for row in range(count)]
    model, sampler = load_for_evaluation(config, cache, None)
    decoding = build_decoding(config.training, model, cache.tokenizer)
    seed = derive_evaluation_seed(config.seed, "validation", 0)
    generator = torch.Generator().manual_seed(seed)
    sampled = sample_completions(
        *(config, cache, held_out, rows),
        lambda prompts: sampler(model, prompts, decoding, generator),
    )
    problems = [held_out.problems[row] for row in rows]
    return cache.task, list(zip(problems, *sampled, strict=True))


def _train_start(
    config: TrialConfig,
    cache: WorkerCache,
    clock: Clock,
    report: Report,
    earlier: Checkpoint | None,
) -> tuple[Checkpoint, str]:
    """Train on demonstrations to the end, and free the memory; return how many they were, too."""
    PROCESS_ENGINE.close()  # its memory serves the training
    trainer = build_start_trainer(config, cache)
    evaluator = Evaluator(config, cache, choose_held_out_sampler(config))
    reporter = StepReporter(config, trainer, evaluator, clock, report)
    trainer.add_callback(reporter)
    with TRAINING.watch():
        trainer.train(resume_from_checkpoint=None if earlier is None else str(earlier.path))
    assert reporter.checkpoint is not None, "the last step has one"
    checkpoint, found = read_checkpoint(reporter.checkpoint), trainer.demonstrations
    del trainer, reporter
    memory.free_garbage()
    return checkpoint, found


def _had_no_gradient(config: TrialConfig) -> bool:
    if not (config.train or config.parts):
        return False
    ends = [(p.checkpoint.parent, parse_step(p.checkpoint.name) or 0) for p in config.parts]
    for directory, last in ends or [(config.directory, config.training.steps)]:
        norms = [s.metrics.get("train/grad_norm") for s in read_steps(directory) if s.step <= last]
        if len(norms) < max(last, 1) or any(norm != 0 for norm in norms):
            return False
    return True


def load_for_evaluation(
    config: TrialConfig, cache: WorkerCache, trained: Path | None
) -> tuple[PreTrainedModel, Generate]:
    """Load the untrained policy, or a trained one as it was in memory, and its sampler.

    An engine in this process samples either, too: TRL starts it, or takes over the one that is
    kept, with a trainer that trains nothing and whose weights it gets.
    """
    # A start is what trials begin at: its whole weights, beside which its adapter lies.
    adapter = None if trained is None or config.supervised else find_adapter(trained)
    form = config.model if adapter is None else read_form(adapter, config.model)
    of_engine = uses_engine_in_process(config) and not config.supervised
    of_engine = of_engine and form.lora_rank <= config.largest_rank
    if not of_engine:
        PROCESS_ENGINE.close()  # its memory serves the evaluation
    model: Any
    if trained is None or adapter is not None:
        model = cache.take_policy()
    else:
        model = load_initial_policy(replace(config, start=trained))[0]
        # An engine may have to start, with the weights of which it gets others.
        model.name_or_path = str(config.start or resolve_policy(config.policy))
    if of_engine:
        # The policy is not divided either, because nothing is computed with it.
        params = {**config.params, "beta": 0.0}
        plain = replace(
            config, model=form, engine_rank=config.largest_rank, params=params, sharded=False
        )
        trainer, sampler = build_trainer(plain, cache, model)
        if adapter is not None:
            fill_adapter(trainer.model, adapter)
        check_following(trainer, cache.load_split("validation").prompts)
        return trainer.model, sampler
    model = model if adapter is None else load_adapter(model, adapter)
    model = model.to("cuda") if torch.cuda.is_available() else model
    return model, choose_held_out_sampler(config)


def merge_and_validate(
    config: TrialConfig, cache: WorkerCache, clock: Clock, report: Report
) -> tuple[PreTrainedModel, Evaluator, Checkpoint]:
    """Merge the parts of a trial, evaluate the merge on validation prompts, and report it.

    A merge that `config.measured` knows is neither evaluated nor reported again.
    If `report` returns, the merge is kept as `checkpoint-0`; if it raises, nothing of it stays. The
    weights that are evaluated are those of the checkpoint.
    """
    check_parts(config.parts, cache.initial)
    token = TrialWriterToken(config.directory) if distributed.is_first() else None
    with create_draft(config.directory, is_writer=token is not None) as draft:
        if token is not None:
            write_merge(config.parts, draft)
            with explain_full_disk(config.directory, "the settings of a merge"):
                restore_base_files(draft, config.policy, config.model.revision)
        distributed.broadcast_from_first(None)  # it is written
        model, sampler = load_for_evaluation(config, cache, draft)
        evaluator = Evaluator(config, cache, sampler)
        if config.measured is not None:
            cache.load_split("validation")  # counts the prompts that are left out
            validation, cost = config.measured.validation, config.measured.cost
        else:
            validation = evaluator.evaluate(model, "validation", 0)
            metrics = {f"validation/{name}": estimate.mean for name, estimate in validation.items()}
            cost = clock.read(0, evaluator.sampled)
            measurement = Measurement(0, metrics, cost, validation, time.time())
            if token is not None:
                token.append_step(measurement, "the measurement of a merge")
            report(measurement, None)
        checkpoint = None
        if token is not None:

            def fill(target: Path) -> None:
                for path in draft.iterdir():
                    path.rename(target / path.name)

            checkpoint = write_checkpoint(config.directory, 0, cost, fill, validation)
    checkpoint = distributed.broadcast_from_first(checkpoint)
    assert checkpoint is not None, "the first process has written it, or has raised"
    return model, evaluator, checkpoint


def build_trainer(
    config: TrialConfig, cache: WorkerCache, model: PreTrainedModel | None = None
) -> tuple[GDPOTrainer, rollout.Generate]:
    """Build the trainer, and the sampler of held-out completions during and after training.

    `model` is the policy without adapters; None: the untrained one.
    """
    problems = cache.load_split("train").problems
    per_step = count_prompts_per_step(config)
    order = order_prompts(len(problems), config.training.steps * per_step, config.seed)
    tools: list[Any] = getattr(cache.task, "tools", [])
    # TRL reads calls in the turns of chats alone; other prompts are the keys of their tokens.
    prompts = [list(one.turns) if tools else one.prompt for one in problems]
    data = Dataset.from_dict({"prompt": [prompts[i] for i in order], "problem": order})
    model = cache.take_policy() if model is None else model
    adapter = build_adapter_config(model, config.model, config.policy)
    engine = rollout.choose_engine(config, model)
    uses_vllm = engine == "vllm"
    of_engine = vllm_engine.build_engine_arguments(config, model) if uses_vllm else {}
    arguments = build_trainer_arguments(config, cache.task.rewards, of_engine)
    selection = None
    if config.params["prompt_selection"] == "informative":
        selection = PromptSelection(prompts, config.training.steps, per_step, config.seed)
    info = task_files.load_task_info(config.task, config.params)
    shaping = build_shaping(config.params, config.training, info)

    def check_batch(trainer: GDPOTrainer, batch: Mapping[str, Any]) -> None:
        check_first_batch(trainer, batch, dropout=config.model.dropout)
        if not cache.is_read_back:
            check_written_policy(trainer, cache, config.directory)
            cache.is_read_back = True

    # A new adapter draws random numbers before TRL sets its own seed.
    set_seed(config.seed)
    preparing = (
        vllm_engine.prepare_engine(config, model, arguments, cache.initial)
        if uses_vllm
        else nullcontext()
    )
    with preparing, prepare_sharding() if config.sharded else nullcontext():
        trainer = GDPOTrainer(
            normalization=str(config.params["normalization"]),
            gamma=float(config.params["gamma"]),
            baseline=str(config.params["baseline"]),
            ranges=[info.rewards[name] for name in cache.task.rewards],
            reward_funcs=build_reward_functions(cache.task, problems, shaping),
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=cache.tokenizer,
            peft_config=adapter,
            encode=cache.encode_prompts,
            begin_scoring=build_early_scoring(cache.task, problems),
            check_batch=check_batch,
            selection=selection,
            shared_prompts=config.model.shared_prompts,
            limit=memory.choose_limit(config, model),
            tools=tools,
            rollout_func=None
            if uses_vllm
            else functools.partial(rollout.sample_for_trainer, fast=engine == "fast_cpu"),
        )
    if tools:
        trainer.chat_template = cache.prompts.template  # as it writes the first prompt
    trainer.remove_callback(PrinterCallback)
    if uses_vllm and config.rollout.vllm_mode == "colocate":
        return trainer, vllm_engine.ColocatedEngine(trainer, sleeps=config.rollout.sleep).generate
    if uses_vllm:
        vllm_engine.name_engine_failures(trainer)
    return trainer, rollout.choose_held_out_sampler(config)


def build_start_trainer(config: TrialConfig, cache: WorkerCache) -> StartTrainer:
    """Build the trainer of a supervised start; see `collect_demonstrations` for its errors."""
    start = config.supervised
    assert start is not None, "the trial is a supervised start"
    found = collect_demonstrations(config, cache.task, cache.prompts)
    model: Any = cache.take_policy()
    own = start.completions_per_step // distributed.count_processes()
    limit = memory.choose_limit(config, model)
    longest = max(len(prompt) + len(completion) for prompt, completion in found.rows)
    most = max(1, limit.size // longest) if limit.counts_tokens else limit.size
    size = next(size for size in range(min(own, most), 0, -1) if own % size == 0)
    arguments = SFTConfig(
        max_steps=start.steps,
        learning_rate=start.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(WARMUP_SHARE * start.steps),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=own // size,
        # The rows have their labels and their order.
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        max_length=None,
        **build_common_arguments(config),
    )
    set_precision(arguments)
    order = order_prompts(len(found.rows), start.steps * start.completions_per_step, config.seed)
    labels = [completion for _, completion in found.rows]
    for row, mask in enumerate(found.masks):
        pairs = zip(labels[row], mask, strict=True)
        labels[row] = [token if own else _IGNORED for token, own in pairs]
    rows: dict[str, Any] = {
        "input_ids": [[*found.rows[i][0], *found.rows[i][1]] for i in order],
        "labels": [[*[_IGNORED] * len(found.rows[i][0]), *labels[i]] for i in order],
    }
    set_seed(config.seed)  # a new adapter draws random numbers, the same in every process
    trainer = StartTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=cache.tokenizer,
        peft_config=build_adapter_config(model, config.model, config.policy),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.demonstrations = str(found)
    return trainer
