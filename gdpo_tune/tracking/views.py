"""Charts that MLflow opens on: the front against every pair of objectives, parameters, curves.

An experiment's tag `mlflow.sharedViewState.<key>` is an entry of MLflow's menu of views, and a link
with that key opens it. What such a tag holds is documented nowhere: it is what MLflow's own page
writes, read from version 3.17, and a test in a browser opens every view.

The page loads the first 100 runs of a view. Views are sorted by `pareto/rank`, so that these are
the front and what comes next to it, however many trials there are.

Texts here may hold what only the writer knows: see `resolved`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdpo_tune.tracking.run_content import clean_name

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

SERVER = "@server@"
"""Stands for the address of the server with a slash; for nothing where MLflow is a database."""
EXPERIMENT = "@experiment@"
"""Stands for the experiment's id."""
PARENT = "@parent@"
"""Stands for the id of the sweep's run, which is part of every key: sweeps share experiments."""
WORKFLOW = "workflowType=machine_learning"
"""Of MLflow's two faces, that of training; the other one is about language-model traces."""
PREFIX = "mlflow.sharedViewState."
LOADED = 100
"""Runs that MLflow's page loads at a time."""
MOST_PAIRS = 6
MOST_PARAMETERS = 8
MOST_CURVES = 12
"""Charts of a kind; an experiment's tag may have 20,000 characters."""
RANK = "metrics.`pareto/rank`"
TRIALS, FRONT, PROGRESS = "trials", "front", "progress"
TITLES = {TRIALS: "front and trials", FRONT: "front alone", PROGRESS: "progress"}
"""View -> its name in the menu, behind the sweep's."""
PAIRS, CURVES, PARAMETERS = "Front", "Learning curves", "Parameters"
COLUMNS = {PAIRS: 2, CURVES: 3, PARAMETERS: 1}
"""Section -> charts beside each other."""
HEIGHT = 400
"""Of a chart, in pixels."""
AUTOMATIC = (
    "Model metrics",
    "System metrics",
    "cost",
    "objective",
    "pareto",
    "test",
    "train",
    "train/reward",
    "validation",
)
"""Sections that MLflow adds by itself; they are kept closed, below ours."""


def resolved(text: str, *, server: str, experiment: str, parent: str) -> str:
    """`text` with the words that stand for addresses and ids replaced."""
    known = {SERVER: server, EXPERIMENT: experiment, PARENT: parent}
    for word, value in known.items():
        text = text.replace(word, value)
    return text


def server_address(uri: str) -> str:
    """What a link begins with: empty for a database, whose page may be served anywhere."""
    if not uri.startswith(("http://", "https://")):
        return ""
    return re.sub(r"://[^/]*@", "://", uri).rstrip("/") + "/"


def link(view: str = TRIALS) -> str:
    """Address of a view in MLflow, charts first."""
    return (
        f"{SERVER}#/experiments/{EXPERIMENT}/runs?{WORKFLOW}"
        f"&viewStateShareKey={key(view)}&compareRunsMode=CHART"
    )


def key(view: str) -> str:
    """Key of a view of this sweep."""
    return f"{PARENT}-{view}"


def links() -> str:
    """Every view of this sweep, in Markdown."""
    return ", ".join(f"[{title}]({link(view)})" for view, title in TITLES.items())


def note_line(spec: SweepSpec) -> str:
    """The sweep's line in the experiment's note, in Markdown; `noted` puts it there."""
    run = f"{SERVER}#/experiments/{EXPERIMENT}/runs/{PARENT}"
    report = f"{run}/artifacts/report.html?{WORKFLOW}"
    return f"- **{spec.name}**: {links()}, [report]({report})"


def noted(note: str, line: str, parent: str) -> str:
    """An experiment's note with the line of one sweep; what others wrote stays.

    Args:
        note: as it is; may be empty.
        line: of this sweep.
        parent: id of the sweep's run, by which an earlier line of it is known.
    """
    others = [other for other in note.splitlines() if parent not in other]
    return "\n".join([*others, line]).lstrip("\n")


def experiment_tags(spec: SweepSpec, created: int) -> dict[str, str]:
    """The views of a sweep as tags of its experiment.

    Args:
        spec: the sweep.
        created: milliseconds since 1970; the menu shows the newest first.
    """
    goals = [clean_name(f"objective/{name}") for name in spec.objectives]
    children = f"tags.`mlflow.parentRunId` = '{PARENT}'"
    front = f"{children} AND tags.pareto = 'true'"
    columns = [
        *(f"metrics.`{goal}`" for goal in goals),
        RANK,
        *(f"params.`{name}`" for name in _parameters(spec)),
    ]
    pairs, parallel = _pairs(goals), [_parallel(spec, goals)]
    of_all = {PAIRS: pairs, PARAMETERS: parallel}
    of_front = {PAIRS: pairs, CURVES: _curves(spec), PARAMETERS: parallel}
    trace = [_line("hypervolume", across) for across in ("step", "time")]
    states = {
        TRIALS: _state(children, columns, of_all),
        FRONT: _state(front, columns, of_front),
        PROGRESS: _state(f"attributes.run_id = '{PARENT}'", [], {PAIRS: trace}),
    }
    return {
        PREFIX + key(view): json.dumps(
            {
                "name": f"{spec.name}: {TITLES[view]}",
                "createdAt": created,
                "updatedAt": created,
                "state": json.dumps(state, separators=(",", ":")),
            }
        )
        for view, state in states.items()
    }


def _state(
    search: str, columns: Sequence[str], sections: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """What the page keeps of a view: runs, columns, and charts by section."""
    ours = [
        {**_section(name, name, display=True), "columns": COLUMNS[name], "cardHeight": HEIGHT}
        for name in sections
    ]
    theirs = [_section(f"automatic {name}", name, display=False) for name in AUTOMATIC]
    charts = [
        {**chart, "uuid": f"{name} {index}", "metricSectionId": name}
        for name, members in sections.items()
        for index, chart in enumerate(members)
    ]
    return {
        "searchFilter": search,
        "orderByKey": RANK,
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": ["attributes.`Duration`", *columns],
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOW_ALL",
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": False,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
        "compareRunSections": [*ours, *theirs],
        "compareRunCharts": charts,
    }


def _section(uuid: str, name: str, *, display: bool) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "name": name,
        "display": display,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _chart(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "runsCountToCompare": LOADED,
        "deleted": False,
        "isGenerated": False,
        **more,
    }


def _pairs(goals: Sequence[str]) -> list[dict[str, Any]]:
    """A scatter for each pair of the objectives' metrics, the earlier one upwards."""
    pairs = list(itertools.combinations(goals, 2))[:MOST_PAIRS]
    return [
        _chart(
            "SCATTER",
            xaxis={"key": across, "type": "METRIC"},
            yaxis={"key": up, "type": "METRIC"},
        )
        for up, across in pairs
    ]


def _parallel(spec: SweepSpec, goals: list[str]) -> dict[str, Any]:
    return _chart(
        "PARALLEL",
        selectedParams=_parameters(spec),
        selectedMetrics=goals,
        showAllRuns=True,
    )


def _parameters(spec: SweepSpec) -> list[str]:
    return list(spec.space.dimensions)[:MOST_PARAMETERS]


def _curves(spec: SweepSpec) -> list[dict[str, Any]]:
    """Objectives on validation prompts, then the rewards of training."""
    weights = (name.partition(".") for name in spec.space.domains)
    rewards = [reward for family, _, reward in weights if family == "reward_weights"]
    names = [
        *(f"validation/{name}" for name in spec.objectives),
        *(f"train/reward/{name}/mean" for name in rewards),
    ]
    return [_line(clean_name(name)) for name in names[:MOST_CURVES]]


def _line(metric: str, across: str = "step") -> dict[str, Any]:
    return _chart(
        "LINE",
        metricKey=metric,
        selectedMetricKeys=[metric],
        lineSmoothness=0,
        xAxisScaleType="linear",
        scaleType="linear",
        range={},
        xAxisKey=across,
        selectedXAxisMetricKey="",
        yAxisKey="metric",
        yAxisExpressions=[],
        ignoreOutliers=False,
        useGlobalXaxisKey=False,
        useGlobalLineSmoothing=False,
    )
