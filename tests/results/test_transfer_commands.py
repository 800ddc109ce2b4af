"""`export` and `train --from` of candidates under another policy, data or lengths."""

import pytest

from gdpo_tune import export, train
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Part
from gdpo_tune.exporters.page import PAGE
from gdpo_tune.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.transfers import GIVEN, POLICY, store_sweep, transfer
from tests.support.tuning import build_outcome


@pytest.fixture
def sweep(tmp_path):
    return store_sweep(tmp_path)


def test_a_checkpoint_has_the_steps_that_are_asked_for(sweep):
    with Ledger.open(sweep) as ledger:
        params = ledger.get_records()[0].params
        ledger.start(params, "checkpoint", "candidate", 70, parts=[Part(0, 30, 1.0)])
        ledger.complete(1, build_outcome(0.9, 0.9, 0.5))
    assert transfer(sweep, which="0@30").spec.training.steps == 30
    assert transfer(sweep, POLICY, *GIVEN, which="0@30").spec.training.steps == 100
    limits = ["training.max_completion_length=128", "training.length_limit=50"]
    request = transfer(sweep, *limits, which="0@30")
    assert request.spec.training.steps == 30
    assert request.note.endswith("30 of 60 steps, with other lengths")


def test_mergekit_takes_no_recipe_and_no_parameters(sweep):
    with Ledger.open(sweep) as ledger:
        params = ledger.get_records()[0].params
        ledger.start(params, "search", "model", 71)
        ledger.complete(1, build_outcome(0.5, 0.9, 0.5))
        halves = [Part(0, 60, 0.5), Part(1, 60, 0.5)]
        ledger.start({}, "merge", "candidate", 72, parts=halves)
        ledger.complete(2, build_outcome(0.95, 0.95, 0.9))
    words = [f"{sweep.directory}:merge-2", "--to", "mergekit"]
    with pytest.raises(UsageError, match="a merge is no training"):
        export.main([*words, "--recipe", "code_qwen"])
    with pytest.raises(UsageError, match="has no effect"):
        export.main([*words, "--set", "space.beta=0"])


def test_nothing_is_written_before_the_refusal(sweep, tmp_path):
    out = tmp_path / "o"
    source = f"{sweep.directory}:0"
    with pytest.raises(UsageError, match="do not carry over"):
        export.main([source, "--to", "trl", "--out", str(out), "--set", POLICY])
    with pytest.raises(UsageError, match="do not carry over"):
        train.main(["--from", source, "--out", str(out), "--set", POLICY])
    assert not out.exists()


def test_the_page_begins_with_what_carries_over(sweep, tmp_path, capsys):
    out = tmp_path / "o"
    words = [word for each in (POLICY, *GIVEN) for word in ("--set", each)]
    assert export.main([f"{sweep.directory}:0", "--to", "verl", "--out", str(out), *words]) == 0
    page = (out / PAGE).read_text()
    head = page.partition("`verl.yaml` adapts")[0]
    assert "not what the sweep searched: another policy and other lengths" in head
    assert "measured on policy embedded, data the prompts that the task writes, 64 tokens" in head
    assert "`normalization grpo`, `group_size 8`" in head
    assert "`reward_weights.format 0.5`" in head
    assert "| `space.learning_rate` | 1e-4 | 1e-6 | `--set` |" in head
    assert "| `training.length_limit` | 26 | 200 | `--set` |" in head
    assert "Kept from the candidate, and perhaps wrong here: `beta 0`" in head
    assert "1 up to 26 tokens, else 0, in the sweep; 1 up to 200 tokens, else 0, here" in head
    printed = capsys.readouterr().out
    assert "carries over: normalization grpo, group_size 8" in printed
    assert "does not carry over to another policy and other lengths: policy" in printed
    assert "learning_rate 1e-6 (was 1e-4)" in printed


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"length_shape": "ramp"}, "falls from `training.length_limit` to the longest"),
        (
            {"length_shape": "overlong", "length_cache": 0.25},
            "1 up to 48 tokens, then in a line to 0 at 64, in the sweep; 1 up to 384 tokens, then "
            "in a line to 0 at 512, here. `length_cache` carries over as a share",
        ),
    ],
    ids=str,
)
def test_the_page_says_what_a_shape_in_tokens_means_now(tmp_path, shape, words):
    space = ["space.length_shape=[step, ramp, overlong]", "space.length_cache=[0.25]"]
    spec, out = store_sweep(tmp_path, shape, space), tmp_path / "o"
    export.main(
        [
            f"{spec.directory}:0",
            "--to",
            "trl",
            "--recipe",
            "code_qwen",
            "--reference-data",
            "--out",
            str(out),
        ]
    )
    assert words in (out / PAGE).read_text()


def test_a_page_without_a_transfer_says_nothing_of_it(sweep, tmp_path):
    export.main([f"{sweep.directory}:0", "--to", "trl", "--out", str(tmp_path / "o")])
    assert "carries over" not in (tmp_path / "o" / PAGE).read_text().lower()


def test_a_recipe_needs_a_sweep(tmp_path, capsys):
    file = str(ROOT / "search_spaces" / "code.yaml")
    with pytest.raises(UsageError, match="--recipe requires a sweep"):
        export.main([file, "--to", "trl", "--recipe", "code_qwen"])
    with pytest.raises(SystemExit):
        train.main([file, "--recipe", "code_qwen"])
    assert "--recipe requires --from" in capsys.readouterr().err
