"""Record of a sweep for others: from it `load_sweep("hf://...")` reads the same front.

    sweep/spec.yaml                the resolved file, without what is about the author's machine
          ledger.journal           the ledger's records
          trials/<number>/steps.jsonl    metrics of training, thinned as for MLflow

Numbers are those of the sweep, bit for bit. Prompts, completions and policies stay behind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gdpo_tune.core.files import is_present
from gdpo_tune.core.hub_address import RECORD
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.steps import STEPS_FILE, is_kept, read_steps
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger.history import INCIDENT, REQUEST
from gdpo_tune.ledger.opening import open_for_reading
from gdpo_tune.ledger.trial_encoding import TRIALS
from gdpo_tune.publishing.private_text import PrivateTextRemover
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.model import JOURNAL, SPEC
from gdpo_tune.spec.model import RUNS, Tracking

NODE = re.compile(r"\bnode ([\w.-]+)")
SOMEONE = "someone"
"""Author of every request in a published record."""
LEFT_OUT = " left out ("
"""Begin of the part of a data set's description that quotes one of its rows."""


def build_record(sweep: Sweep) -> dict[str, bytes]:
    """Return the files of a sweep's record: path in a repository -> content."""
    # Without the changes of requests, which are in the ledger.
    name = sweep.file.parent.name
    public = make_public(load_spec(sweep.file, [sweep.storage_override], name, to_run=False))
    files = {SPEC: public.dump_yaml().encode(), JOURNAL: _copy_journal(sweep, public)}
    for record in sweep.records:
        if record.is_training and (steps := _copy_steps(record)):
            files[f"{TRIALS}/{record.number}/{STEPS_FILE}"] = steps
    return {f"{RECORD}/{name}": content for name, content in files.items()}


def make_public(spec: SweepSpec) -> SweepSpec:
    """Return a specification without addresses, variables and directories of its author."""
    task, data = spec.task, spec.data
    # How code is run is a decision for each machine.
    limit = min(spec.sandbox.cpu_seconds, spec.sandbox.wall_seconds)  # a service ignores the first
    sandbox = spec.sandbox.replace(url="", type="local", cpu_seconds=limit)
    server = {"vllm_mode": "colocate", "vllm_server": ""} if spec.rollout.vllm_server else {}
    return spec.model_copy(
        update={
            "task": Path(task).name if is_task_file(task) else task,
            "policy": name_policy(spec.policy),
            "data": data.replace(source=Path(data.source).name) if data.is_local else data,
            "sandbox": sandbox,
            "rollout": spec.rollout.replace(**server),
            "search": spec.search.model_copy(update={"warm_start": ()}),
            "resources": spec.resources.model_copy(update={"env": ()}),
            "tracking": Tracking(),
            "notify": None,
            "storage": RUNS,
            "ledger": "",
        }
    )


def name_policy(policy: str) -> str:
    """Return a policy's name for others: of a directory, its last part."""
    is_directory = policy not in POLICIES and is_present(Path(policy).expanduser())
    is_directory = is_directory or policy.startswith(("/", "~", "."))
    return Path(policy).name if is_directory else policy


def _copy_journal(sweep: Sweep, public: SweepSpec) -> bytes:
    """Return the records of a ledger without what is private, for a sweep that has `public`."""
    journal = open_for_reading(sweep.spec)
    try:
        records = list(journal.read_logs(0))
    finally:
        journal.close()
    remover = PrivateTextRemover([*list_private_names(sweep.spec), *_list_nodes(records)])
    cleaned = (_clean_record(record, remover, public) for record in records)
    lines = (json.dumps(record, separators=(",", ":")) for record in cleaned if record is not None)
    return "".join(f"{line}\n" for line in lines).encode()


def _list_nodes(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of machines that the incidents of a sweep name."""
    incidents = (
        str(value["what"])
        for record in records
        for key, value in record.get("user_attr", {}).items()
        if key.startswith(INCIDENT)
    )
    return [name for text in incidents for name in NODE.findall(text)]


def list_private_names(spec: SweepSpec) -> list[str]:
    """Return the parts of a sweep's directories and addresses that name a place or a person."""
    places = [str(spec.directory.absolute().parent), spec.storage, spec.tracking.uri, spec.ledger]
    texts = [*places, spec.sandbox.url, spec.rollout.vllm_server, *spec.search.warm_start]
    return [text for text in texts if "/" in text.removeprefix("sqlite:///")]


def _clean_record(
    record: Mapping[str, Any], remover: PrivateTextRemover, public: SweepSpec
) -> dict[str, Any] | None:
    """Return a record of the journal as it may be published; None if it is left out."""
    attributes: Mapping[str, Any] = record.get("user_attr", {})
    if any(key.startswith(INCIDENT) for key in attributes):
        return None  # they name the machines of a cluster
    cleaned: dict[str, Any] = remover.clean_all(record)
    for key, value in cleaned.get("user_attr", {}).items():
        if key.startswith(REQUEST):
            value["author"] = SOMEONE
        if key == "outcome" and LEFT_OUT in value.get("environment", {}).get("data", ""):
            value["environment"]["data"] = value["environment"]["data"].partition(LEFT_OUT)[0]
    if "identity" in attributes:
        cleaned["user_attr"]["identity"] = public.compute_identity()
    return cleaned


def _copy_steps(record: TrialRecord) -> bytes:
    """Return the metrics of a training, thinned; empty if there are none."""
    steps = read_steps(record.directory) if record.directory else []
    last = steps[-1].step if steps else 0
    kept: Iterable[dict[str, Any]] = (
        {"step": m.step, "metrics": dict(m.metrics), "cost": asdict(m.cost)}
        for m in steps
        if is_kept(m.step, last)
    )
    return "".join(f"{json.dumps(step)}\n" for step in kept).encode()
