"""The commands with a real policy: a sweep that is killed and resumed, and what follows from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gdpo_tune.core.trials import WITHOUT_ENGINE
from gdpo_tune.results.open_sweep import Sweep, find_sweep
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.real.greedy_tokens import ROUNDING
from tests.real.real_sweeps import STORE, RealSweep, run_program, sample_in_process
from tests.support.killed_sweeps import kill_driver, wait_for_condition

pytestmark = pytest.mark.real

TRAINED = 1
"""Number of a trial whose policy is published and exported."""


@pytest.fixture(scope="module")
def killed(workplace: Path, policy: Path) -> RealSweep:
    """Return a sweep whose driver was killed during a trial, and which then ran to its end."""
    return kill_and_resume(RealSweep(workplace, "words", policy, trials=3, steps=3, merges=2))


def kill_and_resume(sweep: RealSweep) -> RealSweep:
    """Kill the driver of a sweep during its first trainings, and run it to its end."""
    trial = sweep.directory / "trials" / str(TRAINED)
    with sweep.start() as process:  # a step without its checkpoint would be trained again
        wait_for_condition(
            process, lambda: find_newest_checkpoint(trial) is not None, sweep.read_log
        )
        kill_driver(process, whole_machine=False)
    sweep.run()
    return sweep


@pytest.fixture(scope="module")
def ended(killed: RealSweep) -> Sweep:
    return killed.check_end()


@pytest.fixture(scope="module")
def merged(killed: RealSweep) -> Path:
    """Return the adapter of a merge that the command asked for."""
    words = ("runs/words", "--weights", "1=0.5,2=0.5")
    run_program("-m", "gdpo_tune.merge", *words, cwd=killed.workplace)
    records = find_sweep(str(killed.workplace / "runs" / "words")).records
    policy = next(r.checkpoint for r in records if r.role == "merge" and r.request)
    assert policy is not None
    return policy


@pytest.fixture(scope="module")
def published(killed: RealSweep) -> Path:
    return publish(killed, TRAINED)


def publish(sweep: RealSweep, trial: int) -> Path:
    """Return the directory that a policy would be published from."""
    words = (f"runs/{sweep.name}:{trial}", "--to", f"someone/{sweep.name}", "--dry-run")
    licence = ("--license", "apache-2.0", "--out", "published")
    run_program("-m", "gdpo_tune.publish", *words, *licence, cwd=sweep.workplace)
    return sweep.workplace / "published" / sweep.name


@pytest.fixture(scope="module")
def collected(killed: RealSweep) -> Path:
    """Return what TRL trained in an export for two steps, named by the steps of the trial."""
    workplace, source = killed.workplace, f"runs/words:{TRAINED}"
    run_program("-m", "gdpo_tune.export", source, "--to", "trl", "--out", "trl", cwd=workplace)
    short = ("--max_steps", "2", "--logging_steps", "1")
    run_program("trl/run.sh", *short, cwd=workplace, program="bash")
    words = (source, "--collect", "trl", "--out", "collected")
    run_program("-m", "gdpo_tune.export", *words, cwd=workplace)
    return workplace / "collected" / "checkpoint-3"


def test_a_killed_sweep_resumes_and_ends_with_a_front(ended: Sweep):
    assert ["finished" in session for session in ended.sessions] == [False, True]
    merges = [record for record in ended.records if record.role == "merge"]
    assert merges
    assert {record.state for record in merges} <= {"complete", "pruned"}
    assert (ended.spec.directory / "report.html").stat().st_size > 0


def test_every_way_of_loading_gives_the_same_tokens(
    killed: RealSweep, ended: Sweep, merged: Path, published: Path, collected: Path
):
    workplace = killed.workplace
    trained, knee = ended.records[TRAINED], ended.front.knee
    assert knee is not None
    kept = [str(record.checkpoint) for record in (trained, ended.records[knee.first])]
    assert all((Path(path) / "adapter_model.safetensors").is_file() for path in kept)
    size = sum(file.stat().st_size for file in killed.directory.rglob("*") if file.is_file())
    assert size < (killed.policy / "model.safetensors").stat().st_size, "no whole policy is kept"
    policies = [killed.policy, *kept, published, collected, merged]
    base, *sampled = sample_in_process("policy", *map(str, policies), cwd=workplace)
    assert all(each.logits != base.logits for each in sampled), "training has no effect"
    registered = sample_in_process("registry", STORE, "models:/words@knee", cwd=workplace)
    assert registered == [sampled[1]]
    adapters = [published / "adapter", collected / "adapter", merged]
    own, *joined = sample_in_process("adapter", killed.policy, kept[0], *adapters, cwd=workplace)
    assert own == joined[0], "an adapter is published as it is"
    # a merge's files are an adapter alone, which is not rounded: the program compares it
    assert [each.tokens for each in joined[:2]] == [each.tokens for each in sampled[2:4]]


def test_a_sweep_trains_every_weight(workplace: Path, policy: Path):
    sweep = RealSweep(workplace, "whole", policy, rank=0)
    knee = sweep.run().front.knee
    assert knee is not None
    checkpoint = sweep.directory / "trials" / str(knee.first) / "checkpoint-2"
    registered = sample_in_process("registry", STORE, "models:/whole@knee", cwd=workplace)
    assert sample_in_process("policy", checkpoint, cwd=workplace) == registered


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_architectures_share_prompts_and_load_again(workplace: Path, policy: Path, kind: str):
    base = workplace / f"{kind}-policy"
    run_program("-m", "tests.real.random_policy", kind, policy, base)
    sweep = RealSweep(workplace, kind, base)
    record = sweep.run().records[TRAINED]
    assert record.checkpoint is not None
    (sampled,) = sample_in_process("policy", record.checkpoint, cwd=workplace)
    (joined,) = sample_in_process("adapter", base, record.checkpoint, cwd=workplace)
    assert sampled.logits == pytest.approx(joined.logits, abs=ROUNDING)


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_a_sweep_with_vllm_is_killed_and_its_merges_are_adapters(workplace: Path, policy: Path):
    # one engine in memory
    sweep = RealSweep(workplace, "vllm", policy, engine="vllm", merges=2, cpus=2)
    ended = kill_and_resume(sweep).check_end()
    merges = [record for record in ended.records if record.role == "merge"]
    assert merges
    assert {record.state for record in merges} <= {"complete", "pruned"}
    assert all(WITHOUT_ENGINE not in record.environment for record in merges)
    kept, published = ended.records[TRAINED].checkpoint, publish(sweep, TRAINED)
    assert kept is not None
    (whole,) = sample_in_process("policy", published, cwd=workplace)
    own, joined = sample_in_process("adapter", policy, kept, published / "adapter", cwd=workplace)
    assert own == joined, "an adapter is published as it is"
    assert joined.tokens == whole.tokens
    words = (f"runs/vllm:{TRAINED}", "--to", "trl", "--out", "trl-vllm")
    run_program("-m", "gdpo_tune.export", *words, cwd=workplace)
    assert "use_vllm: true" in (workplace / "trl-vllm" / "grpo.yaml").read_text()
