"""What is published of an ordinary loader's epochs, and that the loader draws what it would have drawn."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import signal
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hook_daemon import HookDaemon, until
from tiny_training import (
    SIZE,
    WORKERS,
    Indexed,
    Network,
    Numbered,
    OfAll,
    batches_of,
    indexed,
    loader,
    own,
    train_epoch,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import trainer_hook
from spiderfs.protocol import Plan, Progress
from trainer_hook.connection import client, introduce
from trainer_hook.samplers.epoch import EpochSampler

# Whether the next epoch is known while one runs.
AHEAD, UNKNOWN = True, False


class Eager(Sampler[list[int]]):
    """A batch sampler that draws an epoch when its iterator is made, before the loader draws a seed."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SIZE).reshape(-1, 5).tolist())

    def __len__(self) -> int:
        return SIZE // 5


class BitByBit(OfAll):
    """Draws each index when it is asked for, from generators that the training uses too."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE // 2, ())) + random.randrange(SIZE // 4) + int(np.random.randint(SIZE // 4))


class Shuffling(OfAll):
    """Has a generator and a list of its own, which it changes; and it counts its epochs at their end."""

    def __init__(self) -> None:
        self.numbers = [*range(SIZE)]
        self.numpy_generator = np.random.default_rng(7)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.numpy_generator.shuffle(self.numbers)
        for number in self.numbers:
            yield (number + self.epoch) % SIZE
        self.epoch += 1


class Pairs(Sampler[list[int]]):
    """A batch sampler of one's own, by the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(SIZE // 2).tolist():
            yield [first, first + SIZE // 2]

    def __len__(self) -> int:
        return SIZE // 2


def distributed() -> Any:
    return DistributedSampler(Indexed(), 2, 1)


KINDS: dict[str, tuple[Any, bool]] = {
    "in order": (dict, AHEAD),
    "shuffled": (lambda: {"shuffle": True}, UNKNOWN),
    "shuffled, with a generator": (lambda: {"shuffle": True, "generator": own()}, AHEAD),
    "the last batch left out": (lambda: {"shuffle": True, "generator": own(), "drop_last": True}, AHEAD),
    "single samples": (lambda: {"shuffle": True, "generator": own(), "batch_size": None}, AHEAD),
    "workers": (lambda: {"shuffle": True, "generator": own(), **WORKERS}, AHEAD),
    "workers that stay": (lambda: {"shuffle": True, "generator": own(), "persistent_workers": True, **WORKERS}, AHEAD),
    "with replacement": (
        lambda: {"sampler": RandomSampler(Indexed(), replacement=True, num_samples=70, generator=own())},
        AHEAD,
    ),
    "more than all": (lambda: {"sampler": RandomSampler(Indexed(), num_samples=120, generator=own())}, AHEAD),
    "a part": (lambda: {"sampler": SubsetRandomSampler(range(3, 40, 2))}, UNKNOWN),
    "weighted, with a generator": (
        lambda: {"sampler": WeightedRandomSampler(range(1, SIZE + 1), 60, generator=own())},
        AHEAD,
    ),
    "distributed": (lambda: {"sampler": distributed()}, AHEAD),
    "a batch sampler": (lambda: {"batch_sampler": BatchSampler(RandomSampler(Indexed()), 5, True)}, UNKNOWN),
    "a batch sampler of one's own": (lambda: {"batch_sampler": Pairs()}, UNKNOWN),
    "a batch sampler that draws at once": (lambda: {"batch_sampler": Eager()}, UNKNOWN),
    "the same with workers": (lambda: {"batch_sampler": Eager(), **WORKERS}, UNKNOWN),
    "bit by bit": (lambda: {"sampler": BitByBit()}, UNKNOWN),
    "a list that it shuffles": (lambda: {"sampler": Shuffling()}, UNKNOWN),
}


# Of what these draw, the epoch after the next is known too.
REPEATING = ("with replacement", "more than all", "weighted, with a generator")


def seed() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def epochs(batches: DataLoader[Any], count: int = 3) -> list[tuple[list[list[int]], list[int]]]:
    """The batches of each epoch, and where the random generators stand after it."""
    seed()
    result = []
    for epoch in range(count):
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        drawn = batches_of(batches)
        generator = getattr(batches.sampler, "generator", None)
        states = [torch.get_rng_state()] + ([] if generator is None else [generator.get_state()])
        result.append((drawn, torch.cat(states).tolist()))
    return result


def plans(daemon: HookDaemon, begun: bool) -> list[Plan]:
    return [plan for _, plan in daemon.sink.plans if plan.begun is begun]


def begun(daemon: HookDaemon) -> list[list[int]]:
    return [plan.order.tolist() for plan in plans(daemon, True)]


def last_plan(daemon: HookDaemon, begun: bool) -> tuple[int, int, list[int]]:
    plan = plans(daemon, begun)[-1]
    return plan.epoch, plan.position, plan.order.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_generators_are_those_of_the_loader_without_a_plan(daemon: HookDaemon, kind: str) -> None:
    options, known = KINDS[kind]
    expected = epochs(indexed(**options()), 5 if kind in REPEATING else 4)
    orders = [[*itertools.chain.from_iterable(drawn)] for drawn, _ in expected]

    batches = indexed(**options())
    seed()
    with trainer_hook.plan(daemon.mount, batches):
        for epoch in range(3):
            if isinstance(batches.sampler, DistributedSampler):
                batches.sampler.set_epoch(epoch)
            assert batches_of(batches) == expected[epoch][0]
            assert torch.get_rng_state().tolist() == expected[epoch][1][: len(torch.get_rng_state())]
            until(lambda epoch=epoch: len(plans(daemon, True)) == epoch + 1)  # type: ignore[misc]
            assert last_plan(daemon, True)[::2] == (epoch, orders[epoch])
            # Of what is drawn with replacement the epoch after the next is of use too.
            ahead = 0 if not known else 2 if len(set(orders[1])) < len(orders[1]) else 1
            until(lambda count=epoch + ahead if known else 0: len(plans(daemon, False)) == count)  # type: ignore[misc]
    foreseen = [(plan.epoch, plan.position, plan.order.tolist()) for plan in plans(daemon, False)]
    assert foreseen == [(epoch, 0, orders[epoch]) for epoch in range(1, 1 + len(foreseen))]
    assert type(batches) is DataLoader
    assert epochs(indexed(**options()), 2) == expected[:2]
    del batches
    gc.collect()


@pytest.mark.parametrize(("seeded", "split"), [(True, False), (False, False), (False, True)])
def test_the_next_epoch_of_what_accelerate_deals_out_is_known(daemon: HookDaemon, seeded: bool, split: bool) -> None:
    batches = prepare_data_loader(
        indexed(shuffle=True, generator=own(), drop_last=True),
        num_processes=2,
        process_index=1,
        put_on_device=False,
        use_seedable_sampler=seeded,
        split_batches=split,
    )
    with trainer_hook.plan(daemon.mount, batches):
        for epoch in range(3):
            batches_of(batches)
            until(lambda epoch=epoch: (len(begun(daemon)), len(plans(daemon, False))) == (epoch + 1, epoch + 1))  # type: ignore[misc]
    drawn, foreseen = begun(daemon), [plan.order.tolist() for plan in plans(daemon, False)]
    assert drawn[0] != drawn[1] != drawn[2]
    assert foreseen[:2] == drawn[1:]


@pytest.mark.parametrize(
    "kind", ["shuffled", "single samples", "workers", "workers that stay", "the same with workers"]
)
def test_the_daemon_gets_the_progress_of_the_loader_and_the_loop(
    daemon: HookDaemon, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, _ = KINDS[kind]
    batches = indexed(**options())
    if not batches.num_workers:
        # This test waits after each batch. With workers, the hook would often be asked just while it takes one batch
        # and dispatches another.
        monkeypatch.setattr(client, "PROGRESS_EVERY_S", 0.002)
        monkeypatch.setattr(client, "COLLECT_MS", 2)
    seed()
    at_rest = []
    with trainer_hook.plan(daemon.mount, batches):
        for epoch in range(2):
            taken = largest = 0
            for batch in batches:
                size = torch.as_tensor(batch).numel()
                taken, largest = taken + size, max(largest, size)
                until(lambda now=(epoch, taken): said(daemon) == now)  # type: ignore[misc]
                at_rest.append(daemon.sink.progress[-1][1])
            assert taken == len(plans(daemon, True)[-1].order)
    told = [progress for _, progress in daemon.sink.progress]
    assert [progress.epoch for progress in told] == sorted(progress.epoch for progress in told)
    in_hand = max(1, 2 * batches.num_workers)
    assert max(progress.dispatched - progress.taken for progress in at_rest if progress.epoch == 0) <= in_hand * largest
    # While the loop asks for a batch, the next one is dispatched before that one is taken.
    asking = max(progress.dispatched - progress.taken for progress in told if progress.epoch == 0)
    assert asking <= (in_hand + 1) * largest
    assert told[-1].dispatched == told[-1].taken == len(plans(daemon, True)[-1].order)
    del batches
    gc.collect()


def said(daemon: HookDaemon) -> tuple[int, int]:
    """The epoch that was told of last, and how much of it was taken."""
    _, progress = daemon.sink.progress[-1] if daemon.sink.progress else (None, Progress("train", 0, 0, 0))
    return progress.epoch, progress.taken


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_left_early_are_those_of_the_loader_without_a_plan(
    daemon: HookDaemon, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop takes no batch, some, all but the last, and all; it draws from the global generators in between."""

    def some_epochs(batches: DataLoader[Any]) -> list[Any]:
        seed()
        result = []
        for epoch, count in enumerate((3, 0, len(batches) - 1, len(batches), 2)):
            if isinstance(batches.sampler, DistributedSampler):
                batches.sampler.set_epoch(epoch)
            taken = []
            for batch in itertools.islice(batches, count):
                taken.append(
                    (torch.as_tensor(batch).tolist(), random.random(), float(torch.rand(())), np.random.rand())
                )
            result.append(taken)
        return result

    options, _ = KINDS[kind]
    expected = some_epochs(indexed(**options()))
    batches = indexed(**options())
    with trainer_hook.plan(daemon.mount, batches):
        assert some_epochs(batches) == expected
    del batches
    gc.collect()
    # What a sampler draws bit by bit depends on what the training draws in between: that is found out, and said once.
    assert [record.message for record in caplog.records] == (
        [
            "spiderfs: the loader's epochs are not planned any more: "
            "its sampler draws something else than a copy of it did"
        ]
        if kind == "bit by bit"
        else []
    )


def test_a_sampler_that_shares_its_generator_with_a_copy_is_not_planned(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    class OfItsClass(OfAll):
        generator = np.random.default_rng(1)

        def __iter__(self) -> Iterator[int]:
            return iter(self.generator.permutation(SIZE).tolist())

    class NotToBeCopied(OfAll):
        def __init__(self) -> None:
            self.numbers = (number for number in range(SIZE))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    for sampler, reason in (
        (OfItsClass(), "OfItsClass draws by generator"),
        (NotToBeCopied(), "BatchSampler cannot be copied"),
    ):
        caplog.clear()
        batches = indexed(batch_sampler=BatchSampler(sampler, 5, False))
        with trainer_hook.plan(daemon.mount, batches):
            (record,) = caplog.records
            assert f"a plan must not change what is drawn: {reason}" in record.message
            assert sorted(itertools.chain.from_iterable(batches_of(batches))) == [*range(SIZE)]
    assert not daemon.sink.plans


class Plain:
    """A data set that is no torch Dataset, as those of other packages; it must not be copied."""

    def __init__(self) -> None:
        self.samples = [(f"{number}.png", 0) for number in range(SIZE)]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the data set is copied")


class PlainList(list[int]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the list is copied")


class InPieces(Sampler[int]):
    """A sampler of one's own that has the data set, or a view of it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.generator = own()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.dataset), generator=self.generator).tolist())

    def __len__(self) -> int:
        return len(self.dataset)


@pytest.mark.parametrize(
    ("data", "sampler", "same"),
    [
        (Plain(), RandomSampler, False),
        (Plain(), InPieces, True),
        (PlainList(range(SIZE)), SequentialSampler, True),
        # Another list than the loader's data set may be one that the sampler changes.
        (PlainList(range(SIZE)), InPieces, True),
    ],
)
def test_a_data_set_is_not_copied_with_the_sampler(daemon: HookDaemon, data: Any, sampler: Any, same: bool) -> None:
    options = {"sampler": sampler(data), "batch_size": 8}
    batches = DataLoader(data if same else Indexed(), **options)
    with trainer_hook.plan(daemon.mount, batches, samples=Indexed().samples):
        drawn = batches_of(batches)
        until(lambda: begun(daemon) == [[*itertools.chain.from_iterable(drawn)]])


class Preempted(Exception):
    pass


class Interrupted(OfAll):
    """Gets a signal while its copy draws, as a job that is told to end may at any time."""

    def __init__(self) -> None:
        self.original = id(self)

    def __iter__(self) -> Iterator[int]:
        for number in torch.randperm(SIZE).tolist():
            if number == 20 and id(self) != self.original:
                signal.raise_signal(signal.SIGUSR1)
            yield number


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        self.end()

    def end(self, *_: Any) -> None:
        raise Preempted


def ends_at_once_next_time(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Preempted


@pytest.mark.parametrize("handler", [Handler(), Handler().end, partial(Handler().end, "now"), ends_at_once_next_time])
def test_what_a_signal_handler_raises_comes_through_to_the_training(
    daemon: HookDaemon, handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batches = indexed(sampler=Interrupted())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with trainer_hook.plan(daemon.mount, batches):
            for _ in range(2):
                signal.signal(signal.SIGUSR1, handler)
                torch.manual_seed(11)
                with pytest.raises(Preempted):
                    next(iter(batches))
            assert not caplog.records
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            # The training goes on with its plan, if it goes on.
            torch.manual_seed(11)
            drawn = batches_of(batches)
            until(lambda: begun(daemon)[-1:] == [[*itertools.chain.from_iterable(drawn)]])
    finally:
        signal.signal(signal.SIGUSR1, before)
    torch.manual_seed(11)
    assert drawn == batches_of(batches)


def test_attach_publishes_unless_told_not_to(daemon: HookDaemon) -> None:
    model, batches = Network(), loader()
    for publish in (True, False):
        hook = trainer_hook.attach(daemon.mount, model, batches, plan=publish)
        train_epoch(model, batches)
        hook.close()
    until(lambda: len(daemon.sink.batches) == 2 * 7)
    (plan,) = plans(daemon, True)
    drawn = [index for _, batch in daemon.sink.batches[:7] for index in batch.indices.tolist()]
    assert plan.order.tolist() == drawn


@pytest.mark.parametrize("workers", [{}, WORKERS], ids=["alone", "workers"])
def test_any_sampler_can_be_drawn_ahead(daemon: HookDaemon, workers: dict[str, Any]) -> None:
    batches = indexed(shuffle=True, **workers)
    with trainer_hook.plan(daemon.mount, batches, draw_ahead=True):
        for epoch in range(3):
            drawn = [*itertools.chain.from_iterable(batches_of(batches))]
            assert sorted(drawn) == [*range(SIZE)]
            until(lambda epoch=epoch: len(plans(daemon, False)) == epoch + 1)  # type: ignore[misc]
            assert last_plan(daemon, True)[::2] == (epoch, drawn)
    until(lambda: len(plans(daemon, True)) == 3)
    ahead = [plan.order.tolist() for plan in plans(daemon, False)]
    assert ahead[:2] == [plan.order.tolist() for plan in plans(daemon, True)[1:]]


@pytest.mark.parametrize("workers", [{}, {"persistent_workers": True, **WORKERS}], ids=["alone", "workers"])
def test_an_epoch_left_early_is_withdrawn(daemon: HookDaemon, workers: dict[str, Any]) -> None:
    batches = indexed(shuffle=True, generator=own(), **workers)
    with trainer_hook.plan(daemon.mount, batches):
        for step, _ in enumerate(batches):
            if step == 2:
                break
        until(lambda: begun(daemon)[-1:] == [[]])
        ahead = last_plan(daemon, False)
        drawn = batches_of(batches)
        until(lambda: last_plan(daemon, True)[::2] == ahead[::2])
    assert [*itertools.chain.from_iterable(drawn)] == ahead[2]
    del batches
    gc.collect()


def test_the_iteration_that_began_last_is_the_one_planned(daemon: HookDaemon) -> None:
    batches = indexed(shuffle=True)
    with trainer_hook.plan(daemon.mount, batches):
        first, second = iter(batches), iter(batches)
        taken = [*next(first).tolist(), *next(first).tolist()]
        until(lambda: len(begun(daemon)) == 1)
        other = next(second).tolist()
        until(lambda: len(begun(daemon)) == 2)
        assert [begun(daemon)[0][:16], begun(daemon)[1][:8]] == [taken, other]
        del first
        assert len(batches_of(second)) == 6
    assert len(begun(daemon)) == 2


def test_when_the_daemon_comes_back_it_gets_the_plan_from_where_the_training_is(daemon: HookDaemon) -> None:
    batches = indexed(shuffle=True, generator=own())
    planning = trainer_hook.plan(daemon.mount, batches)
    taking = iter(batches)
    for _ in range(2):
        next(taking)
    until(lambda: len(daemon.sink.plans) == 2)
    daemon.__exit__()
    for _ in range(2):
        next(taking)
    with daemon:
        until(lambda: len(daemon.sink.plans) == 4)
    before, after = plans(daemon, True), plans(daemon, False)
    assert before[1].order.tolist() == before[0].order.tolist()
    assert (before[1].position, after[1].position) == (4 * 8, 0)
    planning.close()
    daemon.__enter__()


@pytest.mark.parametrize("kind", [trainer_hook.SpiderSampler, trainer_hook.EchoSampler, trainer_hook.ShadeSampler])
def test_resuming_after_the_last_whole_batch_begins_the_next_epoch(
    daemon: HookDaemon, kind: type[trainer_hook.SpiderSampler | trainer_hook.EchoSampler]
) -> None:
    """The state may be taken as the last batch is there, before the loop knows that it is the last."""

    def resumed(state: dict[str, Any] | None) -> tuple[EpochSampler, DataLoader[Any], Any]:
        sampler = kind(SIZE)
        if state is not None:
            sampler.load_state_dict(state)
        batches = DataLoader(Numbered(), batch_size=8, sampler=sampler, drop_last=True)
        return sampler, batches, trainer_hook.attach(daemon.mount, Network(), batches)

    sampler, batches, hook = resumed(None)
    states = [sampler.state_dict() for _ in batches]
    expected = [labels.tolist() for _, labels in batches]
    hook.close()
    assert len(states) == len(expected) == SIZE // 8
    for state, left, epoch in ((states[-2], 1, 0), (states[-1], SIZE // 8, 1)):
        sampler, batches, hook = resumed(state)
        drawn = [labels.tolist() for _, labels in batches]
        assert (len(drawn), sampler.epoch) == (left, epoch)
        if epoch:
            assert drawn == expected
        hook.close()


def test_a_sampler_that_resumes_draws_the_rest_of_its_epoch(daemon: HookDaemon) -> None:
    class Resuming(OfAll):
        begin = 20

        def __iter__(self) -> Iterator[int]:
            yield from range(self.begin, SIZE)
            self.begin = 0

    batches = indexed(sampler=Resuming())
    with trainer_hook.plan(daemon.mount, batches):
        for begin in (20, 0):
            assert [*itertools.chain.from_iterable(batches_of(batches))] == [*range(begin, SIZE)]
            until(lambda begin=begin: begun(daemon)[-1:] == [[*range(begin, SIZE)]])  # type: ignore[misc]


def test_epochs_that_were_foreseen_wrongly(daemon: HookDaemon) -> None:
    """A training that never says its epoch repeats the first; one that jumps about is no longer foreseen."""
    for numbers, published in (([0, 0, 0, 0, 0], 5), ([0, 5, 3, 9, 2], 2)):
        sampler: Any = distributed()
        earlier = len(begun(daemon)), len(plans(daemon, False))
        batches = indexed(sampler=sampler)
        with trainer_hook.plan(daemon.mount, batches, split=str(numbers)):
            for epoch, number in enumerate(numbers):
                sampler.set_epoch(number)
                assert [*batches]
                counts = earlier[0] + epoch + 1, earlier[1] + min(epoch + 1, published)
                until(lambda counts=counts: (len(begun(daemon)), len(plans(daemon, False))) == counts)  # type: ignore[misc]
        ahead = plans(daemon, False)[earlier[1] :]
        assert len(ahead) == published
        if published == 5:
            assert ahead[1].order.tolist() == ahead[4].order.tolist() == last_plan(daemon, True)[2]


def test_a_loader_that_cannot_be_planned_draws_as_before(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(itertools.count())

    class Understated(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(itertools.cycle(range(SIZE)))

        def __len__(self) -> int:
            return 2

    class Named(Sampler[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(("one", "two"))

        def __len__(self) -> int:
            return 2

    caplog.set_level(logging.WARNING)
    batches = indexed(sampler=Endless())
    with trainer_hook.plan(daemon.mount, batches):
        taken = [*itertools.islice(batches, 3)]
        assert taken[2].tolist() == [*range(16, 24)]
    batches = indexed(sampler=Named(), collate_fn=list)
    with trainer_hook.plan(daemon.mount, batches):
        assert [*batches] == [["one", "two"]]
    assert not daemon.sink.plans
    assert "has no length" in caplog.text
    assert "something else, than a list of indices" in caplog.text
    batches = indexed(sampler=Understated())
    with trainer_hook.plan(daemon.mount, batches):
        taken = [*itertools.islice(batches, 30)]
        assert taken[29].tolist() == [number % SIZE for number in range(29 * 8, 30 * 8)]
    assert len(plans(daemon, True)[0].order) == 2 * 8


def test_nothing_keeps_a_loader_alive(daemon: HookDaemon) -> None:
    gc.disable()
    try:
        for close in (True, False):
            batches = indexed(shuffle=True, persistent_workers=True, **WORKERS)
            planning = trainer_hook.plan(daemon.mount, batches)
            assert len([*batches]) == 7
            if close:
                planning.close()
            workers = batches._iterator._workers  # type: ignore[union-attr]
            gone = weakref.ref(batches)
            del batches
            assert gone() is None
            assert not any(worker.is_alive() for worker in workers)
            planning.close()
    finally:
        gc.enable()


def test_a_loader_may_be_freed_in_the_sending_thread(daemon: HookDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    loaders = [indexed()]
    planning = trainer_hook.plan(daemon.mount, loaders[0])
    # As the garbage collector does that runs in this thread.
    planning._connection.client.batch(loaders.clear)
    until(lambda: "detached" in [name for name, _ in daemon.sink.calls])
    assert not failures


def test_a_loader_may_be_freed_while_another_one_is_planned(
    daemon: HookDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders, following = [indexed()], indexed()
    trainer_hook.plan(daemon.mount, loaders[0])
    looks = introduce._Connection.has_another

    def freed_first(connection: Any, *arguments: Any) -> bool:
        loaders.clear()
        return looks(connection, *arguments)

    monkeypatch.setattr(introduce._Connection, "has_another", freed_first)
    trainer_hook.plan(daemon.mount, following)
    drawn = [*itertools.chain.from_iterable(batches_of(following))]
    until(lambda: begun(daemon) == [drawn])


def test_what_cannot_be_planned_is_said_with_what_to_give(daemon: HookDaemon) -> None:
    plan: Any = trainer_hook.plan
    batches, mount = indexed(), daemon.mount
    for arguments, said in (
        (
            (batches, mount),
            "the loader is a PosixPath, no torch DataLoader: give the mount's directory, then the loader",
        ),
        ((mount, [1, 2]), "the loader is a list, no torch DataLoader"),
        ((mount, batches.dataset), "the loader is a Indexed, no torch DataLoader"),
        ((None, batches), "the directory is a NoneType, no path: give the directory of the mount"),
        ((7, batches), "the directory is a int, no path"),
        ((mount, DataLoader(torch.zeros(3))), r"no \.samples"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=said):
            plan(*arguments)
    for length in (10, SIZE + 1):
        sampler = trainer_hook.SpiderSampler(length)
        with pytest.raises(ValueError, match=f"SpiderSampler draws from {length} samples, .* has {SIZE}: make it with"):
            plan(mount, DataLoader(Indexed(), 5, sampler=sampler))
    with plan(mount, batches), pytest.raises(ValueError, match="has a plan or a hook already: close that one first"):
        plan(mount, batches)


def test_a_process_is_one_trainer_for_all_its_loaders(daemon: HookDaemon) -> None:
    model, training, held_out = Network(), loader(), indexed()
    hook = trainer_hook.attach(daemon.mount, model, training)
    with pytest.raises(ValueError, match="is called 'train'"):
        trainer_hook.plan(daemon.mount, held_out)
    planning = trainer_hook.plan(daemon.mount, held_out, split="val")
    train_epoch(model, training)
    assert len([*held_out]) == 7
    until(lambda: {plan.list for plan in plans(daemon, True)} == {"train", "val"})
    planning.close()
    planning.close()
    until(lambda: begun(daemon)[-1] == [])
    assert plans(daemon, True)[-1].list == "val"
    train_epoch(model, training)
    until(lambda: len([plan for plan in plans(daemon, True) if plan.list == "train"]) == 2)
    hook.close()
    assert len({trainer for trainer, _ in daemon.sink.lists}) == 1
    until(lambda: "detached" in [name for name, _ in daemon.sink.calls])
    trainer_hook.attach(daemon.mount, model, held_out).close()
    assert len({trainer for trainer, _ in daemon.sink.lists}) == 2
