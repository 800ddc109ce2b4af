"""How many trials share a process: as the file says, or as many as the memory of a GPU holds."""

import pytest

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.policy_shapes import find_known_size
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.gpu import check_gpu_share, choose_pack, measure_trial, settle_pack
from gdpo_tune.spec.spec_warnings import list_warnings
from tests.support.paths import ROOT

GIB = 2**30
SIZE = find_known_size("Qwen/Qwen2.5-0.5B-Instruct")
LORA = "model.lora_rank=32"


@pytest.fixture
def spec():
    def load(*overrides):
        path = ROOT / "search_spaces" / "math_qwen.yaml"
        return load_spec(path, [*overrides, "rollout.engine=vllm"], to_run=False)

    return load


def choose(spec, memory=80 * GIB, size=SIZE):
    return choose_pack(spec, size, lambda: memory)


def test_a_number_is_taken_as_it_is(spec):
    assert choose(spec("resources.pack=3", LORA), size=None) == (3, "as requested")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.lora_rank=0"], "every weight is trained"),
        ([LORA, "resources.gpus=0", "resources.cpus=1"], "on a CPU"),
        ([LORA, "rollout.sleep=true"], "rollout.sleep: true asks for an engine of its own"),
        ([LORA, "rollout.reuse_engine=false"], "rollout.reuse_engine: false asks for"),
    ],
)
def test_trials_that_gain_nothing_from_a_shared_process_get_their_own(spec, overrides, why):
    def read_device():
        raise AssertionError("the answer does not depend on it")

    choice = choose_pack(spec("resources.pack=auto", *overrides), SIZE, read_device)
    assert choice.value == 1
    assert why in choice.why


def test_trials_of_several_processes_share_none(spec):
    path = ROOT / "search_spaces" / "code.yaml"
    overrides = ["resources={pack: auto, workers: 2, gpus: 1}", LORA]
    choice = choose(load_spec(path, overrides, to_run=False))
    assert (choice.value, choice.why) == (1, "a trial has 2 processes of its own")


def test_auto_takes_as_many_as_fit_and_says_why(spec):
    asked = spec("resources.pack=auto", LORA)
    assert choose(asked, 141 * GIB) == (8, "at most 8; they fit in 151 GB")
    by_memory = {gib: choose(asked, gib * GIB).value for gib in (10, 12, 14, 24, 141)}
    counts = list(by_memory.values())
    assert counts == sorted(counts)
    assert counts[0] == 1
    some = next(gib for gib, count in by_memory.items() if 1 < count < 8)
    assert f"{by_memory[some]} fit in" in choose(asked, some * GIB).why
    half = spec("resources={pack: auto, gpus: 0.5}", LORA)
    assert choose(half, 48 * GIB).value == by_memory[24] > 1
    few = spec("resources.pack=auto", LORA, "search.trials=2")
    assert choose(few, 141 * GIB) == (2, "all trials of the sweep; they fit in 151 GB")


def test_auto_is_one_where_the_memory_is_not_known(spec):
    asked = spec("resources.pack=auto", LORA)
    assert choose(asked, None).value == 1
    assert "write a number" in choose(asked, None).why
    assert "size of the policy is unknown" in choose(asked, size=None).why


def test_a_trial_of_a_pack_has_its_part_of_the_process(spec, tmp_path):
    settled = settle_pack(spec("resources.pack=auto", LORA), 4)
    assert settled.resources.pack == 4
    assert settled.resources.total_gpus == 0.25
    alone = spec(LORA)
    assert alone.compute_identity() == settled.compute_identity()
    copy = tmp_path / "spec.yaml"
    copy.write_text(settled.dump_yaml())
    assert load_spec(copy, to_run=False) == settled


def test_more_trials_than_fit_are_refused_with_bytes_and_a_number_that_fits(spec):
    crowded = spec("resources.pack=64", LORA)
    alone = spec(LORA)
    assert SIZE is not None
    assert measure_trial(crowded, SIZE).weights > 5 * measure_trial(alone, SIZE).weights
    assert measure_trial(crowded, SIZE).engine.least > measure_trial(alone, SIZE).engine.least
    with pytest.raises(ResourcesError) as caught:
        check_gpu_share(crowded, SIZE, 24 * GIB)
    message = str(caught.value)
    assert "in 64 trials at a time takes at least" in message
    assert "GB for weights, gradients and moments" in message
    fit = int(message.partition("resources.pack=")[2].partition(",")[0])
    assert 1 <= fit < 64
    check_gpu_share(spec(f"resources.pack={fit}", LORA), SIZE, 24 * GIB)
    with pytest.raises(ResourcesError):
        check_gpu_share(spec(f"resources.pack={fit + 1}", LORA), SIZE, 24 * GIB)


def test_checkpoints_of_all_trials_of_a_process_count(spec, monkeypatch):
    monkeypatch.setattr(machine, "count_local_cpus", lambda: 8)
    monkeypatch.setattr(machine, "count_visible_gpus", lambda environment: 2)
    trials = spec("resources={pack: 4, gpus: 1, cpus: 1}", LORA)
    assert machine.count_local_slots(trials) == 8


def test_the_dry_run_tells_how_many_trials_share_a_process(spec):
    asked = spec("resources.pack=auto", LORA)
    choice = choose(asked, 141 * GIB)
    text = render_dry_run(settle_pack(asked, choice.value), SIZE, pack=choice)
    assert "# Trials a process: 8 (at most 8; they fit in 151 GB)" in text.splitlines()
    assert ", shared with up to 7 others" in text
    assert "  pack: 8" in text
    assert "Trials a process" not in render_dry_run(spec(LORA), SIZE)


def test_more_places_than_trials_are_a_warning(spec):
    (warning,) = [w for w in list_warnings(spec("resources.pack=40", LORA)) if ".pack" in w]
    assert warning.startswith("resources.pack = 40: the sweep has")
    assert not [w for w in list_warnings(spec("resources.pack=4", LORA)) if ".pack" in w]
