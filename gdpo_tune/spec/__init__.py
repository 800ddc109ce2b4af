"""What is asked: the YAML of a sweep as frozen models, or every error in it at once."""

from gdpo_tune.spec.domains import Choice, Domain, Fixed, Uniform
from gdpo_tune.spec.dry_run import dry_run
from gdpo_tune.spec.dump import shown_yaml, without_password
from gdpo_tune.spec.lint import lint
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import check_resources
from gdpo_tune.spec.model import (
    Constraint,
    Keep,
    ObjectiveSpec,
    Replicates,
    Resources,
    Scheduler,
    Search,
    SweepSpec,
    Tracking,
)
from gdpo_tune.spec.space import Space

__all__ = [
    "Choice",
    "Constraint",
    "Domain",
    "Fixed",
    "Keep",
    "ObjectiveSpec",
    "Replicates",
    "Resources",
    "Scheduler",
    "Search",
    "Space",
    "SweepSpec",
    "Tracking",
    "Uniform",
    "check_resources",
    "dry_run",
    "lint",
    "load_spec",
    "shown_yaml",
    "without_password",
]
