"""Records in a ring of shared memory: what is found is what was put, and the oldest leave first."""

from __future__ import annotations

import random

from forking import exit_status, forked

from spiderfs.shared.shared_memory import RecentRecords


def test_what_was_put_last_is_found_and_nothing_else() -> None:
    rng, records, model = random.Random(1), RecentRecords(1 << 16), dict[bytes, bytes]()
    for turn in range(20_000):
        key = b"%d" % rng.randrange(40)
        if rng.random() < 0.1:
            records.remove(key)
            model.pop(key, None)
        else:
            model[key] = rng.randbytes(rng.randrange(200)) + b"%d" % turn
            assert records.put(key, model[key])
        key = b"%d" % rng.randrange(40)
        found = records.get(key)
        assert found is None or found == model.get(key)
        # What was put just now is there.
        last = b"last %d" % turn
        records.put(last, last)
        assert records.get(last, 2, 3) == last[2:5]


def test_the_oldest_leave_first_and_too_long_ones_are_refused() -> None:
    records = RecentRecords(1 << 16)
    assert not records.put(b"long", bytes(1 << 15))
    for number in range(100):
        assert records.put(b"%d" % number, bytes(5000))
    there = [number for number in range(100) if records.get(b"%d" % number) is not None]
    assert there == list(range(there[0], 100))
    assert 10 <= len(there) <= 13


def test_an_earlier_value_does_not_come_back_when_a_key_is_removed() -> None:
    records = RecentRecords(1 << 20)
    records.put(b"a", b"1" * 20_000)
    records.put(b"a", b"2" * 20_000)
    records.put(b"b", b"3" * 20_000)
    records.remove(b"a")
    assert records.get(b"a") is None
    assert records.get(b"b") == b"3" * 20_000


def test_processes_that_write_at_once_find_what_each_has_written() -> None:
    records = RecentRecords(8 << 20)

    def write(process: int) -> None:
        for number in range(1000):
            value = b"%d %d " % (process, number) * 50
            assert records.put(b"%d-%d" % (process, number), value)
            assert records.get(b"%d-%d" % (process, number)) == value

    children = [forked(lambda process=process: write(process)) for process in range(3)]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    for process in range(3):
        for number in range(1000):
            assert records.get(b"%d-%d" % (process, number)) == b"%d %d " % (process, number) * 50
