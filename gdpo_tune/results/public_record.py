"""Fields that may leave the machine: by `publish`, and to MLflow under `tracking.private`.

A field leaves if it is listed here or in `publishing.record`, as a number or as a name that this
package, the space or the task declares. No text of a trial leaves: a reason, an incident or an
environment may quote rows, completions, paths, hosts and people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gdpo_tune.core.content import RECORDED
from gdpo_tune.core.errors import NO_SIGNAL
from gdpo_tune.core.files import DATA_FILES, expand_path, is_local_source, path_exists
from gdpo_tune.core.object_store import RUNS
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.core.trial_files import KEPT, REWARDS, ZERO_STD
from gdpo_tune.core.trials import UNCHANGED, TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import Tracking

VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)*(\+(cpu|cu\d+|rocm[\d.]+))?")
HARDWARE = ("gpu_utilisation", "gpu_memory_gib", "gpu_peak_gib")
"""Step metrics of the machine."""
OF_REWARD = ("mean", "std", "share", "failed", ZERO_STD)
"""Step metrics of each reward."""


def hide_texts(record: TrialRecord) -> TrialRecord:
    """Return a trial without its texts; its places stay, for what reads its files."""
    reason = f"{NO_SIGNAL}text left out" if record.had_no_signal else ""
    environment = {UNCHANGED: "true"} if record.is_unchanged else {}
    return replace(record, reason=reason, content="", environment=environment)


def list_public_versions(session: Mapping[str, Any]) -> dict[str, str]:
    """List the versions that a session of a sweep ran with, by package."""
    provenance: Mapping[str, Any] = session.get("provenance", {})
    found = {**provenance.get("packages", {}), "python": provenance.get("python")}
    versions = {name: str(found.get(name)) for name in (*RECORDED, "python")}
    return {name: text for name, text in versions.items() if VERSION.fullmatch(text)}


def list_public_curves(spec: SweepSpec) -> set[str]:
    """List the step metrics that leave: not those that a reward function logs under any name."""
    info = load_task_info(spec.task, spec.space.domains)
    names = {f"train/{name}" for name in (*KEPT, *HARDWARE)}
    names |= {f"train/{REWARDS}{reward}/{part}" for reward in info.rewards for part in OF_REWARD}
    return names | {f"validation/{name}" for name in info.metrics}


def make_public(spec: SweepSpec) -> SweepSpec:
    """Return a specification without addresses, variables and directories of its author."""
    task, data = spec.task, spec.data
    # How code is run is a decision for each machine.
    sandbox = spec.sandbox.replace(type="local")
    server = {"vllm_mode": "colocate", "vllm_server": ""} if spec.rollout.vllm_server else {}
    start = spec.start
    if start is not None and start.file:
        start = start.replace(demonstrations=name_source(start.file, "demonstrations"))
    parts = {"validation": data.validation, "test": data.test}
    parts = {n: each.replace(source=name_source(each.source, n)) for n, each in parts.items()}
    return spec.model_copy(
        update={
            "task": Path(task).name if is_task_file(task) else task,
            "policy": name_policy(spec.policy),
            "data": data.replace(source=name_source(data.source, "data"), **parts),
            "start": start,
            "sandbox": sandbox,
            "rollout": spec.rollout.replace(**server),
            "search": spec.search.model_copy(update={"warm_start": ()}),
            "resources": spec.resources.model_copy(update={"env": ()}),
            "tracking": Tracking(private=spec.tracking.private),
            "notify": None,
            "storage": RUNS,
        }
    )


def name_source(source: str, name: str) -> str:
    """Return a source of data for others: of a path, `name` and the kind of file."""
    if not source or not is_local_source(source):
        return source
    return name + next((kind for kind in DATA_FILES if source.lower().endswith(kind)), "")


def name_policy(policy: str) -> str:
    """Return a policy's name for others: of a directory, its last part."""
    is_directory = policy not in POLICIES and path_exists(expand_path(policy))
    is_directory = is_directory or policy.startswith(("/", "~", ".", "$"))
    return Path(policy).name if is_directory else policy
