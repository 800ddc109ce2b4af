"""Merges and checkpoints are evaluated on the engine that samples the trainings."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trial_files import COMPLETIONS_FILE, read_steps
from gdpo_tune.core.trials import WITHOUT_ENGINE
from tests.support.packs import run_side_by_side, run_trial

pytestmark = pytest.mark.vllm

RANK = 8
SHARES = ((0.25, 0.75), (0.5, 0.5), (0.75, 0.25))


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


def train_parts(train, build, **form):
    """Train two policies; return the function that builds a merge of them."""
    ends = [run_trial(train, build(f"part-{seed}", seed=seed, **form)) for seed in range(2)]
    assert [end.error for end in ends] == [None, None]

    def build_merge(name: str, shares=(0.5, 0.5), **changes):
        parts = tuple(
            TrainedPart(end.outcome.checkpoint, share)
            for end, share in zip(ends, shares, strict=True)
        )
        return build(name, parts=parts, train=False, **form, **changes)

    return build_merge


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_merge_has_the_tokens_of_transformers_on_the_kept_engine(build, monkeypatch, rank):
    from gdpo_tune.training import train
    from gdpo_tune.training.engine import PROCESS_ENGINES, Engine

    built, syncs = [], []
    plain, forget = Engine.__init__, Engine.forget
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *args: (built.append(self), plain(self, *args))[1]
    )
    monkeypatch.setattr(
        Engine, "forget", lambda self, *args: (syncs.append(self), forget(self, *args))[1]
    )
    build_merge = train_parts(train, build, rank=rank)
    merged = run_trial(train, build_merge("engine"))
    assert merged.error is None
    after = run_trial(train, build("part-1-again", seed=1, rank=rank))
    assert after.error is None
    assert len(built) == 1, "one engine for trainings and merge"
    assert len(syncs) == 3
    transformers = RolloutSettings(engine="transformers")
    expected = run_trial(train, build_merge("transformers", rollout=transformers))
    assert not PROCESS_ENGINES.has(PROCESS_ENGINES._key)
    files = [build(name).directory / COMPLETIONS_FILE for name in ("engine", "transformers")]
    assert files[0].read_text() == files[1].read_text()
    assert merged.outcome.test == expected.outcome.test
    assert merged.outcome.validation == expected.outcome.validation
    # the engine is as it was: a training after the merge is that before it
    again = {n: v for n, v in after.reports[-1].metrics.items() if "time" not in n}
    before = read_steps(build("part-1").directory)[-1].metrics
    assert again == {name: before[name] for name in again}


def test_a_merge_above_the_room_of_the_engine_is_sampled_without_it(build):
    from gdpo_tune.training import train

    build_merge = train_parts(train, build, room=1)
    merged = run_trial(train, build_merge("merge"))
    assert merged.error is None
    note = merged.outcome.environment[WITHOUT_ENGINE]
    assert note == f"of rank {2 * RANK}, and vLLM has room for {RANK}"


def test_merges_in_a_pack_are_adapters_in_one_batch(build, monkeypatch):
    from gdpo_tune.training import train
    from gdpo_tune.training.engine import Engine
    from gdpo_tune.training.shared_worker import SharedWorker

    batches = []
    plain = Engine.generate

    def generate(self, requests, on_finished=None):
        batches.append({request.adapter.lora_int_id for request in requests})
        return plain(self, requests, on_finished)

    monkeypatch.setattr(Engine, "generate", generate)
    pack = SharedWorker(3)
    build_merge = train_parts(pack.train, build)
    batches.clear()
    runs = run_side_by_side(
        *(
            functools.partial(run_trial, pack.train, build_merge(f"pack-{i}", shares))
            for i, shares in enumerate(SHARES)
        )
    )
    pack.close()
    assert [run.error for run in runs] == [None] * 3
    assert {1, 2, 3} in batches, "one batch for all three"
    for number, (run, shares) in enumerate(zip(runs, SHARES, strict=True)):
        config = build_merge(
            f"alone-{number}", shares, rollout=RolloutSettings(engine="transformers")
        )
        assert run.outcome.test == run_trial(train, config).outcome.test
