"""Sweeps to publish, whose files name a machine, people, addresses and secrets."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.events import Incident, RecordedRequest
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.trial_files import MARKER, append_step
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome, load_code_spec

STORED = ROOT / "tests" / "data" / "code_sweep"
MACHINE = "workbench"
"""Name of the machine on which the tests publish."""
PRIVATE = ("gpu-box-17", MACHINE, "anna.b", "mlflow.internal", "HOOK_anna", "10.1.2.3", "/opt")
"""Words about a machine and its people that no published file may have."""
REASON = "FileNotFoundError: /opt/anna.b/data/x.bin on node gpu-box-17.lan (http://10.1.2.3:8000/a)"
VALUES = [(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]


def copy_stored_sweep(directory: Path) -> Path:
    target = directory / "code"
    target.mkdir(parents=True)
    shutil.copyfile(STORED / "spec.yaml", target / "spec.yaml")
    ledger = gzip.decompress((STORED / "ledger.journal.gz").read_bytes())
    (target / "ledger.journal").write_bytes(ledger)
    return target


def make_sweep(directory: Path, *, kept: tuple[int, ...] = (0, 1), **keys: str) -> SweepSpec:
    """Make a sweep with a failed trial and a front of three, of which some policies were kept."""
    overrides = [
        "tracking.uri=http://mlflow.internal:5000",
        "notify.webhook_env=HOOK_anna",
        "resources.env=[DATA_HOME=/opt/anna.b]",
        *(f"{key}={value}" for key, value in keys.items()),
    ]
    spec = load_code_spec(directory / "runs", overrides)
    cost = Cost(completions=64)
    with Ledger.open(spec) as ledger:
        packages = {"packages": {"torch": "2.13.0"}, "python": "3.11.7", "machine": MACHINE}
        session = ledger.begin_session(1.0, 2, packages)
        for number, (correct, form) in enumerate(VALUES):
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            place = ledger.get_trial_directory(number)
            append_step(place, Measurement(1, {"train/loss": 0.25}, cost))
            (place / "completions.jsonl").write_text('{"prompt": "private prompt"}\n')
            (place / "writer").write_text("gpu-box-17")
            outcome = build_outcome(correct, form, 0.5)
            checkpoint = make_policy(place / "checkpoint-60") if number in kept else None
            ledger.complete(number, replace(outcome, checkpoint=checkpoint))
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=80)
        ledger.fail(3, REASON)
        ledger.record_incident(Incident(2.0, "node gpu-box-17 was lost", (1,)))
        ledger.record_request(
            RecordedRequest("1", "stop", {"trial": 9}, "anna.b", 1.0, 2.0, "refused", "no trial 9")
        )
        ledger.end_session(session, "all configurations were tried")
    return spec


def make_policy(directory: Path) -> Path:
    """Make a checkpoint of the policy that ships, with what only its trainer needs."""
    shutil.copytree(POLICIES["embedded"], directory)
    config = json.loads((directory / "config.json").read_text())
    config["_name_or_path"] = "/opt/anna.b/models/base"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "trainer_state.json").write_text('{"host": "gpu-box-17"}')
    (directory / "rng_state.pth").write_bytes(b"state")
    marker = {"step": 60, "cost": {}, "validation": {}, "files": {}}
    (directory / MARKER).write_text(json.dumps(marker))
    return directory
