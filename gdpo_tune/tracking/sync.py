"""Send what MLflow lacks of a sweep that nobody runs now, from the sweep's folder alone."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from gdpo_tune.core.events import SweepFinished, SweepStarted
from gdpo_tune.ledger import Ledger
from gdpo_tune.tracking.mlflow_sink import MlflowSink
from gdpo_tune.tracking.server import check_server

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

PATIENCE = 10.0
"""Seconds for which a server that takes nothing is asked again."""
GLANCE = 0.5
SAYING = 5.0
"""Seconds between two looks at the progress, and between two lines about it."""


def sync(spec: SweepSpec) -> int:
    """Bring MLflow up to date with the ledger, the metric files and the pictures of a sweep.

    What a spool still holds is sent; what MLflow lost, if only a database, is written again.

    Returns:
        Exit status: 1 if something is left, which stderr says with its reason.

    Raises:
        LedgerHeldError: the sweep runs, and sends by itself.
        TrackingError: `tracking.required`, and the server does not answer.
    """
    check_server(spec)
    with Ledger.open(spec) as ledger:
        records, sessions = tuple(ledger.records()), ledger.sessions()
        sink = MlflowSink(spec)
        sink(SweepStarted(records, len(records)))
        finished = bool(sessions and sessions[-1].get("ending"))
        sink(SweepFinished(records, interrupted=not finished))
        sink.log_pictures()
        wait(sink)
        warning = sink.close()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
        return 1
    print("MLflow: up to date")
    return 0


def wait(sink: MlflowSink) -> None:
    """Wait until everything is sent, or the server has taken nothing for `PATIENCE` seconds."""
    least, moved, said = sys.maxsize, time.monotonic(), time.monotonic()
    while (state := sink.state()) is not None and state.pending:
        now = time.monotonic()
        if state.pending < least:
            least, moved = state.pending, now
        if state.kind == "away" and now - moved > PATIENCE:
            return
        if now - said > SAYING:
            # A sender that keeps up calls itself up to date with a batch on its way.
            left = f"MLflow: {state.pending:,} updates left"
            print(state if state.kind == "away" else left, flush=True)
            said = now
        time.sleep(GLANCE)
