"""A program: load policies in one of three ways, and print the tokens that each takes greedily.

    python -m tests.real.greedy_tokens policy DIRECTORY ...          from_pretrained
    python -m tests.real.greedy_tokens adapter BASE DIRECTORY ...    PEFT's adapters on their base
    python -m tests.real.greedy_tokens registry URI MODEL ...        models of MLflow's registry

The last line is a JSON list: for each policy its tokens for each prompt, and the highest logit of
each first token, in which policies differ that say the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Ann has 17 pens and gets 9 more. How many pens does Ann have?",
    "A box holds 12 apples. How many apples are in 3 boxes?",
)
MOST_TOKENS = 16
ROUNDING = 0.5
"""Most by which rounding weights to bfloat16 may lower a logit beside another: four of its steps
between 16 and 32, where the highest ones are. A merge has .26."""


def sample_greedily(model: Any, tokenizer: Any) -> tuple[list[list[int]], list[float]]:
    """Return the tokens of a completion for each prompt, and the highest first logits."""
    completions: list[list[int]] = []
    logits: list[float] = []
    for prompt in PROMPTS:
        inputs = encode_prompt(tokenizer, prompt)
        sampled = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MOST_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        completions.append(sampled.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        logits.append(sampled.logits[0].max().item())
    return completions, logits


def encode_prompt(tokenizer: Any, prompt: str) -> Any:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )


def load_policies(*directories: str) -> Iterator[tuple[Any, Any]]:
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory)
        yield model, AutoTokenizer.from_pretrained(directory)


def load_adapters(base: str, *directories: str) -> Iterator[tuple[Any, Any]]:
    """Yield adapters joined with their base, as training joins them.

    A joined policy is rounded, so one whose adapter is apart may choose otherwise between tokens
    that are about equally likely. It has to give the joined policy's tokens up to `ROUNDING`.
    """
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(base)
    for directory in directories:
        precise = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        apart = PeftModel.from_pretrained(precise, directory)
        plain = AutoModelForCausalLM.from_pretrained(base)
        joined: Any = PeftModel.from_pretrained(plain, directory).merge_and_unload()
        for prompt, tokens in zip(PROMPTS, sample_greedily(joined, tokenizer)[0], strict=True):
            ids = encode_prompt(tokenizer, prompt)["input_ids"]
            row = torch.cat([ids, torch.tensor([tokens])], dim=1)
            with torch.no_grad():
                logits = apart(row).logits[0, ids.shape[1] - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            loss = (logits.max(dim=1).values - chosen).max().item()
            assert loss < ROUNDING, f"{directory}: {loss:.3f}"
        yield joined, tokenizer


def load_registered(uri: str, *models: str) -> Iterator[tuple[Any, Any]]:
    import mlflow
    from mlflow.transformers import load_model

    mlflow.set_tracking_uri(uri)
    for model in models:
        pipeline: Any = load_model(model)
        yield pipeline.model, pipeline.tokenizer


WAYS = {"policy": load_policies, "adapter": load_adapters, "registry": load_registered}

if __name__ == "__main__":
    torch.set_num_threads(1)  # threads that wait for a core of a busy machine take minutes
    way, *names = sys.argv[1:]
    print(json.dumps([sample_greedily(*loaded) for loaded in WAYS[way](*names)]))
