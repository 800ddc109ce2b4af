"""Send what MLflow lacks of a sweep that does not run, from the sweep's directory alone."""

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
"""Seconds after which `sync` gives up on a server that takes nothing."""
POLL_SECONDS = 0.5
PRINT_SECONDS = 5.0


def sync(spec: SweepSpec) -> int:
    """Bring MLflow up to date with the ledger, the metric files and the figures of a sweep.

    It sends what the spool still holds, and writes again what MLflow lost, even a whole database.
    The result is the exit status: 1 if something is left; stderr has the reason.

    Raises:
        LedgerHeldError: the sweep runs, and sends by itself.
        TrackingError: `tracking.required`, and the server does not answer.
    """
    check_server(spec)
    with Ledger.open(spec) as ledger:
        records, sessions = tuple(ledger.get_records()), ledger.get_sessions()
        sink = MlflowSink(spec)
        sink(SweepStarted(records, len(records)))
        finished = bool(sessions and sessions[-1].get("ending"))
        sink(SweepFinished(records, interrupted=not finished))
        sink.log_figures()
        wait_until_sent(sink)
        warning = sink.close()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
        return 1
    print("MLflow: up to date")
    return 0


def wait_until_sent(sink: MlflowSink) -> None:
    """Wait until everything is sent, or the server has taken nothing for `PATIENCE` seconds."""
    least, progressed, printed = sys.maxsize, time.monotonic(), time.monotonic()
    while (state := sink.get_state()) is not None and state.pending:
        now = time.monotonic()
        if state.pending < least:
            least, progressed = state.pending, now
        if state.kind == "away" and now - progressed > PATIENCE:
            return
        if now - printed > PRINT_SECONDS:
            # A sender that keeps up calls itself up to date while its last batch is on its way.
            left = f"MLflow: {state.pending:,} updates left"
            print(state if state.kind == "away" else left, flush=True)
            printed = now
        time.sleep(POLL_SECONDS)
