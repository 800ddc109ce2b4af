"""The fake training, after it has written digests of the variables that its process has."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Outcome, Report
from tests.support import fake_training

WATCHED = ("HF_TOKEN", "HF_HOME", "NCCL_DEBUG")
FILE = "variables.json"


def digest(value: str) -> str:
    """A value cannot be found in a file that has this."""
    return hashlib.sha256(value.encode()).hexdigest()


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    config.directory.mkdir(parents=True, exist_ok=True)
    present = {name: digest(os.environ[name]) for name in WATCHED if name in os.environ}
    (config.directory / FILE).write_text(json.dumps(present))
    return fake_training.train(config, resume=resume, report=report)
