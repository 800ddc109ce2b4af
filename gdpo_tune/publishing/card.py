"""Model card and card of the numbers, from the ledger alone; and the prompt that a card shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from gdpo_tune import __version__
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core import task_files
from gdpo_tune.core.files import HUB_ID
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.text import (
    NO_VALUE,
    format_hypervolume,
    format_interval,
    format_number,
    format_parameter,
    show,
)
from gdpo_tune.policies.load_policy import find_local_directory, find_required_version
from gdpo_tune.policies.prompt_choice import choose_prompt_format, load_local_tokenizer
from gdpo_tune.policies.prompt_format import PROMPTS_FILE
from gdpo_tune.publishing.publication import Publication
from gdpo_tune.publishing.record import PolicyFiles
from gdpo_tune.results.front_table import BASELINES, build_front_row, list_rows
from gdpo_tune.results.picks import PickedCandidate
from gdpo_tune.results.public_record import list_public_versions
from gdpo_tune.results.wording import capitalize_warning, list_result_warnings
from gdpo_tune.spec import SweepSpec

TAGS = ("gdpo_tune", "reinforcement-learning", "pareto-front", "trl")


def build_model_card(
    publication: Publication, candidate: PickedCandidate, policy: PolicyFiles, others: Sequence[str]
) -> str:
    """Return the model card of a candidate; `others` are the published members of the front."""
    repository, spec = publication.name_repository(candidate.name), publication.spec
    member = candidate.configuration
    assert member is not None, "only what was measured is published"
    below = publication.sweep.spec.policy if policy.is_adapter else ""
    base = find_local_directory(below, spec.model.revision) if below else None
    baselines = [column for column in publication.sweep.front.baselines if column is not member]
    row = build_front_row(publication.sweep.front, member)
    own_warnings = [f"This policy is {text}." for text in row.shortfalls]
    if not member.is_on_front:
        own_warnings.append("This policy is not on the front of its sweep.")
    if member.is_provisional and not member.is_initial:
        own_warnings.append("This policy has one seed, so part of its lead may be luck.")
    if not publication.sweep.ending:
        own_warnings.append("The sweep had not finished, so its front may change.")
    return _render(
        "model_card.md.jinja",
        publication,
        candidate=candidate,
        repository=repository,
        metadata=_build_metadata(publication, candidate, member),
        own_warnings=own_warnings,
        columns=["this policy", *(BASELINES[column.role] for column in baselines)],
        metrics=build_metric_rows(publication, [member, *baselines]),
        training=describe_training(publication, candidate),
        policy=policy,
        required_version=find_required_version(policy.directory, base),
        example=build_example(publication.sweep.spec, policy.directory),
        lora_rank=spec.model.lora_rank,
        members=build_member_rows(publication, others, candidate.name),
    )


def build_record_card(
    publication: Publication, members: Sequence[PickedCandidate], missing: Sequence[str]
) -> str:
    """Return the card of the data set that has the numbers of a front."""
    from huggingface_hub import DatasetCardData

    metadata = DatasetCardData(
        pretty_name=f"{publication.target}: numbers of a sweep",
        tags=["gdpo_tune", "pareto-front"],
        viewer=False,  # it is not a table
    )
    return _render(
        "record_card.md.jinja",
        publication,
        metadata=metadata.to_yaml(),
        repository=publication.record,
        members=build_member_rows(publication, [member.name for member in members]),
        missing=len(missing),
    )


def _render(
    template: str, publication: Publication, own_warnings: Sequence[str] = (), **values: Any
) -> str:
    spec, front = publication.spec, publication.sweep.front
    findings = list_result_warnings(publication.sweep.spec, front)
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    packages = {"gdpo-tune": __version__}
    if sessions := publication.sweep.sessions:
        packages |= list_public_versions(sessions[-1])
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gdpo_tune.publishing"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    return environment.get_template(template).render(
        spec=spec,
        front=front,
        publication=publication,
        record=publication.record,
        policy_name=spec.policy,
        is_embedded=spec.policy in POLICIES,
        data=describe_prompts(spec),
        objectives=[
            f"`{name}` ({goal.direction}d): {publication.metrics[name].doc}"
            for name, goal in spec.objectives.items()
        ],
        hypervolume=format_hypervolume(front.hypervolume, front.hypervolume_interval, points),
        versions=", ".join(f"{name} {version}" for name, version in packages.items()),
        version=__version__,
        trials=len(front.records),
        warnings=[*own_warnings, *(capitalize_warning(warning.finding) for warning in findings)],
        **values,
    )


def _build_metadata(
    publication: Publication, candidate: PickedCandidate, member: Configuration
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    spec, is_merge = publication.spec, candidate.record.role == "merge"
    base: dict[str, Any] = {}
    if spec.policy not in POLICIES and HUB_ID.fullmatch(spec.policy):
        base = {"base_model": spec.policy, "base_model_relation": "finetune"}
    source, mode = spec.data.source, member.params.get("normalization")
    licence = publication.licence
    keys: dict[str, Any] = {"license": licence.identifier, "license_name": licence.name}
    keys["license_link"] = licence.link
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source if source and not spec.data.is_local else spec.task,
            dataset_name=f"{spec.task}: test prompts",
            metric_type=name,
            metric_name=f"{name} ({publication.metrics[name].doc})",
            metric_value=member.mean[name].mean,
            metric_args={"standard_error": member.mean[name].se},
        )
        for name in spec.objectives
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *(["merge"] if is_merge else []), *([str(mode)] if mode else [])],
        datasets=[source] if source and not spec.data.is_local else None,
        model_name=publication.name_repository(candidate.name).id.partition("/")[2],
        eval_results=results,
        **base,
        **{key: value for key, value in keys.items() if value},
    ).to_yaml()


def describe_prompts(spec: SweepSpec) -> str:
    """Return where the prompts of a sweep come from."""
    training, data = spec.training, spec.data
    counts = (
        f"{training.train_prompts:,} for training, {training.validation_prompts:,} for the search, "
        f"{training.test_prompts:,} for the values below"
    )
    if not data.source:
        return f"prompts that the task `{spec.task}` writes itself: {counts}"
    if data.is_local:
        return f"the author's own file `{data.source}`, which is not published: {counts}"
    place = f"[{data.source}](https://huggingface.co/datasets/{data.source})"
    own = {"validation": data.validation, "test": data.test}
    splits = [data.split, *(s.split or name for name, s in own.items() if s.split or s.source)]
    return f"{place} (split {', '.join(splits)}): {counts}"


def build_metric_rows(
    publication: Publication, columns: Sequence[Configuration]
) -> list[tuple[str, list[str]]]:
    """Return each metric of the first column with its value of every column, objectives first."""
    rows = [(name, list[str]()) for name in {**publication.spec.objectives, **columns[0].mean}]
    for name, cells in rows:
        metric = publication.metrics[name]
        for value in (column.mean.get(name) for column in columns):
            if value is None:
                cells.append(NO_VALUE)
                continue
            # An interval at 95 %, within the range of the metric.
            interval = format_interval(max(value.low, metric.low), min(value.high, metric.high))
            cells.append(f"{format_number(value.mean)} ({interval})")
    return rows


def build_member_rows(
    publication: Publication, published: Sequence[str], own: str = ""
) -> tuple[list[list[str]], list[list[str]]]:
    """Return a row for each member of the front and each baseline: those that stand out, and all.

    `own` is the name of the policy of the card, in bold.
    """
    first: list[list[str]] = []
    rows: list[list[str]] = []
    for row in list_rows(publication.sweep.front):
        name, title = row.policy.name, row.title
        if name in published and publication.is_front:
            repository = publication.name_repository(name)
            title = f"[{title}](https://huggingface.co/{repository.path})"
        title = f"**{title}**" if name == own else title
        rows.append([title, *row.cells, ", ".join(row.remarks)])
        if row.stands_out or name == own:
            first.append(rows[-1])
    return first, rows


def describe_training(publication: Publication, candidate: PickedCandidate) -> dict[str, Any]:
    """Return how a policy was made: its parameters, or the parts of a merge."""
    records, record = publication.sweep.records, candidate.record
    if len(record.parts) > 1:
        parts = [
            {
                "weight": show(part.weight),
                "name": f"{part.trial}@{part.step}",
                "params": _format_params(publication, records[part.trial].params),
            }
            for part in record.parts
        ]
        return {"parts": parts, "names": list(parts[0]["params"])}
    number, until = record.number, float("inf")
    if record.parts:
        number, until = record.parts[0].trial, record.parts[0].step
    training = records[number]
    return {
        "parts": [],
        "params": _format_params(publication, training.params),
        "seed": training.seed,
        "steps": min(until, record.ends_at or publication.spec.training.steps),
    }


def _format_params(publication: Publication, params: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that are in effect; weights as trained, the largest is 1."""
    spec = publication.spec
    active = spec.space.select_active(params)
    prefix = "reward_weights."
    largest = max((abs(v) for n, v in params.items() if n.startswith(prefix)), default=1) or 1
    return {
        name: format_parameter(value / largest if name.startswith(prefix) else value)
        for name, value in params.items()
        if name in active
    }


PLACEHOLDER = "YOUR PROMPT"


@dataclass(frozen=True)
class Example:
    """A prompt to begin with."""

    text: str
    """Text of the prompt; empty if the policy reads turns of a chat."""
    messages: list[dict[str, str]]
    """Turns for the chat template of its tokenizer; empty without one."""
    is_placeholder: bool
    """True if the reader has to write the prompt itself."""


def build_example(spec: SweepSpec, directory: Path) -> Example | None:
    """Build an example for the policy in a directory.

    Rows of data sets are not published, so their place is marked. None if the directory has no
    tokenizer, or if the task is in a file, whose words are not published either.
    """
    tokenizer = load_local_tokenizer(str(directory))
    if tokenizer is None or task_files.is_task_file(spec.task):
        return None
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        instructions: str = task.instructions
        own = "" if spec.data.source else str(task.problems("test", 1, 0)[0].prompt)
    # A policy that ships knows the format; one that was trained says how it was prompted.
    name = str(directory) if (directory / PROMPTS_FILE).exists() else spec.policy
    style = choose_prompt_format(name, tokenizer, instructions, spec.model)
    prompt = own or PLACEHOLDER
    if tokenizer.chat_template is None:
        return Example(style.render(prompt), [], not own)
    return Example("", style.build_messages(prompt), not own)
