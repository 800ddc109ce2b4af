"""A toy task and a tiny random policy, so that training runs in seconds and needs no sandbox."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tasks.base import Problem, Scores

SETTINGS = TrainingSettings(
    steps=3,
    completions_per_step=16,
    max_completion_length=8,
    length_limit=4,
    train_prompts=12,
    validation_prompts=6,
    test_prompts=6,
    samples_per_prompt=2,
    evaluate_every=2,
    checkpoint_every=2,
)


def mark_slow_cases(
    cases: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]
) -> list[Any]:
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [c if c in quick else pytest.param(*c, marks=pytest.mark.slow) for c in cases]


class ToyTask:
    """A task whose rewards vary on random text: letters of the prompt, vowels, shortness."""

    rewards = ("hits", "vowels", "length")
    metrics = ("hits", "length")
    instructions = ""
    opened = 0
    closed = 0

    def __init__(self, settings: TrainingSettings, sandbox=None, data=None) -> None:
        self.settings = settings
        self.sandbox = sandbox
        ToyTask.opened += 1

    def problems(self, split, count, seed):
        letters = string.ascii_lowercase
        first = {"warm_start": "w", "train": "t", "validation": "v", "test": "e"}[split]
        return [
            Problem(prompt=first + letters[i % 26] * (1 + i // 3) + "=", family="toy")
            for i in range(count)
        ]

    def score(self, problems, completions, lengths, *_):
        hits = [
            float(sum(c in problem.prompt for c in text))
            for problem, text in zip(problems, completions, strict=True)
        ]
        vowels = [float(sum(c in "aeiou" for c in text)) for text in completions]
        short = [float(length <= self.settings.length_limit) for length in lengths]
        return Scores(
            rewards={"hits": hits, "vowels": vowels, "length": short},
            metrics={"hits": hits, "length": short},
            partial={"hits": [hit**0.5 for hit in hits]},
        )

    def environment(self):
        return {"judge": "toy"}

    def close(self):
        ToyTask.closed += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


RANGES = {"hits": (0.0, 8.0), "vowels": (0.0, 8.0), "length": (0.0, 1.0)}


TOY = TaskInfo(ToyTask, RANGES, {}, {}, "embedded", length_reward="length", partial_reward="hits")
TARGET = f"{__name__}:TOY"
"""The toy task's line in `registry.TASKS`."""


def register_toy_task(monkeypatch, task: type = ToyTask) -> None:
    monkeypatch.setitem(globals(), "TOY", replace(TOY, build=task))
    monkeypatch.setitem(registry.TASKS, "toy", TARGET)


def write_policy(directory: Path, layers: int = 2, kv_heads: int = 2, width: int = 32) -> str:
    """Write a random Llama policy over lower-case letters and return its directory."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase, "="])
    }
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        **ends,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def write_gpt2(directory: Path, generation: dict[str, Any] | None = None, **changes) -> str:
    """Write a random GPT-2, whose positions are learned, and whose modules are Conv1D.

    It has no dropout unless `changes` of its config give it some. `generation` are entries of its
    generation_config.json, which are not checked.
    """
    import json

    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    write_policy(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **ends}
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    settings |= {"vocab_size": len(tokenizer), "initializer_range": 0.2, **changes}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**settings)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    entries = {"eos_token_id": 1, "pad_token_id": 0, **(generation or {})}
    (directory / "generation_config.json").write_text(json.dumps(entries))
    return str(directory)


def build_trial_config(
    policy: str, directory: Path, seed: int = 0, settings=SETTINGS, **params
) -> TrialConfig:
    """Build a complete config; `params` such as `group_size=8`."""
    infos = list_parameters(TOY)
    defaults = {name: info.default for name, info in infos.items()}
    complete = {**defaults, "group_size": 4, "learning_rate": 1e-2, **params}
    return TrialConfig("toy", policy, seed, complete, settings, directory)


def run(config: TrialConfig, resume: Path | None = None):
    """Return the reports, each a measurement and a path, and the outcome of a trial."""
    from gdpo_tune.training import train

    reports = []
    outcome = train(config, resume=resume, report=lambda m, path: reports.append((m, path)))
    return reports, outcome


def stop_after(config: TrialConfig, step: int, reason: type[BaseException] = SystemExit) -> Path:
    """Run until the report of a step raises; return the newest checkpoint."""
    from gdpo_tune.training import train
    from gdpo_tune.training.checkpoints import find_newest_checkpoint

    def report(measurement, _):
        if measurement.step == step:
            raise reason

    with pytest.raises(reason):
        train(config, resume=None, report=report)
    newest = find_newest_checkpoint(config.directory)
    assert newest is not None
    return newest


def have_same_weights(one: Path, other: Path) -> bool:
    import torch

    from gdpo_tune.policies.load_policy import load_policy

    ours, theirs = (load_policy(str(path))[0].state_dict() for path in (one, other))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def build_plain_trainer(policy: str, directory: Path, cls: type | None = None, **changes):
    """Build TRL's trainer (or `cls`) on the tiny policy, with one constant reward by default."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from gdpo_tune.policies.load_policy import load_policy

    model, tokenizer = load_policy(policy)
    own = ("normalization", "rollout_func", "shared_prompts", "limit")
    extra = {key: changes.pop(key) for key in own if key in changes}
    rewards = changes.pop("reward_funcs", [score_constantly])
    letters = string.ascii_lowercase
    usual = [letter * (1 + i % 5) + "=" for i, letter in enumerate(letters)]
    prompts = changes.pop("prompts", usual)
    arguments = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        **changes,
    }
    trainer = (cls or GRPOTrainer)(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def compute_trl_advantages(trainer, rewards, weights, group, aggregation, scale_rewards):
    import torch

    count = len(rewards)
    trainer.multi_objective_aggregation = aggregation
    trainer.scale_rewards = scale_rewards
    trainer.model.train()
    trainer.num_generations = group
    trainer.reward_weights = torch.tensor(weights, dtype=rewards.dtype)
    trainer.reward_funcs = trainer.reward_func_names = [f"r{k}" for k in range(len(weights))]
    ids = [[5]] * count
    trainer._generate = lambda prompts: (ids, ids, None, ["a"] * count, None, {}, None, [])
    trainer._calculate_rewards = lambda *_: rewards
    return trainer._generate_and_score_completions([{"prompt": "a"}] * count)["advantages"]


def score_constantly(completions, **_):
    return [0.0] * len(completions)
