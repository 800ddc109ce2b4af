"""Environment of NeMo-RL that gives the rewards, the tokens of a prompt, and rows of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_tune.exporters.glue.judging import WEIGHTS, judge_each, weigh
from gdpo_tune.exporters.glue.prompt_rows import READING, ExportedPrompt
from gdpo_tune.policies.prompts import PromptFormat


def build_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return the columns of a prompt for NeMo-RL's `ResponseDataset`."""
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return {"messages": messages, "problem": prompt.problem}


def process_prompt(
    row: Mapping[str, Any], spec: Any, tokenizer: Any, longest: int, number: int
) -> dict[str, Any]:
    """Return a prompt as NeMo-RL samples from it: the tokens that the searched policy read.

    One above `longest` tokens is cut and does not count in the loss, as in NeMo-RL's own.
    """
    import torch

    reader, turns = PromptFormat(tokenizer, **READING), row["messages"]
    plain = "\n\n".join(turn["content"] for turn in turns)
    prompt = plain if reader.template is None else turns
    tokens = torch.tensor(reader.encode([prompt])[0])
    fits = len(tokens) < longest
    text = reader.render(prompt)
    return {
        "message_log": [
            {"role": "user", "content": text, "token_ids": tokens if fits else tokens[:4]}
        ],
        "length": len(tokens),
        "extra_env_info": {"problem": row["problem"]},
        "loss_multiplier": 1.0 if fits else 0.0,
        "idx": number,
        "task_name": row["task_name"],
    }


class Judge:
    """Environment of one turn, whose `config` is the section `env.gdpo` of the configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(config["tokenizer"])
        self._longest: int = config["max_completion_length"]
        self._sums: bool = config["weighted_sum"]

    def step(
        self, logs: Sequence[Sequence[Mapping[str, str]]], metadata: Sequence[Mapping[str, str]]
    ) -> tuple[Any, ...]:
        """Return the rewards of N completions, and the end of N episodes.

        NeMo-RL passes no tokens on, so that a completion is tokenized again.
        """
        import torch

        texts = [turns[-1]["content"] for turns in logs]
        tokens = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths = [min(len(each) + 1, self._longest) for each in tokens]
        rewards = judge_each([entry["problem"] for entry in metadata], texts, lengths)
        separate = {
            f"reward/{name}": torch.tensor([each[name] or 0.0 for each in rewards])
            for name in WEIGHTS
        }
        sums = torch.tensor([weigh(each) for each in rewards])
        nothing = [{"role": "environment", "content": ""} for _ in texts]
        given = sums if self._sums else separate
        unknown = [None] * len(texts)
        return nothing, list(metadata), unknown, given, torch.ones(len(texts)), unknown

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch as it is, and no metrics."""
        return batch, {}

    def shutdown(self) -> None:
        """Leave the sandbox, if there is one, to the end of this process."""
