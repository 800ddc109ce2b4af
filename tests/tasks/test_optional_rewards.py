"""Optional rewards in a sweep file: on where the space has a weight for them, else absent."""

from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning.plan import build_published
from tests.support.paths import ROOT
from tests.tasks.own_tasks import FILES, written

CODE = ROOT / "search_spaces" / "code.yaml"
TASK = (FILES / "measured.txt").read_text()
ON = "space.reward_weights.bug_free=[0, 1]"


def test_a_weight_switches_the_reward_on():
    plain = load_spec(CODE)
    assert not [name for name in plain.space.domains if "bug_free" in name]
    assert "partial_credit" not in load_task_info(plain.task, plain.space.domains).published
    spec = load_spec(CODE, [ON, "space.conditioning.bug_free=[none, correctness]"])
    assert spec.compute_identity() != load_spec(CODE).compute_identity()
    assert "reward_weights.bug_free" in spec.space.searched_domains
    assert spec.space.domains["conditioning.length"].list_values() == ("none",)
    setting = build_published(spec)
    assert setting["reward_weights.bug_free"] == 1
    assert setting["partial_credit"] is True
    with build_task(spec.task, spec.training, spec.sandbox, spec.data, spec.space.domains) as task:
        assert task.rewards == ("correctness", "format", "length", "bug_free")


def test_a_reward_that_is_only_measured_is_no_part_of_the_baseline(tmp_path):
    """docs/own_task.md: a weight of 0 is measured and not trained on."""
    goals = (
        "{right: {direction: maximize, reference: 0}, plain: {direction: maximize, reference: 0}}"
    )
    (tmp_path / "mine.yaml").write_text(
        f"task: {written(tmp_path, TASK)}\nobjectives: {goals}\n"
        "space: {reward_weights: {right: 1, plain: 0, short: [0.5, 2]}}\n"
    )
    setting = build_published(load_spec(tmp_path / "mine.yaml"))
    weights = {n.rpartition(".")[2]: v for n, v in setting.items() if "reward_weights" in n}
    assert weights == {"right": 1, "plain": 0, "short": 1}


def test_published_points_have_the_optional_reward():
    spec = load_spec(
        CODE,
        [
            ON,
            "space.reward_weights.length={range: [0, 2]}",
            "space.partial_credit=[false, true]",
            "enqueue=[published]",
        ],
    )
    assert len(spec.enqueue) == 3
    assert {point["reward_weights.bug_free"] for point in spec.enqueue} == {1.0}
