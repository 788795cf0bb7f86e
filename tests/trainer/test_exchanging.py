"""A loader with `share`: whatever the daemon answers, each sample of an epoch comes exactly once."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choices import all_or_covering
from hook_daemon import HookDaemon, until
from tiny_training import SIZE, WORKERS, Indexed, Network, Numbered, batches_of, indexed, own
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

import trainer_hook
from spiderfs.protocol import Exchange
from trainer_hook.loader.exchange import like, why_not_replaced
from trainer_hook.refurbishing.sampler import RefurbishedDraw, SharedDraw


def chained(batches: Sequence[Sequence[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(batches)]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled, with a generator": lambda: {"shuffle": True, "generator": own()},
    "the last batch left out": lambda: {"shuffle": True, "generator": own(), "drop_last": True},
    "single samples": lambda: {"shuffle": True, "generator": own(), "batch_size": None},
    "workers": lambda: {"shuffle": True, "generator": own(), **WORKERS},
    "workers that stay": lambda: {"shuffle": True, "generator": own(), "persistent_workers": True, **WORKERS},
    "distributed": lambda: {"sampler": DistributedSampler(Indexed(), 2, 1)},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(Indexed(), generator=own()), 5, False)},
}


def the_last_first(question: Exchange) -> list[int]:
    return [SIZE - 1 - number for number in range(len(question.wanted))]


def nonsense(question: Exchange) -> list[int]:
    return [*(int(index) for index in question.wanted[::-1]), 4_000_000_000, 7, 7, 7, 0]


ANSWERS: dict[str, Callable[[Exchange], Sequence[int]]] = {
    "nothing": lambda question: (),
    "the last first": the_last_first,
    "nonsense": nonsense,
    "always the same": lambda question: [3] * len(question.wanted),
}


@pytest.mark.parametrize(("kind", "answer"), all_or_covering(KINDS, ANSWERS))
def test_each_sample_of_an_epoch_comes_exactly_once(daemon: HookDaemon, kind: str, answer: str) -> None:
    daemon.sink.give = ANSWERS[answer]
    torch.manual_seed(1)
    expected = [batches_of(loader) for loader in [indexed(**KINDS[kind]())] for _ in range(2)]
    torch.manual_seed(1)
    loader = indexed(**KINDS[kind]())
    with trainer_hook.plan(daemon.mount, loader, share=True):
        for batches in expected:
            exchanged = batches_of(loader)
            assert [len(batch) for batch in exchanged] == [len(batch) for batch in batches]
            # The samples are those that the sampler drew, so what it drew is not changed by the exchange.
            assert sorted(chained(exchanged)) == sorted(chained(batches))
            if answer == "nothing":
                assert exchanged == batches


def test_what_the_daemon_names_is_taken(daemon: HookDaemon) -> None:
    daemon.sink.give = lambda question: [40, 41] if question.position == 8 else ()
    loader = indexed()
    with trainer_hook.plan(daemon.mount, loader, share=True):
        batches = batches_of(loader)
        assert batches[:2] == [list(range(8)), [40, 41, *range(10, 16)]]
        assert batches[5] == [8, 9, *range(42, 48)]
        until(lambda: len(daemon.sink.questions) == 8)
    questions = [question for _, question in daemon.sink.questions]
    assert [question.position for question in questions] == [0, 8, 16, 24, 32, 40, 48, 50]
    assert questions[1].wanted.tolist() == list(range(8, 16))
    assert questions[2].dispatched.tolist() == batches[1]


def test_a_loader_without_share_asks_nothing(daemon: HookDaemon) -> None:
    loader, validation = indexed(), indexed()
    with (
        trainer_hook.plan(daemon.mount, loader, split="train"),
        trainer_hook.plan(daemon.mount, validation, split="validation"),
    ):
        assert batches_of(loader) == batches_of(validation)
        until(lambda: len(daemon.sink.plans) >= 2)
    assert daemon.sink.questions == []


def test_a_daemon_that_comes_back_gets_the_order_as_it_is(daemon: HookDaemon) -> None:
    daemon.sink.give = the_last_first
    loader = indexed()
    with trainer_hook.plan(daemon.mount, loader, share=True):
        batches = iter(loader)
        taken = [next(batches) for _ in range(3)]
        daemon.__exit__()
        daemon.sink.plans.clear()
        with daemon:
            until(lambda: bool(daemon.sink.plans))
            plan = daemon.sink.plans[0][1]
            assert plan.position == 24
            assert plan.order[:24].tolist() == torch.cat(taken).tolist()
            assert sorted(plan.order.tolist()) == list(range(SIZE))
            taken += batches
        assert torch.cat(taken).tolist() != list(range(SIZE))
        assert sorted(torch.cat(taken).tolist()) == list(range(SIZE))
    daemon.__enter__()


@pytest.mark.parametrize(
    "state",
    [
        {"order": [0, 0], "consumed": 0},
        {"order": [99], "consumed": 0},
        {"order": [0]},
        {"consumed": 0},
        {"order": [1, 2, 3], "consumed": 7},
        {"order": [0.5], "consumed": 0},
        {"order": [2**32], "consumed": 0},
        [1, 2, 3],
    ],
)
def test_a_state_of_another_list_is_refused(daemon: HookDaemon, state: Any) -> None:
    with trainer_hook.plan(daemon.mount, indexed(), share=True) as planning, pytest.raises(ValueError, match=r"."):
        planning.load_state_dict(planning.planner._list | state if isinstance(state, dict) else state)


def test_a_refurbished_loader_is_refused(tmp_path: Path) -> None:
    halves = (lambda image: image, lambda image: image)
    plain = indexed(shuffle=True)
    plain.dataset.transform = None  # type: ignore[attr-defined]
    loader = trainer_hook.refurbish(plain, split=halves, store=tmp_path)
    with pytest.raises(ValueError, match='refurbish with reuse="jobs"'):
        trainer_hook.plan(tmp_path, loader, share=True)


def test_a_draw_whose_generation_the_mount_assigns_changes_places() -> None:
    drawn = [SharedDraw(index, 7) for index in (3, 1)]
    assert why_not_replaced([drawn]) is None
    made = like(drawn, [5, 9])
    assert (made, [type(one) for one in made], [one.epoch for one in made]) == ([5, 9], [SharedDraw] * 2, [7, 7])
    assert why_not_replaced([[RefurbishedDraw(3, 0)]]) is not None
    again = pickle.loads(pickle.dumps(made[0]))
    assert (again, again.epoch) == (5, 7)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler(range(1, SIZE + 1), 60),
        lambda: RandomSampler(Indexed(), replacement=True),
        lambda: trainer_hook.SpiderSampler(SIZE),
    ],
)
def test_a_sampler_that_repeats_is_refused(daemon: HookDaemon, sampler: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="draws samples more than once in an epoch"):
        trainer_hook.plan(daemon.mount, indexed(sampler=sampler()), share=True)


def test_a_sampler_that_turns_out_to_repeat_is_left_alone(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    expected = batches_of(indexed(sampler=RandomSampler(Indexed(), num_samples=120, generator=own())))
    loader = indexed(sampler=RandomSampler(Indexed(), num_samples=120, generator=own()))
    with caplog.at_level(logging.WARNING, "trainer_hook"), trainer_hook.plan(daemon.mount, loader, share=True):
        assert batches_of(loader) == expected
    assert "its sampler draws some more than once in an epoch" in caplog.text


class Unforeseen(Sampler[int]):
    """Half of the samples, which a copy of it does not foretell."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return SIZE // 2

    def __iter__(self) -> Iterator[int]:
        self.drawn = random.SystemRandom().sample(range(SIZE), SIZE // 2)
        return iter(self.drawn)


def test_what_a_sampler_draws_counts_where_its_copy_draws_something_else(daemon: HookDaemon) -> None:
    daemon.sink.give = the_last_first
    sampler = Unforeseen()
    loader = indexed(sampler=sampler)
    with trainer_hook.plan(daemon.mount, loader, share=True):
        for _ in range(2):
            assert sorted(chained(batches_of(loader))) == sorted(sampler.drawn)


def test_a_hook_shares_too(daemon: HookDaemon) -> None:
    daemon.sink.give = the_last_first
    model, data = Network(), Numbered()
    loader = DataLoader(data, batch_size=8, shuffle=True)
    hook = trainer_hook.attach(daemon.mount, model, loader, share=True)
    for inputs, _ in loader:
        model(inputs)
        assert len(hook.indices) == len(inputs)
    hook.close()
    assert len(daemon.sink.questions) >= 7


# -- the types of what a sampler draws


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
    daemon.sink.give = the_last_first
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
    daemon.sink.give = the_last_first
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

    daemon.sink.give = the_last_first
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
