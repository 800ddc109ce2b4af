"""Writing of a trained policy, and a self-check that what is written reads back as trained.

An architecture, a version of PEFT or a tokenizer's class may lose weights, adapters or blanks
without a word. Sources: unsloth#5345, transformers#45488, vllm#48482.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gdpo_tune.core.errors import PolicyError, TrialFailure
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.policies.load_policy import PROBE, load_policy
from gdpo_tune.training import distributed
from gdpo_tune.training.checkpoints import create_draft
from gdpo_tune.training.decoding import keep_random_state
from gdpo_tune.training.lora import GatheredPolicy, gather_policy, save_policy
from gdpo_tune.training.self_check import TOKENS, change_weights, choose_limit, read_completions
from gdpo_tune.training.worker_cache import WorkerCache


def write_policy(
    trainer: Any,
    cache: WorkerCache,
    directory: Path,
    *,
    whole: bool,
    dtype: torch.dtype = torch.float32,
    gathered: GatheredPolicy | None = None,
) -> None:
    """Write the policy of a trainer with its tokenizer, prompts and decoding; see `save_policy`."""
    save_policy(trainer.model, directory, whole=whole, dtype=dtype, gathered=gathered)
    trainer.processing_class.save_pretrained(directory)
    cache.save_format(directory)


def check_written_policy(trainer: Any, cache: WorkerCache, directory: Path) -> None:
    """Write the policy below a trial's `directory`, load it afresh, and compare the two.

    Its weights are changed for a moment, because a policy whose change was lost agrees until then.
    One with adapters is written as a checkpoint and as a whole. It is loaded on the CPU.

    Raises:
        TrialFailure: tokens, prompts or log-probabilities differ, in all processes of the trial.
    """
    ids: list[int] = trainer.processing_class(PROBE, add_special_tokens=False)["input_ids"]
    pairs = [(ids[:1], ids[1:TOKENS])]
    has_adapters = hasattr(trainer.model, "peft_config")
    with (
        torch.no_grad(),
        keep_random_state(trainer.model.device),
        change_weights(trainer, pairs),
        explain_full_disk(directory, "the self-check of what is written"),
    ):
        expected = read_completions(trainer, pairs)
        for whole in (False, True) if has_adapters else (False,):
            gathered, problem = gather_policy(trainer.model, whole=whole), ""
            if distributed.is_first():
                with create_draft(directory, f"self-check-{whole}") as draft:
                    write_policy(trainer, cache, draft, whole=whole, gathered=gathered)
                    problem = _find_difference(trainer, cache, draft, ids, expected)
            if problem := distributed.broadcast_from_first(problem):
                form = "the whole policy" if whole and has_adapters else "a checkpoint"
                raise TrialFailure(f"self-check: {form} of this training, loaded afresh, {problem}")


def _find_difference(
    trainer: Any, cache: WorkerCache, draft: Path, ids: list[int], expected: torch.Tensor
) -> str:
    limit, precision = choose_limit(trainer)
    try:
        model, tokenizer = load_policy(str(draft), precision)
    except PolicyError as error:
        return f"is refused: {error}"
    if tokenizer(PROBE, add_special_tokens=False)["input_ids"] != ids:
        return f"splits {PROBE!r} into other tokens: save the tokenizer under a class that keeps it"
    if cache.prompts.template is not None:
        turns: Any = cache.prompts.build_messages(PROBE)
        options: Any = {"tools": [*cache.prompts.tools] or None, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        if text != (own := cache.prompts.render(PROBE)):
            return f"writes prompts as {text!r}, where the training reads {own!r}"
    tokens = torch.tensor([ids[:TOKENS]])
    logits = model.eval()(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    scores = (logits / trainer.temperature).log_softmax(dim=-1)
    apart = (scores.gather(1, tokens[0, 1:, None])[:, 0] - expected).abs().mean().item()
    if apart <= limit:
        return ""
    return (
        f"differs by {apart:.3g} nats in the log-probability of a token, and the limit is "
        f"{limit:g} in {precision}: its files lack what is trained\n"
        "    fix: another version of Transformers or PEFT, or other model.lora_targets"
    )
