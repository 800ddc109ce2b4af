"""A trial that trains nothing: it merges trained policies and evaluates the merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Measurement, Report
from gdpo_tune.policies.load_policy import keep_form, load_policy
from gdpo_tune.training import ranks
from gdpo_tune.training.checkpoints import Checkpoint, create_draft, write_checkpoint
from gdpo_tune.training.evaluation import Evaluator
from gdpo_tune.training.merging import check_parts, write_merge
from gdpo_tune.training.step_reporter import Clock, TrialWriterToken
from gdpo_tune.training.trl_arguments import choose_weights_dtype


def merge_and_validate(
    config: TrialConfig, evaluator: Evaluator, clock: Clock, report: Report
) -> tuple[PreTrainedModel, Checkpoint]:
    """Merge the parts of a trial, evaluate the merge on validation prompts, and report it.

    If `report` returns, the merge is kept as `checkpoint-0`; if it raises, nothing of it stays. The
    weights that are evaluated are those that `from_pretrained` reads from the checkpoint.

    Raises:
        TrialFailure: the parts cannot be merged.
        DiskFullError: there is no room for the merge.
    """
    check_parts(config.parts, evaluator.cache.initial)
    token = TrialWriterToken(config.directory) if ranks.is_first() else None
    with create_draft(config.directory, is_writer=token is not None) as draft:
        if token is not None:
            write_merge(config.parts, draft, evaluator.cache.take_policy)
            with explain_full_disk(config.directory, "the settings of a merge"):
                keep_form(draft, config.policy, config.model.revision)
        ranks.broadcast_from_first(None)  # it is written
        model = load_merge(config, draft)
        validation = evaluator.evaluate(model, "validation", 0)
        metrics = {f"validation/{name}": estimate.mean for name, estimate in validation.items()}
        cost = clock.read(0, evaluator.sampled)
        measurement = Measurement(0, metrics, cost, validation)
        if token is not None:
            token.check()
            with explain_full_disk(config.directory, "the measurement of a merge"):
                append_step(config.directory, measurement)
        report(measurement, None)
        checkpoint = None
        if token is not None:

            def fill(target: Path) -> None:
                for path in draft.iterdir():
                    path.rename(target / path.name)

            checkpoint = write_checkpoint(config.directory, 0, cost, fill, validation)
    checkpoint = ranks.broadcast_from_first(checkpoint)
    assert checkpoint is not None, "the first process has written it, or has raised"
    return model, checkpoint


def load_merge(config: TrialConfig, directory: Path) -> PreTrainedModel:
    """Load a merge as a trial of this configuration loads a policy."""
    model: Any = load_policy(str(directory), choose_weights_dtype(config.model))[0]
    return model.to("cuda") if torch.cuda.is_available() else model
