"""`steps.jsonl` while it grows."""

from gdpo_tune.core.trial_files import STEPS_FILE, StepsReader, append_step, read_steps
from gdpo_tune.core.trials import Cost, Measurement


def test_a_reader_follows_a_file_that_grows(tmp_path):
    reader = StepsReader(tmp_path)
    assert reader.read() == []
    append_step(tmp_path, Measurement(1, {"train/loss": 0.5}, Cost()))
    assert [step.step for step in reader.read()] == [1]
    append_step(tmp_path, Measurement(2, {"train/loss": 0.4}, Cost()))
    path = tmp_path / STEPS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])  # the writer is in the middle of its line
    assert [step.step for step in reader.read()] == [1]
    path.write_bytes(whole)
    assert reader.read() == read_steps(tmp_path)
    append_step(tmp_path, Measurement(1, {"train/loss": 0.3}, Cost()))  # a later attempt
    assert [step.metrics["train/loss"] for step in reader.read()] == [0.3]
    path.unlink()
    assert reader.read() == []


def test_a_reader_reads_nothing_twice(tmp_path, monkeypatch):
    reader = StepsReader(tmp_path)
    append_step(tmp_path, Measurement(1, {}, Cost()))
    first = reader.read()
    monkeypatch.setattr(type(tmp_path), "open", None)
    assert reader.read() == first
