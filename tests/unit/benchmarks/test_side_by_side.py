"""Work in several processes: what comes back, what is prepared once, and who ends them."""

from __future__ import annotations

import io
import multiprocessing
import os

import pytest
from rich.console import Console

from benchmarks.common.side_by_side import counted, side_by_side


def prepare() -> tuple[int, list[int]]:
    return os.getpid(), []


def square(prepared: tuple[int, list[int]], number: int) -> tuple[int, int, int]:
    process, done = prepared
    assert process == os.getpid()
    done.append(number)
    if number == 13:
        raise RuntimeError("no luck")
    return process, number * number, len(done)


def test_one_job_works_here_and_in_order() -> None:
    found = list(side_by_side(prepare, square, range(4), 1))
    assert found == [(os.getpid(), number * number, number + 1) for number in range(4)]


def test_each_process_prepares_once() -> None:
    found = list(side_by_side(prepare, square, range(6), 2))
    assert sorted(result for _, result, _ in found) == [0, 1, 4, 9, 16, 25]
    processes = {process for process, _, _ in found}
    assert os.getpid() not in processes
    assert len(processes) <= 2
    assert {process: max(count for of, _, count in found if of == process) for process in processes} == {
        process: sum(of == process for of, _, _ in found) for process in processes
    }


def test_an_error_ends_all() -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        list(side_by_side(prepare, square, [13, *range(8)], 2))
    assert multiprocessing.active_children() == []


def test_what_is_left_is_counted() -> None:
    console = Console(file=io.StringIO(), record=True)
    assert list(counted(iter("ab"), "abcd", console)) == ["a", "b"]
    assert console.export_text().splitlines() == ["3 left, some 0 minutes", "2 left, some 0 minutes"]
