"""A sweep file, complete and frozen. `load.load_spec` reads one from YAML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, PrivateAttr

from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.object_store import RUNS, find_local_copy, is_url, join_address
from gdpo_tune.core.settings import (
    DECISIVE_ROLLOUT_KEYS,
    INDIFFERENT_TRAINING,
    LATER_DATA,
    LATER_TRAINING,
    STRICT,
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    Scoring,
    TrainingSettings,
)
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Objective, Params, ParamValue, TrialRecord
from gdpo_tune.spec.notation import convert_to_notation, dump_entries
from gdpo_tune.spec.notify_section import SweepNotify
from gdpo_tune.spec.objectives import Constraint, ObjectiveSpec, read_constraint
from gdpo_tune.spec.paths import PROJECT
from gdpo_tune.spec.problems import hide_passwords, hide_service_path, show
from gdpo_tune.spec.search_section import Search
from gdpo_tune.spec.sections import Section, accept_mapping, require_pattern
from gdpo_tune.spec.space import Space
from gdpo_tune.spec.storage_section import TRACKING_VARIABLES, Tracking, expand_storage, read_ledger
from gdpo_tune.spec.training_section import Resources

Text = Annotated[str, require_pattern(r"(?s).*\S.*", "empty", "write a word, or remove the key")]


class SweepSpec(Section):
    """One sweep: its task, objectives, search space, budget and storage."""

    other_keys: ClassVar = ("extends",)

    name: str
    """Name of the sweep: letters, digits, `.`, `_`, `-`. Another sweep needs another name."""
    task: str
    """One of the tasks below, or a class of your own: `path/to/file.py:MyTask`."""
    policy: Text = ""
    """The policy that ships for the task, a Hub id, or a directory."""
    scoring: Scoring = STRICT
    """How completions are scored, in training and held out: `strict` as this package describes the
    rewards, `released` as the authors' code does, for a task that offers it."""
    objectives: dict[str, ObjectiveSpec] = {}
    """Metric -> direction and reference."""
    constraints: dict[str, Annotated[Constraint, BeforeValidator(read_constraint)]] = {}
    """Metric -> bound on validation prompts, such as `">= 0.2"`. A bound may refer to the untrained
    policy or the published setting: `">= untrained"`, `"<= published + 0.02"`."""
    space: Space
    """Parameter -> domain."""
    enqueue: tuple[dict[str, ParamValue], ...] = ()
    """Points of the space to try first; a missing parameter gets a quasi-random value. The word
    `published` stands for those that the method's paper compares, besides the baseline."""
    keep: Literal["front", "all", "none"] = "front"
    """Trials whose checkpoints stay at the end: the front (if empty, all), all, or none. A sweep
    that is extended later merges these alone."""
    training: Annotated[TrainingSettings, accept_mapping(TrainingSettings)] = TrainingSettings()
    """Settings that all trials share."""
    sandbox: Annotated[SandboxSettings, accept_mapping(SandboxSettings)] = SandboxSettings()
    """Isolation and limits of the code that the policy writes."""
    data: Annotated[DataSettings, accept_mapping(DataSettings)] = DataSettings()
    """Source of the prompts."""
    model: Annotated[ModelSettings, accept_mapping(ModelSettings)] = ModelSettings()
    """Loading and training of the policy."""
    rollout: Annotated[RolloutSettings, accept_mapping(RolloutSettings)] = RolloutSettings()
    """Engine that samples completions during training."""
    search: Search = Search()
    """Sampler, scheduler and budget of the search."""
    resources: Resources = Resources()
    """CPUs, GPUs and workers of one trial."""
    tracking: Tracking = Tracking()
    """MLflow server and experiment that show the sweep."""
    notify: SweepNotify | None = None
    """Webhook that is notified when the sweep ends, and when its first trial fails."""
    storage: Annotated[Text, AfterValidator(expand_storage)] = RUNS
    """Directory of all sweeps, or address of an object store such as `s3://bucket/sweeps`, which
    needs `ledger`; this sweep is in `<storage>/<name>`."""
    ledger: Annotated[str, BeforeValidator(read_ledger)] = ""
    """Database of the record of all trials, `postgresql+psycopg2://USER@HOST/DATABASE`; default: a
    file in the sweep's directory. The password belongs in `PGPASSWORD` or `~/.pgpass`."""
    _written: dict[str, str] = PrivateAttr(default_factory=dict[str, str])
    """Path that `resolve_paths` has changed -> the text of the file."""

    @property
    def directory(self) -> Path:
        """Local directory of this sweep; on an object store, of a copy of its small files."""
        storage = find_local_copy(self.storage) if is_url(self.storage) else Path(self.storage)
        return storage / self.name

    @property
    def address(self) -> str:
        """Address of this sweep on an object store; empty for a sweep in a directory."""
        return join_address(self.storage, self.name) if is_url(self.storage) else ""

    @property
    def location(self) -> str:
        """Directory or address of this sweep, for messages."""
        return self.address or str(self.directory)

    @property
    def output_directory(self) -> Path:
        """Directory for files that commands create from trials of this sweep."""
        return Path(RUNS) if self.address else Path(self.storage)

    def list_objectives(self) -> tuple[Objective, ...]:
        """Return the objectives in the file's order."""
        return tuple(
            Objective(name, objective.direction, objective.reference)
            for name, objective in self.objectives.items()
        )

    @property
    def judged_metrics(self) -> tuple[str, ...]:
        """Metrics that objectives and constraints name."""
        return tuple(dict.fromkeys([*self.objectives, *self.constraints]))

    def meets_constraints(self, means: Mapping[str, float]) -> bool:
        """Return whether metrics meet every constraint; one that was not measured meets none."""
        return all(n in means and bound.holds(means[n]) for n, bound in self.constraints.items())

    def resolve_constraints(self, records: Iterable[TrialRecord]) -> SweepSpec:
        """Return a spec whose bounds have the values of the baselines among the records."""
        if all(constraint.baseline is None for constraint in self.constraints.values()):
            return self
        complete = (r for r in records if r.state == "complete" and r.is_comparable)
        measured = {r.role: r.validation for r in complete}
        resolved = {
            name: constraint.model_copy(update={"value": measured[constraint.baseline][name].mean})
            if constraint.baseline in measured and name in measured[constraint.baseline]
            else constraint
            for name, constraint in self.constraints.items()
        }
        return self.model_copy(update={"constraints": resolved})

    @property
    def has_candidates(self) -> bool:
        """True if merges and checkpoints may join the front.

        They are policies of trials, which have to be kept. Their own cost is that of an evaluation,
        so they do not join a front on which costs are judged.
        """
        return self.keep != "none" and not COST_METRICS.keys() & {*self.judged_metrics}

    def build_trial_config(self, params: Params, seed: int, directory: Path) -> TrialConfig:
        """Return the input of `train()` for one trial, in a directory of its own."""
        return TrialConfig(
            task=self.task,
            policy=self.policy,
            seed=seed,
            params=params,
            training=self.training,
            directory=directory,
            threads=max(1, int(self.resources.cpus)),
            sandbox=self.sandbox,
            data=self.data,
            model=self.model,
            rollout=self.rollout,
            gpu_share=min(1.0, self.resources.gpus) or 1.0,
            sharded=self.resources.shards_policy,
            scoring=self.scoring,
            judged_metrics=self.judged_metrics,
        )

    def compute_identity(self) -> str:
        """Return a short hash of all settings that decide the result of a trial.

        These are task, policy, objectives, space, training, and `scoring`, `data`, `model`,
        `DECISIVE_SANDBOX_KEYS` and `DECISIVE_ROLLOUT_KEYS` where they differ from the defaults.
        Order and notation of the file do not count, nor do budgets, resources, constraints, the
        rest of `rollout`, tracking, `notify`, the name and `INDIFFERENT_TRAINING`. A parameter that
        was added later, or a setting of `LATER_TRAINING`, counts only away from its default.
        """
        decisive = self.model_dump(mode="json", include={"task", "policy", "objectives", "space"})
        training = select_decisive(self.training)
        decisive["training"] = drop_later_defaults(training, TrainingSettings(), LATER_TRAINING)
        if self.scoring != STRICT:
            decisive["scoring"] = self.scoring
        for name in self.space.omittable_names:
            del decisive["space"]["domains"][name]
        for name in ("sandbox", "data", "model", "rollout"):
            settings = getattr(self, name)
            section, default = select_decisive(settings), select_decisive(type(settings)())
            changed = {k: value for k, value in section.items() if value != default.get(k)}
            if changed:
                decisive[name] = changed
        text = json.dumps(self.restore_written(decisive), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def restore_written(self, value: Any) -> Any:
        """Return a value of JSON with paths as the sweep's file has them."""
        if isinstance(value, Mapping):
            return {key: self.restore_written(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.restore_written(child) for child in value]
        return self._written.get(value, value) if isinstance(value, str) else value

    def set_written(self, written: dict[str, str]) -> None:
        """Note the paths that differ from the file, as `resolve_paths` returns them."""
        self._written = written

    def dump_stored_yaml(self) -> str:
        """Return the file that the sweep's directory keeps: `dump_yaml`, and where its paths begin.

        Such a file may hold a password.
        """
        project = next((path for path, text in self._written.items() if text == "."), Path.cwd())
        return self.dump_yaml() + dump_entries({PROJECT: str(project)})

    def dump_yaml(self) -> str:
        """Return the resolved file, every default written out; loading it gives an equal spec."""
        plain = self.restore_written(self.model_dump(mode="json"))
        if self.notify is None:  # a key without a value is refused
            del plain["notify"]
        if self.tracking.origins.get("uri") == TRACKING_VARIABLES["uri"]:
            plain["tracking"]["uri"] = hide_passwords(self.tracking.uri)  # no file may have it
        plain["constraints"] = {name: limit.text for name, limit in self.constraints.items()}
        # `reward_weights` and its like stay together, because a key may be written only once.
        grouped = sorted(self.space.domains.items(), key=lambda item: item[0].rpartition(".")[0])
        plain["space"] = {name: convert_to_notation(domain) for name, domain in grouped}
        plain["enqueue"] = self.enqueue
        return dump_entries(plain)


DECISIVE_SANDBOX_KEYS = ("modules", "cpu_seconds", "wall_seconds", "memory_mb")
"""Settings of the sandbox on which the result of a test can depend."""


def select_decisive(settings: Any) -> dict[str, Any]:
    """Return the settings of a section that count in the identity, with modules in order."""
    plain = asdict(settings)
    if isinstance(settings, TrainingSettings):
        return {key: value for key, value in plain.items() if key not in INDIFFERENT_TRAINING}
    if isinstance(settings, DataSettings):
        return drop_later_defaults(plain, DataSettings(), LATER_DATA)
    if isinstance(settings, ModelSettings):
        del plain["template_date"]  # that of the start, which a sweep keeps
    if isinstance(settings, SandboxSettings):
        plain["modules"] = tuple(sorted(set(settings.modules)))
        return {key: plain[key] for key in DECISIVE_SANDBOX_KEYS}
    if isinstance(settings, RolloutSettings):
        return {key: plain[key] for key in DECISIVE_ROLLOUT_KEYS}
    return plain


def drop_later_defaults(
    section: Mapping[str, Any], defaults: Any, later: Collection[str]
) -> dict[str, Any]:
    """Return the settings of a section without those of `later` at their defaults."""
    default = asdict(defaults)
    return {k: value for k, value in section.items() if k not in later or value != default[k]}


def dump_public_yaml(spec: SweepSpec, *, stored: bool = False) -> str:
    """Return the resolved file as it may be shown: without the secrets in its addresses.

    With `stored` it is as `dump_stored_yaml` returns it.
    """
    uri = hide_passwords(spec.tracking.uri)
    public = {
        "tracking": spec.tracking.model_copy(update={"uri": uri}),
        "sandbox": replace(spec.sandbox, url=hide_service_path(spec.sandbox.url)),
        "ledger": hide_passwords(spec.ledger),
    }
    public = spec.model_copy(update=public)
    return public.dump_stored_yaml() if stored else public.dump_yaml()


def list_decisive_values(spec: SweepSpec) -> dict[str, Any]:
    """Return all that `SweepSpec.compute_identity` may use: dotted key -> value as in a file."""
    names = ("training", "sandbox", "data", "model", "rollout")
    sections: dict[str, dict[str, Any]] = {
        "objectives": {name: goal.model_dump() for name, goal in spec.objectives.items()},
        "space": {name: convert_to_notation(domain) for name, domain in spec.space.domains.items()},
        **{name: select_decisive(getattr(spec, name)) for name in names},
    }
    flat = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.items()}
    named = {"task": spec.task, "policy": spec.policy, "scoring": spec.scoring, **flat}
    return {key: spec.restore_written(value) for key, value in named.items()}


def list_differences(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for each key whose values differ, with both values."""
    return [
        f"{key} = {show(earlier.get(key))}, not {show(current.get(key))}"
        for key in dict.fromkeys([*current, *earlier])
        if earlier.get(key) != current.get(key)
    ]
