"""Request for one training: from a file with fixed values, or from a candidate of a sweep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from gdpo_tune.core.content import describe_changes, list_changes, measure_content
from gdpo_tune.core.errors import SpecError, SpecProblem, UsageError
from gdpo_tune.core.files import expand_path, is_file
from gdpo_tune.core.text import show
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import ADAPTER_CONFIG, MARKER
from gdpo_tune.core.trials import (
    CHECKPOINT_PREFIX,
    Params,
    Part,
    TrialRecord,
    find_main_part,
    find_start,
    title_candidate,
)
from gdpo_tune.results.open_sweep import Sweep, fetch_policy, split_source
from gdpo_tune.results.picks import load_and_pick
from gdpo_tune.results.transfer import (
    OPTION,
    STEPS,
    Transfer,
    TransferPlan,
    plan_transfer,
    refuse_parameters,
)
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.document import ABSENT, Place, locate, read_overrides
from gdpo_tune.spec.space import format_domain


class Parent(NamedTuple):
    """A trained policy and its weight in a merge."""

    source: str
    """Sweep and candidate, such as `runs/code:7@40`."""
    weight: float
    policy: str
    """Path or URL of the policy; empty if its checkpoint was not kept."""
    is_adapter: bool = False
    """True if there is an adapter alone."""


def list_parents(sweep: Sweep, parts: Sequence[Part], location: str) -> list[Parent]:
    """List the parents of a merge in the sweep at a location."""
    parents: list[Parent] = []
    for part in parts:
        training, name = sweep.records[part.trial], f"{CHECKPOINT_PREFIX}{part.step}"
        path = training.directory and training.directory.absolute() / name
        policy = str(path) if path and path.is_dir() else ""
        # On an object store: of that, this machine has the marker, which lists the files.
        marker = path / MARKER if path else Path()
        listed = json.loads(marker.read_bytes()).get("files", {}) if is_file(marker) else {}
        is_adapter = ADAPTER_CONFIG in listed or bool(path and is_file(path / ADAPTER_CONFIG))
        policy = f"{training.address}/{name}" if training.address else policy
        is_end = part.step == (training.ends_at or sweep.spec.training.steps)
        pick = f"{part.trial}" if is_end else f"{part.trial}@{part.step}"
        parents.append(Parent(f"{location}:{pick}", part.weight, policy, is_adapter))
    return parents


def explain_missing_policy(sweep: Sweep, record: TrialRecord, source: str, why: str = "") -> str:
    """Return why nothing can be done with the policy of a candidate, and what makes it again.

    `source` names the sweep. Default of `why`: the policy was not kept.
    """
    parts = record.parts if len(record.parts) > 1 else ()
    parents = list_parents(sweep, parts, source)
    missing = [parent.source for parent in parents if not parent.policy]
    if parents and not missing:
        weights = ",".join(f"{p.source.rpartition(':')[2]}={p.weight!r}" for p in parents)
        fix = f"python -m gdpo_tune.merge {quote(source)} --weights {weights}"
    else:
        trained = [quote(each) for each in missing or [f"{source}:{record.name}"]]
        fix = "\n         ".join(f"python -m gdpo_tune.train --from {each}" for each in trained)
    why = why or f"its policy was not kept (keep: {sweep.spec.keep})"
    return (
        f"{source}: {title_candidate(record.name)}: {why}\n"
        f"    fix: choose another candidate, or make it again:\n         {fix}"
    )


@dataclass(frozen=True)
class TrainingRequest:
    """Request for one training."""

    spec: SweepSpec
    params: Params
    seed: int
    label: str
    """Part of a directory's name, such as `knee`."""
    note: str
    """Source of the parameters, for a person."""
    trial_lines: tuple[str, ...] = ()
    """Lines about the picked candidate, for a person."""
    name: str = ""
    """Name of the picked candidate, and `sweep`, the location of its sweep; empty for a file."""
    sweep: str = ""
    parents: tuple[Parent, ...] = ()
    """Parents of a merge that is repeated; its `params` are empty."""
    transfer: Transfer | None = None
    """Origin of its values, if policy, data or lengths are others than in the sweep."""
    start: Path | None = None
    """Merge, or policy after the supervised start of the sweep, at which it begins; None: its own
    start."""
    begins_merged: bool = False
    """True if `start` is a merge."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines for a terminal: the picked candidate, and what carries over from it."""
        return (*self.trial_lines, *(self.transfer.lines if self.transfer else ()))


def build_request_from_file(path: Path | str, overrides: Sequence[str]) -> TrainingRequest:
    """Build the request that a file describes; a SpecError lists every problem of it."""
    spec = load_spec(path, overrides)
    return TrainingRequest(spec, _fix_params(spec, path), spec.search.seed, "train", str(path))


def _fix_params(spec: SweepSpec, path: Path | str) -> Params:
    problems = list[SpecProblem]()
    for name in spec.space.dimensions:
        domain = spec.space.domains[name]
        middle = domain.find_middle()
        example = f"{middle:.3g}" if isinstance(middle, float) else show(middle)
        reason = "several values are possible, and a training requires one"
        fix = f"--set space.{name}={example}, or search it with gdpo_tune.sweep"
        problems.append(SpecProblem(str(path), f"space.{name}", format_domain(domain), reason, fix))
    if problems:
        raise SpecError(tuple(problems))
    return spec.space.complete({})


def build_request_from_sweep(
    source: str,
    overrides: Sequence[str],
    pick: str | None = None,
    option: str = "--from",
    *,
    to_run: bool = True,
    merges: bool = False,
    recipe: str = "",
) -> TrainingRequest:
    """Build a request that repeats a candidate of a sweep, for example a trial at another budget.

    For a checkpoint it repeats the training up to its step. For a merge it begins at the weights of
    that, with the parameters of its largest part; with `merges` it has the parents instead.

    `overrides` change the sweep's file; under another policy, other data or other lengths also the
    parameters that do not carry over, as does `recipe`, the value of `--recipe`. `to_run` is True
    if it is trained on this machine. Other arguments are those of `load_and_pick`. A UsageError
    says why there is no such candidate, or why it cannot be repeated so.
    """
    sweep, picked = load_and_pick(source, pick, option)
    record, location = picked.record, sweep.spec.address or split_source(source, pick)[0]
    note = f"{title_candidate(picked.name)} of {location}"
    request = TrainingRequest(
        sweep.spec, {}, record.seed, picked.label, note, picked.lines, picked.name, location
    )
    is_merge, is_checkpoint = len(record.parts) > 1, len(record.parts) == 1
    if is_merge and merges:
        if recipe:
            reason = f"a merge is no training, so {OPTION} has no effect"
            raise UsageError(f"{option} {source}: {reason}\n    fix: leave it out")
        refuse_parameters(read_overrides(overrides), option)
        spec = sweep.reload(overrides, to_run=to_run)
        parents = list_parents(sweep, record.parts, location)
        start = fetch_policy(sweep.spec, find_start(sweep.records))
        return dataclasses.replace(request, spec=spec, parents=tuple(parents), start=start)
    main = find_main_part(record.parts) if record.parts else Part(record.number, 0, 1.0)
    training, whole = sweep.records[main.trial], sweep.spec.training.steps
    step = main.step if is_checkpoint else training.ends_at or whole
    plan = plan_transfer(
        sweep.spec, training.params, overrides, recipe, option=option, source=source
    )
    spec = sweep.reload(_list_changes(sweep, plan, overrides, step), to_run=to_run)
    lines = [*picked.lines, *(list_changed_content(sweep, spec, main.trial) if to_run else ())]
    decisive = ("task", "policy", "model", "data", "start")
    is_same = all(getattr(spec, name) == getattr(sweep.spec, name) for name in decisive)
    if is_checkpoint and spec.training.steps == step:
        if plan is None or not plan.has(STEPS):
            _refuse_another_course(spec, step, sweep.spec, f"{option} {source}")
            note += f", {step} of {whole} steps"
    elif record.parts:
        title = title_candidate(training.name)
        note = (
            f"{title} of {location}" + f", from the weights of {picked.name}" * is_same * is_merge
        )
        lines.append(
            f"{title_candidate(picked.name)} is a merge: this training begins at "
            f"{'its weights' if is_same else spec.policy}, with the parameters of its largest "
            f"part, {title}"
            if is_merge
            else f"{picked.name} has {step} steps: with {spec.training.steps} this is {title}"
        )
    params, transfer = training.params, None
    if plan is not None:
        params = _fix_params(spec, source)
        transfer = plan.describe(spec, params)
        note += f", with {transfer.title}"
    request = dataclasses.replace(request, spec=spec, params=params, seed=training.seed, note=note)
    request = dataclasses.replace(request, trial_lines=tuple(lines), transfer=transfer)
    if not is_same:
        return request
    start = _find_merged_policy(sweep, record, location) if is_merge else find_start(sweep.records)
    start = fetch_policy(sweep.spec, start)
    return dataclasses.replace(request, start=start, begins_merged=is_merge)


def _find_merged_policy(sweep: Sweep, record: TrialRecord, location: str) -> Path:
    """Return the directory of a merge's weights; a UsageError says that none can be trained on."""
    if record.checkpoint is None:
        raise UsageError(explain_missing_policy(sweep, record, location))
    if sweep.spec.model.lora_rank:
        why = "its weights are those of adapters, and a training begins at whole weights"
        raise UsageError(explain_missing_policy(sweep, record, location, why))
    return record.checkpoint


def _list_changes(
    sweep: Sweep, plan: TransferPlan | None, overrides: Sequence[str], step: int
) -> list[str]:
    if plan is not None and plan.missing:
        missing = UsageError(plan.missing)
        try:
            sweep.reload(plan.overrides, to_run=False)
        except SpecError as error:  # other problems of the overrides come first
            problems = tuple(each for each in error.problems if each.key not in plan.examples)
            raise (SpecError(problems) if problems else missing) from None
        raise missing
    changes, whole = list(overrides) if plan is None else plan.overrides, sweep.spec.training
    asked = locate(read_overrides(overrides), Place(""), (STEPS,))[1]
    if step == whole.steps or asked not in (ABSENT, step) or (plan is not None and plan.recipe):
        return changes
    share = min(whole.warmup_steps / step, 0.99)
    return [f"training.steps={step}", f"training.warmup_share={share}", *changes]


def list_changed_content(sweep: Sweep, spec: SweepSpec, number: int) -> list[str]:
    """Return a warning if what decided results, as trial `number` was recorded, has changed."""
    recorded = next((c for c in reversed(sweep.contents) if number >= c["first"]), None)
    if recorded is None:
        return []
    facts = measure_content(spec, spec.start.file if spec.start else "")
    others = [k for k in ("policy", "data") if getattr(spec, k) != getattr(sweep.spec, k)]
    changes = list_changes(recorded["digests"], facts, without=others)
    described = describe_changes(changes, sweep.spec.location, recorded["time"])
    return [f"warning: {described}"] if changes else []


def _refuse_another_course(spec: SweepSpec, step: int, sweep: SweepSpec, source: str) -> None:
    training, whole = spec.training, sweep.training.steps
    if step == whole:
        return
    warms_up = sweep.training.warmup_steps >= step
    if training.lr_schedule != "constant" or warms_up:
        rule = "warmup_share" if warms_up else "lr_schedule"
        raise UsageError(
            f"{source}: training.{rule} = {show(getattr(sweep.training, rule))}: the learning rate "
            f"of the first {step} steps depends on all {whole}, so {step} steps alone would be "
            "another training\n    fix: pick the trial itself, whose training passes this step"
        )


def override_policy(policy: str) -> list[str]:
    """Return the overrides that make a file's policy another one; of an adapter none."""
    if is_file(expand_path(policy) / ADAPTER_CONFIG):
        return []
    return [f"policy={json.dumps(policy, ensure_ascii=False)}", 'model.revision=""']


def build_evaluation_config(
    spec: SweepSpec, policy: str, seed: int, directory: Path
) -> TrialConfig:
    """Build the configuration that evaluates a policy, of which `override_policy` told the file.

    An adapter is loaded with its base, which Transformers alone can.
    """
    config = spec.build_trial_config(spec.space.complete_baseline({}), seed, directory)
    if override_policy(policy):
        return config
    rollout = config.rollout.replace(engine="transformers")
    model = config.model.replace(lora_rank=0, revision="")
    path = str(expand_path(policy))
    return dataclasses.replace(config, policy=path, rollout=rollout, model=model)


def build_trial_config(
    request: TrainingRequest, *, seed: int | None, out: Path | None, threads: int | None
) -> TrialConfig:
    """Build the configuration of a training.

    None stands for the seed of the request, a directory next to the sweeps, and as many CPU threads
    of torch as a sweep's trial has.
    """
    spec = request.spec
    name = f"{spec.name}-{request.label}-{spec.training.steps}"
    name += "" if seed is None else f"-seed{seed}"
    directory = (out or spec.output_directory / name).expanduser().absolute()
    config = spec.build_trial_config(
        request.params, request.seed if seed is None else seed, directory
    )
    threads = config.threads if threads is None else threads
    return dataclasses.replace(config, threads=threads, start=request.start, writes_whole=True)
