"""Recipe of the embedded policies: `python -m recipes.make_policy --task code`.

It takes demonstrations of the task's warm-start prompts, a tokenizer of its own, half a million
random parameters and a fixed number of supervised steps on one core. The result is written to
`--out`, by default into the package itself, with `measured.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.registry import describe_task
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.policies.load_policy import resolve_policy
from recipes.demonstrations import Frame, draw_mode, render
from recipes.tokenizer import (
    ANSWER_TAGS,
    END,
    PAD,
    TOOL_TAGS,
    build_tokenizer,
    get_token_id,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from gdpo_tune.tasks.base import Task
    from recipes.warm_start import Pair


@dataclass(frozen=True)
class Recipe:
    """Differences between the embedded policies."""

    frame: Frame
    tags: tuple[str, ...]
    """Entries of the vocabulary besides the learnt ones."""
    steps: int
    """Optimizer steps."""
    settings: TrainingSettings
    """Lengths with which the policy is measured, as in the task's sweep."""


RECIPES: Mapping[str, Recipe] = {
    "code": Recipe(
        Frame("", "<answer>", "</answer>"), ANSWER_TAGS, steps=1800, settings=TrainingSettings()
    ),
    "math": Recipe(
        Frame("\n", "<answer>", "</answer>"),
        ANSWER_TAGS,
        steps=2400,
        settings=TrainingSettings(max_completion_length=48, length_limit=14),
    ),
    "tools": Recipe(
        Frame("\n", "<tool_call>\n", "\n</tool_call>"),
        TOOL_TAGS,
        steps=2400,
        settings=TrainingSettings(max_completion_length=64, length_limit=24),
    ),
}
"""Task -> recipe of its policy."""
SEED = 0
PROMPTS = 20_000
DEMONSTRATIONS_PER_PROMPT = 3
HELD_OUT = 500
TOKENIZER_TEXTS = 5000


def main(argv: Sequence[str] | None = None) -> int:
    """Make the policy and return the exit status 0."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.make_policy", description="Make an embedded policy again."
    )
    parser.add_argument(
        "--task", choices=RECIPES, default="code", help="task that the policy is for"
    )
    parser.add_argument("--out", type=Path, help="target directory (default: in the package)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the task's)")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="warm-start prompts")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="prompts to measure on")
    args = parser.parse_args(argv)
    out = args.out or Path(resolve_policy(describe_task(args.task).embedded))
    steps = RECIPES[args.task].steps if args.steps is None else args.steps
    make(args.task, out, steps=steps, prompts=args.prompts, held_out=args.held_out)
    return 0


def make(task: str, out: Path, *, steps: int, prompts: int, held_out: int) -> None:
    """Train a policy, save it to `out` and measure it on `held_out` validation prompts."""
    import torch

    from recipes.warm_start import Schedule, fit

    torch.set_num_threads(1)  # sums in another order would give other weights
    torch.manual_seed(SEED)
    start = time.process_time()
    texts = list_demonstrations(task, prompts)
    tokenizer, pairs = tokenize(texts, RECIPES[task].tags)
    model = build_model(tokenizer)
    print_progress(
        f"{len(texts)} demonstrations, {len(tokenizer)} tokens, {model.num_parameters()} parameters"
    )
    schedule = Schedule(steps=steps)
    pad = get_token_id(tokenizer, PAD)
    loss = fit(model, pairs, schedule, pad=pad, seed=SEED, report=print_progress)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print_progress(f"saved to {out}")
    facts = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "demonstrations": len(texts),
        "schedule": asdict(schedule),
        "loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    if held_out:
        from recipes.measure import measure

        longest = RECIPES[task].settings.max_completion_length
        facts |= measure(model, tokenizer, build_task(task), longest, held_out, seed=SEED)
    (out / "measured.json").write_text(json.dumps(facts, indent=2) + "\n")
    print_progress(json.dumps(facts, indent=2))


def list_demonstrations(task: str, prompts: int) -> list[tuple[str, str]]:
    """Return (prompt, completion) of a task's warm-start split, several for each prompt."""
    rng = random.Random(f"demonstrations/{SEED}")
    frame = RECIPES[task].frame
    pairs: list[tuple[str, str]] = []
    for problem in build_task(task).problems("warm_start", prompts, SEED):
        for _ in range(DEMONSTRATIONS_PER_PROMPT):
            thought = problem.data["thoughts"][draw_mode(rng)]
            pairs.append((problem.prompt, render(thought, problem.data["solution"], rng, frame)))
    rng.shuffle(pairs)
    return pairs


def build_task(task: str) -> Task:
    """Build a task with the lengths with which its policy is measured."""
    return describe_task(task).build(RECIPES[task].settings)


def tokenize(
    texts: Sequence[tuple[str, str]], tags: Sequence[str]
) -> tuple[PreTrainedTokenizerFast, list[Pair]]:
    """Learn the tokenizer from some of the texts and encode all of them, end token included."""
    tokenizer = build_tokenizer(
        (prompt + completion for prompt, completion in texts[:TOKENIZER_TEXTS]), tags
    )
    end = get_token_id(tokenizer, END)
    prompts = tokenizer([prompt for prompt, _ in texts])["input_ids"]
    completions = tokenizer([completion for _, completion in texts])["input_ids"]
    pairs = [(p, [*c, end]) for p, c in zip(prompts, completions, strict=True)]
    return tokenizer, pairs


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama of half a million random parameters."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    pad, end = get_token_id(tokenizer, PAD), get_token_id(tokenizer, END)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=384,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def print_progress(line: str) -> None:
    """Print one line of progress at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
