"""Scoring of completions, and held-out evaluation.

A task's joint scores become reward functions in TRL's form, whose values are checked. Held-out
completions are sampled with their own generator; standard errors are clustered by prompt.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.metrics import estimate_metrics
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.shaping import Rewards, Shaping
from gdpo_tune.core.task_files import describe_task_error
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import (
    MOST_COMPLETIONS,
    REWARDS,
    Completion,
    shorten_completion,
    write_completions,
)
from gdpo_tune.core.trials import Estimate
from gdpo_tune.core.trl_fields import ITERATIONS
from gdpo_tune.policies.load_policy import list_end_tokens, read_position_limit
from gdpo_tune.tasks.base import (
    EvaluationFunction,
    Problem,
    RewardFunction,
    Scores,
    Split,
    Task,
    check_ranges,
    read_reward_values,
)
from gdpo_tune.training import distributed
from gdpo_tune.training.decoding import Decoding, keep_random_state
from gdpo_tune.training.distributed import gather_weights
from gdpo_tune.training.progress import TRAINING
from gdpo_tune.training.rollout import Generate
from gdpo_tune.training.turns import Sample, TurnLoop
from gdpo_tune.training.worker_cache import ProblemSet, WorkerCache

LogMetric = Callable[[str, float], None]
"""Callback of TRL by which a reward function logs a metric."""

_log = logging.getLogger(__name__)


def score_batch(
    task: Task,
    problems: Sequence[Problem],
    completions: Sequence[Any],
    tokens: Sequence[Sequence[int]],
    trainer_state: Mapping[str, Any],
    lengths: Sequence[int],
) -> Scores:
    """Let a task score N completions, and check their range if the task says it.

    `lengths` count the tokens of the policy, not those of tools.

    Raises:
        TrialFailure: a check fails.
    """
    scores = task.score(problems, completions, lengths, tokens, trainer_state)
    check_ranges(scores, task)
    return scores


def require_finite(
    values: Sequence[float | None], name: str, when: str, item: str = "completion"
) -> None:
    """Raise `NonFiniteError` at the first NaN or inf; None passes."""
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise NonFiniteError(f"{name} of {item} {row} is {value} {when}")


BeginScoring = Callable[[int, str], None]
"""Gets a problem's index and a completion of it, as soon as it is sampled."""


def build_early_scoring(task: Task, problems: Sequence[Problem]) -> BeginScoring | None:
    """Return a function that lets the task begin with a completion; None if it cannot."""
    begin: Any = getattr(task, "begin_scoring", None)
    return begin and (lambda problem, completion: begin(problems[problem], completion))


def build_reward_functions(
    task: Task, problems: Sequence[Problem], shaping: Shaping | None = None
) -> list[RewardFunction]:
    """Build one function per reward, in the order of `task.rewards`; all score a batch only once.

    They read the column `problem` of the data set, an index into `problems`. `shaping` changes the
    rewards of the task; None leaves them as they are.
    """
    shapes = shaping or Shaping()
    latest: tuple[Sequence[str] | None, Scores, Rewards] = (None, Scores({}, {}), {})
    warned: set[str] = set()

    def compute_reward(
        name: str,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        problem: Sequence[int],
        log_metric: LogMetric | None = None,
        trainer_state: Any = None,
        lengths: Sequence[int] | None = None,
        **_: Any,
    ) -> Sequence[float | None]:
        nonlocal latest
        if completions is not latest[0]:  # TRL calls one function after another on each batch
            state = dict(vars(trainer_state)) if trainer_state else {}
            state.pop("stateful_callbacks", None)  # they cannot be sent to another process
            lengths = lengths or [len(ids) for ids in completion_ids]
            judged = [problems[index] for index in problem]
            scores = score_batch(task, judged, completions, completion_ids, state, lengths)
            _refuse_many_failures(task, scores, len(completions))
            latest = completions, scores, shapes.apply(scores.rewards, lengths, scores.partial)
        scores, rewards = latest[1:]
        if log_metric is not None and name == task.rewards[0]:  # once a batch
            for metric, value in scores.logged:
                log_metric(metric, value)
        failed = scores.failures.get(name)
        if log_metric is not None and failed is not None:
            # Always logged, because all processes must log the same metrics.
            log_metric(f"{REWARDS}{name}/failed", len(failed) / len(completions))
            if failed and name not in warned:
                warned.add(name)
                first = next(iter(failed.values()))
                _log.warning("reward %s raised (reported once): %s", name, first)
        return rewards[name]

    functions: list[RewardFunction] = []
    for name in task.rewards:
        function: Any = functools.partial(compute_reward, name)
        function.__name__ = name
        functions.append(function)
    return functions


def _refuse_many_failures(task: Any, scores: Scores, count: int) -> None:
    """Raise TrialFailure if functions raised so often that it would change what is trained."""
    for name, failed in scores.failures.items():
        share = len(failed) / count
        if share > task.most_failed:
            raise TrialFailure(
                f"reward {name} raised for {share:.0%} of {count} completions, and at most "
                f"{task.most_failed:.0%} may fail (most_failed of its class); first: "
                f"{next(iter(failed.values()))}"
            )


@dataclass
class Evaluator:
    """Held-out evaluation of one trial's policy."""

    config: TrialConfig
    cache: WorkerCache
    sampler: Generate
    sampled: int = 0
    """Completions of all evaluations so far, those of other processes included."""
    unscored: dict[str, str] = field(default_factory=dict[str, str])
    """`not_scored.<split>.<reward>` -> how many completions of the last evaluation, and why."""

    def evaluate_test(self, model: PreTrainedModel, step: int) -> dict[str, Estimate]:
        """Estimate every metric on test prompts, and keep a few completions in a file."""
        kept: dict[int, Completion] = {}
        estimates = self.evaluate(model, "test", step, kept)
        of_all = dict(chain.from_iterable(part.items() for part in distributed.gather(kept)))
        if distributed.is_first():
            with explain_full_disk(self.config.directory, "some completions"):
                write_completions(self.config.directory, [of_all[row] for row in sorted(of_all)])
        return estimates

    def evaluate(
        self,
        model: PreTrainedModel,
        split: Split,
        step: int,
        kept: dict[int, Completion] | None = None,
    ) -> dict[str, Estimate]:
        """Estimate mean and standard error of every metric of the task.

        Trial, split and `step`, the steps of training so far, decide the seed; the global random
        state stays as it is. Of n processes, each takes every n-th prompt, and all get the
        estimates over all prompts. `kept` gets the first completion of each prompt of this process
        that `choose_shown_prompts` names, by the prompt's row.

        Raises:
            NonFiniteError: a metric is NaN or infinite.
            TrialFailure: a metric of `TrialConfig.required_metrics` has too few values.
        """
        settings, task = self.config.training, self.cache.task
        seed = derive_evaluation_seed(self.config.seed, split, step)
        held_out = self.cache.load_split(split)
        # Equal draws in every process would correlate the noise of different prompts.
        generator = torch.Generator().manual_seed(seed + distributed.get_rank())
        batches = self._sample(model, held_out, generator)
        prompts = len(held_out.prompts)
        shown = choose_shown_prompts(prompts)
        functions = getattr(task, "evaluations", {})
        sampled = [name for name in task.metrics if name not in functions]
        records: list[tuple[Any, ...]] = []  # number of a prompt, then one value per metric
        failures: dict[str, list[str]] = defaultdict(list)
        updates = self.config.updates_per_step
        state = {"global_step": step * updates, "max_steps": settings.steps * updates}
        for batch, texts, tokens, lengths in batches:
            problems = [held_out.problems[row] for row in batch]
            scores = score_batch(task, problems, texts, tokens, state, lengths)
            for name in sampled:
                require_finite(scores.metrics[name], f"metric {name}", f"on {split} prompts")
            for name, failed in scores.failures.items():
                failures[name] += failed.values()
            records += zip(batch, *(scores.metrics[name] for name in sampled), strict=True)
            for index, row in enumerate(batch):
                if kept is not None and row in shown and row not in kept:
                    values = {name: column[index] for name, column in scores.metrics.items()}
                    extra = {name: column[index] for name, column in scores.columns.items()}
                    prompt = problems[index].prompt
                    kept[row] = shorten_completion(prompt, texts[index], values, extra)
        self.sampled += prompts * settings.samples_per_prompt
        # Nothing is trained on these, so a judge that is away costs values and not the training.
        for name, errors in failures.items():
            text = f"{len(errors)} of {len(records)} completions: {errors[0]}" if errors else ""
            self.unscored[f"not_scored.{split}.{name}"] = text
        gathered = sorted(chain(*distributed.gather(records)), key=itemgetter(0))
        columns = {name: [r[i] for r in gathered] for i, name in enumerate(sampled, start=1)}
        estimates = estimate_metrics(columns, settings.samples_per_prompt, seed)
        for name, function in functions.items():
            estimates |= self._measure_policy(model, name, function, split, seed)
        for name in self.config.required_metrics:
            if name in task.metrics and name not in estimates:
                raised = f" ({failures[name][0]})" if failures[name] else ""
                raise TrialFailure(
                    f"metric {name}, an objective or a constraint, has no value on two {split} "
                    f"prompts{raised}: raise training.{split}_prompts, or judge another metric"
                )
        return estimates

    def _measure_policy(
        self,
        model: PreTrainedModel,
        name: str,
        function: EvaluationFunction,
        split: Split,
        seed: int,
    ) -> dict[str, Estimate]:
        """Estimate a metric that a function of the task measures on the policy itself.

        Each of several processes calls it; the values of the first one count.
        """
        task: Any = self.cache.task
        title, trains = f"evaluation {name} ({task.places[name]})", model.training
        model.eval()
        try:
            with keep_random_state(model.device), gather_weights(model), torch.no_grad():
                returned: Any = function(model, self.cache.tokenizer, split=split, seed=seed)
        except Exception as error:  # a user's function may raise anything
            raise TrialFailure(f"{title} raised {describe_task_error(error)}") from error
        finally:
            model.train(trains)
            TRAINING.note_progress()
        returned = distributed.gather(returned)[0]
        count = max(2, np.size(returned))  # one value has no standard error
        values = read_reward_values(returned, count, title, "item")
        require_finite(values, title, f"on {split}", "item")
        check_ranges(Scores({}, {name: values}), task, "item")
        return estimate_metrics({name: values}, 1, seed)

    def _sample(
        self, model: PreTrainedModel, held_out: ProblemSet, generator: torch.Generator
    ) -> list[tuple[list[int], *SampledBatch]]:
        """Sample this process's part; return rows of prompts, and the completions, by batch."""
        settings, tokenizer = self.config.training, self.cache.tokenizer
        decoding = build_decoding(settings, model, tokenizer)
        processes, prompts = distributed.count_processes(), len(held_out.prompts)
        own_rows = range(distributed.get_rank(), prompts, processes)
        rows = [row for row in own_rows for _ in range(settings.samples_per_prompt)]
        begin_scoring = build_early_scoring(self.cache.task, held_out.problems)
        batches: list[tuple[list[int], *SampledBatch]] = []

        def sample(asked: Sequence[Sequence[int]]) -> list[list[int]]:
            return self.sampler(model, asked, decoding, generator)

        # As many batches as the first process has: samplers may gather weights for each.
        most = -(-prompts // processes) * settings.samples_per_prompt
        size = settings.completions_per_step // processes
        for start in range(0, most, size):
            batch = rows[start : start + size]
            sampled = sample_completions(self.config, self.cache, held_out, batch, sample)
            if not batch:
                continue
            batches.append((batch, *sampled))
            if begin_scoring is not None:  # while the next batch is sampled
                for row, text in zip(batch, sampled[0], strict=True):
                    begin_scoring(row, text)
        return batches


SampledBatch = tuple[list[Any], list[list[int]], list[int]]
"""Completions, texts or messages; all their tokens; and how many of them the policy wrote."""


def sample_completions(
    config: TrialConfig,
    cache: WorkerCache,
    held_out: ProblemSet,
    rows: Sequence[int],
    sample: Sample,
) -> SampledBatch:
    """Sample a completion for each row of a split, in turns with the tools of the task, if any."""
    prompts = [held_out.prompts[row] for row in rows]
    if not cache.prompts.tools:
        tokens, codec = sample(prompts), cache.tokenizer
        texts: list[Any] = codec.batch_decode(tokens, skip_special_tokens=True) if tokens else []
        return texts, tokens, list(map(len, tokens))
    positions = read_position_limit(config.policy, config.model.revision) or sys.maxsize
    iterations = int(config.params.get(ITERATIONS, sys.maxsize))
    longest = config.training.max_completion_length
    loop = TurnLoop(cache.task, cache.prompts, longest, positions, iterations)
    problems = [held_out.problems[row] for row in rows]
    messages, tokens, masks = loop.run(problems, prompts, sample)
    return messages, tokens, list(map(sum, masks))


def build_decoding(
    settings: TrainingSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Decoding:
    """Return the settings with which held-out completions are sampled."""
    config: Any = model.generation_config  # of `build_neutral_decoding`
    return Decoding(
        max_new_tokens=settings.max_completion_length,
        temperature=settings.evaluation_temperature or None,
        end_tokens=list_end_tokens(tokenizer, config.eos_token_id),
        pad_token=config.pad_token_id,
    )


def choose_shown_prompts(count: int) -> frozenset[int]:
    """Draw the rows of the prompts whose completions are kept: the same in every trial."""
    rows = np.random.default_rng(0).permutation(count)[:MOST_COMPLETIONS]
    return frozenset(rows.tolist())


def derive_evaluation_seed(seed: int, split: str, step: int) -> int:
    """Derive the seed of an evaluation."""
    digest = hashlib.sha256(f"{seed}/{split}/{step}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
