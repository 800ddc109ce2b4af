"""Self-checks of a trial: engine, trainer and policy give tokens the same probability.

In the first batch a few completions are read as the trainer reads them (in training mode) and
plainly (each alone, unpadded, in evaluation mode). The engine is compared by what it tells: vLLM
the log-probabilities of its samples, the fast CPU sampler those of the next token, all others the
scores from which they draw four tokens. Then vLLM, which has weights of its own, has to show that
it follows: they are changed for a moment, because an engine that never gets them agrees until they
have moved. Random states and results stay as they are. `StepJudge` compares engine and trainer in
all later steps.

Shapes: n completions of this process, C tokens of the longest one, R rows that are read, E entries
of the vocabulary, N tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gdpo_tune.core.errors import EngineDiedError, TrialFailure
from gdpo_tune.policies.load_policy import takes_argument
from gdpo_tune.training import distributed
from gdpo_tune.training.decoding import Decoding, cut_after_end, keep_random_state
from gdpo_tune.training.distributed import gather_weights
from gdpo_tune.training.fast_cpu import LlamaDecoder
from gdpo_tune.training.rollout import keeps_simple_cache, sample_from_cache, uses_fast_cpu

LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.2}
"""Largest mean difference of a token's log-probability, in nats at a temperature of 1, by the
precision of the computation. Rounding alone gives 2e-6 and .03 for a SmolLM2 of 135M."""
Pairs = list[tuple[list[int], list[int]]]
"""Tokens of prompts, each with those of a completion."""
_ROWS = 4
TOKENS = 32
"""Tokens of a completion that are read."""
_DRAWN = 4
"""Tokens that are drawn where an engine has no log-probabilities of its samples."""
_LEAST_MOVED, _MOVED = 0.05, 0.5
"""Mean change of a token's log-probability, in nats, that the noise has to cause, and should."""
_FOLLOWS = 4
"""An engine that follows is this many times closer than one that has missed the change."""
_NOISE, _DOUBLINGS = 0.02, 8
"""Noise on the weights by their root mean square, and how often it may be doubled."""
_BOUND, _ROUNDINGS = 0.05, 5
"""Largest mean difference in a step: the larger of `_BOUND` nats and `_ROUNDINGS` times that of the
first step, which is rounding."""
_LEAST_WEIGHT = 0.1
"""Least mean weight of what was sampled; below it next to nothing is learnt."""
_CAUSES = {
    "trainer": "dropout or other noise in training mode, positions that count padding, or an "
    "attention mask that the architecture ignores",
    "engine": "settings of the policy's generation config that change what is sampled, other "
    "weights or another tokenizer in the engine, or a server without `--logprobs-mode "
    "processed_logprobs`",
}


_CAUSES_OF_MISSED_WEIGHTS = (
    "Likely causes: weights or adapters that never reach the engine, an adapter whose modules are "
    "under other names there, or a cache of prompts that outlives the weights\n"
    "    fix: --set rollout.engine=transformers, or another version of vLLM"
)


def check_first_batch(trainer: Any, batch: Mapping[str, Any], *, dropout: bool = False) -> None:
    """Compare log-probabilities on a few of the n completions in `batch`, TRL's of a step.

    With `dropout`, which the trial keeps on purpose, the trainer's pass is computed without it. If
    the trainer differs that computes each prompt once, it goes on with padded batches.

    Raises:
        TrialFailure: two of the three differ by more than the limit of the precision, in any
            process of the trial; it is raised in all of them.
    """
    policy = trainer.model
    limit, precision = choose_limit(trainer)
    training = policy.training
    with torch.no_grad(), keep_random_state(policy.device):
        policy.train(training and not dropout)
        differences = _compare(trainer, batch)
        policy.train(training)
    parts = distributed.gather(differences)
    for name, causes in _CAUSES.items():
        worst = max((part[name] for part in parts), key=_rank_gap)
        if not worst <= limit:  # NaN differs too
            if name == "trainer" and not trainer.unshared:
                trainer.unshared = f"its first batch differed by {worst:.3g} nats a token"
                check_first_batch(trainer, batch, dropout=dropout)
                return
            raise TrialFailure(
                f"self-check of the first batch: the {name} and a plain forward pass of the same "
                f"policy differ by {worst:.3g} nats in the log-probability of a token, and the "
                f"limit is {limit:g} in {precision}: the trial would "
                f"not train the policy that it samples from. Likely causes: {causes}"
            )
    if trainer.use_vllm:
        rows = zip(batch["prompt_ids"], batch["prompt_mask"].bool(), strict=True)
        check_following(trainer, [ids[mask].tolist() for ids, mask in rows])


def choose_limit(trainer: Any) -> tuple[float, str]:
    """Return the limit for the precision of a trainer, and the name of that."""
    bfloat16 = trainer.args.bf16 or trainer.model.dtype == torch.bfloat16
    limit = LIMITS[torch.bfloat16 if bfloat16 else torch.float32] / min(1, trainer.temperature)
    return limit, "bfloat16" if bfloat16 else "float32"


@dataclass(frozen=True)
class FollowingFigures:
    """Mean absolute differences between engine and policy, in nats a token."""

    synced: float
    changed: float
    """After the weights were changed and sent."""
    cached: float
    """Of the same prompts once more, which come from the engine's cache."""
    restored: float
    missed: float
    """From the policy before the change: that of an engine which has missed it."""


def check_following(trainer: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Let vLLM show that it follows the weights, unless an earlier trial has seen that.

    It samples for the shortest and the longest of `prompts`, which are tokens.

    Raises:
        TrialFailure: it does not, in any process of the trial; it is raised in all of them.
    """
    steps: Any = getattr(trainer.vllm_generation, "llm", None)  # a server has none
    followed: set[object] = steps.engine.followed if hasattr(steps, "engine") else set()
    weights = trainer.model.named_parameters()
    trained = frozenset(name for name, weight in weights if weight.requires_grad)
    if trained in followed:
        return

    prompts = sorted(prompts, key=len)
    prompts = prompts[:: max(1, len(prompts) - 1)]
    with keep_random_state(trainer.model.device):
        figures = measure_following(trainer, prompts, TOKENS)
    parts = distributed.gather(figures)
    names = ("changed", "cached", "restored")
    gaps = {name: max((getattr(part, name) for part in parts), key=_rank_gap) for name in names}
    apart = max(gaps.values(), key=_rank_gap)
    missed = min(part.missed for part in parts)
    limit = min(choose_limit(trainer)[0], missed / _FOLLOWS)
    if apart <= limit:
        followed.add(trained)
        return
    raise TrialFailure(
        f"self-check of the engine: after a change of the weights it differs by {apart:.3g} nats a "
        f"token from the policy, by {missed:.3g} from the one before, and the limit is "
        f"{limit:.3g}: it would sample from another policy than the one in training "
        f"({', '.join(f'{name} {gap:.3g}' for name, gap in gaps.items())}). "
        f"{_CAUSES_OF_MISSED_WEIGHTS}"
    )


@torch.no_grad()
def measure_following(
    trainer: Any, prompts: Sequence[Sequence[int]], tokens: int
) -> FollowingFigures:
    """Change the weights, send them to the trainer's vLLM, restore them, and send them again.

    The policy is as before to the bit, and so is what vLLM has of it. Each completion has at most
    `tokens` tokens.
    """
    generation = trainer.vllm_generation

    def sample() -> tuple[Pairs, Tensor]:
        longest = generation.max_completion_length
        generation.max_completion_length = min(tokens, longest)
        try:
            _, completions, scores, _ = generation.generate(
                prompts=[list(prompt) for prompt in prompts], images=None, num_generations=1
            )
        finally:
            generation.max_completion_length = longest
        told = [math.nan if row[0] is None else row[0] for rows in scores for row in rows]
        pairs = [(list(a), list(b)) for a, b in zip(prompts, completions, strict=True)]
        return pairs, torch.tensor(told)

    def measure(sampled: tuple[Pairs, Tensor]) -> float:
        return float((sampled[1] - read_completions(trainer, sampled[0])).abs().mean())

    before = sample()
    synced = measure(before)
    with change_weights(trainer, before[0]):
        generation.sync_weights()
        first, again = sample(), sample()
        changed, cached = measure(first), measure(again)
    generation.sync_weights()
    return FollowingFigures(synced, changed, cached, measure(sample()), measure(first))


@contextmanager
def change_weights(trainer: Any, pairs: Pairs) -> Generator[float]:
    """Add noise to the trained weights in the block, and restore them exactly.

    Yields the mean absolute change of the log-probabilities of completions, which come with their
    prompts in `pairs`. A small one would be lost in rounding, so the noise grows.

    Raises:
        TrialFailure: the weights that are trained change nothing of what the policy computes.
    """
    before, size, moved = read_completions(trainer, pairs), _NOISE, 0.0
    # Only now: after a pass of its own a sharded policy may show its whole weights for a while.
    weights = [(n, w) for n, w in trainer.model.named_parameters() if w.requires_grad]
    local = [(n, w.to_local() if isinstance(w, DTensor) else w) for n, w in weights]
    kept = [weight.detach().to("cpu", copy=True) for _, weight in local]  # a GPU may be full
    draw = torch.Generator(trainer.model.device)
    try:
        for _ in range(_DOUBLINGS + 1):
            draw.manual_seed(0)
            for (name, weight), old in zip(local, kept, strict=True):
                noise = torch.randn(weight.shape, generator=draw, device=weight.device)
                # One factor of an adapter is 0 at first.
                scale = 1.0 if "lora_" in name else float(old.float().square().mean().sqrt())
                weight.copy_(old)
                weight.add_(noise, alpha=size * scale)
            change = (read_completions(trainer, pairs) - before).abs().mean()
            moved = min(distributed.gather(float(change)))
            if moved >= _MOVED:
                break
            size *= 2
        if not moved >= _LEAST_MOVED:
            raise TrialFailure(
                "self-check: noise on every trained weight moves the policy's "
                f"log-probabilities by {moved:.3g} nats a token, so training could not change it\n"
                "    fix: another policy, or --set model.lora_targets=[all-linear] with adapters"
            )
        yield moved
    finally:
        for (_, weight), old in zip(local, kept, strict=True):
            weight.copy_(old)


def read_completions(trainer: Any, pairs: Pairs) -> Tensor:
    """Return the log-probabilities [N] of the tokens of completions, on the CPU."""
    policy, training = trainer.model, trainer.model.training
    policy.eval()
    rows: list[Tensor] = []
    with gather_weights(policy):
        for prompt, completion in pairs:
            text = torch.tensor([*prompt, *completion], device=policy.device)
            new = text[len(prompt) :, None]
            plain = _read_plainly(trainer, text, len(new))[:-1]
            rows.append(plain.gather(1, new)[:, 0].cpu())
    policy.train(training)
    return torch.cat(rows)


def _rank_gap(gap: float) -> tuple[bool, float]:
    """Return a key by which NaN is the largest."""
    return math.isnan(gap), gap


class StepJudge:
    """Judge of engine and trainer in each step, by the N tokens that were sampled for it.

    TRL takes a token whose log-probability the engine does not know for equally likely in both, and
    drops completions that are too unlikely for the trainer. An engine that has lost the weights
    would so end as a success in which nothing was learnt. Source: trl#6166, trl#5312.
    """

    def __init__(self) -> None:
        self._rounding: float | None = None
        self._in_a_row = 0

    def judge(
        self, trainer: Any, sampled: Tensor, trained: Tensor, weights: Tensor | None = None
    ) -> float:
        """Return the mean |difference| of log-probabilities [N] over all processes, in nats.

        `weights` are those of TRL's correction, of tokens or completions.

        Raises:
            EngineDiedError: the engine tells NaN or inf, or two steps in a row differ by too much.
            TrialFailure: the correction leaves next to nothing in two steps in a row.
        """
        difference = sampled.double() - trained.double()
        weights = difference.neg().exp() if weights is None else weights.double()
        lost = ~sampled.isfinite() & trained.isfinite()  # those of the trainer are in its loss
        columns = (lost.double(), difference.abs(), torch.ones_like(difference))
        columns += (weights, torch.ones_like(weights))
        sums: Any = trainer.accelerator.reduce(torch.stack([c.sum() for c in columns]))
        missing, total, tokens, weight, weighed = sums.tolist()
        if not tokens:  # every completion was cut, and left out of the loss
            return 0.0
        where = trainer._describe_step()
        if missing:
            raise EngineDiedError(
                f"{missing:.0f} of {tokens:.0f} log-probabilities of the engine are NaN or "
                f"infinite at {where}"
            )
        apart, left = total / max(1.0, tokens), weight / max(1.0, weighed)
        rounding = self._rounding = apart if self._rounding is None else self._rounding
        bound = max(_ROUNDINGS * rounding, _BOUND)
        is_bad = apart > bound or left < _LEAST_WEIGHT
        self._in_a_row = self._in_a_row + 1 if is_bad else 0
        if self._in_a_row >= 2 and apart > bound:
            raise EngineDiedError(
                f"the engine no longer follows the policy: its log-probabilities differ by "
                f"{apart:.3g} nats a token at {where}, and the bound is {bound:.3g}"
            )
        if self._in_a_row >= 2:
            raise TrialFailure(
                f"the importance sampling correction leaves {left:.1%} of the samples at {where}, "
                f"although engine and trainer differ by {apart:.3g} nats a token: completions are "
                "too long for one weight each\n"
                "    fix: --set rollout.importance_sampling=token_truncate"
            )
        return apart


def _compare(trainer: Any, batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean differences of trainer and engine from a plain forward pass."""
    policy: Any = trainer.model
    lengths = batch["prompt_mask"].sum(dim=1)
    places = torch.linspace(0, len(lengths) - 1, min(_ROWS, len(lengths))).long()
    rows = lengths.argsort(stable=True)[places.to(lengths.device)]  # short and long prompts
    width = min(TOKENS, batch["completion_ids"].shape[1])
    masked = batch["completion_mask"]
    # One without a token was cut and left out of the loss: it has the full length.
    masked = masked.masked_fill(masked.sum(dim=1, keepdim=True) == 0, 1)
    ids = torch.cat([batch["prompt_ids"][rows], batch["completion_ids"][rows, :width]], dim=1)
    mask = torch.cat([batch["prompt_mask"][rows], masked[rows, :width]], dim=1)
    of_trainer = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    present = mask[:, -width:].bool()
    # Tokens of tools have no log-probability of an engine.
    from_policy = batch.get("tool_mask", masked)[rows, :width][present].bool()
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
            engine = float((sampled - expected)[from_policy].abs().mean())
        elif uses_fast_cpu(trainer):
            after = LlamaDecoder(policy, [text.tolist() for text in texts], 0).logits
            own = (after / trainer.temperature).log_softmax(dim=-1)
            engine = _compute_distance(own, torch.stack([part[-1] for part in plain]))
        else:
            engine = _compare_scores(trainer, ids[:, :-width], mask[:, :-width])
    return {"trainer": float((of_trainer[present] - expected).abs().mean()), "engine": engine}


def _read_plainly(trainer: Any, tokens: Tensor, count: int) -> Tensor:
    """Return log-probabilities [count + 1, E] of what follows the last `count` + 1 prefixes."""
    network = trainer.model
    fewer = {"logits_to_keep": count + 1} if takes_argument(network, "logits_to_keep") else {}
    with trainer.accelerator.autocast():
        logits = network(input_ids=tokens[None], use_cache=False, **fewer).logits
    return (logits[0, -count - 1 :].float() / trainer.temperature).log_softmax(dim=-1)


def _compare_scores(trainer: Any, ids: Tensor, mask: Tensor) -> float:
    """Return how far the scores from which tokens are drawn are from the policy's own."""
    policy: Any = trainer.model
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
