"""How many completions a sweep will sample."""

from __future__ import annotations

from dataclasses import dataclass

from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.schedulers import PbtSettings


@dataclass(frozen=True)
class Share:
    """A part of the budget."""

    what: str
    completions: int
    how: str
    """The calculation."""


def shares(spec: SweepSpec) -> list[Share]:
    """Where the budget goes: training and held-out evaluation.

    The two baselines are the untrained policy, which is evaluated only, and the published
    setting, which is trained like any trial. Replicates are counted as if all were needed.
    """
    settings, search = spec.training, spec.search
    validations = evaluations(spec)
    validation = settings.validation_prompts * settings.samples_per_prompt
    test = settings.test_prompts * settings.samples_per_prompt
    training = settings.steps * settings.completions_per_step
    replicates = search.replicates.most
    trained = search.trials + replicates + 1
    evaluation = trained * (validations * validation + test) + validation + test
    a_run = f"{validations} x {validation} + {test} a trained run"
    return [
        Share("search", search.trials * training, f"{search.trials} trials x {training}"),
        Share("replicates", replicates * training, f"{replicates} x {training}"),
        Share("published baseline", training, f"1 x {training}"),
        Share("held-out evaluation", evaluation, a_run),
    ]


def evaluations(spec: SweepSpec) -> int:
    """How often a trial answers validation prompts, rungs of successive halving aside."""
    settings, chosen = spec.training, spec.search.scheduler
    met = chosen.meetings(settings.steps) if isinstance(chosen, PbtSettings) else ()
    usual = range(settings.evaluate_every, settings.steps, settings.evaluate_every)
    return len(usual) + sum(step not in usual for step in met) + 1


def total(spec: SweepSpec) -> int:
    """Completions in all."""
    return sum(share.completions for share in shares(spec))
