"""Files that are published: the record of a sweep, and a kept policy.

From the record `load_sweep("hf://...")` reads the same front.

    sweep/spec.yaml                the resolved file, without what is about the author's machine
          ledger.journal           the ledger's records
          trials/<number>/steps.jsonl    metrics of training, thinned as for MLflow

Numbers are those of the sweep, bit for bit. Prompts, completions and policies stay behind; what of
the texts leaves is in `results.public_record`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.addresses import RECORD
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.object_store import JOURNAL, SPEC
from gdpo_tune.core.trial_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    STEPS_FILE,
    TRIALS,
    find_adapter,
    is_kept,
    read_steps,
)
from gdpo_tune.ledger.opening import open_for_reading
from gdpo_tune.policies.load_policy import resolve_policy
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.public_record import PublicFilter, name_policy
from gdpo_tune.spec import load_spec


def build_record(sweep: Sweep) -> dict[str, bytes]:
    """Return the files of a sweep's record: path in a repository -> content."""
    # Without the changes of requests, which are in the ledger.
    assert sweep.file is not None, "it was read"
    name = sweep.file.parent.name
    public = PublicFilter(load_spec(sweep.file, [sweep.storage_override], name, to_run=False))
    journal = open_for_reading(sweep.spec)
    try:
        selected = map(public.select_record, journal.read_logs(0))
        lines = [json.dumps(r, separators=(",", ":")) + "\n" for r in selected if r is not None]
    finally:
        journal.close()
    files = {SPEC: public.spec.dump_yaml().encode(), JOURNAL: "".join(lines).encode()}
    for record in sweep.records:
        steps = read_steps(record.directory) if record.is_training and record.directory else []
        kept = (
            {"step": m.step, "metrics": public.select(m.metrics), "cost": asdict(m.cost)}
            for m in steps
            if is_kept(m.step, steps[-1].step)
        )
        if text := "".join(f"{json.dumps(step)}\n" for step in kept):
            files[f"{TRIALS}/{record.number}/{STEPS_FILE}"] = text.encode()
    return {f"{RECORD}/{name}": content for name, content in files.items()}


PUBLISHED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "prompts.json", "initial_policy.json", ADAPTER_CONFIG),
)
"""Files of a checkpoint that readers need; the state of a trainer stays behind."""
NAMES_OF_BASE = ("base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys with the place from which a policy or its base was loaded."""


@dataclass(frozen=True)
class PolicyFiles:
    """Policy of one candidate."""

    directory: Path
    """Its place on this machine."""
    files: Mapping[str, Path | bytes]
    """Path in a repository -> file of this machine, or content."""
    is_adapter: bool
    """True if the directory has an adapter alone: the weights below it are written for a reader."""
    has_adapter: bool
    """True if an adapter is published beside the whole policy."""


def collect_policy_files(sweep: Sweep, directory: Path) -> PolicyFiles:
    """Collect the files of a policy, whose JSON names no directory here; refuse missing weights.

    Of an adapter alone these are the small files: `publish` writes its policy whole.
    """
    base, revision = name_policy(sweep.spec.policy), sweep.spec.model.revision
    files: dict[str, Path | bytes] = {}
    is_adapter, has_base = (directory / ADAPTER_CONFIG).is_file(), sweep.spec.start is None
    # An adapter would need the start below it, which is published nowhere.
    for prefix in ("", f"{ADAPTER}/") if has_base else ("",):
        for pattern in PUBLISHED:
            for path in sorted((directory / prefix).glob(pattern)):
                if is_adapter and path.name.startswith("adapter_"):
                    continue
                is_config = path.suffix == ".json" and path.name != "tokenizer.json"
                names = base, sweep.spec.policy, revision
                files[prefix + path.name] = _clean_config(path, *names) if is_config else path
    if not any(directory.glob("*.safetensors")):
        raise UsageError(
            f"{directory} has no weights as *.safetensors\n    fix: train the policy again"
        )
    return PolicyFiles(
        directory,
        files,
        is_adapter=is_adapter,
        has_adapter=has_base and find_adapter(directory) is not None,
    )


def _clean_config(path: Path, base: str, policy: str, revision: str) -> bytes:
    """Return a JSON file in which the base has its name for others, and its revision."""
    content: Any = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        return path.read_bytes()
    changed = {
        key: base if value in (policy, resolve_policy(policy)) else name_policy(str(value))
        for key, value in content.items()
        if key in NAMES_OF_BASE and value
    }
    if path.name == ADAPTER_CONFIG and revision:  # older adapters do not name it
        changed["revision"] = content.get("revision") or revision
    if all(content.get(key) == value for key, value in changed.items()):
        return path.read_bytes()
    return (json.dumps(content | changed, indent=2) + "\n").encode()
