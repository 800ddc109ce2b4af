"""Rules between the keys of a sweep file, section by section.

A rule yields a `Finding` for each key that does not fit. `check_spec` looks at the file alone;
with `to_run` also at paths and earlier sweeps. `list_needs` looks for the data and packages of the
machine that trains.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import NamedTuple

from gdpo_tune.core import registry
from gdpo_tune.core.addresses import split_service_url
from gdpo_tune.core.engines import ADAPTER_RANKS
from gdpo_tune.core.errors import SpecError, TaskFileError, UsageError
from gdpo_tune.core.files import (
    DATA_KINDS,
    expand_path,
    find_path_problem,
    is_data_file,
    is_directory,
    is_file,
    is_local_source,
    list_data_files,
    path_exists,
)
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.object_store import JOURNAL, SPEC, is_url
from gdpo_tune.core.policy_shapes import find_position_limit
from gdpo_tune.core.redaction import is_secret, redact_passwords
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.settings import EVERY_LINEAR, DataSettings, HeldOutData, Section
from gdpo_tune.core.system import RENDEZVOUS
from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.core.task_info import STRICT
from gdpo_tune.core.text import (
    explain_unknown_name,
    join_names,
    list_template_columns,
    show,
    suggest,
)
from gdpo_tune.core.trl_fields import ITERATIONS
from gdpo_tune.spec.document import KeyPath, Place, Problems, get_map, read_document
from gdpo_tune.spec.earlier_results import TABLE, read_results
from gdpo_tune.spec.first_trials import TRAININGS_PER_CHOICE, count_least_wide
from gdpo_tune.spec.model import (
    FULL_TRAININGS,
    LEAST_RESOURCE,
    Constraint,
    HalvingSettings,
    SweepSpec,
)
from gdpo_tune.spec.space import Choices, Uniform

TOTAL, COMPLETION_LENGTH = "training.completions_per_step", "training.max_completion_length"
LEAST_RUNG = 2
"""Fewest steps of the wide rung."""
LONGEST_NAME = 100
"""Most characters of a sweep's name; the names of directories and pages append to it."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
SECRET = re.compile(r"://[^/@]*:[^/@]*@|\?")
"""Secret in the address of a store."""
EXAMPLE = "http://HOST:PORT"
RESERVED_ARGUMENTS = (
    *("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"),
    *("conversation", "chat_template", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
)
"""Names that are no arguments of a chat template: of `apply_chat_template`, or what it gives."""
SET_BY_RAY = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("NODE_RANK", "LOCAL_WORLD_SIZE", *RENDEZVOUS),
)
"""Variables that differ from trial to trial; so do those that begin with `RAY_`."""


class Finding(NamedTuple):
    """A key that does not fit, why, and what to write instead."""

    key: str | KeyPath
    reason: str
    fix: str
    inputs: tuple[str, ...] = ()
    """Further keys that have to be valid: a problem in one of them drops this finding."""
    value: object = None
    """Shown instead of the key's value in the file."""
    fallback_key: str | KeyPath = ""
    """Key to name where the file does not write `key`."""


Findings = Iterator[Finding]


def check_spec(spec: SweepSpec, task: TaskInfo | None, *, to_run: bool) -> Findings:
    """Yield what does not fit; a key with a problem of its own has its default in `spec`."""
    if task is not None:
        yield from _check_task_defaults(spec, task)
        yield from _check_metrics(spec, task)
        yield from _check_tools(spec, task)
    yield from check_weights(spec)
    yield from check_group_sizes(spec)
    yield from check_resource_settings(spec)
    yield from check_lengths_and_batches(spec)
    yield from _check_search(spec)
    if task is not None:
        yield from _check_plan(spec)
    yield from _check_storage(spec)
    yield from _check_rollout(spec)
    yield from _check_start(spec)
    if to_run:
        yield from _check_warm_start(spec)
        yield from _check_sandbox(spec)
        yield from _check_data(spec)
        yield from _check_model(spec)


def list_needs(spec: SweepSpec) -> Findings:
    """Yield the data and packages that training needs and this machine lacks."""
    for index, module in enumerate(spec.sandbox.modules):
        top, found = module.partition(".")[0], None
        if not _is_module_name(module):
            continue
        with suppress(ValueError):  # it is loaded already, and has no file
            found = importlib.util.find_spec(top)  # without importing it
        if found is None:
            fix = "install the package that has it, or remove the name"
            path = ("sandbox", "modules", index)
            yield Finding(path, f"no module {top} is installed", fix, ("sandbox.type",))
    for key, section in _list_data_sections(spec).items():
        source = section.source
        if source and is_local_source(source) and not path_exists(expand_path(source)):
            reason = "no such file or directory, and not the id of a data set on the Hub"
            fix = f"write the path of a {DATA_KINDS} file, or an id such as openai/gsm8k"
            yield Finding(f"{key}.source", reason, fix, ("task",))
    if spec.start and spec.start.file:
        file, fix = expand_path(spec.start.file), f"write data, or the path of a {DATA_KINDS} file"
        if list_data_files(file) != [file]:
            reason = find_path_problem(spec.start.file) or "no such file of demonstrations"
            yield Finding("start.demonstrations", reason, fix)
    if spec.model.lora_rank and importlib.util.find_spec("peft") is None:
        fix = "pip install 'gdpo-tune[peft]', or remove the key to train every weight"
        yield Finding("model.lora_rank", "LoRA needs the package peft", fix)
    flash = spec.model.attention == "flash_attention_2"
    if flash and importlib.util.find_spec("flash_attn") is None:
        fix = "pip install flash-attn --no-build-isolation, or write auto"
        yield Finding("model.attention", "flash_attention_2 needs the package flash-attn", fix)
    if spec.training.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        fix = "pip install 'gdpo-tune[adam8bit]', or write optimizer: adamw"
        yield Finding("training.optimizer", "adamw_8bit needs the package torchao", fix)


def _find_unused(
    section: str, keys: str, settings: Section, reason: str, fix: str, *on: str
) -> Findings:
    """Yield `keys` of a section, separated by spaces, that have no effect and are not a default."""
    for key in keys.split():
        if getattr(settings, key) != type(settings).model_fields[key].default:
            yield Finding(f"{section}.{key}", reason, fix, on)


def check_name(name: object, problems: Problems) -> str:
    """Return the sweep's name; refuse one that no directory can have."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    reason = (
        "not a name that a directory can have (letters, digits, '.', '_', '-'; at most "
        f"{LONGEST_NAME} of them)"
    )
    proposal = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).strip("-.")[:LONGEST_NAME]
    proposal = proposal or "my-sweep" if isinstance(name, str) else f'"{proposal}"'
    problems.refuse("name", reason, f"write name: {proposal}", value=name)
    return "sweep"


def check_task(name: object, weighted: Iterable[str], problems: Problems) -> TaskInfo | None:
    """Return a task with its rewards that are `weighted` in the space; refuse an unknown one."""
    if name is None:
        reason, fix = "missing", "add task: code"
    elif isinstance(name, str) and is_task_file(name) and (unusable := find_path_problem(name)):
        reason, fix = unusable, "write path/to/file.py:MyTask"
    elif isinstance(name, str) and (name in registry.TASKS or is_task_file(name)):
        try:
            return load_task_info(name, [f"reward_weights.{reward}" for reward in weighted])
        except TaskFileError as error:
            reason = str(error).removeprefix(f"{name}: ")
            fix = "correct the file; docs/own_task.md has an example"
    else:
        reason, fix = explain_unknown_name("task", name, registry.TASKS)
    problems.refuse("task", reason, fix)
    return None


def _check_task_defaults(spec: SweepSpec, task: TaskInfo) -> Findings:
    name, policy, training = spec.task, spec.policy, spec.training
    if unusable := find_path_problem(policy):
        fix = f"write {task.embedded}, a directory, or a Hub id such as org/name"
        yield Finding("policy", unusable, fix)
    if policy in registry.POLICIES and policy != task.embedded and not is_task_file(name):
        others = [other for other in registry.TASKS if load_task_info(other).embedded == policy]
        reason = f"made for {join_names(others)} and cannot answer the prompts of {name}"
        yield Finding("policy", reason, f"write policy: {task.embedded}, or remove the key")
    if spec.scoring != STRICT and not task.offers_released:
        offering = [each for each in registry.TASKS if load_task_info(each).offers_released]
        reason = f"no code of the authors scores the task {name}"
        fix = f"remove the key, or write as task one of {join_names(offering)}"
        yield Finding("scoring", reason, fix, ("task",))
    for split, most in ({} if spec.data.source else task.prompts).items():
        count = getattr(training, f"{split}_prompts")
        if count > most:
            reason = f"the {name} task can write {most} distinct {split} prompts"
            fix = f"write at most {most}, or give a data set as data.source"
            yield Finding(f"training.{split}_prompts", reason, fix, value=count)
    longest, config = training.max_completion_length, None
    directory = registry.POLICIES.get(policy) or expand_path(policy)
    with suppress(OSError, ValueError):  # whether there is such a policy is checked elsewhere
        config = json.loads((directory / "config.json").read_bytes())
    limit = find_position_limit(config) if isinstance(config, dict) else None
    if limit is not None and longest >= limit:
        reason = f"{policy} has {limit} positions, for a prompt and its completion together"
        fix = f"write a number well below {limit}, or give another policy"
        yield Finding(COMPLETION_LENGTH, reason, fix, ("policy",), longest)
    unknown = [each for each, (low, high) in task.rewards.items() if math.isinf(high - low)]
    weights = {each: spec.space.list_reachable(f"reward_weights.{each}") for each in unknown}
    weighted = [each for each in unknown if weights[each] != (0,)]
    state = "state the lowest and highest value of {} in its task"
    if weighted and spec.space.domains["gamma"].list_values() != (0,):
        reason = f"the range of {join_names(weighted)} is unknown, and gamma needs it"
        yield Finding("space.gamma", reason, f"remove gamma, or {state.format(weighted[0])}")
    for parameter in [name for name in spec.space.domains if name.startswith("conditioning.")]:
        for other in {*unknown} & {*(spec.space.domains[parameter].list_values() or ())}:
            reason = f"the range of {other} is unknown, and its threshold needs it"
            fix = f"condition on another reward, or {state.format(other)}"
            yield Finding(("space", parameter), reason, fix)


def _check_tools(spec: SweepSpec, task: TaskInfo) -> Findings:
    if not task.calls_tools and ITERATIONS in spec.space.domains:
        reason = "has no effect: the task has no tools"
        yield Finding(("space", *ITERATIONS.split(".")), reason, "remove the key", ("task",))
    if task.calls_tools and spec.resources.shards_policy:
        reason = "tools are called after turns that each worker samples at a pace of its own"
        fix = "write resources.sharding: none, or workers: 1"
        yield Finding("resources.sharding", reason, fix, ("task", "resources.workers"))


def _check_metrics(spec: SweepSpec, task: TaskInfo) -> Findings:
    if not spec.objectives:
        fix = "write correctness: {direction: maximize, reference: 0} below it"
        yield Finding("objectives", "names no metric to optimise", fix)
    metrics, wanted = registry.collect_metrics(task), join_names(COST_METRICS)
    for section, kind, names in (
        ("objectives", "objective", spec.objectives),
        ("constraints", "metric", spec.constraints),
        ("search.target", "metric", spec.search.target),
    ):
        for name in names:
            path = (section, name)
            if name == "completions" and name not in metrics:
                reason = "every trial of a sweep samples the same number: there is no trade-off"
                yield Finding(path, reason, f"name another cost, {wanted}, or write search.budget")
            elif name not in metrics:
                fix = f"{suggest(name, metrics)}metrics of this task: {join_names(metrics)}"
                is_reward = name in task.rewards or name in task.optional_rewards
                reason = "a reward, and no metric of held-out prompts" if is_reward else ""
                yield Finding(path, reason or f"unknown {kind}", fix)
            elif name == "gpu_hours" and name not in task.metrics and not spec.resources.gpus:
                fix = "name seconds instead, or give trials GPUs with resources.gpus"
                yield Finding(path, "no trial has a GPU: always 0", fix, ("resources.gpus",))
    for name, objective in spec.objectives.items():
        if name not in metrics:
            continue
        info, maximize = metrics[name], objective.direction == "maximize"
        if not (objective.reference < info.high if maximize else objective.reference > info.low):
            reason = f"no value of {name} is better than this: the hypervolume would always be 0"
            side = f"below {info.high:g}" if maximize else f"above {info.low:g}"
            fix = f"write the worst value of interest, {side}"
            yield Finding(("objectives", name, "reference"), reason, fix)
    limits: list[tuple[tuple[str, ...], Constraint]] = [
        (("constraints", name), bound) for name, bound in spec.constraints.items()
    ]
    for name, bound in spec.search.target.items():
        limits.append((("search", "target", name), bound))
        if bound.baseline:
            fix = 'write a number, such as ">= 0.6"'
            yield Finding(limits[-1][0], "search.target takes a number, not a baseline", fix)
    for path, constraint in limits:
        name = path[-1]
        if name not in metrics:
            continue
        info, least = metrics[name], constraint.op == ">="
        best, worst = (info.high, info.low) if least else (info.low, info.high)
        # the baseline is measured later: at the worst it has the worst value
        bound = constraint.bound + (worst if constraint.baseline else 0.0)
        if best < bound if least else best > bound:
            fix = f"the metric lies between {info.low:g} and {info.high:g}"
            yield Finding(path, "no trial can ever meet this", fix)


def check_weights(spec: SweepSpec) -> Findings:
    """Refuse a space in which a trial can have only weights of 0."""
    domains = spec.space.domains
    weights = [name for name in domains if name.startswith("reward_weights.")]
    for name in weights:
        values = spec.space.list_reachable(name)
        if not (domains[name].contains(0) if values is None else 0 in values):
            return
    if weights:  # none: of an unknown task, if the file names no reward
        always = all(domains[name].list_values() == (0,) for name in weights)
        what = (
            "every weight is 0" if always else "a trial could have a weight of 0 for every reward"
        )
        anchor = weights[0].rpartition(".")[2]
        fix = f"fix one above 0, such as {anchor}: 1: only ratios matter"
        yield Finding("space.reward_weights", f"{what}, so nothing would be learnt", fix)


def check_lengths_and_batches(spec: SweepSpec) -> Findings:
    """Refuse a length limit without effect, and batches that do not divide their wholes."""
    training, workers = spec.training, spec.resources.workers
    limit, longest = training.length_limit, training.max_completion_length
    if limit >= longest:
        reason = f"not below max_completion_length = {longest}: every completion is within it"
        fix = f"write a limit below {longest}, or raise {COMPLETION_LENGTH}"
        yield Finding("training.length_limit", reason, fix, (COMPLETION_LENGTH,), limit)
    total, mini = training.completions_per_step, training.mini_batch_size
    if mini and (total % mini or mini % workers):
        reason = f"{workers} workers cannot compute equal parts of it"
        if total % mini:
            reason = f"does not divide the {total} completions of a step"
        sizes = [size for size in range(workers, total, workers) if total % size == 0]
        fix = f"write one of {show(sizes)}, or 0 for" if sizes else "write 0 for"
        key, inputs = "training.mini_batch_size", (TOTAL, "resources.workers")
        yield Finding(key, reason, f"{fix} one optimizer step a pass", inputs)


def _list_group_sizes(spec: SweepSpec) -> list[int]:
    sizes = spec.space.list_reachable("group_size") or ()
    return [size for size in sizes if isinstance(size, int)]


def _shorten(sizes: list[int]) -> str:
    return join_names(sizes[:6]) + (", ..." if len(sizes) > 6 else "")


def check_group_sizes(spec: SweepSpec) -> Findings:
    """Refuse group sizes that do not divide the completions of a step."""
    total, domain = spec.training.completions_per_step, spec.space.domains["group_size"]
    uneven = [size for size in _list_group_sizes(spec) if total % size]
    if uneven:
        divisors = [size for size in range(2, total + 1) if total % size == 0]
        if isinstance(domain, Uniform):
            divisors = [size for size in divisors if domain.low <= size <= domain.high] or divisors
        reason = f"{_shorten(uneven)} does not divide {TOTAL} = {total}"
        fix = f"use group sizes among {show(divisors)}, or change {TOTAL}"
        yield Finding("space.group_size", reason, fix, (TOTAL,), fallback_key=TOTAL)


def check_resource_settings(spec: SweepSpec) -> Findings:
    """Refuse variables that no trial can get, shares that no machine grants, and uneven workers."""
    own, workers, gpus = spec.resources, spec.resources.workers, spec.resources.gpus
    seen: set[str] = set()
    for index, entry in enumerate(own.env):
        name, sign, value = entry.partition("=")
        shown, reason, fix = name, "", ""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason, fix = "not the name of an environment variable", "write a name such as HF_HOME"
        elif name in SET_BY_RAY or name.startswith("RAY_"):
            reason = "every process gets its own value of this variable"
            fix = "remove it; see resources.gpus and .workers"
        elif name in seen:
            reason, fix = "named twice", "remove one of them"
        elif sign and is_secret(name, value):
            reason = "a secret in a file, from which it would reach the ledger, MLflow and the logs"
            fix = f"write the name alone, env: [{name}], and export {name} before the command"
            shown = f"{name}=***"
        if reason:
            path = ("resources", "env")
            yield Finding((*path, name), reason, fix, (), shown, fallback_key=(*path, index))
        seen.add(name)
    if workers > 1 and gpus not in (0.0, 1.0):
        reason = f"each of the {workers} workers of a trial trains on one GPU of its own"
        yield Finding("resources.gpus", reason, "write gpus: 1, which is for each of them, or 0")
    elif 0 < gpus < LEAST_RESOURCE:
        reason = "Ray counts in ten-thousandths, so this would be 0"
        yield Finding("resources.gpus", reason, f"write 0 for none, or at least {LEAST_RESOURCE}")
    elif gpus > 1:
        reason = "a training process computes on one GPU, and the others would idle"
        fix = f"write gpus: 1; for several GPUs a trial, also workers: {math.ceil(gpus)}"
        yield Finding("resources.gpus", reason, fix)
    if own.sharding == "full" and workers == 1:
        reason = "FSDP asked of one process, which holds the whole policy"
        fix = "write resources.workers: 2 or more, or sharding: auto"
        yield Finding("resources.sharding", reason, fix, ("resources.workers",))
    if workers > 1 and spec.rollout.vllm_mode == "server":
        reason = f"a server samples for one worker, and a trial has {workers}"
        fix = "write vllm_mode: colocate, with an engine in each worker, or resources.workers: 1"
        yield Finding("rollout.vllm_mode", reason, fix, ("resources.workers",))
    total, sizes = spec.training.completions_per_step, _list_group_sizes(spec)
    uneven = [size for size in sizes if workers > 1 and total // size % workers]
    if uneven:
        prompts = _shorten([total // size for size in uneven])
        reason = (
            f"does not divide the {prompts} prompts of a step that group_size {_shorten(uneven)} "
            f"leaves of {TOTAL} = {total}"
        )
        multiple = math.lcm(*(size * workers for size in sizes))
        fix = f"write completions_per_step: {-(-total // multiple) * multiple}, or fewer workers"
        yield Finding("resources.workers", reason, fix, ("space.group_size", TOTAL))


def _check_search(spec: SweepSpec) -> Findings:
    search = spec.search
    if search.sampler not in registry.SAMPLERS:
        reason, fix = explain_unknown_name("sampler", search.sampler, registry.SAMPLERS)
        yield Finding("search.sampler", reason, fix)
    if search.budget.gpu_hours and not spec.resources.gpus:
        fix = "write hours or completions instead, or give trials GPUs with resources.gpus"
        reason = "no trial has a GPU, so it is never spent"
        yield Finding("search.budget.gpu_hours", reason, fix, ("resources.gpus",))


def _check_plan(spec: SweepSpec) -> Findings:
    search, training, budget = spec.search, spec.training, spec.search.budget
    scheduler = search.scheduler
    if not isinstance(scheduler, HalvingSettings):
        if not search.trials:
            yield Finding("search.trials", "must be at least 1", "write a number of at least 1")
        return
    if not any((budget.completions, budget.gpu_hours, budget.hours)):
        fix = "write search.budget: {completions: ...}, or gpu_hours or hours; or type: fifo"
        reason = "halving divides a budget, and there is none"
        yield Finding("search.scheduler.type", reason, fix, ("search.budget.completions",))
    least = count_least_wide(spec)
    if search.trials and search.trials < least:
        reason = f"the wide rung needs {least} configurations: {_explain_wide(spec)}"
        fix = f"write {least} or more, or remove the key; or search fewer choices"
        yield Finding("search.trials", reason, fix, ("search.scheduler",))
    elif budget.completions:
        steps = spec.search_completions // training.completions_per_step
        count = (search.trials or least) + 1
        needed = math.ceil(LEAST_RUNG * count / scheduler.wide_share)
        if steps < needed <= budget.completions // training.completions_per_step:
            reason = (
                f"{search.replicates.max_trainings} replicates of up to {training.steps} steps "
                f"leave {steps} steps of the budget for the search"
            )
            fix = "write max_runs: 0, a larger search.budget.completions or fewer training.steps"
            inputs = ("search.budget.completions", "training.steps")
            yield Finding("search.replicates.max_runs", reason, fix, inputs)
        elif steps < needed:
            reason = (
                f"it pays for {steps} steps of all trainings together, and the wide rung of {count}"
                f" trainings may take {scheduler.wide_share:.2g} of them, {LEAST_RUNG} or more "
                f"each: {_explain_wide(spec)}"
            )
            # replicates have their part too; their length may follow from the budget
            again = search.replicates.max_trainings
            total = -(-needed * (FULL_TRAININGS + again) // FULL_TRAININGS)
            total = max(total, needed + again * training.steps) * training.completions_per_step
            widest = _find_widest(spec)
            fix = f"write {total} or more; a useful sweep takes ten "
            fix += "times as many" + (f"; or fix space.{widest} at one value" if widest else "")
            inputs = ("training.completions_per_step", "search.replicates.max_runs")
            yield Finding("search.budget.completions", reason, fix, inputs)
    for key, value, plain in (
        ("lr_schedule", training.lr_schedule, "constant"),
        ("warmup_share", training.warmup_share, 0.0),
    ):
        if value != plain:
            reason = "it follows from the length of a training, which halving decides"
            fix = f"write {key}: {show(plain)}, or search.scheduler: {{type: fifo}} with trials"
            yield Finding(f"training.{key}", reason, fix, ("search.scheduler",))


def _find_widest(spec: SweepSpec) -> str:
    """Return the searched dimension with most choices; empty without one."""
    domains = spec.space.searched_domains.items()
    counts = {name: len(d.choices) for name, d in domains if isinstance(d, Choices)}
    return max(counts, key=lambda name: counts[name], default="")


def _explain_wide(spec: SweepSpec) -> str:
    widest = _find_widest(spec)
    if not widest:
        return "those that span what can be traded"
    count = len(spec.space.list_reachable(widest) or ())
    return f"each choice needs {TRAININGS_PER_CHOICE} trainings, and {widest} has {count} choices"


def _check_storage(spec: SweepSpec) -> Findings:
    storage, key = spec.storage, "storage"
    tracking = spec.tracking
    _, is_file_address, path = tracking.uri.partition(":///")
    if unusable := find_path_problem(path) if is_file_address else "":
        yield Finding("tracking.uri", unusable, "write sqlite:///mlflow.db, or another file")
    # Column `experiments.name`, which SQLite does not enforce; MLflow's MAX_EXPERIMENT_NAME_LENGTH.
    most = 256 if tracking.uri.startswith(("postgresql", "mysql", "mssql")) else 500
    if len(tracking.experiment) > most:
        reason = f"{len(tracking.experiment)} characters; MLflow takes at most {most} there"
        yield Finding("tracking.experiment", reason, "write a shorter name", ("tracking.uri",))
    if not is_url(storage):
        is_taken = "is a file, not a directory" if is_file(Path(storage)) else ""
        if unusable := is_taken or find_path_problem(storage):
            yield Finding(key, unusable, "name another directory")
    elif SECRET.search(storage):
        shown = redact_passwords(storage).partition("?")[0]
        reason = "with a password or a query, which files and messages of the sweep would show"
        fix = "leave it out; packages of stores read variables, such as AWS_SECRET_ACCESS_KEY"
        yield Finding(key, reason, fix, value=shown)
    elif spec.resources.workers > 1:
        reason = "an object store, and the processes of a trial need one directory"
        yield Finding(
            key, reason, "write a directory that every node sees, or resources.workers: 1"
        )
    elif {*storage.split("/")} & {".", ".."} or storage.endswith("://"):
        reason = "not the address of a directory on an object store"
        yield Finding(key, reason, "write it like s3://bucket/sweeps")


def _check_rollout(spec: SweepSpec) -> Findings:
    own, model, resources = spec.rollout, spec.model, spec.resources
    on, remove = ("rollout.engine", "rollout.vllm_mode"), "remove the key"
    if own.engine == "transformers":
        keys = "vllm_mode vllm_server vllm_memory_share importance_sampling importance_sampling_cap"
        reason = "engine: transformers is not vLLM"
        yield from _find_unused("rollout", f"{keys} reuse_engine sleep", own, reason, remove, *on)
    elif own.vllm_mode == "colocate":
        reason = "only vllm_mode: server uses a server"
        yield from _find_unused("rollout", "vllm_server", own, reason, remove, *on)
        if own.engine == "vllm" and model.lora_rank > ADAPTER_RANKS[-1]:
            reason = f"vLLM samples with adapters of rank {ADAPTER_RANKS[-1]} at most"
            fix = f"write lora_rank: {ADAPTER_RANKS[-1]}, or rollout.engine: transformers"
            yield Finding("model.lora_rank", reason, fix, on)
    else:
        reason = "a server has a GPU of its own; its command line sets the share"
        yield from _find_unused("rollout", "vllm_memory_share", own, reason, remove, *on)
        reason = "a server runs on its own"
        yield from _find_unused("rollout", "reuse_engine sleep", own, reason, remove, *on)
        if own.engine == "auto":
            reason = "engine: auto may choose another engine, which uses no server"
            yield Finding("rollout.vllm_mode", reason, "write engine: vllm beside it", on)
        url, key = own.vllm_server, "rollout.vllm_server"
        if not url:
            reason = "missing: vllm_mode: server uses a server that is already running"
            yield Finding(key, reason, f"add vllm_server: {EXAMPLE}")
        else:
            try:
                split_service_url(url)
            except ValueError as error:
                fix = f"write {EXAMPLE}, where the service listens"
                yield Finding(key, f"not the address of a web service: {error}", fix)
        if model.lora_rank:
            reason = (
                "a server gets whole weights, and bfloat16 would round small updates of an adapter "
                "away"
            )
            fix = "write vllm_mode: colocate, or model.lora_rank: 0"
            yield Finding("rollout.vllm_mode", reason, fix, ("model.lora_rank",))
    if own.importance_sampling == "off" and own.engine != "transformers":
        reason, other = "importance_sampling: off has no cap", "rollout.importance_sampling"
        yield from _find_unused("rollout", "importance_sampling_cap", own, reason, remove, other)
    asleep = ""
    if resources.gpus == 0:
        asleep = "vLLM on a CPU has no sleep mode"
    elif resources.gpus < 1:
        asleep = "vLLM fails if another trial takes memory of its GPU while it falls asleep"
    if own.sleep and asleep:
        fix = "remove the key, or write resources: {gpus: 1}"
        yield Finding("rollout.sleep", asleep, fix, ("resources.gpus",))


def _check_start(spec: SweepSpec) -> Findings:
    workers = spec.resources.workers
    for name, constraint in spec.constraints.items():
        if constraint.baseline == "start" and spec.start is None:
            reason = "this sweep has no supervised start"
            fix = 'add start: {demonstrations: data}, or write ">= untrained" instead'
            yield Finding(("constraints", name), reason, fix, value=constraint.text)
    if spec.start and spec.start.completions_per_step % workers:
        reason = f"does not divide among resources.workers = {workers}"
        fix = f"write a multiple of {workers}"
        yield Finding("start.completions_per_step", reason, fix, ("resources.workers",))


def _check_sandbox(spec: SweepSpec) -> Findings:
    own, on = spec.sandbox, ("sandbox.type",)
    for index, module in enumerate(own.modules):
        if not _is_module_name(module):
            path, fix = ("sandbox", "modules", index), "write names as after import, such as numpy"
            yield Finding(path, "not a name that can be imported", fix, on)
    cpu, wall = own.cpu_seconds, own.wall_seconds
    if wall < cpu:
        reason = f"below cpu_seconds = {cpu:g}, which could never be used up"
        fix = f"write at least {cpu:g}, better {4 * cpu:g}: a busy machine is slower"
        inputs = ("sandbox.cpu_seconds", *on)
        yield Finding("sandbox.wall_seconds", reason, fix, inputs, wall)


def _is_module_name(module: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split("."))


def _check_data(spec: SweepSpec) -> Findings:
    own, key = spec.data, "data.source"
    if not own.source:
        reason = "has no effect: without data.source the task writes its own prompts"
        fix = "add data.source, or remove the key"
        keys = "layout config split columns prompt_template validation test"
        yield from _find_unused("data", keys, own, reason, fix, key)
        return
    if is_task_file(spec.task):
        reason = "has no effect: a task in a file writes its own prompts"
        fix = "remove the key, and read the data in the task's rows()"
        yield Finding(key, reason, fix, ("task",))
        return
    yield from _check_layout(spec)
    for name, section in _list_data_sections(spec).items():
        source = section.source or own.source
        place, is_local = expand_path(source), is_local_source(source)
        if section.source and is_local:
            path = f"{name}.source"
            if unusable := find_path_problem(source):
                yield Finding(path, unusable, f"write the path of a {DATA_KINDS} file")
            elif is_directory(place) and not list_data_files(place):
                reason = f"a directory without a {DATA_KINDS} file"
                yield Finding(path, reason, "name another directory")
            elif path_exists(place) and not (is_directory(place) or is_data_file(place)):
                reason = f"not a {DATA_KINDS} file"
                yield Finding(path, reason, "convert it, and name the new file")
        has_splits = not is_local or is_directory(place)
        if not has_splits and section.split not in ("", "train"):
            reason = "has no effect: a file has no splits"
            fix = "remove the key, or name the file that you mean as source"
            yield Finding(f"{name}.split", reason, fix, (key,))
    if own.is_local and not is_file(expand_path(own.source) / "README.md"):
        reason = "has no effect: only a clone from the Hub, with its README.md, has any"
        yield from _find_unused("data", "config", own, reason, "remove the key")


def _list_data_sections(spec: SweepSpec) -> dict[str, DataSettings | HeldOutData]:
    own = spec.data
    return {"data": own, "data.validation": own.validation, "data.test": own.test}


def _check_layout(spec: SweepSpec) -> Findings:
    own, task, key, layout = spec.data, spec.task, "data.layout", spec.data.layout
    layouts = {name: registry.describe_layout(name) for name in registry.LAYOUTS}
    known = task in registry.TASKS
    fitting = [name for name, info in layouts.items() if not known or task in info.tasks]
    if not layout:
        reason = "missing: the meaning of the columns is not guessed"
        yield Finding(key, reason, f"add layout: one of {join_names(fitting)}")
    elif layout not in layouts:
        yield Finding(key, *explain_unknown_name("layout", layout, layouts))
    elif layout not in fitting:
        reason = f"made for the task {' or '.join(layouts[layout].tasks)}, not for {task}"
        fix = f"write layout: one of {join_names(fitting)}, or another task"
        yield Finding(key, reason, fix)
    else:
        info = layouts[layout]
        columns = (*info.columns, *info.optional)
        for name in (name for name in own.columns if name not in columns):
            reason, fix = explain_unknown_name(f"column of layout {layout}", name, columns)
            fix += "; write {column of the layout: column of the data}"
            yield Finding(f"data.columns.{name}", reason, fix)
        if own.prompt_template and info.columns[0] in own.columns:
            reason = f"has no effect: data.prompt_template writes the {info.columns[0]}"
            fix = "remove one of the two keys"
            yield Finding(f"data.columns.{info.columns[0]}", reason, fix)
    try:
        list_template_columns(own.prompt_template)
    except ValueError as error:
        fix = 'write the name of a column in braces, "{Body} {Question}", and {{ for a brace'
        yield Finding("data.prompt_template", f"cannot be filled: {error}", fix)


def _check_model(spec: SweepSpec) -> Findings:
    own, policy = spec.model, spec.policy
    if not own.lora_rank:
        reason, fix = "without lora_rank no module gets an adapter", "add lora_rank: 16, or remove"
        keys = "lora_alpha lora_targets"
        yield from _find_unused("model", keys, own, reason, f"{fix} the key", "model.lora_rank")
    if own.lora_rank and not own.lora_targets:
        fix = f"write [{EVERY_LINEAR}], or names of modules such as [q_proj, v_proj]"
        yield Finding("model.lora_targets", "empty, so nothing would be trained", fix)
    elif EVERY_LINEAR in own.lora_targets and len(own.lora_targets) > 1:
        reason = f"{EVERY_LINEAR} already stands for every name"
        yield Finding("model.lora_targets", reason, f"write [{EVERY_LINEAR}], or only names")
    is_bfloat16_on_gpu = spec.resources.gpus > 0 and own.dtype != "float32"
    if own.attention == "flash_attention_2" and not is_bfloat16_on_gpu:
        reason = "flash_attention_2 computes in bfloat16 on a GPU alone"
        fix = "write auto, or ask for a GPU and not for dtype: float32"
        yield Finding("model.attention", reason, fix, ("resources.gpus", "model.dtype"))
    for name, value in own.chat_template_kwargs.items():
        path = ("model", "chat_template_kwargs", name)
        is_finite = isinstance(value, float) and math.isfinite(value)
        if not isinstance(value, str | int) and not is_finite:
            yield Finding(
                path, "neither a text nor a number", "write a word, a number, true or false"
            )
        if not name.isidentifier() or name in RESERVED_ARGUMENTS or name.endswith("_token"):
            reason = "a chat template gets this from Transformers, or cannot read such a name"
            fix = "write the name of a variable of the template, such as enable_thinking"
            yield Finding(path, reason, fix)
    if own.template_date:
        try:
            date.fromisoformat(own.template_date)
        except ValueError:
            yield Finding("model.template_date", "not a date", "write one such as '2026-01-31'")
    if own.revision and policy in registry.POLICIES:
        reason = f"policy {policy} ships with the package and has no revisions"
        fix = "remove the key, or give a Hub id as the policy"
        yield Finding("model.revision", reason, fix, ("policy", "task"))


def _check_warm_start(spec: SweepSpec) -> Findings:
    search, key = spec.search, "search.warm_start"
    sampler = registry.SAMPLERS.get(search.sampler)
    if not search.warm_start:
        return
    if sampler is not None and not sampler.learns:
        learning = [name for name, info in registry.SAMPLERS.items() if info.learns]
        fix = f"remove the key, or write as sampler one of {join_names(learning)}"
        yield Finding(key, f"the sampler {search.sampler} learns from no trial", fix)
        return
    seen: set[Path] = set()
    for index, directory in enumerate(map(expand_path, search.warm_start)):
        complaint = _compare(directory, spec)
        if not complaint and directory.resolve() in seen:
            complaint = "named twice, which would count its trials twice", "remove one of them"
        if complaint:
            yield Finding(("search", "warm_start", index), *complaint)
        else:
            seen.add(directory.resolve())


def _compare(directory: Path, spec: SweepSpec) -> tuple[str, str] | None:
    """Return why nothing can be learned from a sweep, and the fix; None if something can."""
    if directory.suffix == TABLE:
        try:
            read_results(directory, spec)
        except UsageError as error:
            reason, _, fix = str(error).partition("\n    fix: ")
            return reason, fix
        return None
    remove, file = "name another directory, or remove this one", directory / SPEC
    unusable = find_path_problem(str(directory)) or "there is no sweep in this directory"
    no_sweep = unusable, "name that of a sweep, such as runs/code"
    if not is_file(file):
        return no_sweep
    try:
        earlier = read_document(file, (), None, Problems(Place(str(file), 1)))
    except SpecError as error:
        return f"its {SPEC} cannot be read: {error}", remove
    if not is_file(directory / JOURNAL):
        return no_sweep
    if spec.task != "unknown" and earlier.get("task") != spec.restore_written(spec.task):
        return f"its task is {earlier.get('task')}, not {spec.task}", remove
    objectives, constraints = (get_map(earlier, key) for key in ("objectives", "constraints"))
    directions = {name: get_map(objectives, name).get("direction") for name in objectives}
    missing = [name for name in spec.objectives if name not in directions]
    if missing:
        reason = f"its objectives are {join_names(directions)}, without {join_names(missing)}"
        return reason, remove
    opposite = [name for name, o in spec.objectives.items() if directions[name] != o.direction]
    if opposite:
        return f"{join_names(opposite)} had the opposite direction there", remove
    unknown = join_names(n for n in spec.constraints if n not in {*objectives, *constraints})
    if unknown:
        return f"the constraint {unknown} was neither objective nor constraint there", remove
    return None
