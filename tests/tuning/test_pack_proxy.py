"""The process of a trial that trains nothing: where its trial gets a place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tuning.ray import pack_proxy
from gdpo_tune.tuning.ray.messages import AttemptConfig, Setup, TrialPlaced


class Host:
    """A process with or without a place, and the trials that it was told to end."""

    def __init__(self, placed: TrialPlaced | None) -> None:
        self.left: list[int] = []
        self.enter = SimpleNamespace(remote=lambda attempt: placed)
        self.leave = SimpleNamespace(remote=self.left.append)


def test_an_earlier_attempt_in_another_process_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    placed = TrialPlaced("pack-1", "node")
    full, chosen, other = hosts = [Host(None), Host(placed), Host(placed)]
    monkeypatch.setattr(pack_proxy.ray, "get", lambda answer: answer)
    monkeypatch.setattr(pack_proxy, "order_by_load", lambda number, patience: hosts)
    monkeypatch.setattr(pack_proxy, "list_hosts", lambda: iter(hosts))
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(), tmp_path / "trials" / "7")
    attempt = AttemptConfig(trial, Setup("", tmp_path / "spec.yaml", pack=2))
    assert pack_proxy.find_place(attempt) == (chosen, placed)
    assert [host.left for host in (full, chosen, other)] == [[7], [], [7]]
