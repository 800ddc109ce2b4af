"""Reward models as reward functions: classifiers with one output, read as TRL reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gdpo_tune.core.errors import UsageError


class RewardModel:
    """The logit of `prompt + completion`, by a model from the Hub or a directory.

    Raises:
        UsageError: there is no such model, or its tokenizer cannot pad.
    """

    def __init__(self, name: str) -> None:
        try:
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"reward model {name} cannot be loaded: {reason}") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise UsageError(f"the tokenizer of reward model {name} has no pad or end token")
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        """Return N rewards."""
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        inputs = self._tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(self._model.device)
        with torch.inference_mode():
            return self._model(**inputs).logits[:, 0].float().tolist()
