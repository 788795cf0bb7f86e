"""A loader with `share` gives its data set what a sampler draws: of the same types, and whatever the sampler does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon
from tiny_training import SIZE, Indexed
from torch.utils.data import DataLoader, Sampler

import trainer_hook
from spiderfs.protocol import Exchange


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path) as daemon:
        daemon.sink.give = the_last_first
        yield daemon


def the_last_first(question: Exchange) -> list[int]:
    return [SIZE - 1 - number for number in range(len(question.wanted))]


class Typed(Sampler[Any]):
    """Indices of a type, one after the other; or some at a time."""

    def __init__(self, make: Callable[[list[int]], Any], at_a_time: int = 1) -> None:
        self.make = make
        self.at_a_time = at_a_time

    def __len__(self) -> int:
        return -(-SIZE // self.at_a_time)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(5)).tolist()
        for first in range(0, SIZE, self.at_a_time):
            yield self.make(order[first : first + self.at_a_time])


class Seen(Indexed):
    """Keeps what it was asked for, as it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return index


TYPES: dict[str, Callable[[list[int]], Any]] = {
    "tensors": lambda some: torch.tensor(some[0]),
    "numbers of NumPy": lambda some: np.int64(some[0]),
    "arrays without dimensions": lambda some: np.array(some[0], np.int32),
}
MANY: dict[str, Callable[[list[int]], Any]] = {
    "a tensor": lambda some: torch.tensor(some, dtype=torch.int32),
    "an array": lambda some: np.array(some, np.int16),
    "a list of tensors": lambda some: [torch.tensor(index) for index in some],
    "a tuple": tuple,
}


@pytest.mark.parametrize("kind", TYPES | MANY)
def test_an_exchanged_index_is_of_the_type_that_the_sampler_draws(daemon: HookDaemon, kind: str) -> None:
    """A data set may count on it: `index.item()`, `indices.tolist()`, a look-up by a tensor."""
    sampler = Typed(TYPES[kind]) if kind in TYPES else Typed(MANY[kind], 8)
    as_single = {"sampler": sampler, "batch_size": None}
    kinds: list[dict[str, Any]] = [as_single, {"sampler": sampler}] if kind in TYPES else [{"batch_sampler": sampler}]
    if kind in MANY and kind != "a tuple":
        kinds.append(as_single)
    for options in kinds:
        data = Seen()
        loader = DataLoader(data, **({} if "batch_sampler" in options else {"batch_size": 8}) | options)
        with trainer_hook.plan(daemon.mount, loader, share=True):
            assert [*loader]
        drawn = [*sampler]
        if "batch_sampler" in options:
            drawn = [index for some in drawn for index in some]
        assert flat(data.asked) != flat(drawn), "the samples are exchanged"
        assert [described(asked) for asked in data.asked] == [described(index) for index in drawn]
        assert sorted(flat(data.asked)) == list(range(SIZE))


def flat(draws: Sequence[Any]) -> list[int]:
    return [*itertools.chain.from_iterable(np.atleast_1d(np.asarray(draw)).tolist() for draw in draws)]


def described(draw: Any) -> tuple[Any, ...]:
    inner = described(draw[0]) if isinstance(draw, list | tuple) else ()
    return type(draw), getattr(draw, "dtype", None), getattr(draw, "shape", None), inner


class Richer(int):
    """An index that says more than its number."""


@pytest.mark.parametrize(
    "make",
    [lambda some: Richer(some[0]), lambda some: (some[0], 224), lambda some: (some[0], 0.5), lambda some: some[0] > 9],
)
def test_draws_that_are_more_than_an_index_are_not_exchanged(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture, make: Callable[[list[int]], Any]
) -> None:
    sampler = Typed(make)
    for options in ({"batch_size": 8}, {"batch_size": None}):
        data = Seen()
        loader = DataLoader(data, sampler=sampler, collate_fn=list if options["batch_size"] else None, **options)
        caplog.clear()
        with trainer_hook.plan(daemon.mount, loader, share=True):
            assert [*loader]
        assert data.asked == [*sampler]
        assert [type(asked) for asked in data.asked] == [type(draw) for draw in sampler]
        assert "Traceback" not in caplog.text
        assert "not exchanged" in caplog.text or "not planned" in caplog.text


def test_a_sampler_that_draws_more_than_its_length_is_drawn_to_its_end(daemon: HookDaemon) -> None:
    class Understated(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(SIZE))

        def __len__(self) -> int:
            return 16

    loader = DataLoader(Indexed(), batch_size=8, sampler=Understated())
    with trainer_hook.plan(daemon.mount, loader, share=True):
        assert sorted(torch.cat([*loader]).tolist()) == list(range(SIZE))


def test_a_list_that_names_a_file_twice_is_not_exchanged(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    samples = [(f"{number % 40}.png", 0) for number in range(SIZE)]
    loader = DataLoader(Indexed(), batch_size=8)
    with trainer_hook.plan(daemon.mount, loader, samples=samples, share=True):
        assert torch.cat([*loader]).tolist() == list(range(SIZE))
    assert "10 of its 50 samples are files that the list has before: name each file once" in caplog.text
    assert not daemon.sink.questions
