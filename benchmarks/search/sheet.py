"""Data sheet of the table of learning curves, computed from the table itself."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from surrogate import Surrogate, compute_r_squared, encode_features
from table import Curves, read_table

from gdpo_tune.core.files import write_atomically
from gdpo_tune.spec import SweepSpec

PACKAGES = ("gdpo-tune", "torch", "trl", "transformers")


def write_sheet(spec: SweepSpec, table: Path) -> None:
    """Write the sheet of a table atomically to a `.md` file beside the table."""
    text = render_sheet(spec, read_table(table), table.name)
    write_atomically(table.with_suffix(".md"), text.encode())


def render_sheet(spec: SweepSpec, curves: Curves, name: str) -> str:
    """Render the sheet as Markdown."""
    training = spec.training
    steps = [level // training.completions_per_step for level in curves.levels]
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    seconds = curves.cpu_seconds[:, -1]
    return "\n".join(
        [
            f"# Data sheet of `{name}`",
            "",
            f"Learning curves of {len(curves.params)} configurations of the task `{spec.task}`, "
            "each trained once, really, by `python benchmarks/search/curves.py`.",
            "",
            f"- **Policy:** `{spec.policy}`, which ships with the package; "
            f"**space:** `search_spaces/{spec.task}.yaml`, the first points of a scrambled Sobol "
            f"sequence (seed {spec.search.seed}); the seed of a training is the number of its "
            "configuration.",
            f"- **Budget:** {training.steps} steps of {training.completions_per_step} completions, "
            "one thread of a CPU.",
            f"- **Measured** after steps {', '.join(map(str, steps))} on "
            f"{training.validation_prompts} validation prompts, and at the end on "
            f"{training.test_prompts} test prompts, {training.samples_per_prompt} samples each at "
            "temperature 1. Standard errors: bootstrap clustered by prompt. They say how well a "
            "policy was measured, not how much another seed would have differed.",
            f"- **Made with** {versions}, Python {platform.python_version()}, "
            f"{platform.machine()}; {seconds.mean():.1f} CPU-s a training "
            f"({seconds.min():.1f} to {seconds.max():.1f}), {seconds.sum() / 3600:.2f} CPU-h in "
            "all, evaluations included. Values are equal on equal hardware and versions; the times "
            "are not.",
            "- **Licence:** Apache-2.0, as the package; no data from elsewhere is in it.",
            "",
            "## Columns",
            "",
            "| column | meaning |",
            "|---|---|",
            "| `configuration` | number of the configuration, and seed of its training |",
            *(f"| `{key}` | parameter |" for key in curves.params[0]),
            "| `split` | `validation`, or `test` in a configuration's last row |",
            "| `step`, `completions` | training done by then |",
            "| `seconds`, `cpu_seconds` | since the start, evaluations included |",
            "| metric, metric`.se` | mean over held-out completions, and its standard error |",
            "",
            "## What is in it",
            "",
            "Spearman correlation of a rung with the end, both on validation prompts; spread over "
            "configurations; noise.",
            "",
            *_render_correlations(curves, spec, steps),
            "",
            "R2: share of the variance of test values that a Gaussian process predicts of "
            "configurations left out. Deviation: how much one training differs from the process "
            "beyond its standard error: its seed, and whatever the process is too smooth for.",
            "",
            *_render_surrogates(curves, spec),
            "",
        ]
    )


def _render_correlations(curves: Curves, spec: SweepSpec, steps: list[int]) -> list[str]:
    lines = [
        f"| | {' | '.join(f'step {step}' for step in steps[:-1])} | at the end: lowest, median, "
        "highest | standard error |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for name in spec.objectives:
        values = curves.means[name]
        cells = [
            f"{_compute_spearman(values[:, c], values[:, -1]):.2f}" for c in range(len(steps) - 1)
        ]
        low, middle, high = np.percentile(values[:, -1], [0, 50, 100])
        cells.append(f"{low:.2f}, {middle:.2f}, {high:.2f}")
        cells.append(f"{np.median(curves.errors[name][:, -1]):.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _compute_spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Compute Spearman's correlation; NaN if one of the arrays is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(spearmanr(one, other).statistic)


def _render_surrogates(curves: Curves, spec: SweepSpec) -> list[str]:
    points = np.array(
        [encode_features(params, spec.space.searched_domains) for params in curves.params]
    )
    lines = ["| | R2 | deviation | standard error |", "|---|---|---|---|"]
    for name in spec.objectives:
        values, errors = curves.test_means[name], curves.test_errors[name]
        fit = Surrogate(points, values, errors)
        share = compute_r_squared(values, fit.predict_left_out())
        lines.append(f"| {name} | {share:.2f} | {fit.deviation:.3f} | {np.median(errors):.3f} |")
    return lines
