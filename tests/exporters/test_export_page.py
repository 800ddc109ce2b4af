"""The page of an export: the rows of `differences.md`, the candidate, the shaping."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import ExportError
from gdpo_tune.exporters import differences
from gdpo_tune.exporters.page import format_page
from gdpo_tune.exporters.write_export import MERGERS
from gdpo_tune.spec import checks
from tests.support.export import export_to, flatten, make_page, make_recipe, parse_settings
from tests.support.export_batch import PARTS

SWIFT_NEMO = ("ms-swift", "nemo-rl")
LIBRARIES = sorted({*registry.EXPORTERS} - {*MERGERS})
VLLM = ("rollout.engine=vllm", "resources.gpus=1")
SEQUENCE = (*VLLM, "rollout.importance_sampling=sequence_mask")
TOKEN = (*VLLM, "rollout.importance_sampling=token_truncate")
SUM, GRPO, KL = "space.normalization=grpo_no_std", "space.normalization=grpo", "space.beta=0.01"
AGAIN = ("training.train_prompts=100", "training.steps=60")
SITUATIONS = (
    (),
    (GRPO, KL),
    (SUM, KL, *TOKEN),
    (GRPO, "space.baseline=leave_one_out"),
    (*PARTS, KL, *AGAIN, "training.completions_per_step=48"),
    (*PARTS, "space.num_iterations=2", "training.completions_per_step=48"),
    (*PARTS, "space.loss_type=bnpo", "training.completions_per_step=48"),
    AGAIN,
    (*VLLM,),
    SEQUENCE,
    ("policy=org/nowhere",),
    ("training.optimizer=adamw_8bit",),
    ("space.prompt_selection=informative",),
)
"""Trainings of which each row of the table explains one."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_row_of_the_table_explains_a_training(library, monkeypatch):
    # an export needs no torchao here
    monkeypatch.setattr(checks, "importlib", MagicMock())
    found = set()
    for overrides in SITUATIONS:
        try:
            recipe = make_recipe(*overrides, is_chat=True)
            closed = replace(recipe, end_tokens=(1, 2), own_decoding={"eos_token_id": 1})
            for each in (recipe, closed):  # the latter with a template that ends turns otherwise
                found |= {row.topic for row in export_to(library, each).differences}
        except ExportError:
            continue
    for conditions, topic, *_ in differences.read_differences(library, differences.TRAINERS):
        pattern = re.sub(r"\\{\w+\\}", r".*", re.escape(topic))
        forced = "own sampling" in conditions  # see test_export_sampling
        assert forced or any(re.fullmatch(pattern, topic) for topic in found), topic


@pytest.mark.parametrize("declared", [[1, 2], [2], 2, 1, None])
def test_an_end_of_turns_that_the_policys_files_lack_is_said(declared):
    """Source: Qwen2.5-7B, whose generation_config.json lacks the `<|im_end|>` of its template."""
    recipe = make_recipe(end_tokens=(1, 2), own_decoding={"eos_token_id": declared})
    said = [row.ours for row in export_to("verl", recipe).differences]
    is_missing = "2" not in str(declared)
    assert ("also where the chat template ends a turn" in said) is is_missing


MISMATCH = "log-prob mismatch between vLLM and trainer"
PRECISION = "| computed in | bfloat16 on a GPU, float32 elsewhere | bfloat16"
KL_ROW = "| gradient of the KL | k3 times the ratio of probabilities"
SAID = [
    ("trl", (), "`scale_rewards` | no such key | has no effect beside"),
    ("axolotl", (), "adds the weighted rewards up before it normalizes"),
    ("ms-swift", (), "1e-8"),
    ("ms-swift", (), "a separate branch without gdpo"),
    ("verl", (), "whitened over tokens"),
    ("verl", (), "the newer trainer does not pass the single rewards on"),
    ("verl", (), 'see "Measured differences" in `docs/export.md` of gdpo_tune'),
    ("nemo-rl", (), "alphabetical by reward"),
    ("nemo-rl", (), "eps 0"),
    ("nemo-rl", (), "\n    NEMO_RL=/path/to/RL bash run.sh\n"),
    *(
        (library, (SUM, *SEQUENCE), f"{MISMATCH} | each completion is weighted")
        for library in SWIFT_NEMO
    ),
    ("ms-swift", (SUM, *TOKEN, KL), "each token is weighted by its probability in the trainer"),
    ("ms-swift", (SUM, *TOKEN, KL), "`token_truncate` above 3 | the same, but the KL is"),
    ("verl", (), PRECISION),
    ("nemo-rl", (), PRECISION),
    ("verl", ("model.dtype=float32",), "| computed in | float32 | bfloat16"),
    ("verl", (), "counts as a raw 0"),
    ("nemo-rl", (), "counts as a raw 0"),
    ("trl", (GRPO,), "counts as a raw 0"),
    ("axolotl", (KL,), "`use_bias_correction_kl` is off there, so the file turns it on"),
    ("verl", (KL, "space.num_iterations=2"), "do not multiply it by the ratio"),
    ("verl", (KL, "space.num_iterations=2"), KL_ROW),
    ("ms-swift", (KL,), "of k3 alone, which is not that of the reverse KL"),
    ("ms-swift", (KL,), KL_ROW),
    ("nemo-rl", (*PARTS, KL), "| ratio that multiplies the KL |"),
    *((library, PARTS, "gradients are 2 times smaller") for library in ("axolotl", "ms-swift")),
    *((library, PARTS, "loss_type dapo divides by") for library in ("verl", "nemo-rl")),
    *((library, PARTS, "whole groups where they fit") for library in SWIFT_NEMO),
    *((library, (), "| rollout engine |") for library in ("verl", "nemo-rl")),
    ("axolotl", (), "| weights that are trained | float32 | bfloat16 on a GPU"),
    ("axolotl", ("policy=org/nowhere",), "| tokens that end a completion |"),
    ("ms-swift", AGAIN, "| as in the file in every pass |"),
    ("ms-swift", (), "| per_device_train_batch_size x "),
    ("axolotl", (), "| micro_batch_size x "),
]
UNSAID = [
    *((library, (), MISMATCH) for library in ("ms-swift", "axolotl")),
    ("trl", VLLM, MISMATCH),
    ("ms-swift", (SUM, *TOKEN, "space.beta=0"), MISMATCH),
    ("ms-swift", (SUM, *VLLM, "rollout.importance_sampling=off"), MISMATCH),
    *((library, (), "computed in") for library in ("trl", "axolotl", "ms-swift")),
    *((library, ("model.dtype=bfloat16",), "computed in") for library in LIBRARIES),
    ("nemo-rl", ("model.dtype=float32",), "computed in"),
    ("trl", (), "counts as a raw 0"),
    *((library, (KL,), KL_ROW) for library in ("trl", "axolotl", "verl", "nemo-rl")),
    *((library, ("space.beta=0",), KL_ROW) for library in ("ms-swift", "verl")),
    ("nemo-rl", (KL,), "ratio that multiplies the KL"),
    ("trl", PARTS, "loss_type dapo divides by"),
    ("ms-swift", (*PARTS, "space.loss_type=grpo"), "loss_type grpo divides by"),
    *((library, PARTS, "whole groups") for library in ("trl", "axolotl", "verl")),
    *((library, VLLM, "| rollout engine |") for library in ("verl", "nemo-rl")),
    ("axolotl", ("model.dtype=float32",), "weights that are trained"),
    ("axolotl", ("model.lora_rank=8",), "weights that are trained"),
    ("trl", (), "sampling by the policy's own files"),
    ("trl", (), "make_prompts.py"),
]


@pytest.mark.parametrize(
    ("library", "overrides", "words", "is_said"),
    [*((*row, True) for row in SAID), *((*row, False) for row in UNSAID)],
)
def test_what_the_page_says_of_a_training(library, overrides, words, is_said):
    sizes = ("training.completions_per_step=48",) if PARTS[0] in overrides else ()
    assert (words in make_page(library, *sizes, *overrides)) is is_said


def test_the_page_describes_the_shaping_of_the_rewards():
    overrides = (
        *("space.length_shape=overlong", "space.length_cache=0.25", "space.partial_credit=true"),
        *("space.conditioning.length=correctness", "space.conditioning_threshold.length=0.5"),
    )
    text = make_page("trl", *overrides)
    shaped = "1 up to 48 tokens, then in a line to 0 at 64; 0 unless correctness is at least 0.5"
    assert f"| `length` | 0.25 | 0 to 1 | {shaped} |" in text
    assert "partial credit: the share of tests that pass" in text
    ramp = make_page("trl", "space.length_shape=ramp")
    assert "1 up to 26 tokens, then in a line to 0 at 64" in ramp


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_begins_with_the_candidate_and_ends_where_the_policy_is(library):
    recipe = make_recipe(trial_lines=("chosen by 'knee': trial 7: correctness 0.5", "one seed"))
    exported = export_to(library, recipe)
    page = format_page(recipe, exported)
    assert "- chosen by 'knee': trial 7: correctness 0.5\n- one seed\n" in page
    assert f"\n    {exported.start}\n" in page
    assert f"Then the policy is in `{exported.result}`." in page
    settings = map(str, flatten(parse_settings(exported)).values())
    written = "".join(settings) + exported.run + exported.conversion
    assert exported.result.removesuffix("/checkpoint-60") in written
    assert "make_prompts.py FILE" in format_page(recipe, exported, references_data=True)
