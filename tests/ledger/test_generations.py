"""Generations of a population in the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.trials import Exploit, Generation, Params
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from tests.support.tuning import load_code_spec

FIRST = Generation(12, (0, 1, 2), (Exploit(2, 0, 12, {"learning_rate": 1e-4}),))
SECOND = Generation(24, (0, 1, 2), (Exploit(0, 1, 24, {"learning_rate": 2e-4}),))
THIRD = Generation(36, (0, 1, 2), (Exploit(2, 0, 36, {"reward_weights.format": 1.0}),))


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path)


def begin(ledger: Ledger) -> None:
    for number in range(3):
        ledger.start(ledger.spec.space.complete_baseline({}), "member", "startup", seed=number)


def test_generations_survive_the_process_and_are_in_the_records(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        begin(ledger)
        before = ledger.get_records()
        for generation in (FIRST, SECOND, THIRD):
            ledger.record_generation(generation)
        written = ledger.get_records()
        assert ledger.get_record(1).lineage == ()
    with Ledger.open(spec) as ledger:
        assert ledger.get_generations() == [FIRST, SECOND, THIRD]
        assert [ledger.find_last_sync_step(number) for number in range(4)] == [36, 36, 36, 0]
        assert ledger.get_records() == written
    assert [record.lineage for record in before] == [(), (), ()]
    assert [record.lineage for record in written] == [
        SECOND.exploits,
        (),
        FIRST.exploits + THIRD.exploits,
    ]


def test_a_generation_is_decoded_once(spec: SweepSpec, monkeypatch: pytest.MonkeyPatch):
    decoded: list[int] = []

    def counted(member: int, donor: int, step: int, params: Params) -> Exploit:
        decoded.append(step)
        return Exploit(member, donor, step, params)

    monkeypatch.setattr("gdpo_tune.ledger.ledger.Exploit", counted)
    with Ledger.open(spec) as ledger:
        begin(ledger)
        ledger.record_generation(FIRST)
        ledger.record_generation(SECOND)
    decoded.clear()
    with Ledger.open(spec) as ledger:
        assert ledger.get_generations() == [FIRST, SECOND]
        ledger.record_generation(THIRD)
        assert [len(record.lineage) for record in ledger.get_records()] == [1, 0, 2]
        assert ledger.get_generations() == [FIRST, SECOND, THIRD]
    assert decoded == [12, 24, 36]


def test_a_reader_sees_new_generations(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        begin(ledger)
        with Ledger.open(spec, read_only=True) as reader:
            assert reader.get_records()[2].lineage == ()
            ledger.record_generation(FIRST)
            assert reader.get_records()[2].lineage == FIRST.exploits


def test_a_torn_generation_is_dropped_whole(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        begin(ledger)
        before = (spec.directory / "ledger.journal").stat().st_size
        ledger.record_generation(FIRST)
    written = (spec.directory / "ledger.journal").read_bytes()
    assert written[before:].count(b"\n") == 1
    (spec.directory / "ledger.journal").write_bytes(written[:-1])
    with Ledger.open(spec) as ledger:
        assert ledger.get_generations() == []
        assert [record.lineage for record in ledger.get_records()] == [(), (), ()]
