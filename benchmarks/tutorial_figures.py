"""Tables and pictures of docs/gdpo_in_ten_minutes.md.

    python benchmarks/tutorial_figures.py [--pictures DIRECTORY]

It computes the worked examples with the function that training uses, and prints them as tables. The
picture of a front is drawn from the stored ledger of a real sweep, `tests/data/code_sweep`. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from gdpo_tune.analysis.front import Front, find_untrained
from gdpo_tune.core.text import INK, MODE_COLORS
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.training.normalization import compute_advantages

STORED = Path(__file__).resolve().parent.parent / "tests" / "data" / "code_sweep"
GROUP = 4
MODES = {"grpo": "GRPO", "grpo_no_std": "GRPO without std", "gdpo": "GDPO"}
Rewards = Sequence[tuple[float, float]]
LOST: Rewards = [(1, 1), (0, 0), (0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (0, 0)]
"""Correctness and format of the completions of two prompts: one that is right and well formed among
three that are neither, and one that is only right."""
EQUAL: Rewards = [(1, 1), (1, 0), (0, 1), (0, 0)] * 2
"""Correctness and length, each from 0 to 1."""
MIXED: Rewards = [(6 * correct - 3, short) for correct, short in EQUAL]
"""The same completions, with correctness from -3 to 3."""


def compute(rewards: Rewards, mode: str, weights: tuple[float, float] = (1, 1)) -> list[float]:
    """Compute the advantages of a batch with groups of `GROUP` completions."""
    values = [torch.tensor(numbers, dtype=torch.float64) for numbers in (rewards, weights)]
    return [round(float(a), 2) + 0.0 for a in compute_advantages(*values, GROUP, mode)]


def tabulate_lost() -> str:
    """Tabulate the example in which GRPO's sum loses a difference between two prompts."""
    columns = [compute(LOST, mode) for mode in MODES]
    lines = ["| prompt | correctness | format | " + " | ".join(MODES.values()) + " |"]
    lines.append("|---" * (3 + len(MODES)) + "|")
    for index, (correct, formed) in enumerate(LOST):
        if index % GROUP < 2:  # the other two are like the second
            values = " | ".join(f"{column[index]:.2f}" for column in columns)
            lines.append(f"| {1 + index // GROUP} | {correct} | {formed} | {values} |")
    return "\n".join(lines)


def tabulate_ranges() -> str:
    """Tabulate the example in which the range of a reward acts as a weight."""
    settings = {
        "0 to 1, weights 1 : 1": (EQUAL, (1, 1)),
        "-3 to 3, weights 1 : 1": (MIXED, (1, 1)),
        "0 to 1, weights 6 : 1": (EQUAL, (6, 1)),
    }
    ends = "right, short | right, long | wrong, short | wrong, long"
    lines = [f"| correctness earns | mode | {ends} |", "|---" * 6 + "|"]
    for name, (rewards, weights) in settings.items():
        for mode in ("grpo", "gdpo"):
            values = compute(rewards, mode, weights)[:GROUP]
            cells = " | ".join(f"{value:.2f}" for value in values)
            lines.append(f"| {name} | {MODES[mode]} | {cells} |")
    return "\n".join(lines)


def draw_advantages(path: Path) -> None:
    """Draw the advantages of the first example as bars."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, mode in zip(panels, ("grpo", "gdpo"), strict=True):
        places = [index + (index >= GROUP) for index in range(len(LOST))]
        panel.bar(places, compute(LOST, mode), color=MODE_COLORS[mode])
        panel.axhline(0, color=INK, linewidth=0.8)
        names = ["right,\nwell formed" if r == (1, 1) else "right" if r[0] else "-" for r in LOST]
        panel.set_xticks(places, names)
        panel.set_title(f"{MODES[mode]}: prompt 1 (left), prompt 2 (right)", color=INK, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("advantage")
    figure.savefig(path, dpi=160)


def draw_front(front: Front, path: Path) -> None:
    """Draw correctness against length, with format as a colour, and say how to read it."""
    untrained = find_untrained(front.baselines)
    assert untrained is not None
    assert front.knee is not None
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    panel = figure.subplots()
    points = [
        [c.mean[name].mean for c in front.members] for name in ("correctness", "length", "format")
    ]
    errors = [[c.mean[name].se for c in front.members] for name in ("correctness", "length")]
    panel.axvspan(0, untrained.mean["correctness"].mean, color="#7f7f7f", alpha=0.12, linewidth=0)
    panel.errorbar(
        *points[:2], xerr=errors[0], yerr=errors[1], fmt="none", ecolor="#b8bec8", zorder=1
    )
    marks = panel.scatter(*points[:2], c=points[2], cmap="viridis", s=45, edgecolors=INK, zorder=2)
    figure.colorbar(marks, label="format adherence")
    published = next(c for c in front.baselines if c.role == "published")
    named = {
        "untrained policy": (untrained, "X", (14, -16)),
        "published weights": (published, "*", (-120, -22)),
        "knee": (front.knee, "o", (22, 16)),
        "best correctness": (front.extremes["correctness"], "o", (-30, -30)),
        "best length adherence": (front.extremes["length"], "o", (22, 4)),
    }
    for text, (configuration, marker, offset) in named.items():
        place = [configuration.mean[name].mean for name in ("correctness", "length")]
        if marker != "o":
            look = {"c": "white", "edgecolors": INK, "linewidths": 1.4, "zorder": 3}
            panel.scatter(*place, marker=marker, s=170, **look)
        look = {"arrowprops": {"arrowstyle": "-", "color": INK, "linewidth": 0.7}, "color": INK}
        panel.annotate(text, place, offset, textcoords="offset points", zorder=4, **look)
    panel.text(0.215, 0.245, "worse than no training\nin correctness", color="#5c6470")
    panel.set(xlabel="correctness", ylabel="length adherence", xlim=(0.2, 0.92), ylim=(0.22, 0.95))
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def read_stored_front() -> Front:
    with tempfile.TemporaryDirectory() as directory:
        sweep = Path(directory) / "code"
        sweep.mkdir()
        (sweep / "spec.yaml").write_bytes((STORED / "spec.yaml").read_bytes())
        journal = gzip.decompress((STORED / "ledger.journal.gz").read_bytes())
        (sweep / "ledger.journal").write_bytes(journal)
        return read_sweep(str(sweep), str(sweep)).front


def tabulate_front(front: Front) -> str:
    """Tabulate the baselines, the knee and the extremes of a front."""
    untrained = find_untrained(front.baselines)
    assert untrained is not None
    assert front.knee is not None
    published = next(c for c in front.baselines if c.role == "published")
    rows = {"untrained policy": untrained, "published weights": published, "knee": front.knee}
    rows |= {f"best {name}": c for name, c in front.extremes.items()}
    lines = ["| policy | correctness | format | length |", "|---|---|---|---|"]
    for name, configuration in rows.items():
        values = (f"{configuration.mean[goal.name].mean:.2f}" for goal in front.objectives)
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables and draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="directory to draw the pictures into")
    options = parser.parse_args()
    front = read_stored_front()
    print(tabulate_lost(), tabulate_ranges(), tabulate_front(front), sep="\n\n", end="\n\n")
    if options.pictures is not None:
        draw_advantages(options.pictures / "ten_minutes_advantages.png")
        draw_front(front, options.pictures / "ten_minutes_front.png")
    examples = {mode: compute(LOST, mode) for mode in MODES}
    print(json.dumps({"benchmark": "tutorial_figures", "advantages": examples}))


if __name__ == "__main__":
    main()
