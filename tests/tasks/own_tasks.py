"""Tasks in files, as a user writes them, and short trials of them."""

from pathlib import Path

from gdpo_tune.core import task_files
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import train
from tests.support.paths import ROOT

SETTINGS = TrainingSettings(
    steps=2,
    completions_per_step=16,
    max_completion_length=8,
    length_limit=4,
    train_prompts=40,
    validation_prompts=6,
    test_prompts=6,
    samples_per_prompt=2,
    dead_steps=0,
)
FILES = ROOT / "tests" / "data" / "task_files"
HEAD = "from gdpo_tune.tasks.custom import RewardFunctionTask\n"
TASK = (FILES / "mine.txt").read_text()
"""One reward in (0, 2), which is always 1."""


def with_line(line: str) -> str:
    """Return the file with a line in the class."""
    return TASK.replace("\n    def rows", f"    {line}\n\n    def rows")


def written(folder: Path, text: str = TASK, name: str = "Mine") -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:{name}"


def build(folder: Path, text: str, name: str):
    task = written(folder, text, name)
    return task_files.build_task(task, SETTINGS, SandboxSettings(), DataSettings())


def trial(task: str, folder: Path, policy="embedded", settings=SETTINGS, **params) -> TrialConfig:
    defaults = {name: info.default for name, info in PARAMETERS.items()}
    rewards = task_files.load_task_info(task).rewards
    weights = {f"reward_weights.{name}": 1.0 for name in rewards}
    complete = {**defaults, **weights, "group_size": 4, **params}
    return TrialConfig(task, policy, 0, complete, settings, folder / "trial")


def run_trial(config: TrialConfig, resume=None):
    return train(config, resume=resume, report=lambda *_: None)
