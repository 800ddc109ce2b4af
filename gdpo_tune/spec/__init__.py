"""The YAML of a sweep as frozen models, or every error in it at once."""

from gdpo_tune.spec.dry_run import render_dry_run, render_needs
from gdpo_tune.spec.gpu import (
    PackChoice,
    check_gpu_share,
    choose_pack,
    choose_sampler,
    count_affordable_trials,
    read_device_memory,
    settle_pack,
)
from gdpo_tune.spec.load import keep_recorded_tracking, load_spec
from gdpo_tune.spec.machine import (
    check_disk,
    check_resources,
    count_local_cpus,
    find_machine_problems,
    find_unset_webhook,
    list_sandbox_warnings,
)
from gdpo_tune.spec.model import (
    AshaSettings,
    Constraint,
    GrowthSettings,
    ObjectiveSpec,
    Resources,
    Search,
    SweepSpec,
    dump_public_yaml,
)
from gdpo_tune.spec.space import Choices, Domain, Fixed, Space, Uniform
from gdpo_tune.spec.spec_warnings import list_warnings

__all__ = [
    "AshaSettings",
    "Choices",
    "Constraint",
    "Domain",
    "Fixed",
    "GrowthSettings",
    "ObjectiveSpec",
    "PackChoice",
    "Resources",
    "Search",
    "Space",
    "SweepSpec",
    "Uniform",
    "check_disk",
    "check_gpu_share",
    "check_resources",
    "choose_pack",
    "choose_sampler",
    "count_affordable_trials",
    "count_local_cpus",
    "dump_public_yaml",
    "find_machine_problems",
    "find_unset_webhook",
    "keep_recorded_tracking",
    "list_sandbox_warnings",
    "list_warnings",
    "load_spec",
    "read_device_memory",
    "render_dry_run",
    "render_needs",
    "settle_pack",
]
