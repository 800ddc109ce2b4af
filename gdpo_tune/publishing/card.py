"""Model card and card of the record, from the ledger alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jinja2

from gdpo_tune import __version__
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.addresses import REPOSITORY_ID
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.text import format_hypervolume
from gdpo_tune.core.trial_files import ADAPTER_CONFIG
from gdpo_tune.policies.load_policy import find_required_version
from gdpo_tune.publishing.card_tables import (
    build_member_rows,
    build_metric_rows,
    describe_training,
    get_metric,
    list_columns,
)
from gdpo_tune.publishing.example import build_example
from gdpo_tune.publishing.policy_files import PolicyFiles
from gdpo_tune.publishing.publication import Publication, PublishedPolicy
from gdpo_tune.results.wording import capitalize_warning, list_result_warnings
from gdpo_tune.spec import SweepSpec

TAGS = ("gdpo_tune", "reinforcement-learning", "pareto-front", "trl")


def build_model_card(
    publication: Publication, candidate: PublishedPolicy, policy: PolicyFiles, others: Sequence[str]
) -> str:
    """Return the model card of a candidate; `others` are the published members of the front."""
    repository, spec = publication.name_repository(candidate.name), publication.spec
    config = policy.directory / ADAPTER_CONFIG
    own = json.loads(config.read_bytes()) if policy.is_adapter else {}
    return _render(
        "model_card.md.jinja",
        publication,
        candidate=candidate,
        repository=repository,
        metadata=_build_metadata(publication, candidate, policy),
        warnings=list_candidate_warnings(publication, candidate.configuration),
        columns=list_columns(publication.front, candidate.configuration),
        metrics=build_metric_rows(publication, candidate.configuration),
        training=describe_training(publication, candidate),
        policy=policy,
        revision=own.get("revision") or spec.model.revision,
        required_version=find_required_version(policy.directory),
        example=build_example(publication.sweep.spec, policy.directory),
        lora_rank=spec.model.lora_rank,
        members=build_member_rows(publication, others, candidate.name),
    )


def build_record_card(
    publication: Publication, members: Sequence[PublishedPolicy], missing: Sequence[str]
) -> str:
    """Return the card of the data set that has the record of a front."""
    from huggingface_hub import DatasetCardData

    metadata = DatasetCardData(
        pretty_name=f"{publication.target}: record of a sweep",
        tags=["gdpo_tune", "pareto-front"],
        viewer=False,  # a ledger is no table
    )
    return _render(
        "record_card.md.jinja",
        publication,
        metadata=metadata.to_yaml(),
        repository=publication.record,
        warnings=list_findings(publication),
        members=build_member_rows(publication, [member.name for member in members]),
        missing=len(missing),
    )


def list_candidate_warnings(publication: Publication, configuration: Configuration) -> list[str]:
    """Return what a reader has to know before using a policy: its own faults, then the front's."""
    front, found = publication.front, list[str]()
    found += [f"This policy is {text}." for text in front.list_shortfalls(configuration)]
    if not configuration.is_on_front:
        found.append("This policy is not on the front of its sweep.")
    if configuration.is_provisional and configuration.role != "untrained":
        found.append("This policy has one seed, so part of its lead may be luck.")
    if not publication.has_ended:
        found.append("The sweep had not finished, so its front may change.")
    return found + list_findings(publication)


def list_findings(publication: Publication) -> list[str]:
    """Return the warnings about a front for readers, who cannot change the sweep."""
    warnings = list_result_warnings(publication.sweep.spec, publication.front)
    return [capitalize_warning(warning.finding) for warning in warnings]


def _render(template: str, publication: Publication, **values: Any) -> str:
    spec, front = publication.spec, publication.front
    points = ", ".join(f"{goal.name} {goal.reference:g}" for goal in front.objectives)
    packages = {"gdpo-tune": __version__}
    if publication.sessions:
        provenance = publication.sessions[-1].get("provenance", {})
        python = provenance.get("python", "unknown")
        packages = {**provenance.get("packages", {}), "Python": python}
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
        data=describe_data(spec),
        objectives=[
            f"`{name}` ({goal.direction}d): {get_metric(publication, name).doc}"
            for name, goal in spec.objectives.items()
        ],
        hypervolume=format_hypervolume(front.hypervolume, front.hypervolume_interval, points),
        versions=", ".join(f"{name} {version}" for name, version in packages.items()),
        version=__version__,
        trials=len(front.records),
        **values,
    )


def _build_metadata(
    publication: Publication, candidate: PublishedPolicy, policy: PolicyFiles
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    spec, is_merge = publication.spec, candidate.record.role == "merge"
    base: dict[str, Any] = {}
    if spec.policy not in POLICIES and REPOSITORY_ID.fullmatch(spec.policy):
        relation = "adapter" if policy.is_adapter else "finetune"
        base = {"base_model": spec.policy, "base_model_relation": relation}
    source, mode = spec.data.source, candidate.configuration.params.get("normalization")
    licence = publication.licence
    keys: dict[str, Any] = {"license": licence.identifier, "license_name": licence.name}
    keys["license_link"] = licence.link
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=source if source and not spec.data.is_local else spec.task,
            dataset_name=f"{spec.task}: test prompts",
            metric_type=name,
            metric_name=f"{name} ({get_metric(publication, name).doc})",
            metric_value=candidate.configuration.mean[name].mean,
            metric_args={"standard_error": candidate.configuration.mean[name].se},
        )
        for name in spec.objectives
    ]
    return ModelCardData(
        library_name="peft" if policy.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *(["merge"] if is_merge else []), *([str(mode)] if mode else [])],
        datasets=[source] if source and not spec.data.is_local else None,
        model_name=publication.name_repository(candidate.name).id.partition("/")[2],
        eval_results=results,
        **base,
        **{key: value for key, value in keys.items() if value},
    ).to_yaml()


def describe_data(spec: SweepSpec) -> str:
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
