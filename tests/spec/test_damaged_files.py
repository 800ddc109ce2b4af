"""1,210 shipped files with random damage: each is read, or refused by its name with a reason."""

import random
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from gdpo_tune import schedule, sweep
from gdpo_tune.core.errors import GdpoTuneError
from tests.support.damage import damage
from tests.support.paths import ROOT

FILES = [*(ROOT / "search_spaces").glob("*.yaml"), *(ROOT / "sweeps").glob("*.yaml")]
SEEDS = 110
"""Damaged copies of each file."""

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the shipped files in the current directory, without a network."""

    def refuse_network(*_, **__):
        raise OfflineModeIsEnabled("no network in tests")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse_network)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("search_spaces", "sweeps"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("original", sorted(FILES), ids=lambda path: path.stem)
def test_a_damaged_file_is_read_or_refused_with_its_name_and_a_reason(original, project, capsys):
    text, file = original.read_text(encoding="utf-8"), Path(original.parent.name, original.name)
    check = check_space if file.parts[0] == "search_spaces" else check_schedule
    for seed in range(SEEDS):
        file.write_bytes(damage(text, random.Random(f"{file}/{seed}")))
        try:
            status, message = check(file), ""
        except GdpoTuneError as error:
            status, message = error.exit_status, str(error)
        except Exception as error:
            raise AssertionError(f"damage {seed} of {file}: {error!r}") from error
        printed = message + capsys.readouterr().err
        assert status in (0, 2), f"damage {seed}"
        if status:
            assert re.search(rf"{file.parent}/\w+\.yaml", printed), f"damage {seed}"
            assert "fix: " in printed or f"{file}: policy " in printed, f"damage {seed}"


def check_space(file: Path) -> int:
    return sweep.main([str(file), "--dry-run"])


def check_schedule(file: Path) -> int:
    status = schedule.main([str(file), "validate", "--files-only"])
    return status or schedule.main([str(file), "render", "--to", "systemd"])
