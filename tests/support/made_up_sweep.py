"""A made-up sweep of any size, sent to MLflow like a real one, without training."""

import sys
from pathlib import Path

from gdpo_tune.core.events import SweepFinished, SweepStarted
from gdpo_tune.figures import write_front_png, write_report
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.tracking import MlflowSink
from tests.support.figures import add_candidates, make_records, make_spec, write_steps

PATIENCE = 240.0


def send_sweep(directory, uri, trials, *, steps=True):
    """Send a finished sweep with a report; return its spec, its records and its link."""
    spec = make_spec(directory / "runs")
    spec = spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"uri": uri})})
    records = add_candidates(make_records(spec, trials, replicates=4, failed=(4,)))
    for record in records if steps else []:
        if record.is_training:
            write_steps(record)
    sink = MlflowSink(spec)
    sink(SweepStarted(tuple(records), len(records)))
    sink(SweepFinished(tuple(records), interrupted=False))
    write_report(Sweep(spec, records))
    write_front_png(Sweep(spec, records))
    sink.log_figures()
    warning = sink.close(PATIENCE)
    assert warning == "", warning
    return spec, records, sink.get_front_link()


if __name__ == "__main__":
    print(send_sweep(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))[2])
