"""`resources.env`: environment variables of every process that trains, on every node.

An entry is a name, whose value the command's own environment has, or `NAME=VALUE`. Values of the
first kind never enter a spec, so that no file, report or server shows a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.redaction import is_secret
from gdpo_tune.core.system import RENDEZVOUS
from gdpo_tune.spec.problems import Problems, YamlNode, join_names, show
from gdpo_tune.spec.sections import build_refusal

KEY = ("resources", "env")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SET_BY_RAY = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("NODE_RANK", "LOCAL_WORLD_SIZE", *RENDEZVOUS),
)
"""Variables that differ from trial to trial; so do those that begin with `RAY_`."""


def read_entries(data: object) -> object:
    """Return entries from a list, or from a mapping of names to values."""
    if isinstance(data, str):
        raise build_refusal("not a list", f"write it in brackets: [{data.partition('=')[0]}]")
    if not isinstance(data, Mapping):
        return data
    entries = cast("Mapping[str, Any]", data)
    wrong = [name for name, value in entries.items() if not isinstance(value, str)]
    if wrong:
        reason = f"the value of {join_names(wrong)} is no text"
        raise build_refusal(reason, 'write one value a name, and quote it: {NCCL_DEBUG: "INFO"}')
    return tuple(f"{name}={value}" for name, value in entries.items())


def keep_texts(root: YamlNode) -> None:
    """Let values of variables in a document be their text: neither 9.0 nor 007 is a number."""
    node = root.get(KEY)
    entries = {} if node is None else node.entries or {}
    for name, child in entries.items():
        if child.text is not None and child.value is not None:
            entries[name] = replace(child, value=child.text)


def check_entries(entries: Iterable[str], problems: Problems) -> None:
    """Refuse names that cannot be variables of a trial, and values that are secrets."""
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        name, sign, value = entry.partition("=")
        is_mapping = problems.root is not None and problems.root.get((*KEY, name)) is not None
        key = (*KEY, name if is_mapping else index)
        if not NAME.fullmatch(name):
            reason = "not the name of an environment variable"
            problems.note(key, reason, "write a name such as HF_HOME", value=name)
        elif name in SET_BY_RAY or name.startswith("RAY_"):
            reason = "every process gets its own value of this variable"
            problems.note(key, reason, "remove it; see resources.gpus and .workers", value=name)
        elif name in seen:
            problems.note(key, "named twice", "remove one of them", value=name)
        elif sign and is_secret(name, value):
            reason = "a secret in a file, from which it would reach the ledger, MLflow and the logs"
            fix = f"write the name alone, env: [{name}], and export {name} before the command"
            problems.note(key, reason, fix, value=f"{name}=***")
        seen.add(name)


def get_written_variables(entries: Iterable[str]) -> dict[str, str]:
    """Return the variables whose values the file has."""
    parted = (entry.partition("=") for entry in entries)
    return {name: value for name, sign, value in parted if sign}


def collect_variables(entries: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a trial; those that the file only names come from `environment`.

    Raises:
        ResourcesError: one that is named is not set.
    """
    entries = tuple(entries)
    names = [entry for entry in entries if "=" not in entry]
    missing = [name for name in names if name not in environment]
    if missing:
        raise ResourcesError(
            f"resources.env = {show(names)}: not set here: {join_names(missing)}\n"
            f"    fix: export {missing[0]}=..., or remove the name from the file"
        )
    return {name: environment[name] for name in names} | get_written_variables(entries)
