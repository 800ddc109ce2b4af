"""What is asked: the YAML of a sweep as frozen models, or every error in it at once."""

from gdpo_tune.spec.domains import Choice, Domain, Fixed, Uniform
from gdpo_tune.spec.dry_run import dry_run
from gdpo_tune.spec.dump import shown_yaml, without_password
from gdpo_tune.spec.gpu import check_gpu_share, device_memory
from gdpo_tune.spec.lint import lint
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import check_resources, local_cpus
from gdpo_tune.spec.model import (
    Constraint,
    Keep,
    ObjectiveSpec,
    Replicates,
    Resources,
    Search,
    SweepSpec,
    Tracking,
)
from gdpo_tune.spec.sampler_choice import SamplerChoice, choose_sampler, most_trials
from gdpo_tune.spec.sandbox_checks import sandbox_doubts
from gdpo_tune.spec.schedulers import AshaSettings, PbtSettings
from gdpo_tune.spec.space import Space

__all__ = [
    "AshaSettings",
    "Choice",
    "Constraint",
    "Domain",
    "Fixed",
    "Keep",
    "ObjectiveSpec",
    "PbtSettings",
    "Replicates",
    "Resources",
    "SamplerChoice",
    "Search",
    "Space",
    "SweepSpec",
    "Tracking",
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
