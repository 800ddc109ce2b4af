"""Costs of reading, drawing and sending a finished sweep of `scale.py`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scale_driver import measure_mib

from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import SweepSpec


def finish_ours(output: Path, spec: SweepSpec) -> None:
    """Measure the costs of reading, drawing and sending a finished sweep."""
    from gdpo_tune.figures import write_front_png, write_report
    from gdpo_tune.ledger import Ledger

    figures: dict[str, Any] = {}

    @contextmanager
    def measure(part: str) -> Generator[None]:
        before = time.process_time()
        yield
        figures[part] = {
            "cpu_seconds": round(time.process_time() - before, 2),
            "mib": round(measure_mib()),
        }

    with measure("reading the ledger"):
        ledger = Ledger.open(spec, read_only=True)
    with ledger:
        records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
    with measure("report"):
        path = write_report(Sweep(spec, records, sessions))
    with measure("front.png"):
        write_front_png(Sweep(spec, records))
    figures["report_megabytes"] = round(path.stat().st_size / 1e6, 1)
    figures["states"] = {
        state: sum(record.state == state for record in records)
        for state in ("complete", "pruned", "failed", "running")
    }
    with measure("one picture of the live display"):
        draw(spec, records)
    figures["spool"] = count_messages(spec)
    output.write_text(json.dumps(figures))


def draw(spec: SweepSpec, records: Any) -> None:
    """Draw the display of a terminal once, with all trials."""
    from rich.console import Console

    from gdpo_tune.core.events import SweepStarted
    from gdpo_tune.display import LiveDisplay

    with Path(os.devnull).open("w") as null:
        console = Console(file=null, force_terminal=True, width=120)
        display = LiveDisplay(spec, console)
        display._progress.update(SweepStarted(records, len(records)))
        console.print(display.render())


def count_messages(spec: SweepSpec) -> dict[str, int]:
    """Count the messages and metrics that would go to MLflow."""
    count = metrics = 0
    with (spec.directory / "spool.jsonl").open() as lines:
        for line in lines:
            count += 1
            metrics += len(json.loads(line).get("metrics", ()))
    return {"messages": count, "metrics": metrics}
