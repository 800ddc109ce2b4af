"""The YAML of a sweep as frozen models, or every error in it at once."""

from gdpo_tune.spec.dry_run import dry_run
from gdpo_tune.spec.lint import lint
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import (
    check_gpu_share,
    check_resources,
    device_memory,
    local_cpus,
    sandbox_doubts,
)
from gdpo_tune.spec.model import Keep, SweepSpec, shown_yaml
from gdpo_tune.spec.objectives import Constraint, ObjectiveSpec
from gdpo_tune.spec.problems import without_password
from gdpo_tune.spec.sampler_choice import choose_sampler, most_trials
from gdpo_tune.spec.search_section import AshaSettings, PbtSettings, Search
from gdpo_tune.spec.space import Choice, Domain, Fixed, Space, Uniform
from gdpo_tune.spec.training_section import Resources

__all__ = [
    "AshaSettings",
    "Choice",
    "Constraint",
    "Domain",
    "Fixed",
    "Keep",
    "ObjectiveSpec",
    "PbtSettings",
    "Resources",
    "Search",
    "Space",
    "SweepSpec",
    "Uniform",
    "check_gpu_share",
    "check_resources",
    "choose_sampler",
    "device_memory",
    "dry_run",
    "lint",
    "load_spec",
    "local_cpus",
    "most_trials",
    "sandbox_doubts",
    "shown_yaml",
    "without_password",
]
