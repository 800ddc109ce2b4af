"""Checks of `task:`, `policy:`, `model:` and `rollout:`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from datetime import date
from math import isfinite
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.engines import ADAPTER_RANKS
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.files import expand_path, find_path_problem
from gdpo_tune.core.policy_size import find_position_limit
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.settings import (
    EVERY_LINEAR,
    STRICT,
    ModelSettings,
    RolloutSettings,
    Scoring,
    TrainingSettings,
)
from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.spec.problems import Problems, explain_unknown_name, join_names
from gdpo_tune.spec.sandbox_section import check_address

RESERVED_ARGUMENTS = (
    *("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"),
    *("conversation", "chat_template", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
)
"""Names that are no arguments of a chat template: of `apply_chat_template`, or what it gives."""


def check_task(name: object, weighted: Iterable[str], problems: Problems) -> TaskInfo | None:
    """Return a task with its rewards that are `weighted` in the space; refuse an unknown one."""
    parameters = [f"reward_weights.{reward}" for reward in weighted]
    if name is None:
        problems.refuse("task", "missing", "add task: code")
    elif isinstance(name, str) and is_task_file(name) and (unusable := find_path_problem(name)):
        problems.refuse("task", unusable, "write path/to/file.py:MyTask")
    elif isinstance(name, str) and (name in registry.TASKS or is_task_file(name)):
        try:
            return load_task_info(name, parameters)
        except TaskFileError as error:
            reason = str(error).removeprefix(f"{name}: ")
            problems.refuse("task", reason, "correct the file; docs/own_task.md has an example")
    elif isinstance(name, str) and name in registry.REMOVED_TASKS:
        problems.refuse("task", "no longer a task of its own", registry.REMOVED_TASKS[name])
    else:
        problems.refuse("task", *explain_unknown_name("task", name, registry.TASKS))
    return None


def check_policy(policy: str, name: str, task: TaskInfo, problems: Problems) -> None:
    """Refuse a policy that ships for another task, and a directory that no disk can hold."""
    unusable = find_path_problem(policy)
    if unusable:
        fix = f"write {task.embedded}, a directory, or a Hub id such as org/name"
        problems.refuse("policy", unusable, fix)
    if policy not in registry.POLICIES or policy == task.embedded or is_task_file(name):
        return
    others = [other for other in registry.TASKS if load_task_info(other).embedded == policy]
    reason = f"made for {join_names(others)} and cannot answer the prompts of {name}"
    problems.refuse("policy", reason, f"write policy: {task.embedded}, or remove the key")


def check_scoring(scoring: Scoring, name: str, task: TaskInfo, problems: Problems) -> None:
    """Refuse the scoring of the authors' code for a task that does not offer it."""
    if scoring == STRICT or task.offers_released:
        return
    offering = [each for each in registry.TASKS if load_task_info(each).offers_released]
    reason = f"no code of the authors scores the task {name}"
    fix = f"remove the key, or write as task one of {join_names(offering)}"
    problems.refuse("scoring", reason, fix, "task")


def check_positions(training: TrainingSettings, policy: str, problems: Problems) -> None:
    """Refuse completions that are longer than the policy can write, if its files show that."""
    longest = training.max_completion_length
    directory = registry.POLICIES.get(policy) or expand_path(policy)
    try:
        config: Any = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # whether there is such a policy is checked elsewhere
    limit = find_position_limit(config) if isinstance(config, dict) else None
    if limit is not None and longest >= limit:
        reason = f"{policy} has {limit} positions, for a prompt and its completion together"
        fix = f"write a number well below {limit}, or give another policy"
        key = "training.max_completion_length"
        problems.refuse(key, reason, fix, "policy", value=longest)


def check_prompts(
    training: TrainingSettings, source: str, name: str, task: TaskInfo, problems: Problems
) -> None:
    """Refuse more prompts than a task can write, where there is no data set as `source`."""
    for split, most in ({} if source else task.prompts).items():
        count = getattr(training, f"{split}_prompts")
        if count > most:
            reason = f"the {name} task can write {most} distinct {split} prompts"
            fix = f"write at most {most}, or give a data set as data.source"
            problems.refuse(f"training.{split}_prompts", reason, fix, value=count)


def check_model(settings: ModelSettings, policy: str, problems: Problems) -> None:
    """Refuse keys that do not fit together or to the policy."""
    if not settings.lora_rank:
        reason = "without lora_rank no module gets an adapter"
        fix, keys = "add lora_rank: 16, or remove the key", "lora_alpha lora_targets"
        problems.refuse_idle("model", keys, settings, reason, fix, "model.lora_rank")
    if settings.lora_rank and not settings.lora_targets:
        fix = f"write [{EVERY_LINEAR}], or names of modules such as [q_proj, v_proj]"
        problems.refuse("model.lora_targets", "empty, so nothing would be trained", fix)
    elif EVERY_LINEAR in settings.lora_targets and len(settings.lora_targets) > 1:
        reason = f"{EVERY_LINEAR} already stands for every name"
        problems.refuse("model.lora_targets", reason, f"write [{EVERY_LINEAR}], or only names")
    for name, value in settings.chat_template_kwargs.items():
        if not isinstance(value, str | int) and not (isinstance(value, float) and isfinite(value)):
            fix = "write a word, a number, true or false"
            problems.refuse(("model", "chat_template_kwargs", name), "no such value", fix)
        if not name.isidentifier() or name in RESERVED_ARGUMENTS or name.endswith("_token"):
            reason = "a chat template gets this from Transformers, or cannot read such a name"
            fix = "write the name of a variable of the template, such as enable_thinking"
            problems.refuse(("model", "chat_template_kwargs", name), reason, fix)
    if settings.template_date:
        try:
            date.fromisoformat(settings.template_date)
        except ValueError:
            problems.refuse("model.template_date", "no date", "write one such as '2026-01-31'")
    if settings.revision and policy in registry.POLICIES:
        reason = f"policy {policy} ships with the package and has no revisions"
        fix = "remove the key, or give a Hub id as the policy"
        problems.refuse("model.revision", reason, fix, "policy", "task")


def check_packages(settings: ModelSettings, problems: Problems) -> None:
    """Refuse adapters where their package is not installed."""
    if settings.lora_rank and importlib.util.find_spec("peft") is None:
        fix = "pip install 'gdpo-tune[peft]', or remove the key to train every weight"
        problems.refuse("model.lora_rank", "LoRA needs the package peft", fix)


def check_rollout(settings: RolloutSettings, model: ModelSettings, problems: Problems) -> None:
    """Refuse keys without effect, adapters for a server, and an unusable address of a server."""
    inputs = ("rollout.engine", "rollout.vllm_mode")

    def refuse_idle(keys: str, reason: str) -> None:
        problems.refuse_idle("rollout", keys, settings, reason, "remove the key", *inputs)

    if settings.engine == "transformers":
        keys = "vllm_mode vllm_server vllm_memory_share importance_sampling importance_sampling_cap"
        refuse_idle(f"{keys} reuse_engine sleep", "engine: transformers is not vLLM")
    elif settings.vllm_mode == "colocate":
        refuse_idle("vllm_server", "only vllm_mode: server uses a server")
        if settings.engine == "vllm" and model.lora_rank > ADAPTER_RANKS[-1]:
            reason = f"vLLM samples with adapters of rank {ADAPTER_RANKS[-1]} at most"
            fix = f"write lora_rank: {ADAPTER_RANKS[-1]}, or rollout.engine: transformers"
            problems.refuse("model.lora_rank", reason, fix, *inputs)
    else:
        reason = "a server has a GPU of its own; its command line sets the share"
        refuse_idle("vllm_memory_share", reason)
        refuse_idle("reuse_engine sleep", "a server runs on its own")
        if settings.engine == "auto":
            reason = "engine: auto may choose another engine, which uses no server"
            fix = "write engine: vllm beside it"
            problems.refuse("rollout.vllm_mode", reason, fix, *inputs)
        reason = "vllm_mode: server uses a server that is already running"
        check_address(settings.vllm_server, "rollout.vllm_server", reason, problems)
        if model.lora_rank:
            reason = (
                "a server gets whole weights, and bfloat16 would round small updates of an adapter "
                "away"
            )
            fix = "write vllm_mode: colocate, or model.lora_rank: 0"
            problems.refuse("rollout.vllm_mode", reason, fix, "model.lora_rank")
    if settings.importance_sampling == "off" and settings.engine != "transformers":
        problems.refuse_idle(
            "rollout",
            "importance_sampling_cap",
            settings,
            "importance_sampling: off has no cap",
            "remove the key",
            "rollout.importance_sampling",
        )
