"""A program: `unpack_policy.py SOURCE TARGET` makes a policy directory of a GGUF file.

Transformers reads such a file, with the package `gguf`, but does not write what it reads from it.
Its tokenizer takes the special tokens of another family, so they follow from the file's own ids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def unpack_policy(source: Path, target: Path) -> None:
    """Write the only GGUF file of a directory as one that `from_pretrained` reads, in bfloat16."""
    (file,) = source.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    config: Any = read.config
    del config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
    }
    for name, number in ids.items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(**{f"{name}_id": ids[name] for name in ids})
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    unpack_policy(*map(Path, sys.argv[1:]))
