"""Checkpoints before the end of a training that may be on the front."""

from gdpo_tune.analysis.merge_choice import choose_checkpoint, rank_checkpoints
from gdpo_tune.core.trials import Cost, Estimate, Part, Rung
from tests.support.analysis import GOALS, build_checkpoint, build_trial


def is_allowed(means):
    return True


def build_rungs(*values: tuple[int, float, float]):
    return tuple(
        Rung(step, {"a": Estimate(a, 0.01), "b": Estimate(b, 0.01)}, Cost(64 * step))
        for step, a, b in values
    )


def build_curve(number, *values, kept, **fields):
    """Build a trial with these validation values, the last of which is its end."""
    end = values[-1]
    rungs = build_rungs(*values)
    fields = {"rungs": rungs, "kept_steps": kept, "validation": rungs[-1].validation, **fields}
    return build_trial(number, end[1], end[2], **fields)


def test_the_largest_contribution_comes_first_and_dominated_ones_never():
    first = build_curve(1, (20, 0.2, 0.9), (40, 0.3, 0.5), (60, 0.8, 0.4), kept=(20, 40))
    other = build_curve(2, (20, 0.9, 0.2), (60, 0.5, 0.6), kept=(20,))
    # 1@40 is dominated by the end of 2
    assert rank_checkpoints([first, other], GOALS, is_allowed) == [
        Part(1, 20, 1.0),
        Part(2, 20, 1.0),
    ]


def test_only_checkpoints_that_exist_are_chosen():
    trial = build_curve(1, (20, 0.2, 0.9), (60, 0.8, 0.4), kept=())
    assert rank_checkpoints([trial], GOALS, is_allowed) == []
    assert choose_checkpoint([], GOALS, is_allowed) is None


def test_an_evaluated_checkpoint_is_not_chosen_again():
    trial = build_curve(1, (20, 0.2, 0.9), (40, 0.4, 0.6), (60, 0.8, 0.4), kept=(20, 40))
    first = choose_checkpoint([trial], GOALS, is_allowed)
    assert first == Part(1, 20, 1.0)
    done = build_checkpoint(2, 0.1, 0.85, (1, 20))  # a second look was less favourable
    assert choose_checkpoint([trial, done], GOALS, is_allowed) == Part(1, 40, 1.0)


def test_test_values_decide_nothing():
    trial = build_curve(1, (20, 0.2, 0.9), (60, 0.8, 0.4), kept=(20,))
    luckier = build_curve(
        1,
        (20, 0.2, 0.9),
        (60, 0.8, 0.4),
        kept=(20,),
        test={"a": Estimate(1, 0), "b": Estimate(1, 0)},
    )
    assert (
        choose_checkpoint([trial], GOALS, is_allowed)
        == choose_checkpoint([luckier], GOALS, is_allowed)
        is not None
    )


def test_a_dominated_infeasible_end_does_not_count():
    kept = build_curve(1, (20, 0.5, 0.5), (60, 0.7, 0.3), kept=(20,))
    infeasible = build_curve(2, (60, 0.9, 0.9), kept=(), feasible=False)
    assert rank_checkpoints([kept, infeasible], GOALS, is_allowed) == [Part(1, 20, 1.0)]


def test_a_checkpoint_that_breaks_a_constraint_is_not_chosen():
    trial = build_curve(1, (20, 0.2, 0.9), (40, 0.4, 0.6), (60, 0.8, 0.4), kept=(20, 40))
    choice = choose_checkpoint([trial], GOALS, lambda means: means["a"] >= 0.3)
    assert choice == Part(1, 40, 1.0)
