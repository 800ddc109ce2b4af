"""Two workers that share a policy: each samples its part of a step with an engine of its own."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.paths import ROOT
from tests.support.processes import launch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SCRIPT = ROOT / "tests" / "support" / "vllm_workers.py"
RATIO = "train/sampling/importance_sampling_ratio/mean"
APART = "train/sampling/sampling_logp_difference/max"


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["every weight", "adapters"])
def test_engines_follow_the_shared_policy(tmp_path, lora_rank):
    launch(SCRIPT, lora_rank, tmp_path, processes=2)
    seen, other = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert seen == other
    first, second, test = seen
    for step in (first, second):
        print(f"  |log p(vLLM) - log p(trainer)| at most {step[APART]:.7f}")
        assert step[RATIO] == pytest.approx(1, abs=1e-3)
        assert 0 < step[APART] < 1e-4
    assert second["train/kl"] > 0, "the policy has moved, and both engines with it"
    assert all(math.isfinite(mean) for mean in test.values())
