"""The search spaces that ship, and the first search space of a person, from a few answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import expand_path, is_file
from gdpo_tune.core.registry import POLICIES, TaskInfo
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import join_names, suggest
from gdpo_tune.spec.document import dump_flow

_PACKAGE = Path(__file__).parents[1]
DIRECTORIES = tuple(parent / "search_spaces" for parent in (_PACKAGE.parent, _PACKAGE))


def list_spaces() -> dict[str, Path]:
    """Return the search spaces that ship: name -> file."""
    found = (sorted(directory.glob("*.yaml")) for directory in DIRECTORIES)
    return {file.stem: file for file in next(filter(None, found), [])}


def find_space(name: str, option: str) -> Path:
    """Return the file of a search space that ships, or the file `name` itself.

    `UsageError`: there is neither; `option` is where the user wrote `name`.
    """
    file, shipped = expand_path(name), list_spaces()
    if is_file(file):
        return file
    if name in shipped:
        return shipped[name]
    raise UsageError(
        f"{option} {name}: no such file, and no search space that ships\n"
        f"    fix: {suggest(name, shipped)}write a YAML file, or one of {join_names(shipped)}"
    )


LARGEST_COST = 0.05
"""Share of its range by which the first objective may end below the untrained policy."""
LARGEST_COST_EMBEDDED = 0.25
"""The same share for the policies that ship, whose fronts are wider."""
EMBEDDED_BUDGET, LARGE_BUDGET, CPU_BUDGET = 89_600, 409_600, 8_192
"""Completions in training of a first file: for a policy that ships about 155 steps of 64 for each
of four long trainings, on a GPU 100 steps of 512, and for another policy on a CPU 36 of 32."""
CPU_PROMPTS = {"train_prompts": 500, "validation_prompts": 64, "test_prompts": 64}
CPU_TOKENS = 128
"""Longest completion of a policy that does not ship, on a CPU: 135M parameters write some 30 tokens
a second and core."""
BUILT_IN = "built-in"
"""Source of prompts: those that the task writes itself."""


@dataclass(frozen=True)
class KnownData:
    """A public data set of a task, with the lengths that suit it."""

    source: dict[str, Any]
    prompts: dict[str, int]
    tokens: int
    """Longest completion."""
    limit: int
    """`training.length_limit`."""
    has_instructions: bool = False
    """True if the prompts of the data set say what the format is."""


_GSM8K = KnownData(
    {"source": "openai/gsm8k", "config": "main", "split": "train", "layout": "gsm8k"},
    {"train_prompts": 5500, "validation_prompts": 256, "test_prompts": 512},
    1024,
    200,
)
DATA: dict[str, KnownData] = {
    "code": KnownData(
        {
            "source": "google-research-datasets/mbpp",
            "config": "full",
            "split": "train+validation+test",
            "layout": "mbpp",
        },
        {"train_prompts": 700, "validation_prompts": 80, "test_prompts": 80},
        512,
        200,
    ),
    "math": _GSM8K,
    "gsm8k": _GSM8K,
    "tools": KnownData(
        {"source": "data/rlla_4k.parquet", "layout": "toolrl"},
        {"train_prompts": 3000, "validation_prompts": 256, "test_prompts": 256},
        1024,
        512,
        has_instructions=True,
    ),
}
"""Task -> what a policy from the Hub is usually trained on."""
EMBEDDED_LENGTHS = {"code": (64, 26), "math": (48, 14), "gsm8k": (48, 14), "tools": (64, 24)}
"""Task -> longest completion and `length_limit`, in tokens, of the policy that ships for it."""


@dataclass(frozen=True)
class FirstFile:
    """Answers from which the file is written; a bad file of a task is a `TaskFileError`."""

    task: str
    policy: str = ""
    """Empty: the one that ships for the task."""
    gpus: float = 0.0
    """GPUs of one trial."""
    completions: int = 0
    """Completions in training, for which the sweep has a budget; 0: `usual_completions`."""
    data: str = ""
    """Source of the prompts; empty: `suggest_data`."""
    layout: str = ""
    """Layout of that source; empty: that of the task's usual data set."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Column of the layout -> column of the source, where the names differ."""
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Key of `training:` -> prompts that the source holds; empty if that is unknown."""
    info: TaskInfo = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "info", load_task_info(self.task))

    @property
    def chosen_policy(self) -> str:
        """Name of the policy in the file."""
        return self.policy or self.info.embedded

    @property
    def usual_completions(self) -> int:
        """Completions in training that a first sweep of such a policy takes."""
        if self.chosen_policy in POLICIES:
            return EMBEDDED_BUDGET
        return LARGE_BUDGET if self.gpus else CPU_BUDGET

    def suggest_data(self) -> str:
        """Return the usual source of prompts for this task and policy."""
        if self.chosen_policy in POLICIES or self.task not in DATA:
            return BUILT_IN
        return DATA[self.task].source["source"]

    def render(self, file: Path) -> str:
        """Return the text of the file, which `load_spec` accepts if the answers fit together."""
        import jinja2  # late: the names of search spaces are read without it

        is_large, source = self.chosen_policy not in POLICIES, self.data or self.suggest_data()
        known = DATA.get(self.task) if source != BUILT_IN else None
        tokens, limit = EMBEDDED_LENGTHS.get(self.task, (64, 32))
        if is_large:
            tokens, limit = (known.tokens, known.limit) if known else (512, 200)
            if not self.gpus:
                tokens, limit = min(tokens, CPU_TOKENS), min(limit, CPU_TOKENS // 2)
        template = jinja2.Template(
            Path(__file__).with_name("templates").joinpath("sweep.yaml.jinja").read_text(),
            trim_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        default = TrainingSettings()
        few = {k: max(2, n) for k, n in self.prompts.items() if n < getattr(default, k)}
        named = "the policy that ships" if not is_large else self.chosen_policy
        objectives: list[dict[str, str]] = []
        for name in self.info.rewards:
            metric = self.info.metrics[name]
            worst = metric.low if metric.direction == "maximize" else metric.high
            reference = f"{worst:g}" if math.isfinite(worst) else "0"
            objectives.append({"name": name, "direction": metric.direction, "reference": reference})
        first = self.info.metrics[objectives[0]["name"]]
        margin, span = None, first.high - first.low
        if first.direction == "maximize" and math.isfinite(span):
            margin = f"{(LARGEST_COST if is_large else LARGEST_COST_EMBEDDED) * span:g}"
        text = template.render(
            title=" ".join(f"GDPO and GRPO training of {named} on {self.task}.".split()),
            file=file.name,
            name=dump_flow(file.stem),
            task=dump_flow(self.task),
            policy=dump_flow(self.chosen_policy),
            data=self._describe_data(source, known),
            instructions_off=is_large and known is not None and known.has_instructions,
            is_large=is_large,
            offers_released=is_large and self.info.offers_released,
            objectives=objectives,
            margin=margin,
            rewards=list(self.info.rewards),
            prompts=self._count_prompts(few, known),
            step_size=512 if self.gpus else 32,
            tokens=tokens,
            limit=limit,
            completions=self.completions or self.usual_completions,
            cpus=4 if self.gpus else 1,
            gpus=f"{self.gpus:g}",
        )
        return "".join(f"{_align_comment(line)}\n" for line in text.splitlines())

    def _count_prompts(self, few: Mapping[str, int], known: KnownData | None) -> dict[str, int]:
        """Return key of `training:` -> prompts: those that there are; on a CPU fewer."""
        source = self.data or self.suggest_data()
        counts = dict(known.prompts if known and source == known.source["source"] else few)
        if self.chosen_policy in POLICIES or self.gpus:
            return counts
        return {key: min(counts.get(key, most), most) for key, most in CPU_PROMPTS.items()}

    def _describe_data(self, source: str, known: KnownData | None) -> str:
        if source == BUILT_IN:
            return ""
        usual = known.source if known else {}
        section: dict[str, Any] = dict(
            usual if source == usual.get("source") else {"source": source}
        )
        section["layout"] = self.layout or usual.get("layout", "")
        if self.columns:
            section["columns"] = dict(self.columns)
        section["max_prompt_length"] = 2048 if known and known.has_instructions else 512
        return "{" + ", ".join(f"{key}: {dump_flow(value)}" for key, value in section.items()) + "}"


def _align_comment(line: str) -> str:
    key, mark, comment = line.rpartition("  # ")
    is_comment = mark and '"' not in comment  # else it is part of a quoted value
    return f"{key + '  ':<36}# {comment}" if is_comment else line
