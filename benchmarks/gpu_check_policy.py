"""Policies with random weights and a tokenizer to match, made without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

import gdpo_tune

VOCABULARY = 151_936
"""Tokens of the Qwen policies: the logits are as wide as theirs."""
PAD, END = 0, 1
"""Tokens of the embedded policy's tokenizer."""
TOKENIZER = Path(gdpo_tune.__file__).parent / "policies" / "embedded"
SHAPES: Mapping[str, Callable[[], Any]] = {
    "qwen3-0.6b": lambda: Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
}


def write_policy(directory: str, shape: str) -> int:
    """Write a policy with random weights and return its number of parameters.

    Args:
        directory: created if missing.
        shape: a key of `SHAPES`; the weights are those of the same architecture and size.
    """
    config = SHAPES[shape]()
    config.pad_token_id, config.eos_token_id = PAD, END
    torch.manual_seed(0)
    # On the CPU: on a device that does not work, the first step of the check has to say so.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    _write_tokenizer(target, config.vocab_size)
    return model.num_parameters()


def _write_tokenizer(directory: Path, size: int) -> None:
    """Write the embedded policy's tokenizer with a text for each of `size` tokens."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = [*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for token in range(1 + max(known), size):
        vocabulary[f"x{token:06d}"] = token  # no text becomes it, but it has a text
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TOKENIZER / "tokenizer_config.json", directory)
