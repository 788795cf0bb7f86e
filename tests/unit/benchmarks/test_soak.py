"""The soak's model of what may be read: what is planted there is found, and one seed says everything."""

from __future__ import annotations

import pytest

from benchmarks.soak.contents import (
    MIXED,
    RACING,
    SAME,
    SUBSTITUTE,
    WRONG,
    Held,
    History,
    Key,
    Range,
    Seen,
    Segment,
    State,
    cells,
    parsed,
)
from benchmarks.soak.schedule import schedule

SIZE = 1000
CLASSES = {1: 0, 2: 0, 3: 1}


def whole(file: int, version: int, size: int = SIZE) -> State:
    return State(file, size, (Segment(size, version),))


@pytest.fixture
def history() -> History:
    """File 1 was replaced at 10 s, and written to in place from 20 s to 21 s; the others have one version."""
    history = History(CLASSES)
    for file in CLASSES:
        _held(history, whole(file, file), 0.0, 0.0, Key(SIZE, file))
    _held(history, whole(1, 10), 10.0, 10.0, Key(SIZE, 10))
    _held(history, whole(1, 10).written(160, 320, 11), 20.0, 21.0, Key(SIZE, 11), in_place=True)
    return history


def _held(history: History, state: State, began_s: float, changed_s: float, key: Key, in_place: bool = False) -> Held:
    held = history.begin(state, began_s, in_place)
    history.complete(held, changed_s)
    held.key = key
    return held


def seen(data: bytes, key: Key | None, at_s: float, file: int = 1, by_trainer: bool = False) -> Seen:
    return Seen(file, "read", at_s, at_s, 0.0, key, [parsed(0, SIZE, data)], by_trainer=by_trainer)


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (0, 16), (5, 300), (990, 100), (2000, 10)])
def test_what_was_read_is_known_again(offset: int, size: int) -> None:
    state = whole(1, 10).written(160, 320, 11).cut(900)
    found = parsed(offset, size, state.read(offset, offset + size))
    assert state.explains(found)
    assert not found.wrong
    assert not state.cut(899).explains(found) or offset + size < 899 or offset > 900


def test_a_file_that_was_made_longer_has_zeros_there() -> None:
    state = whole(1, 1, 160).cut(480).written(320, 400, 2)
    data = state.read(0, 480)
    assert data == cells(1, 1, 0, 160) + bytes(160) + cells(1, 2, 320, 400) + bytes(80)
    assert state.explains(parsed(0, 480, data))


def test_a_state_of_the_time_is_the_same(history: History) -> None:
    verdict = history.judge(seen(cells(1, 1, 0, SIZE), Key(SIZE, 1), 15.0))
    assert (verdict.how, verdict.late_s) == (SAME, 5.0)
    assert history.judge(seen(cells(1, 10, 0, SIZE), Key(SIZE, 10), 15.0)).how == SAME


@pytest.mark.parametrize(
    "data",
    [
        cells(1, 1, 0, 512) + cells(1, 10, 512, SIZE),  # two versions
        cells(1, 10, 0, SIZE - 16),  # too short
        cells(1, 12, 0, SIZE),  # a version that never was
        cells(3, 3, 0, SIZE),  # another file
        cells(1, 10, 16, SIZE + 16),  # another place
        cells(1, 10, 0, 512) + bytes(SIZE - 512),  # zeros
        cells(1, 10, 0, 992) + b"\0" * 8,  # the end of the last cell
        b"x" * SIZE,
    ],
)
def test_what_never_was_is_found(history: History, data: bytes) -> None:
    assert history.judge(seen(data, Key(SIZE, 10), 15.0)).how == WRONG
    assert history.judge(seen(data, None, 15.0)).how == WRONG


def test_bytes_of_another_version_than_the_open_file_are_found(history: History) -> None:
    assert history.judge(seen(cells(1, 1, 0, SIZE), Key(SIZE, 10), 15.0)).how == WRONG
    assert "never had" in history.judge(seen(cells(1, 1, 0, SIZE), Key(SIZE, 99), 15.0)).why


def test_old_bytes_under_a_new_mtime_are_let_pass_while_it_is_written(history: History) -> None:
    mix = cells(1, 10, 0, 240) + cells(1, 11, 240, 320) + cells(1, 10, 320, SIZE)
    assert history.judge(seen(mix, Key(SIZE, 11), 20.5)).how == RACING
    assert history.judge(seen(mix, Key(SIZE, 11), 21.1)).how == WRONG


def test_what_has_one_size_and_mtime_is_one_version(history: History) -> None:
    _held(history, whole(2, 20), 30.0, 30.0, Key(SIZE, 2))
    mix = cells(2, 2, 0, 512) + cells(2, 20, 512, SIZE)
    assert history.judge(seen(mix, Key(SIZE, 2), 60.0, file=2)).how == MIXED


def test_only_trainers_are_given_substitutes_and_only_of_their_class(history: History) -> None:
    other = cells(2, 2, 0, SIZE)
    assert history.judge(seen(other, Key(SIZE, 2), 5.0, by_trainer=True)).how == SUBSTITUTE
    assert history.judge(seen(other, Key(SIZE, 2), 5.0)).how == WRONG
    assert history.judge(seen(cells(3, 3, 0, SIZE), Key(SIZE, 3), 5.0, by_trainer=True)).how == WRONG


def test_what_is_said_of_a_read_comes_back(history: History) -> None:
    import json

    said = seen(cells(1, 1, 0, SIZE), Key(SIZE, 1), 5.0)
    assert Seen.of(json.loads(json.dumps(said.as_row()))) == said
    assert isinstance(said.ranges[0], Range)


def test_one_seed_is_one_schedule() -> None:
    assert schedule(3, 120.0) == schedule(3, 120.0)
    assert schedule(3, 120.0) != schedule(4, 120.0)
