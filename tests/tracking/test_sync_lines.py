"""What somebody who waits for MLflow is told."""

from types import SimpleNamespace

from gdpo_tune.core.events import TrackingState
from gdpo_tune.tracking import sync


def test_only_what_is_sent_is_called_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr(sync, "SAYING", -1.0)
    monkeypatch.setattr(sync, "GLANCE", 0.0)
    states = iter(
        [
            TrackingState("up to date", 1_200, ""),
            TrackingState("catching up", 800, ""),
            TrackingState("away", 800, "nobody there"),
            TrackingState("up to date", 0, ""),
        ]
    )
    sync.wait(SimpleNamespace(state=lambda: next(states)))
    assert capsys.readouterr().out.splitlines() == [
        "MLflow: 1,200 updates left",
        "MLflow: 800 updates left",
        "MLflow: 800 updates are kept and will be sent: nobody there",
    ]
