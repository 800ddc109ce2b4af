"""Self-check of a trial's first batch: engine, trainer and policy give tokens the same probability.

A few completions are read as the trainer reads them (in training mode) and plainly (each alone,
unpadded, in evaluation mode). The engine is compared by what it tells: vLLM the log-probabilities
of its samples, the fast CPU sampler those of the next token, all others the scores from which they
draw four tokens. Random states and results stay as they are.

Shapes: n completions of this process, R rows that are read, E entries of the vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.policies.load_policy import takes_argument
from gdpo_tune.training import distributed
from gdpo_tune.training.decoding import Decoding, cut_after_end
from gdpo_tune.training.distributed import gather_weights
from gdpo_tune.training.fast_cpu import LlamaDecoder
from gdpo_tune.training.rollout import (
    keeps_simple_cache,
    sample_from_cache,
    uses_fast_cpu,
)

LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.2}
"""Largest mean difference of a token's log-probability, in nats at a temperature of 1, by the
precision of the computation. Rounding alone gives 2e-6 and .03 for a SmolLM2 of 135M."""
_ROWS = 4
_TOKENS = 32
"""Tokens of a completion that are read."""
_DRAWN = 4
"""Tokens that are drawn where an engine has no log-probabilities of its samples."""
_CAUSES = {
    "trainer": "dropout or other noise in training mode, positions that count padding, or an "
    "attention mask that the architecture ignores",
    "engine": "settings of the policy's generation config that change what is sampled, other "
    "weights or another tokenizer in the engine, or a server without `--logprobs-mode "
    "processed_logprobs`",
}


def check_first_batch(trainer: Any, batch: Mapping[str, Any], *, dropout: bool = False) -> None:
    """Compare log-probabilities on a few of the n completions in `batch`, TRL's of a step.

    With `dropout`, which the trial keeps on purpose, the trainer's pass is computed without it. If
    the trainer differs that computes each prompt once, it goes on with padded batches.

    Raises:
        TrialFailure: two of the three differ by more than the limit of the precision, in any
            process of the trial; it is raised in all of them.
    """
    policy = trainer.policy
    bfloat16 = trainer.args.bf16 or policy.dtype == torch.bfloat16
    limit = LIMITS[torch.bfloat16 if bfloat16 else torch.float32] / min(1, trainer.temperature)
    training = policy.training
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        policy.train(training and not dropout)
        differences = _compare(trainer, batch)
        policy.train(training)
    parts = distributed.gather(differences)
    for name, causes in _CAUSES.items():
        worst = max((part[name] for part in parts), key=lambda gap: (math.isnan(gap), gap))
        if not worst <= limit:  # NaN differs too
            if name == "trainer" and not trainer.unshared:
                trainer.unshared = f"its first batch differed by {worst:.3g} nats a token"
                check_first_batch(trainer, batch, dropout=dropout)
                return
            raise TrialFailure(
                f"self-check of the first batch: the {name} and a plain forward pass of the same "
                f"policy differ by {worst:.3g} nats in the log-probability of a token, and the "
                f"limit is {limit:g} in {'bfloat16' if bfloat16 else 'float32'}: the trial would "
                f"not train the policy that it samples from. Likely causes: {causes}"
            )


def _compare(trainer: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean differences of trainer and engine from a plain forward pass."""
    policy: Any = trainer.policy
    lengths = batch["prompt_mask"].sum(dim=1)
    places = torch.linspace(0, len(lengths) - 1, min(_ROWS, len(lengths))).long()
    rows = lengths.argsort(stable=True)[places.to(lengths.device)]  # short and long prompts
    width = min(_TOKENS, batch["completion_ids"].shape[1])
    ids, mask = (
        torch.cat([batch[f"prompt_{kind}"][rows], batch[f"completion_{kind}"][rows, :width]], dim=1)
        for kind in ("ids", "mask")
    )
    of_trainer = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    present = mask[:, -width:].bool()
    policy.eval()
    texts, plain, chosen = list[Tensor](), list[Tensor](), list[Tensor]()
    with gather_weights(policy):
        for tokens, kept in zip(ids, mask.bool(), strict=True):
            count = int(kept[-width:].sum())
            texts.append(tokens[kept])
            plain.append(_read_plainly(trainer, texts[-1], count))
            chosen.append(plain[-1][:-1].gather(1, texts[-1][-count:, None])[:, 0])
        expected = torch.cat(chosen)
        if "sampling_per_token_logps" in batch:
            sampled = batch["sampling_per_token_logps"][rows, :width][present]
            engine = float((sampled - expected).abs().nanmean())  # NaN where vLLM could not tell
        elif uses_fast_cpu(trainer):
            after = LlamaDecoder(policy, [text.tolist() for text in texts], 0).logits
            own = (after / trainer.temperature).log_softmax(dim=-1)
            engine = _compute_distance(own, torch.stack([part[-1] for part in plain]))
        else:
            engine = _compare_scores(trainer, ids[:, :-width], mask[:, :-width])
    return {"trainer": float((of_trainer[present] - expected).abs().mean()), "engine": engine}


def _read_plainly(trainer: Any, tokens: Tensor, count: int) -> Tensor:
    """Return log-probabilities [count + 1, E] of what follows the last `count` + 1 prefixes."""
    network = trainer.policy
    fewer = {"logits_to_keep": count + 1} if takes_argument(network, "logits_to_keep") else {}
    with trainer.accelerator.autocast():
        logits = network(input_ids=tokens[None], use_cache=False, **fewer).logits
    return (logits[0, -count - 1 :].float() / trainer.temperature).log_softmax(dim=-1)


def _compare_scores(trainer: Any, ids: Tensor, mask: Tensor) -> float:
    """Return how far the scores from which tokens are drawn are from the policy's own."""
    policy: Any = trainer.policy
    if keeps_simple_cache(policy):
        kept: list[Tensor] = []
        prompts = [row[present.bool()].tolist() for row, present in zip(ids, mask, strict=True)]
        decoding = Decoding(_DRAWN, trainer.temperature, (), trainer._tokenizer.pad_token_id)
        with trainer.accelerator.autocast():
            new = torch.tensor(sample_from_cache(policy, prompts, decoding, scores=kept))
        scores, new = torch.stack(kept, dim=1).float() / trainer.temperature, new.to(ids.device)
    else:
        config = copy.deepcopy(trainer.generation_config)
        config.max_new_tokens, config.output_scores = _DRAWN, True
        config.return_dict_in_generate = True
        drawn = policy.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        scores, new = torch.stack(drawn.scores, dim=1).float(), drawn.sequences[:, ids.shape[1] :]
    distances: list[float] = []
    for row, tokens in enumerate(new):
        count = len(cut_after_end(tokens.tolist(), trainer.eos_token_ids))
        text = torch.cat([ids[row][mask[row].bool()], tokens[: count - 1]])
        own = scores[row, :count].log_softmax(dim=-1)  # [drawn, E]
        distances.append(_compute_distance(own, _read_plainly(trainer, text, count - 1)))
    return max(distances)


def _compute_distance(engine: Tensor, plain: Tensor) -> float:
    """Return the mean |difference| of log-probabilities [.., E], weighted by both probabilities.

    It is infinite if one of them excludes a token that the other allows.
    """
    weights = (engine.exp() + plain.exp()) / 2
    distances = torch.nan_to_num(weights * (engine - plain).abs(), nan=0.0, posinf=torch.inf)
    return float(distances.sum(dim=-1).mean())
