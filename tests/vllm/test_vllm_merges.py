"""Merges and checkpoints are evaluated on the engine that samples the trainings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trial_files import COMPLETIONS_FILE, read_steps
from gdpo_tune.core.trials import WITHOUT_ENGINE, Measurement, Outcome

pytestmark = pytest.mark.vllm

RANK = 8


@pytest.fixture
def build(build_config, tmp_path):
    """Return a builder of trials by name, which are judged by their likeliest completions."""

    def build_trial(name: str, *, rank: int = RANK, room: int = 2, **changes):
        config = build_config(steps=4, evaluation_temperature=0.0, learning_rate=1e-2)
        return replace(
            config,
            model=ModelSettings(lora_rank=rank),
            engine_rank=room * rank,
            directory=tmp_path / name,
            **changes,
        )

    return build_trial


def run_trial(config: TrialConfig) -> tuple[Outcome, list[Measurement]]:
    """Run a trial; return its outcome and what it reported."""
    from gdpo_tune.training import train  # late: what it imports warns

    reports = []
    outcome = train(config, resume=None, report=lambda measurement, _: reports.append(measurement))
    return outcome, reports


def train_parts(build, **form):
    """Train two policies; return the function that builds a merge of them."""
    ends = [run_trial(build(f"part-{seed}", seed=seed, **form))[0] for seed in range(2)]

    def build_merge(name: str, **changes):
        parts = tuple(TrainedPart(end.checkpoint, 0.5) for end in ends)
        return build(name, parts=parts, train=False, **form, **changes)

    return build_merge


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_merge_has_the_tokens_of_transformers_on_the_kept_engine(build, monkeypatch, rank):
    from gdpo_tune.training.engine import PROCESS_ENGINE, Engine

    built, syncs = [], []
    plain, forget = Engine.__init__, Engine.forget
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *args: (built.append(self), plain(self, *args))[1]
    )
    monkeypatch.setattr(
        Engine, "forget", lambda self, *args: (syncs.append(self), forget(self, *args))[1]
    )
    build_merge = train_parts(build, rank=rank)
    merged, _ = run_trial(build_merge("engine"))
    _, after = run_trial(build("part-1-again", seed=1, rank=rank))
    assert len(built) == 1, "one engine for trainings and merge"
    assert len(syncs) == 3
    transformers = RolloutSettings(engine="transformers")
    expected, _ = run_trial(build_merge("transformers", rollout=transformers))
    assert not PROCESS_ENGINE.has(PROCESS_ENGINE._key)
    files = [build(name).directory / COMPLETIONS_FILE for name in ("engine", "transformers")]
    assert files[0].read_text() == files[1].read_text()
    assert merged.test == expected.test
    assert merged.validation == expected.validation
    # the engine is as it was: a training after the merge is that before it
    again = {n: v for n, v in after[-1].metrics.items() if "time" not in n}
    before = read_steps(build("part-1").directory)[-1].metrics
    assert again == {name: before[name] for name in again}


def test_a_merge_above_the_room_of_the_engine_is_sampled_without_it(build):
    build_merge = train_parts(build, room=1)
    merged, _ = run_trial(build_merge("merge"))
    note = merged.environment[WITHOUT_ENGINE]
    assert note == f"of rank {2 * RANK}, and vLLM has room for {RANK}"
