"""Text of `--dry-run`: the resolved file, its space, its budget, and warnings."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gdpo_tune.core.metrics import HOUR
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.registry import SCHEDULERS
from gdpo_tune.core.settings import StartSettings
from gdpo_tune.core.text import align_columns, format_bytes, format_duration, join_names, show
from gdpo_tune.core.trials import EVALUATED_WORK
from gdpo_tune.spec.first_trials import count_wide, divide_budget, find_wide_step
from gdpo_tune.spec.gpu import choose_sampler, measure_trial
from gdpo_tune.spec.machine import count_local_slots, find_pace
from gdpo_tune.spec.model import SweepSpec, dump_public_yaml
from gdpo_tune.spec.space import Uniform, format_domain
from gdpo_tune.spec.spec_warnings import list_warnings

EVALUATIONS = ("held-out evaluation", "merges", "checkpoints")
"""Parts of a sweep that train nothing."""


def render_dry_run(spec: SweepSpec, size: PolicyShapes | None = None, policy: str = "") -> str:
    """Return the text that `--dry-run` prints, without a line break at its end.

    `size` is that of the policy, if it is known; `policy` says what is known about its files.
    """
    warnings, total = list_warnings(spec), spec.training.completions_per_step
    scheduler = spec.search.scheduler
    tracking, sandbox, budget = spec.tracking, spec.sandbox, spec.search.budget
    packages = f" with {join_names(sandbox.modules)}" if sandbox.modules else ""
    sizes = map(int, spec.space.list_reachable("group_size") or ())
    limits = {
        "trials": budget.trials,
        "completions": budget.completions,
        "GPU-hours": budget.gpu_hours,
        "hours": budget.hours,
        "trials in a row that do not move the hypervolume": spec.search.patience,
    }
    ends = ", ".join(f"after {limit:,g} {unit}" for unit, limit in limits.items() if limit)
    parts = [
        "# Resolved",
        dump_public_yaml(spec).rstrip(),
        "",
        f"# Identity: {spec.compute_identity()} (kept in {spec.location})",
        "",
        f"# Space: {len(spec.space.dimensions)} dimensions",
        *_align(_list_dimensions(spec)),
        "",
        "# Prompts a step",
        *_align([(f"group_size {size}", f"{total // size} prompts") for size in sizes]),
        "",
        f"# Time: {describe_time(spec)}",
        "# Completions, " + ("as planned" if spec.search.is_divided else "at most"),
        *_render_completions(spec),
        "",
        *([f"# Policy: {policy}"] if policy else []),
        *([f"# Start: {_describe_start(spec.start)}"] if spec.start else []),
        f"# A trial: {_describe_workers(spec)}",
        f"# Sampler: {choose_sampler(spec)}",
        f"# Scheduler: {scheduler.type} ({SCHEDULERS[scheduler.type].doc})",
        f"# Sweep ends early: {ends or 'never'}",
        f"# Sandbox: {sandbox.type}{packages}, up to {sandbox.workers} at a time: "
        f"{sandbox.cpu_seconds:g} s CPU, {sandbox.wall_seconds:g} s wall, {sandbox.memory_mb} MiB",
        f"# Rollouts: {_describe_rollouts(spec)}",
        f"# Tracking: {redact_passwords(tracking.uri)} ({tracking.origins.get('uri', 'default')}), "
        f"experiment {tracking.experiment} ({tracking.origins.get('experiment', 'name')}); "
        "without a call to MLflow or a test run",
        *([f"# GPU memory: {_describe_gpu_memory(spec, size)}"] if spec.resources.gpus else []),
        "",
        "# Warnings" + ("" if warnings else ": none"),
        *(f"  - {warning}" for warning in warnings),
    ]
    return "\n".join(parts)


def render_needs(needs: Iterable[object]) -> str:
    """Return what a sweep needs where it trains and this machine lacks, each problem once."""
    lines = [f"  - {need}" for need in dict.fromkeys(map(str, needs))]
    head = "# Needed where it trains, and missing on this machine"
    return "\n".join([head + ("" if lines else ": nothing"), *lines])


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in align_columns(rows)]


def _list_dimensions(spec: SweepSpec) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, domain in spec.space.searched_domains.items():
        kind = "choice"
        if isinstance(domain, Uniform):
            kind = ("integer" if domain.integer else "float") + (" (log)" if domain.log else "")
        when = f"when {show(domain.when)}" if domain.when else ""
        rows.append((name, kind, format_domain(domain), when))
    return rows


def describe_time(spec: SweepSpec) -> str:
    """Return how long the sweep may take, at the pace of the last one like it in its storage."""
    if (pace := find_pace(spec)) is None:
        return "unknown before a first sweep of this task and policy here"
    each, name = pace
    if spec.search.is_divided and not spec.search_completions:
        return f"until the budget is spent; {each:.3g} s a completion, as in {name}"
    shares = _list_completions(spec)
    evaluated = sum(count for name, count, _ in shares if name in EVALUATIONS)
    trained = sum(count for name, count, _ in shares if name not in EVALUATIONS)
    seconds = each * (trained + EVALUATED_WORK * evaluated)
    slots = count_local_slots(spec)
    text = f"at most {format_duration(seconds / (slots or 1))}"
    text += f", {slots} at a time" if slots else " of one trial at a time"
    if gpus := spec.resources.total_gpus:
        text += f", {seconds * gpus / HOUR:.3g} GPU-hours"
    return f"{text}, at the pace of {name}"


def _render_completions(spec: SweepSpec) -> list[str]:
    shares = _list_completions(spec)
    if not spec.search.is_divided:
        shares.append(("total", sum(count for _, count, _ in shares), ""))
    return _align([(name, f"{count:,}".rjust(12), formula) for name, count, formula in shares])


def _list_completions(spec: SweepSpec) -> list[tuple[str, int, str]]:
    """Return the completions of each part of a sweep and how they add up, in order of time.

    Every trial counts with its full budget, and so does every replicate, merge and checkpoint.
    Validations at rungs do not count.
    """
    if spec.search.is_divided:
        return _list_planned_completions(spec)
    settings, search = spec.training, spec.search
    replicates = search.replicates.max_trainings
    validations = len(range(settings.evaluate_every, settings.steps, settings.evaluate_every)) + 1
    validation, test = settings.validation_completions, settings.test_completions
    training = settings.steps * settings.completions_per_step
    trained = search.trials + replicates + 1
    evaluation = trained * (validations * validation + test)
    evaluation += (len(spec.baselines) - 1) * (validation + test)  # those that sample nothing else
    each = f"{validations} x {validation} + {test} a trained run"
    candidates: dict[str, int] = {}
    if spec.has_candidates:
        merges = spec.most_merges + (replicates if spec.most_merges else 0)
        candidates = {"merges": merges, "checkpoints": search.checkpoints.budget}
    one = validation + test
    return [
        ("search", search.trials * training, f"{search.trials} trials x {training}"),
        ("replicates", replicates * training, f"{replicates} x {training}"),
        ("published baseline", training, f"1 x {training}"),
        ("held-out evaluation", evaluation, each),
        *[(name, count * one, f"{count} x {one}") for name, count in candidates.items() if count],
    ]


def _list_planned_completions(spec: SweepSpec) -> list[tuple[str, int, str]]:
    """Return what a divided budget is expected to be spent on; hours are not in completions."""
    settings, search = spec.training, spec.search
    each, first, count = settings.completions_per_step, find_wide_step(spec), count_wide(spec) + 1
    wide, budget = count * first * each, spec.search_completions
    rungs = f"{count} trainings x {first} steps, with the published setting"
    shares = [("wide rung", wide, rungs)]
    long, end = divide_budget(spec, count)
    if budget:
        longest = f"about {long} of these, or new ones at corners, to about {end} steps"
        shares.append(("long trainings", max(0, budget - wide), longest))
    if replicates := search.replicates.max_trainings:
        most = replicates * settings.steps * each
        shares.append(("replicates", most, f"{replicates} x at most {settings.steps} steps"))
    validation, test = settings.validation_completions, settings.test_completions
    halvings = max(1, math.floor(math.log2(settings.steps / first)))
    rungs = count + long * halvings
    ends = long + replicates + len(spec.baselines) - 1
    evaluated = (rungs + ends) * validation + ends * test
    formula = f"{rungs} rungs x {validation}, {ends} ends x {validation + test}"
    shares.append(("held-out evaluation", evaluated, formula))
    if spec.has_candidates:
        tried, merges = spec.most_merges, min(spec.most_merges, search.merges.budget)
        if tried:
            total = f"{tried} x {validation}, at most {merges} x {test}"
            shares.append(("merges", tried * validation + merges * test, total))
        if checkpoints := search.checkpoints.budget:
            total = f"at most {checkpoints} x {validation + test}"
            shares.append(("checkpoints", checkpoints * (validation + test), total))
    return shares


def _describe_start(start: StartSettings) -> str:
    source = start.file or "the solutions that the data states of training prompts"
    return (
        f"{start.steps} steps of {start.completions_per_step} demonstrations, learning rate "
        f"{start.learning_rate:g}; {source}"
    )


def _describe_workers(spec: SweepSpec) -> str:
    resources, total = spec.resources, spec.training.completions_per_step
    each = resources.share_text
    if resources.workers == 1:
        return f"1 worker with {each}"
    share = total // resources.workers
    policy = "one policy among them" if resources.shards_policy else "a whole policy each"
    return (
        f"{resources.workers} workers, each with {each} and {share} completions of a step; {policy}"
    )


def _describe_rollouts(spec: SweepSpec) -> str:
    settings, share = spec.rollout, min(1.0, spec.resources.gpus)
    if settings.engine != "transformers" and settings.vllm_mode == "server":
        return f"{settings.engine} at {settings.vllm_server}, one trial at a time"
    if settings.engine == "transformers" or not share:
        return settings.engine
    asleep = ", and sleeps while a step is computed" if settings.sleep else ""
    part = f"{share * settings.vllm_memory_share:.3g} of a GPU"
    return f"{settings.engine}; vLLM gets {part}{asleep}"


def _describe_gpu_memory(spec: SweepSpec, size: PolicyShapes | None) -> str:
    if size is None:
        return "unknown until the policy is on this machine"
    memory = measure_trial(spec, size)
    states = memory.weights + memory.gradients + memory.reference
    text = f"about {format_bytes(memory.total)} to train"
    if memory.workers > 1:
        part = f"1/{memory.shards} of the policy" if memory.shards > 1 else "the whole policy"
        text += f" on each of {memory.workers} GPUs, with {part}"
    text += f": {format_bytes(states)} of weights, gradients, moments and reference, "
    text += f"{format_bytes(memory.activations)} of activations"
    if not memory.has_engine:
        return text
    engine = memory.engine
    text += f"; at least {format_bytes(engine.least)} for vLLM"
    kept = format_bytes(engine.workspace)
    return text + (f", of which {kept} stay while it sleeps" if spec.rollout.sleep else "")
