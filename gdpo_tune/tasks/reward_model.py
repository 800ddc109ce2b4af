"""Reward models as reward functions: classifiers with one output, read as TRL reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gdpo_tune.core.errors import UsageError, get_first_line


class RewardModel:
    """The logit of `prompt + completion`, by a model from the Hub or a directory.

    Raises:
        UsageError: there is no such model, or its tokenizer cannot pad.
    """

    def __init__(self, name: str) -> None:
        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, output_loading_info=True
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, RuntimeError) as error:
            reason = get_first_line(error)
            raise UsageError(f"reward model {name} cannot be loaded: {reason}") from error
        self._model, report = loaded
        if missing := sorted(map(str, report["missing_keys"])):
            # They would be drawn at random, as trl#1379 has it.
            raise UsageError(
                f"reward model {name} lacks trained weights: {', '.join(missing)}\n    fix: name a "
                "classifier with one output, saved with its head, not a language model"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise UsageError(f"the tokenizer of reward model {name} has no pad or end token")
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        self._model.to(device).eval()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Return N rewards; conversations are read in the template of the reward model."""
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        if not isinstance(prompts[0], str):
            texts = [self._tokenizer.apply_chat_template(turns, tokenize=False) for turns in texts]
        inputs = self._tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(self._model.device)
        with torch.inference_mode():
            return self._model(**inputs).logits[:, 0].float().tolist()
