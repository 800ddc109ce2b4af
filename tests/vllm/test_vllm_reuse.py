"""A trial on the engine of earlier trials: bit for bit the trial of a process of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def run_process(directory: Path, rank: int, *trials: str):
    """Train trials in one process; return what the last one gave, and its seconds."""
    command = [sys.executable, "-m", "tests.vllm.trial_process", str(directory), str(rank), *trials]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer, answer.pop("seconds_to_first_step", None)


@pytest.mark.parametrize("rank", [0, 4], ids=["every weight", "adapters"])
def test_a_trial_after_others_is_bitwise_that_of_a_new_process(tmp_path: Path, rank: int):
    """One of the others was stopped, and one failed with NaN."""
    alone, cold = run_process(tmp_path / "alone", rank, "target")
    after, warm = run_process(tmp_path / "after", rank, "plain", "stopped", "diverges", "target")
    print(
        f"  {cold:.2f} s to the end of the first step with a new engine, {warm:.2f} s with another"
    )
    assert after == alone
    assert after["engines"] == 1
    assert [step for step, _ in after["reports"]] == [1, 2, 3, 4]
    assert after["test"]
    assert warm < cold


def test_the_untrained_policy_is_evaluated_alike_on_the_engine_of_a_failed_trial(tmp_path: Path):
    alone, _ = run_process(tmp_path / "alone", 4, "baseline")
    after, _ = run_process(tmp_path / "after", 4, "diverges", "baseline")
    assert after == alone
    assert after["engines"] == 1


def test_a_dead_engine_is_replaced(tmp_path: Path):
    alone, _ = run_process(tmp_path / "alone", 0, "target")
    after, _ = run_process(tmp_path / "after", 0, "dies", "target")
    assert (alone.pop("engines"), after.pop("engines")) == (1, 2)
    assert after == alone


def test_a_closed_engine_returns_its_memory(build_config):
    from gdpo_tune.training.engine import PROCESS_ENGINE
    from gdpo_tune.training.trial import build_trainer
    from gdpo_tune.training.worker_cache import open_worker_cache, release_worker_cache

    config = build_config()
    with open_worker_cache(config) as cache:
        trainer, _ = build_trainer(config, cache)
        engine = trainer.vllm_generation.llm.engine
        held = engine.run(list_tensors, engine.llm)
        assert len(held) > 5
        del trainer, engine, _
        PROCESS_ENGINE.close()
        gc.collect()
        assert [one for one in held if one() is not None] == []
    release_worker_cache()


def list_tensors(llm):
    worker = llm.llm_engine.model_executor.driver_worker
    tensors = (*worker.model_runner.kv_caches, *worker.get_model().parameters())
    return [weakref.ref(tensor) for tensor in tensors]
