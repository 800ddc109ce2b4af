"""Preset views of MLflow: the front against every pair of objectives, parameters, and curves.

The tag `mlflow.sharedViewState.<key>` of an experiment is an entry of MLflow's menu of views, and a
link with that key opens it. The tag's format is undocumented. It is what MLflow's
own page writes, read from version 3.17: `mlflow_view.json` holds the parts that never change. A
test in a browser opens every view.

The page loads the first 100 runs of a view. Views are sorted by `pareto/order`, so these are the
front and the trials next to it, however many trials there are.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.trial_files import REWARDS
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tracking.run_content import NOTE, PARENT, clean_name

Chart = dict[str, Any]
METRIC = {"type": "METRIC"}
WORKFLOW = "workflowType=machine_learning"
"""Selects MLflow's pages for training; the others are for traces of language models."""
BY_MODE = {
    "groupBy": {
        "aggregateFunction": "average",
        "groupByKeys": [{"mode": "tag", "groupByData": "normalization"}],
    },
    "useGroupedValuesInCharts": True,
}
"""State in which a line is the mean over the trials of a mode, so that the legend names modes."""
LOADED = 100
"""Runs that MLflow's page loads at a time."""
MAX_PAIRS, MAX_PARAMETERS, MAX_CURVES = 6, 8, 6
"""Charts of a kind; a tag of an experiment may have 20,000 characters."""
TITLES = {
    "trials": "front and trials",
    "front": "front only",
    "modes": "learning curves by mode",
    "progress": "progress",
}
"""View -> its name in the menu, after the name of the sweep."""
PAIRS, CURVES, REWARD_CURVES = "Front", "Objectives on validation prompts", "Mean rewards"
PARAMETERS, PROGRESS = "Parameters", "Hypervolume"
COLUMNS = {PAIRS: 2, CURVES: 3, REWARD_CURVES: 3, PARAMETERS: 1, PROGRESS: 1}
"""Section -> charts side by side."""
FIXED = json.loads((Path(__file__).parent / "mlflow_view.json").read_text(encoding="utf-8"))
"""Fixed parts of a view. The automatic sections are kept closed, below ours. MLflow makes a section
of all before the last slash of a metric's name, and opens those that a view does not name."""


@dataclass(frozen=True)
class Site:
    """Where MLflow shows a sweep."""

    uri: str
    experiment: str
    """Id of the experiment."""
    parent: str
    """Id of the sweep's run. It is part of every view's key: sweeps share experiments."""

    @property
    def page(self) -> str:
        """Address of the experiment, without credentials; relative if MLflow is a database."""
        server = ""  # its page may be served anywhere
        if self.uri.startswith(("http://", "https://")):
            server = re.sub(r"://[^/]*@", "://", self.uri).rstrip("/") + "/"
        return f"{server}#/experiments/{self.experiment}/runs"

    def build_link(self, view: str = "trials") -> str:
        """Return the address of a view in MLflow, charts first."""
        share = f"viewStateShareKey={self.parent}-{view}"
        return f"{self.page}?{WORKFLOW}&{share}&compareRunsMode=CHART"


def format_links(site: Site) -> str:
    """Return links to every view of a sweep, in Markdown."""
    return ", ".join(f"[{title}]({site.build_link(view)})" for view, title in TITLES.items())


def merge_note(note: str, line: str, parent: str) -> str:
    """Return an experiment's note in which `line` replaces the line of the sweep's run `parent`."""
    others = [other for other in note.splitlines() if parent not in other]
    return "\n".join([*others, line]).lstrip("\n")


def build_experiment_tags(spec: SweepSpec, site: Site, created: int) -> dict[str, str]:
    """Return the views of a sweep and its line in the note, as tags of its experiment.

    The menu shows the newest view first, by `created` in milliseconds since 1970.
    """
    from gdpo_tune.results.wording import REPORT_FILE  # numpy takes a while

    goals = [clean_name(f"test/{name}") for name in spec.objectives]
    parameters = list(spec.space.dimensions)[:MAX_PARAMETERS]
    columns = [
        *(f"metrics.`{goal}`" for goal in goals),
        "metrics.`pareto/order`",
        *(f"params.`{name}`" for name in parameters),
    ]
    pairs = [
        _build_chart("SCATTER", xaxis={**METRIC, "key": across}, yaxis={**METRIC, "key": up})
        for across, up in list(itertools.combinations(goals, 2))[:MAX_PAIRS]
    ]
    parallel = _build_chart(
        "PARALLEL", selectedParams=parameters, selectedMetrics=goals, showAllRuns=True
    )
    children = f"tags.`{PARENT}` = '{site.parent}'"
    front = f"{children} AND tags.pareto = 'true'"
    trained = f"{children} AND tags.normalization != ''"
    parameter_charts = {PARAMETERS: [parallel]}
    curves = {CURVES: _build_curves(f"validation/{name}" for name in spec.objectives)}
    names = (name.partition(".") for name in spec.space.domains)
    rewards = [clean_name(reward) for family, _, reward in names if family == "reward_weights"]
    reward_curves = _build_curves(f"train/{REWARDS}{reward}/mean" for reward in rewards)
    charts = {
        "trials": (children, columns, {PAIRS: pairs, **parameter_charts}),
        "front": (front, columns, {PAIRS: pairs, **parameter_charts, **curves}),
        "modes": (trained, columns, {**curves, REWARD_CURVES: reward_curves}),
        "progress": (
            f"attributes.run_id = '{site.parent}'",
            [],
            {PROGRESS: _build_curves(["hypervolume"])},
        ),
    }
    hidden = [*FIXED["automatic_sections"], *(f"train/{REWARDS}{reward}" for reward in rewards)]
    states = {view: _build_state(*content, hidden) for view, content in charts.items()}
    states["modes"] |= BY_MODE
    report = f"{site.page}/{site.parent}/artifacts/{REPORT_FILE}?{WORKFLOW}"
    note = f"- **{spec.name}**: {format_links(site)}, [report]({report})"
    tags = {NOTE: note}
    for view, state in states.items():
        entry = {
            "name": f"{spec.name}: {TITLES[view]}",
            "createdAt": created,
            "updatedAt": created,
            "state": json.dumps(state, separators=(",", ":")),
        }
        tags[f"mlflow.sharedViewState.{site.parent}-{view}"] = json.dumps(entry)
    return tags


def _build_state(
    search: str,
    columns: Sequence[str],
    sections: Mapping[str, Sequence[Chart]],
    hidden: Sequence[str],
) -> dict[str, Any]:
    return {
        **FIXED["state"],
        "searchFilter": search,
        "selectedColumns": ["attributes.`Duration`", *columns],
        "compareRunSections": [
            *(
                _build_section(name, display=True, columns=COLUMNS[name], cardHeight=400)
                for name in sections
            ),
            *map(_build_section, hidden),
        ],
        "compareRunCharts": [
            {**chart, "uuid": f"{name} {index}", "metricSectionId": name}
            for name, charts in sections.items()
            for index, chart in enumerate(charts)
        ],
    }


def _build_section(name: str, *, display: bool = False, **more: int) -> dict[str, Any]:
    uuid = name if display else f"automatic {name}"
    return {"uuid": uuid, "name": name, "display": display, **FIXED["section"], **more}


def _build_chart(kind: str, **more: Any) -> Chart:
    return {"type": kind, **FIXED["chart"], **more}


def _build_curves(metrics: Iterable[str]) -> list[Chart]:
    names = map(clean_name, itertools.islice(metrics, MAX_CURVES))
    return [
        _build_chart("LINE", metricKey=name, selectedMetricKeys=[name], **FIXED["line"])
        for name in names
    ]
