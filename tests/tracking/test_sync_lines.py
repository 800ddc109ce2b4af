"""What somebody who waits for MLflow is told."""

from types import SimpleNamespace

from gdpo_tune.tracking import sync
from gdpo_tune.tracking.sender import State


def test_only_what_is_sent_is_called_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr(sync, "SAYING", -1.0)
    monkeypatch.setattr(sync, "GLANCE", 0.0)
    states = iter(
        [
            State("up to date", 1_200, ""),
            State("catching up", 800, ""),
            State("away", 800, "nobody there"),
            State("up to date", 0, ""),
        ]
    )
    sync.wait(SimpleNamespace(state=lambda: next(states)))
    assert capsys.readouterr().out.splitlines() == [
        "MLflow: 1,200 updates left",
        "MLflow: 800 updates left",
        "MLflow: 800 updates are kept and will be sent: nobody there",
    ]
