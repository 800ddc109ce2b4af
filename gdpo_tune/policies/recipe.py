"""How the embedded policy was made: `python -m gdpo_tune.policies.recipe`.

Demonstrations of the code task's warm-start prompts, an own tokenizer, half a million random
parameters and a fixed number of supervised steps on one core. The result is written to `--out`,
by default into the package itself, with `measured.json` beside the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.policies.demonstrations import draw_mode, render
from gdpo_tune.policies.load import embedded_folder
from gdpo_tune.policies.tokenizer import END, PAD, build_tokenizer, token_id

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from gdpo_tune.policies.warm_start import Pair

STEPS = 1800
SEED = 0
PROMPTS = 20_000
DEMONSTRATIONS_PER_PROMPT = 3
HELD_OUT = 500
TOKENIZER_TEXTS = 5000


def main(argv: Sequence[str] | None = None) -> int:
    """Make the policy; the exit status is 0."""
    parser = argparse.ArgumentParser(
        prog="python -m gdpo_tune.policies.recipe", description="Make the embedded policy again."
    )
    parser.add_argument("--out", type=Path, default=Path(embedded_folder()), help="target folder")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="warm-start prompts")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="prompts to measure on")
    args = parser.parse_args(argv)
    make(args.out, steps=args.steps, prompts=args.prompts, held_out=args.held_out)
    return 0


def make(out: Path, *, steps: int, prompts: int, held_out: int) -> None:
    """Train a policy, save it to `out` and measure it on `held_out` validation prompts."""
    import torch

    from gdpo_tune.policies.warm_start import Schedule, fit

    torch.set_num_threads(1)  # sums in another order would give other weights
    torch.manual_seed(SEED)
    start = time.process_time()
    texts = demonstrations(prompts)
    tokenizer, pairs = tokenize(texts)
    model = build_model(tokenizer)
    say(
        f"{len(texts)} demonstrations, {len(tokenizer)} tokens, {model.num_parameters()} parameters"
    )
    schedule = Schedule(steps=steps)
    pad = token_id(tokenizer, PAD)
    loss = fit(model, pairs, schedule, pad=pad, seed=SEED, say=say)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    say(f"saved to {out}")
    facts = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "demonstrations": len(texts),
        "schedule": asdict(schedule),
        "loss": round(loss, 4),
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    if held_out:
        from gdpo_tune.policies.measure import measure

        facts |= measure(model, tokenizer, held_out, seed=SEED)
    (out / "measured.json").write_text(json.dumps(facts, indent=2) + "\n")
    say(json.dumps(facts, indent=2))


def demonstrations(prompts: int) -> list[tuple[str, str]]:
    """(prompt, completion) of the code task's warm-start split, several for each prompt."""
    from gdpo_tune.tasks.code_problems import generate

    rng = random.Random(f"demonstrations/{SEED}")
    pairs: list[tuple[str, str]] = []
    for problem in generate("warm_start", prompts, SEED):
        for _ in range(DEMONSTRATIONS_PER_PROMPT):
            thought = problem.data["thoughts"][draw_mode(rng)]
            pairs.append((problem.prompt, render(thought, problem.data["solution"], rng)))
    rng.shuffle(pairs)
    return pairs


def tokenize(texts: Sequence[tuple[str, str]]) -> tuple[PreTrainedTokenizerFast, list[Pair]]:
    """Learn the tokenizer from some of the texts and encode all of them, end token included."""
    tokenizer = build_tokenizer(
        prompt + completion for prompt, completion in texts[:TOKENIZER_TEXTS]
    )
    end = token_id(tokenizer, END)
    prompts = tokenizer([prompt for prompt, _ in texts])["input_ids"]
    completions = tokenizer([completion for _, completion in texts])["input_ids"]
    pairs = [(p, [*c, end]) for p, c in zip(prompts, completions, strict=True)]
    return tokenizer, pairs


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of half a million random parameters."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    pad, end = token_id(tokenizer, PAD), token_id(tokenizer, END)
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


def say(line: str) -> None:
    """Print one line of progress at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
