"""A program: `random_policy.py KIND SOURCE TARGET` writes a small policy with random weights.

Its tokenizer, with the chat template, is that of the policy in SOURCE.
"""

from __future__ import annotations

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GenerationConfig,
    Qwen3Config,
)

CONFIGS = {"qwen3": Qwen3Config, "gemma3": Gemma3TextConfig}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
"""Of Gemma 3 alone: both of its kinds of layers."""
SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


def write_policy(kind: str, source: str, target: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    ends = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    torch.manual_seed(0)
    windows = WINDOWS if kind == "gemma3" else {}
    config = CONFIGS[kind](vocab_size=len(tokenizer), **SHAPES, **windows, **ends)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    write_policy(*sys.argv[1:])
