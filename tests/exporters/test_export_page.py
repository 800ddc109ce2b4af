"""The page of an export: the rows of `differences.md`, the candidate, the shaping."""

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
from tests.support.tables import cases

LIBRARIES = sorted({*registry.EXPORTERS} - {*MERGERS})
VLLM = ("rollout.engine=vllm", "resources.gpus=1")
SHORT = {
    "SUM": ("space.normalization=grpo_no_std",),
    "GRPO": ("space.normalization=grpo",),
    "KL": ("space.beta=0.01",),
    "VLLM": VLLM,
    "SEQUENCE": (*VLLM, "rollout.importance_sampling=sequence_mask"),
    "TOKEN": (*VLLM, "rollout.importance_sampling=token_truncate"),
    "AGAIN": ("training.train_prompts=100", "training.steps=60"),
    "PARTS": (*PARTS, "training.completions_per_step=48"),
}
SITUATIONS = (
    *((), ("GRPO", "KL"), ("SUM", "KL", "TOKEN"), ("GRPO", "space.baseline=leave_one_out")),
    *(("PARTS", "KL", "AGAIN"), ("PARTS", "space.num_iterations=2")),
    *(("PARTS", "space.loss_type=bnpo"), ("AGAIN",), ("VLLM",), ("SEQUENCE",)),
    *(("policy=org/nowhere",), ("training.optimizer=adamw_8bit",)),
    ("space.prompt_selection=informative",),
)
"""Trainings of which each row of the table explains one."""


def expand(overrides):
    """Return settings in place of their names."""
    return [setting for word in overrides for setting in SHORT.get(word, (word,))]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_row_of_the_table_explains_a_training(library, monkeypatch):
    # an export needs no torchao here
    monkeypatch.setattr(checks, "importlib", MagicMock())
    found = set()
    for overrides in SITUATIONS:
        try:
            recipe = make_recipe(*expand(overrides), is_chat=True)
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


@cases("exporters", "page")
def test_what_the_page_says_of_a_training(library, overrides, words, is_said):
    assert (words in make_page(library, *expand(overrides))) is is_said


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
