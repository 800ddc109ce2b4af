"""Exported folders that another library's own code reads up to a first batch of completions."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from gdpo_tune.core.parameters import build_shaping
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.exporters.training_setup import TrainingSetup
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.results.retrain import TrainingRequest
from gdpo_tune.tasks.base import Problem
from tests.support.export import make_recipe
from tests.support.paths import ROOT

TEXTS = {
    "code": (
        "<think></think><answer>{solution}</answer>",
        "<answer>{solution}</answer>",
        "{solution}",
        "<think>let me see. 6*2=12. 12+8=20.</think><answer>def f(x): return x</answer>",
        "<think></think><answer>def f(x): return x+1</answer> and so on",
        "def f(x): return 1/0",
        "",
    ),
    "math": (
        "<think></think><answer>{solution}</answer>",
        "<answer>{solution}</answer>",
        "{solution}",
        "<think>12+8=20. 20/2=10. 10+9=19.</think><answer>19</answer>",
        "<think></think><answer>7</answer> and so on",
        "<answer>",
        "",
    ),
    "tools": (
        "{solution}",
        "<think></think>{solution}",
        '<think>a</think>\n<tool_call>\n{{"name":"pay","parameters":{{}}}}\n</tool_call>',
        "<think>a</think>\n<response>b</response>",
        "<think>10+9=19. 19+9=28. 28/2=14.</think>\n<response>b</response>",
        "<tool_call>",
        "",
    ),
}
"""Completions of each prompt; one that is cut at the longest length is added."""


@dataclass(frozen=True)
class FirstBatch:
    """Completions of the first prompts, G for each, and what we make of them."""

    prompts: Sequence[Sequence[int]]
    """Tokens that our policy reads."""
    completions: Sequence[Sequence[Sequence[int]]]
    """Tokens of G completions for each prompt, with the end token unless they are cut."""
    rewards: Mapping[str, Sequence[float]]
    """Reward name -> N rewards, of those with a weight."""
    lengths: Tensor
    """Tokens of N completions."""
    weights: Tensor

    @property
    def values(self) -> Tensor:
        """Return the rewards [N, K]."""
        return torch.tensor(list(self.rewards.values()), dtype=torch.float64).T


def build_first_batch(
    request: TrainingRequest, directory: Path, problems: Sequence[str]
) -> FirstBatch:
    """Build completions for problems of an exported folder, and judge them by our own task."""
    spec, recipe = request.spec, make_recipe(request=request)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "policy")
    read = [Problem(**json.loads(text)) for text in problems]
    completions = [_tokenize(tokenizer, problem, spec.task, recipe) for problem in read]
    sampled = [tokens for group in completions for tokens in group]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    lengths = [len(tokens) for tokens in sampled]
    repeated = [problem for problem, group in zip(read, completions, strict=True) for _ in group]
    with build_task(spec.task, spec.training, spec.sandbox, spec.data, request.params) as task:
        scores = task.score(repeated, texts, lengths)
    shaping = build_shaping(request.params, spec.training, load_task_info(spec.task))
    shaped = shaping.apply(scores.rewards, lengths, scores.partial)
    names = [reward.name for reward in recipe.rewards]
    rewards = {name: [float(value or 0) for value in shaped[name]] for name in names}
    assert all(len(set(values)) > 1 for values in rewards.values())
    return FirstBatch(
        PromptFormat(tokenizer).encode([problem.prompt for problem in read]),
        completions,
        rewards,
        torch.tensor(lengths),
        torch.tensor(recipe.weights, dtype=torch.float64),
    )


def _tokenize(
    tokenizer: Any, problem: Problem, task: str, recipe: TrainingSetup
) -> list[list[int]]:
    solution = problem.data["solution"]
    texts = [text.format(solution=solution) for text in TEXTS[task]]
    tokens = [
        [*ids, tokenizer.eos_token_id]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
    ]
    longest = recipe.spec.training.max_completion_length
    cut = tokenizer(f"<answer>{solution}</answer>" * longest)["input_ids"][:longest]
    return [*(ids[:longest] for ids in tokens), cut]


def start_folder(
    directory: Path,
    stand_in: tuple[str, str],
    packages: Sequence[Path],
    batch: FirstBatch,
    *arguments: str,
    **environment: str,
) -> dict[str, Any]:
    """Start `run.sh` with arguments, and return what the library made of the first batch.

    `stand_in` is a command that it calls, and the program of `tests.support` that is run instead.
    """
    command, program = stand_in
    commands = directory.parent / f"{directory.name}-commands"
    commands.mkdir()
    file = commands / "batch.json"
    file.write_text(json.dumps({"completions": batch.completions}))
    script = commands / command
    source = ROOT / "tests" / "support" / program
    words = shlex.join([sys.executable, str(source), str(file)])
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o755)
    done = subprocess.run(
        ["bash", str(directory / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "RAY_AUTH_MODE": "disabled",
            "ANY_VERSION": "1",
            **environment,
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(file.read_text())
