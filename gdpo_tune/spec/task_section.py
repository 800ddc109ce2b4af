"""Checks of `task:`, `policy:`, `data:`, `model:`, `rollout:` and `sandbox:`."""

from __future__ import annotations

import importlib.util
import json
import keyword
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.service_url import split_service_url
from gdpo_tune.core.settings import (
    DATA_FILES,
    EVERY_LINEAR,
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    TrainingSettings,
)
from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.spec.problems import Problems, explain_unknown_name, join

EXAMPLE = "http://HOST:PORT"
UNUSED_BY_SERVICE = {
    "modules": "an external service has the packages that were installed there",
    "cpu_seconds": "an external service gets wall_seconds alone",
}
"""Setting that a sandbox of type external does not use -> reason."""
SUFFIXES = " or ".join(DATA_FILES)


def check_task(name: object, weighted: Iterable[str], problems: Problems) -> TaskInfo | None:
    """Return a task with its rewards that are `weighted` in the space; refuse an unknown one."""
    parameters = [f"reward_weights.{reward}" for reward in weighted]
    if name is None:
        problems.refuse("task", "missing", "add task: code")
    elif isinstance(name, str) and (name in registry.TASKS or is_task_file(name)):
        try:
            return load_task_info(name, parameters)
        except TaskFileError as error:
            reason = str(error).removeprefix(f"{name}: ")
            problems.refuse("task", reason, "mend the file; docs/own_task.md has an example")
    elif isinstance(name, str) and name in registry.REMOVED_TASKS:
        problems.refuse("task", "no longer a task of its own", registry.REMOVED_TASKS[name])
    else:
        problems.refuse("task", *explain_unknown_name("task", name, registry.TASKS))
    return None


def check_policy(policy: str, name: str, task: TaskInfo, problems: Problems) -> None:
    """Refuse a policy that ships for another task."""
    if policy not in registry.POLICIES or policy == task.embedded or is_task_file(name):
        return
    others = [other for other in registry.TASKS if load_task_info(other).embedded == policy]
    reason = f"made for {join(others)} and cannot answer the prompts of {name}"
    problems.refuse("policy", reason, f"write policy: {task.embedded}, or remove the key")


def check_positions(training: TrainingSettings, policy: str, problems: Problems) -> None:
    """Refuse completions that are longer than the policy can write, as far as its files tell."""
    longest = training.max_completion_length
    directory = Path(registry.POLICIES.get(policy, policy)).expanduser()
    try:
        config: Any = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # whether there is such a policy is checked elsewhere
    room = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(room, int) and longest >= room:
        reason = f"{policy} has {room} positions, for a prompt and its completion together"
        fix = f"write a number well below {room}, or give another policy"
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
    elif importlib.util.find_spec("peft") is None:
        fix = "pip install 'gdpo-tune[peft]', or remove the key to train every weight"
        problems.refuse("model.lora_rank", "LoRA needs the package peft", fix)
    if settings.lora_rank and not settings.lora_targets:
        fix = f"write [{EVERY_LINEAR}], or names of modules such as [q_proj, v_proj]"
        problems.refuse("model.lora_targets", "empty, so nothing would be trained", fix)
    elif EVERY_LINEAR in settings.lora_targets and len(settings.lora_targets) > 1:
        reason = f"{EVERY_LINEAR} already stands for every name"
        problems.refuse("model.lora_targets", reason, f"write [{EVERY_LINEAR}], or names alone")
    if settings.revision and policy in registry.POLICIES:
        reason = f"policy {policy} ships with the package and has no revisions"
        fix = "remove the key, or give a Hub id as the policy"
        problems.refuse("model.revision", reason, fix, "policy", "task")


def check_rollout(settings: RolloutSettings, problems: Problems) -> None:
    """Refuse keys without effect, and an unusable address of a server."""
    inputs = ("rollout.engine", "rollout.vllm_mode")

    def refuse_idle(keys: str, reason: str) -> None:
        problems.refuse_idle("rollout", keys, settings, reason, "remove the key", *inputs)

    if settings.engine == "transformers":
        keys = "vllm_mode vllm_server vllm_memory_share"
        refuse_idle(keys, "engine: transformers is not vLLM")
    elif settings.vllm_mode == "colocate":
        refuse_idle("vllm_server", "only vllm_mode: server asks a server")
    else:
        reason = "a server has a GPU of its own, which its command line divides"
        refuse_idle("vllm_memory_share", reason)
        if settings.engine == "auto":
            reason = "engine: auto may take another engine, which would ask no server"
            fix = "write engine: vllm beside it"
            problems.refuse("rollout.vllm_mode", reason, fix, *inputs)
        reason = "vllm_mode: server asks a server that is already running"
        check_address(settings.vllm_server, "rollout.vllm_server", reason, problems)


def check_data(settings: DataSettings, task: str, problems: Problems) -> None:
    """Refuse keys that do not fit together or to the task, and missing local data."""
    if not settings.source:
        reason = "has no effect: without data.source the task writes its own prompts"
        fix = "add data.source, or remove the key"
        problems.refuse_idle("data", "layout config split", settings, reason, fix, "data.source")
    elif is_task_file(task):
        reason = "has no effect: a task in a file writes its own prompts"
        fix = "remove the key, and read the data in the task's rows()"
        problems.refuse("data.source", reason, fix, "task")
    else:
        _check_layout(settings.layout, task, problems)
        if settings.is_local:
            _check_files(settings, problems)


def _check_layout(layout: str, task: str, problems: Problems) -> None:
    key = "data.layout"
    layouts = {name: registry.describe_layout(name) for name in registry.LAYOUTS}
    unknown_task = problems.has_problem("task")
    fitting = [name for name, info in layouts.items() if unknown_task or task in info.tasks]
    if not layout:
        reason = "missing: what the columns of the data mean is not guessed"
        problems.refuse(key, reason, f"add layout: one of {join(fitting)}")
    elif layout not in layouts:
        problems.refuse(key, *explain_unknown_name("layout", layout, layouts))
    elif layout not in fitting:
        reason = f"made for the task {' or '.join(layouts[layout].tasks)}, not for {task}"
        fix = f"write layout: one of {join(fitting)}, or another task"
        problems.refuse(key, reason, fix)


def _check_files(settings: DataSettings, problems: Problems) -> None:
    source, key = Path(settings.source).expanduser(), "data.source"
    if source.is_dir():
        if not any(file.suffix in DATA_FILES for file in source.iterdir()):
            reason = f"a directory without a {SUFFIXES} file"
            problems.refuse(key, reason, "name another directory")
    elif not source.exists():
        reason = "no such file or directory, and not the id of a data set on the Hub"
        fix = f"write the path of a {SUFFIXES} file, or an id such as openai/gsm8k"
        problems.refuse(key, reason, fix)
    elif source.suffix not in DATA_FILES:
        problems.refuse(key, f"not a {SUFFIXES} file", "convert it, and name the new file")
    reason = "has no effect: local data has no configurations and no splits"
    fix = "remove the key, or name the file that you mean as data.source"
    problems.refuse_idle("data", "config split", settings, reason, fix, key)


def check_sandbox(settings: SandboxSettings, problems: Problems) -> None:
    """Refuse keys that do not fit together, and modules that are not installed."""
    kind = settings.type
    if kind == "external":
        for name, reason in UNUSED_BY_SERVICE.items():
            if problems.has_key(f"sandbox.{name}"):
                fix = "remove the key, or write type: local"
                problems.refuse(f"sandbox.{name}", reason, fix, "sandbox.type")
        reason = "a sandbox of type external is a service"
        check_address(settings.url, "sandbox.url", reason, problems)
        return
    if settings.url:
        reason = f"a sandbox of type {kind} has no address"
        fix = "write type: external, or remove the key"
        problems.refuse("sandbox.url", reason, fix, "sandbox.type")
    for index, module in enumerate(settings.modules):
        parts, path = module.split("."), ("sandbox", "modules", index)
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
            fix = "write names as after import, such as numpy"
            problems.refuse(path, "not a name that can be imported", fix, "sandbox.type")
        elif not _is_installed(parts[0]):
            fix = "install the package that has it, or remove the name"
            problems.refuse(path, f"no module {parts[0]} is installed", fix, "sandbox.type")
    cpu, wall = settings.cpu_seconds, settings.wall_seconds
    if wall < cpu:
        reason = f"below cpu_seconds = {cpu:g}, which could never be used up"
        fix = f"write at least {cpu:g}, better {4 * cpu:g}: a busy machine is slower"
        inputs = ("sandbox.cpu_seconds", "sandbox.type")
        problems.refuse("sandbox.wall_seconds", reason, fix, *inputs, value=wall)


def check_address(url: str, key: str, reason: str, problems: Problems) -> None:
    """Refuse a missing or malformed address of a web service."""
    if not url:
        problems.refuse(key, f"missing: {reason}", f"add {key.rpartition('.')[2]}: {EXAMPLE}")
        return
    try:
        split_service_url(url)
    except ValueError as error:
        fix = f"write {EXAMPLE}, where the service listens"
        problems.refuse(key, f"not the address of a web service: {error}", fix)


def _is_installed(top: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # It is loaded already, and has no file.
        return False
