"""The spool keeps every whole message, whatever happens to the process and the end of its file."""

import json

import pytest

from gdpo_tune.tracking import spool as module
from gdpo_tune.tracking.spool import Spool

MESSAGES = [{"run": str(i), "text": "ü" * i} for i in range(4)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sweep" / "spool.jsonl"


@pytest.fixture
def opened():
    """Opens spools that the test need not close."""
    spools = []

    def open_spool(path, destination="here"):
        spools.append(Spool(path, destination))
        return spools[-1]

    yield open_spool
    for spool in spools:
        spool.close()


@pytest.fixture
def filled(path, opened):
    def fill(destination="here"):
        spool = opened(path, destination)
        for message in MESSAGES:
            spool.put(message)
        return spool

    return fill


def test_messages_outlive_the_process(path, filled, opened):
    filled()  # never closed, as after a kill
    spool = opened(path)
    assert spool.read_batch()[0] == MESSAGES
    assert spool.count_pending() == 4
    assert not spool.is_drained()


def test_a_file_cut_at_any_byte_opens_with_every_whole_message(path, filled, opened):
    filled().close()
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        spool = opened(path)
        expected = MESSAGES[: sum(end <= size for end in ends)]
        assert spool.read_batch()[0] == expected
        spool.put({"run": "new"})
        assert spool.read_batch()[0] == [*expected, {"run": "new"}]
        spool.close()


def test_delivery_goes_on_where_it_was(path, filled, opened):
    spool = filled()
    first, offset = spool.read_batch()
    assert first == MESSAGES
    spool.commit(offset, [])
    assert spool.is_drained()
    spool.put({"run": "later"})
    again = opened(path)
    assert list(again.read_delivered()) == MESSAGES
    assert again.read_batch()[0] == [{"run": "later"}]


def test_a_batch_is_bounded(filled, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    spool = filled()
    seen = []
    while not spool.is_drained():
        messages, offset = spool.read_batch()
        assert len(messages) == 1
        seen += messages
        spool.commit(offset, [])
    assert seen == MESSAGES


def test_another_destination_starts_from_the_beginning(path, filled, opened):
    spool = filled()
    spool.commit(spool.read_batch()[1], [])
    assert opened(path, "there").read_batch()[0] == MESSAGES


def test_a_position_beyond_the_file_counts_what_is_there(path, filled, opened):
    spool = filled()
    spool.commit(spool.read_batch()[1], [])
    spool.close()
    path.write_bytes(path.read_bytes()[:-1])
    assert opened(path).is_drained()


@pytest.mark.parametrize("torn", ['{"off', "[]"])
def test_an_unreadable_position_repeats_everything(path, filled, opened, torn):
    spool = filled()
    spool.commit(spool.read_batch()[1], [])
    path.with_suffix(".offset").write_text(torn)
    assert opened(path).count_pending() == 4


def test_leftovers_are_remembered(path, filled, opened):
    spool = filled()
    spool.commit(spool.read_batch()[1], [MESSAGES[2]])
    again = opened(path)
    assert again.leftover == [MESSAGES[2]]
    assert again.count_pending() == 1
    assert not again.is_drained()


def test_zeros_inside_the_file_cost_only_their_own_line(path, filled, opened):
    filled().close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    assert opened(path).read_batch()[0] == [MESSAGES[0], *MESSAGES[2:]]


def test_only_finite_numbers_get_in(path, opened):
    spool = opened(path)
    with pytest.raises(ValueError, match="JSON"):
        spool.put({"run": "0", "metrics": [["a", float("nan"), 0, 0]]})
    assert spool.is_drained()


def test_the_position_holds_no_password(path, filled):
    spool = filled("postgresql://me:secret@host/db")
    spool.commit(spool.read_batch()[1], [])
    assert "secret" not in path.with_suffix(".offset").read_text()


def test_a_refused_message_is_kept_with_its_reason(filled):
    spool = filled()
    spool.set_aside(MESSAGES[0], "no")
    kept = json.loads(spool.refused_path.read_text())
    assert kept == {"reason": "no", "message": MESSAGES[0]}


def test_a_spool_that_is_moved_aside_leaves_its_name_free(path, filled, opened):
    spool = filled()
    spool.commit(spool.read_batch()[1], [])
    spool.move_aside()
    assert opened(path).read_batch()[0] == []
    assert path.with_suffix(".old.jsonl").read_text().count("\n") == 4


def test_a_torn_line_is_cut_off(path):
    path.parent.mkdir()
    whole = b'{"run":"0","tags":{"a":"some text"}}\n'
    path.write_bytes(2 * whole + b'{"run":"1","tags":{"b":"te')
    opened = Spool(path, "there")
    assert opened.read_batch()[0] == 2 * [json.loads(whole)]
    opened.close()
    assert path.read_bytes() == 2 * whole
