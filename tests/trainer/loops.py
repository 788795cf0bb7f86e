"""Training loops as people write them. A new one is a function and an entry in `LOOPS`; test_loops.py runs them all.

A loop takes its model, its optimizer and the way in which it is followed from a `Training`, and everything else is as
in a script. Sample i of `Numbered` is known by its embedding, so what was sent about it can be checked row by row.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from listed import Listed
from tiny_training import CLASSES, SIZE, WIDTH, features
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, Sampler, Subset

import trainer_hook
from trainer_hook import HookOptions, SpiderSampler

EPOCHS = 2


class Way(Enum):
    """How a training is followed, and whether it draws by a sampler of ours."""

    NOTHING = "nothing"
    PLAN = "plan"
    ATTACH = "attach"
    SAMPLER = "sampler, nothing else"
    ATTACH_SAMPLER = "attach + sampler"

    @property
    def sampled(self) -> bool:
        return self in (Way.SAMPLER, Way.ATTACH_SAMPLER)


class Sent(Enum):
    """Of which samples read something has to arrive; what arrives has to be right in any case."""

    ALL = "all of them, once for each reading"
    SOME = "some"
    NONE = "none"


class Numbered(Listed[Any]):
    """Sample i says by its features who it is; `reads` has what was asked for, in order."""

    def __init__(self, reads: list[int] | None = None, size: int = SIZE, *, first: int = 0, views: int = 0) -> None:
        self.samples = [(f"class{i % CLASSES}/{i}.png", i % CLASSES) for i in range(first, first + size)]
        self.reads = reads
        self.first = first
        self.views = views

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.reads is not None:
            self.reads.append(self.first + index)
        if self.views:
            return self.viewed(index), self.samples[index][1]
        return features(self.first + index), self.samples[index][1]

    def viewed(self, index: int) -> Any:
        # What is sent of an embedding is its direction: a longer one is another view of the same sample.
        return [features(self.first + index) * (1 + view) for view in range(self.views)]


class Network(nn.Module):
    """The classifier sees what the model is given; dropout behind it says whether random numbers are as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(self.classifier(self.body(inputs)))  # type: ignore[no-any-return]


@dataclass
class Training:
    """What a loop is given. `reads` has which samples of followed loaders were read, in order."""

    way: Way
    mount: Path
    model: nn.Module = field(default_factory=Network)
    reads: list[int] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    _optimizer: torch.optim.Optimizer | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self._optimizer

    def data(self, size: int = SIZE, **options: Any) -> Numbered:
        return Numbered(self.reads, size, **options)

    def drawing(self, dataset: Any, seed: int = 3) -> dict[str, Any]:
        """How the loader of a data set draws: shuffled, or by a sampler of ours."""
        if self.way.sampled:
            return {"sampler": SpiderSampler(len(dataset), seed=seed)}
        return {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}

    def loader(self, dataset: Any = None, size: int = 8, **options: Any) -> DataLoader[Any]:
        dataset = self.data() if dataset is None else dataset
        if "sampler" not in options and "batch_sampler" not in options:
            options = self.drawing(dataset) | options
        if "batch_sampler" not in options:
            options["batch_size"] = size
        return DataLoader(dataset, **options)

    def follow(self, loader: Any, model: nn.Module | None = None, **arguments: Any) -> Any:
        """The line of ours in the script."""
        if self.way is Way.PLAN:
            arguments = {name: arguments[name] for name in ("samples", "split") if name in arguments}
            self.hooks.append(trainer_hook.plan(self.mount, loader, **arguments))
        elif self.way in (Way.ATTACH, Way.ATTACH_SAMPLER):
            self.hooks.append(trainer_hook.attach(self.mount, model or self.model, loader, **arguments))
        return loader

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def epoch_end(self, accuracy: float | None = None) -> None:
        for hook in self.hooks:
            if self.way is not Way.PLAN:
                hook.epoch_end(accuracy)

    def close(self) -> None:
        for hook in self.hooks:
            hook.close()


@dataclass(frozen=True)
class Loop:
    """`sent` is what has to arrive of a training that is attached.

    What a loop does with its model concerns only such a training; a loop that is about its loader has more `ways`.
    """

    run: Callable[[Training], None]
    sent: Sent = Sent.ALL
    ways: Sequence[Way] = (Way.NOTHING, Way.ATTACH)


def steps(
    loss: Callable[..., Tensor],
    *,
    model: Callable[[], nn.Module] | None = None,
    data: Callable[[Training], Any] = Training.data,
    epochs: int = EPOCHS,
    **options: Any,
) -> Callable[[Training], None]:
    """A loop that takes a step by the `loss` of each batch. `model` and `data` make what is trained, and on what."""

    def train(t: Training) -> None:
        if model is not None:
            t.model = model()
        loader = t.follow(t.loader(data(t), **options))
        for _ in range(epochs):
            for batch in loader:
                t.step(loss(t, *batch))
            t.epoch_end()

    return train


def of(given: Callable[[Any], Any]) -> Callable[..., Tensor]:
    """The loss of a model that is given something made of the inputs."""
    return lambda t, inputs, labels: cross_entropy(t.model(given(inputs)), labels)


def same(inputs: Any) -> Any:
    return inputs


def copied(pair: Sequence[Tensor]) -> list[Tensor]:
    return [part.clone() for part in pair]


# -- one forward a batch


def plain(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))
        t.epoch_end(0.5)


def autocast(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(t.model(inputs), labels)
            t.step(loss)


def next_of_an_iterator(t: Training) -> None:
    loader = t.follow(t.loader())
    batches = iter(loader)
    for _ in range(12):
        try:
            inputs, labels = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, labels = next(batches)
        t.step(cross_entropy(t.model(inputs), labels))


def forked_workers(t: Training) -> None:
    # Their reads are counted somewhere else.
    options = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    loader = t.follow(t.loader(**options))
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))
    t.reads += [*range(SIZE)] * EPOCHS


def a_loader_for_each_epoch(t: Training) -> None:
    for _ in range(EPOCHS):
        loader = t.follow(t.loader())
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))
        t.epoch_end()
        for hook in t.hooks:
            hook.close()
        t.hooks.clear()


# -- parts of a batch


def in_parts(parts: Callable[[Tensor], Sequence[Tensor]]) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        loader = t.follow(t.loader())
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                for part, wanted in zip(parts(inputs), parts(labels), strict=True):
                    cross_entropy(t.model(part), wanted).backward()  # type: ignore[no-untyped-call]
                t.optimizer.step()
                t.optimizer.zero_grad()

    return train


def accumulation(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            cross_entropy(t.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            if step % 3 == 2:
                t.optimizer.step()
                t.optimizer.zero_grad()


def part_of_a_batch(t: Training) -> None:
    """Hard samples only, whichever those are."""
    loader = t.follow(t.loader())
    for inputs, labels in loader:
        chosen = torch.randperm(len(inputs))[:4]
        t.step(cross_entropy(t.model(inputs[chosen]), labels[chosen]))


# -- several forwards a batch


def r_drop(t: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    one, other = t.model(inputs), t.model(inputs)
    apart = kl_div(one.log_softmax(1), other.softmax(1), reduction="batchmean")
    return cross_entropy(one, labels) + cross_entropy(other, labels) + apart


def both(t: Training, views: Sequence[Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(t.model(views[0]), labels) + cross_entropy(t.model(views[1]), labels)


def two_views(t: Training) -> Numbered:
    return t.data(views=2)


def adversarial(t: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    """What is made up comes first, and has as many rows."""
    made_up = t.model(torch.randn(len(inputs), WIDTH)).square().mean()
    return made_up + cross_entropy(t.model(inputs), labels)  # type: ignore[no-any-return]


def sam(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            cross_entropy(t.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                moves = [(weight, 0.05 * weight.grad) for weight in t.model.parameters() if weight.grad is not None]
                for weight, move in moves:
                    weight.add_(move)
            t.optimizer.zero_grad()
            loss = cross_entropy(t.model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for weight, move in moves:
                    weight.sub_(move)
            t.optimizer.step()
            t.optimizer.zero_grad()


# -- what is made up, or of other samples, beside what is the batch's


class Conditional(nn.Module):
    """A discriminator, which is told the class."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.classifier(inputs).gather(1, labels[:, None])  # type: ignore[no-any-return]


def discriminator(t: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    made_up = t.model(torch.randn(len(inputs), WIDTH), labels).mean()
    return made_up - t.model(inputs, labels).mean()  # type: ignore[no-any-return]


class Paired(nn.Module):
    def __init__(self, combine: Callable[..., Tensor]) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.combine = combine

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.combine(self.classifier, one, other)


def siamese(combine: Callable[..., Tensor], given: Callable[[Any], Any] = same) -> Callable[[Training], None]:
    def loss(t: Training, pair: Any, _: Tensor) -> Tensor:
        return t.model(*given(pair)).square().mean()  # type: ignore[no-any-return]

    return steps(loss, model=lambda: Paired(combine), data=pairs, epochs=1)


def apart(head: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    return head(one) - head(other)  # type: ignore[no-any-return]


def of_the_other(head: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    return head(other) - one.mean()  # type: ignore[no-any-return]


def the_other_first(t: Training, pair: Any, labels: Tensor) -> Tensor:
    other = t.model(pair[1]).square().mean()
    return other + cross_entropy(t.model(pair[0]), labels)  # type: ignore[no-any-return]


class Pairs(Numbered):
    """A sample and another one."""

    def viewed(self, index: int) -> Any:
        return [features(index), features((index + 7) % SIZE)]

    def __init__(self, reads: list[int] | None = None, size: int = SIZE) -> None:
        super().__init__(reads, size, views=2)


def pairs(t: Training) -> Pairs:
    return Pairs(t.reads)


class Stacked(Pairs):
    """The second entry of each row is the partner's."""

    def viewed(self, index: int) -> Any:
        return torch.stack(super().viewed(index))


class Shuffling(Network):
    """Its classifier runs twice, the second time on the rows in another order."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) - super().forward(inputs.roll(1, 0))


class Listed(Network):
    def forward(self, inputs: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([*inputs])[:, 0])


def a_tensor_each(rows: list[tuple[Tensor, int]]) -> tuple[list[Tensor], Tensor]:
    return [row[None, None].clone() for row, _ in rows], torch.tensor([label for _, label in rows])


# -- what labels say


def unlabelled(t: Training, inputs: Tensor, _: Any) -> Tensor:
    return t.model(inputs).square().mean()  # type: ignore[no-any-return]


def collated(
    labels_of: Callable[[Tensor], Any], inputs_of: Callable[[Tensor], Tensor] = same
) -> Callable[[list[tuple[Tensor, int]]], tuple[Tensor, Any]]:
    """A collate function. `labels_of` makes of the labels, one number per class, what a batch has beside its inputs."""

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Any]:
        labels = torch.tensor([label for _, label in rows])
        return inputs_of(torch.stack([row for row, _ in rows])), labels_of(labels)

    return collate


def of_labels(labels_of: Callable[[Tensor], Any]) -> Callable[[Training], None]:
    return steps(unlabelled, collate_fn=collated(labels_of))


def soft(mix: Callable[[Tensor], Tensor], soften: Callable[[Tensor], Tensor]) -> Callable[[Training], None]:
    def four_classes() -> nn.Module:
        model = Network()
        model.classifier = nn.Linear(WIDTH, 4)
        return model

    collate = collated(lambda labels: soften(torch.eye(4)[labels]), mix)
    return steps(of(same), model=four_classes, collate_fn=collate)


class Counted(Numbered):
    """No labels, but numbers of samples, and lengths."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], (index, index * index % 11)


class Retrying(Numbered):
    """Gives the next sample where one cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__((index + 1) % SIZE if index % 5 == 0 else index)


# -- several loaders


def zipped_with_unlabelled(t: Training) -> None:
    loader = t.follow(t.loader())
    unlabelled = DataLoader(Numbered(size=SIZE, first=SIZE), 8)
    for _ in range(EPOCHS):
        for (inputs, labels), (others, _) in zip(loader, unlabelled, strict=True):
            calm = t.model(others).softmax(1).square().mean()
            t.step(cross_entropy(t.model(inputs), labels) + calm)


def two_attached(t: Training) -> None:
    one = t.follow(t.loader(t.data(24)), split="one")
    other = t.follow(t.loader(t.data(24, first=24)), split="other")
    for batch, another in zip(one, other, strict=True):
        t.step(of(same)(t, *another) + of(same)(t, *batch))


def two_attached_in_turn(t: Training) -> None:
    one = t.follow(t.loader(t.data(24)), split="one")
    other = t.follow(t.loader(t.data(24, first=24)), split="other")
    for _ in range(EPOCHS):
        for inputs, labels in itertools.chain(one, other):
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def nested(t: Training) -> None:
    loader = t.follow(t.loader(t.data(16)))
    for outer, labels in loader:
        for inner, wanted in loader:
            t.step(cross_entropy(t.model(inner), wanted))
        t.step(cross_entropy(t.model(outer), labels))


# -- batches that are not trained on, or not at once


def early_break_and_others(t: Training) -> None:
    """The batch at which the loop breaks off is not trained on; copies of others are, which no one follows."""
    loader, others = t.follow(t.loader()), DataLoader(Numbered(size=8, first=SIZE), 8)
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            if step == 3:
                break
            t.step(cross_entropy(t.model(inputs.clone()), labels))
        for inputs, labels in others:
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def skipped(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            if step not in (0, 1, 4):
                t.step(cross_entropy(t.model(inputs), labels))


def one_ahead(lookahead: int | None) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        loader = t.follow(t.loader(), options=HookOptions(lookahead=lookahead))
        for _ in range(EPOCHS):
            waiting: list[Any] = []
            for inputs, labels in loader:
                waiting.append((inputs.clone(), labels))
                if len(waiting) > 1:
                    t.step(of(same)(t, *waiting.pop(0)))
            t.step(of(same)(t, *waiting.pop()))

    return train


class Damaged(Numbered):
    """Some images cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        if index in (7, 31):
            raise OSError("cannot identify image file")
        return sample


def failing(given: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        loader = t.follow(t.loader(Damaged(t.reads), 4, **options))
        for _ in range(EPOCHS):
            batches = iter(loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except OSError:
                    continue
                t.step(of(given)(t, *batch))
        if options:
            # Reads of loader workers are counted somewhere else.
            t.reads += [*range(SIZE)] * EPOCHS

    return train


# -- evaluation


def validation_in_the_middle(t: Training) -> None:
    loader, held_out = t.follow(t.loader()), DataLoader(Numbered(size=16), 8)
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            t.step(cross_entropy(t.model(inputs), labels))
            if step % 3 == 0:
                t.model.eval()
                with torch.no_grad():
                    for others, _ in held_out:
                        t.model(others)
                t.model.train()
        t.epoch_end(0.5)


# -- data sets and samplers


class Stream(IterableDataset[Any]):
    """Which sample comes next only the loop knows."""

    def __init__(self, reads: list[int]) -> None:
        self.data = Numbered(reads)

    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield (*self.data[index], index)


def iterable(t: Training) -> None:
    stream = Stream(t.reads)
    hook = None
    if t.way is not Way.PLAN:
        t.follow(None, samples=stream.data.samples)
        hook = t.hooks[0] if t.hooks else None
    for _ in range(EPOCHS):
        for inputs, labels, indices in DataLoader(stream, 8):
            if hook is not None:
                hook.batch(indices)
            t.step(cross_entropy(t.model(inputs), labels))


class ByClass(Sampler[list[int]]):
    """A batch sampler that draws bit by bit from the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(6):
            yield torch.randperm(SIZE)[:7].tolist()

    def __len__(self) -> int:
        return 6


class Eager(Sampler[list[int]]):
    """A batch sampler whose `__iter__` draws at once."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(SIZE).reshape(5, 10).tolist())

    def __len__(self) -> int:
        return 5


def larger_batches(t: Training) -> None:
    """Some grow as the training does."""
    loader = t.follow(t.loader())
    for epoch in range(EPOCHS):
        assert isinstance(loader.batch_sampler, BatchSampler)
        loader.batch_sampler.batch_size = 4 + epoch
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))


def break_with_a_generator(t: Training) -> None:
    """A sampler that draws bit by bit from its own generator."""

    class Bitwise(Sampler[int]):
        generator = torch.Generator().manual_seed(1)

        def __iter__(self) -> Iterator[int]:
            for _ in range(SIZE):
                yield int(torch.randint(SIZE, (), generator=self.generator))

        def __len__(self) -> int:
            return SIZE

    sampler = Bitwise()
    sampler.generator = torch.Generator().manual_seed(1)
    loader = t.follow(t.loader(sampler=sampler))
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            t.step(cross_entropy(t.model(inputs), labels))
            if step == 3:
                break


ORDER = [*range(SIZE)]
GENERATOR = torch.Generator()


class ShuffledList(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        ORDER[:] = [ORDER[place] for place in torch.randperm(SIZE).tolist()]
        return iter([*ORDER])

    def __len__(self) -> int:
        return SIZE


def drawn_by_a_function() -> list[int]:
    return torch.randperm(SIZE, generator=GENERATOR).tolist()


class Calling(ShuffledList):
    """Calls a function with a generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(drawn_by_a_function())


class OfALoader(ShuffledList):
    """Draws by another loader."""

    def __init__(self) -> None:
        numbers: Any = range(SIZE)
        self.loader = DataLoader(numbers, None, shuffle=True, generator=torch.Generator().manual_seed(1))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.loader))


def _shared_with_a_copy(kind: type[Sampler[int]]) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        ORDER.sort()
        GENERATOR.manual_seed(1)
        steps(of(same), sampler=kind())(t)

    return train


# -- loaders that repeat their sampler


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader[Any]):
    """As Ultralytics has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


class MultiEpochsDataLoader(DataLoader[Any]):
    """As timm has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._DataLoader__initialized = False
        if self.batch_sampler is None:
            self.sampler = Repeating(self.sampler)
        else:
            self.batch_sampler = Repeating(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        repeating: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        return len(repeating.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class LateInfiniteDataLoader(InfiniteDataLoader):
    """As Ultralytics 8.4.190 has it: the first pass makes the iterator."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator: Any = None

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = self._get_iterator()
        yield from super().__iter__()

    def reset(self) -> None:
        self.iterator = None


class LateMultiEpochsDataLoader(MultiEpochsDataLoader):
    """As timm 1.0.31 has it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator: Any = None

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = DataLoader.__iter__(self)
        yield from super().__iter__()


def _repeating(kind: type[DataLoader[Any]], workers: int, size: int | None, reset: bool) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        data = t.data()
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
        loader: Any = kind(data, batch_size=size, num_workers=workers, **t.drawing(data), **options)
        t.follow(loader)
        for epoch in range(4):
            for inputs, labels in loader:
                inputs, labels = inputs.reshape(-1, WIDTH), torch.as_tensor(labels).reshape(-1)
                t.step(cross_entropy(t.model(inputs), labels))
            if reset and epoch == 1:
                loader.reset()
        if workers:
            # Their reads are counted somewhere else.
            t.reads += [*range(SIZE)] * 4

    return train


# -- models


class SequenceFirst(nn.Module):
    """Scores each step of sequences that lie as (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(inputs).mean(0)  # type: ignore[no-any-return]


class Sequences(Numbered):
    """As many steps as a batch has rows, so that no one can say by the shape which is which."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row, label = super().__getitem__(index)
        return row.expand(8, WIDTH) * torch.arange(1.0, 9)[:, None], label


# -- what has rows somewhere else than one thinks


def one_buffer_for_all(t: Training) -> None:
    """A collate function that writes each batch to the same place."""
    buffer = torch.zeros(8, WIDTH)

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        for place, (row, _) in enumerate(rows):
            buffer[place] = row
        return buffer[: len(rows)], torch.tensor([label for _, label in rows])

    steps(of(same), collate_fn=collate)(t)


def pieces_of_one_tensor(t: Training) -> None:
    whole = torch.stack([features(index) for index in range(SIZE)])

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        first = next(index for index in range(SIZE) if torch.equal(whole[index], rows[0][0]))
        return whole[first : first + len(rows)], torch.tensor([label for _, label in rows])

    loader = t.follow(t.loader(collate_fn=collate, sampler=torch.utils.data.SequentialSampler(range(SIZE))))
    kept = []
    for inputs, labels in loader:
        kept.append(inputs)
        t.step(cross_entropy(t.model(inputs), labels))


def sorted_by_label(t: Training) -> None:
    """As collate functions sort by length: the rows are other samples' than was drawn in their places."""

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        rows = sorted(rows, key=lambda row: row[1])
        return torch.stack([row for row, _ in rows]), torch.tensor([label for _, label in rows])

    steps(of(same), size=10, collate_fn=collate)(t)


class Parallel(nn.Module):
    """As nn.DataParallel runs copies of a model in threads, each with a part of the batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        copies, parts = [_replica(self.module), _replica(self.module)], inputs.chunk(2)
        found: dict[int, Tensor] = {}
        threads = [threading.Thread(target=lambda at=at: found.update({at: copies[at](parts[at])})) for at in range(2)]
        begun = threading.Event()

        def first(*_: object) -> None:
            threads[1].start()
            begun.wait()

        def second(*_: object) -> None:
            begun.set()
            threads[0].join()

        # The second copy begins before the first one runs its classifier, and runs its own after that has ended.
        copies[0].classifier.register_forward_pre_hook(first)
        copies[1].classifier.register_forward_pre_hook(second)
        threads[0].start()
        for thread in threads:
            thread.join()
        return torch.cat([found[0], found[1]])


def _replica(module: nn.Module) -> Any:
    copied = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(copied, name, parameter)
    for name, part in module._modules.items():
        copied._modules[name] = None if part is None else _replica(part)
    copied._forward_pre_hooks = copied._forward_pre_hooks.copy()
    return copied


def replicas(t: Training) -> None:
    t.model = nn.Sequential()
    t.model.classifier = nn.Linear(WIDTH, CLASSES)
    loader, parallel = t.follow(t.loader(t.data(48))), Parallel(t.model)
    for inputs, labels in loader:
        t.step(cross_entropy(parallel(inputs), labels))


def accelerated_copies(t: Training) -> None:
    accelerator = Accelerator(cpu=True)
    t.model, loader = accelerator.prepare(t.model, t.loader())
    t.follow(loader)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def in_a_thread(t: Training) -> None:
    loader = t.follow(t.loader())
    waiting: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    while (batch := waiting.get()) is not None:
        t.step(of(torch.clone)(t, *batch))
    thread.join()


def subset(t: Training) -> None:
    loader = t.follow(t.loader(Subset(t.data(), [*range(1, SIZE, 2)])), samples=Numbered().samples[1::2])
    for inputs, labels in [batch for _ in range(EPOCHS) for batch in loader]:
        t.step(cross_entropy(t.model(inputs), labels))


FOLLOWED = (Way.NOTHING, Way.PLAN, Way.ATTACH)
ALL_WAYS = tuple(Way)

LOOPS: dict[str, Loop] = {
    "plain": Loop(plain, ways=ALL_WAYS),
    "autocast": Loop(autocast),
    # `clone` for what `.to(device)` does: another tensor with the same content.
    "on a device": Loop(steps(of(torch.clone))),
    "augmented": Loop(steps(of(lambda inputs: inputs * (1 + torch.rand(()))))),
    "next of an iterator": Loop(next_of_an_iterator, ways=ALL_WAYS),
    "single samples": Loop(
        steps(lambda t, row, label: of(same)(t, row[None], torch.tensor([label])), size=None, epochs=1), ways=ALL_WAYS
    ),
    "forked workers": Loop(forked_workers, ways=ALL_WAYS),
    "a loader for each epoch": Loop(a_loader_for_each_epoch, ways=ALL_WAYS),
    "accumulation": Loop(accumulation),
    "parts": Loop(in_parts(lambda rows: rows.split(3))),
    # No one can say which rows a copy of some rows has.
    "parts copied": Loop(in_parts(lambda rows: copied(rows.split(3))), Sent.NONE),
    "part of a batch": Loop(part_of_a_batch, Sent.NONE),
    "R-Drop": Loop(steps(r_drop)),
    "SAM": Loop(sam),
    "two views": Loop(steps(both, data=two_views)),
    # Twice as many rows as samples, of which no one can say how they lie.
    "two views in one forward": Loop(
        steps(lambda t, views, labels: of(torch.cat)(t, views, torch.cat([labels] * 2)), data=two_views), Sent.NONE
    ),
    # No one can say that both are of the batch.
    "two views on a device": Loop(
        steps(lambda t, views, labels: both(t, copied(views), labels), data=two_views), Sent.NONE
    ),
    "adversarial": Loop(steps(adversarial)),
    "conditional GAN": Loop(steps(discriminator, model=Conditional)),
    "siamese": Loop(siamese(apart), Sent.NONE),
    "siamese on a device": Loop(siamese(apart, copied), Sent.NONE),
    "siamese on a device, the other": Loop(siamese(of_the_other, copied), Sent.NONE),
    "pairs in one tensor": Loop(
        steps(lambda t, both, labels: the_other_first(t, both.unbind(1), labels), data=lambda t: Stacked(t.reads))
    ),
    "shuffled within the model": Loop(steps(of(same), model=Shuffling, epochs=1), Sent.NONE),
    "a list of tensors": Loop(steps(of(same), model=Listed, epochs=1, collate_fn=a_tensor_each)),
    "one-hot": Loop(of_labels(torch.eye(CLASSES, dtype=torch.long).__getitem__)),
    # Two classes; the mask, drawn at random, is often the labels in another order.
    "labels and a mask": Loop(of_labels(lambda labels: [labels > 0, torch.rand(len(labels)) < 0.5]), Sent.SOME),
    "labels and shares of something else": Loop(
        of_labels(lambda labels: [labels, torch.rand(len(labels), 2).softmax(1)])
    ),
    "numbered samples": Loop(steps(unlabelled, data=lambda t: Counted(t.reads))),
    # What has the noise of labels drawn again cannot be told from what gives other samples.
    "labels at random": Loop(
        of_labels(lambda labels: torch.where(torch.rand(len(labels)) < 0.8, labels.roll(1), labels)), Sent.NONE
    ),
    "another sample for a broken one": Loop(steps(of(same), data=lambda t: Retrying(t.reads)), Sent.NONE),
    "zipped with unlabelled": Loop(zipped_with_unlabelled),
    "two attached": Loop(two_attached, ways=ALL_WAYS),
    "two attached in turn": Loop(two_attached_in_turn, ways=ALL_WAYS),
    "nested": Loop(nested, ways=FOLLOWED),
    "early break and others": Loop(early_break_and_others, Sent.SOME, ways=ALL_WAYS),
    "skipped": Loop(skipped, Sent.SOME, ways=ALL_WAYS),
    "ahead on a device": Loop(one_ahead(lookahead=1)),
    "ahead on a device, unsaid": Loop(one_ahead(lookahead=None), Sent.NONE),
    "failing sample": Loop(failing(same), Sent.SOME, ways=ALL_WAYS),
    "failing sample in a worker": Loop(
        failing(torch.clone, num_workers=2, multiprocessing_context="fork"), Sent.SOME, ways=ALL_WAYS
    ),
    "validation in the middle": Loop(validation_in_the_middle, ways=ALL_WAYS),
    "iterable": Loop(iterable),
    "subset": Loop(subset, Sent.SOME, ways=ALL_WAYS),
    "concatenated": Loop(
        steps(of(same), data=lambda t: ConcatDataset([t.data(20), t.data(30, first=20)])), ways=ALL_WAYS
    ),
    "own batch sampler": Loop(steps(of(same), batch_sampler=ByClass()), ways=FOLLOWED),
    "eager batch sampler": Loop(steps(of(same), batch_sampler=Eager()), ways=FOLLOWED),
    "larger batches": Loop(larger_batches, ways=ALL_WAYS),
    "break with a generator": Loop(break_with_a_generator, Sent.SOME, ways=FOLLOWED),
    "one buffer for all": Loop(one_buffer_for_all),
    "pieces of one tensor": Loop(pieces_of_one_tensor, ways=FOLLOWED),
    # As mixup and CutMix are put into the collate function: no row is of one sample.
    "mixed by the loader": Loop(soft(*[lambda rows: 0.7 * rows + 0.3 * rows.roll(1, 0)] * 2), Sent.NONE),
    "smoothed labels": Loop(soft(same, lambda labels: 0.9 * labels + 0.1 / 4)),
    "sorted by label": Loop(sorted_by_label, Sent.NONE),
    "model in parts": Loop(
        steps(lambda t, rows, labels: cross_entropy(t.model.classifier(t.model.body(rows.clone())), labels))
    ),
    "copies by accelerate": Loop(accelerated_copies, ways=ALL_WAYS),
    "background thread to a device": Loop(in_a_thread, Sent.NONE),
    "a sampler with a list of its module": Loop(_shared_with_a_copy(ShuffledList), ways=FOLLOWED),
    "a sampler that calls a function": Loop(_shared_with_a_copy(Calling), ways=FOLLOWED),
    "a sampler with a loader": Loop(_shared_with_a_copy(OfALoader), ways=FOLLOWED),
    "infinite loader": Loop(_repeating(InfiniteDataLoader, 0, 8, reset=False), ways=ALL_WAYS),
    "infinite loader that is made again": Loop(
        _repeating(InfiniteDataLoader, 2, 4, reset=True), Sent.SOME, ways=ALL_WAYS
    ),
    "late infinite loader with workers": Loop(_repeating(LateInfiniteDataLoader, 2, 4, reset=False), ways=ALL_WAYS),
    "multi-epochs loader with workers": Loop(
        _repeating(MultiEpochsDataLoader, 2, 4, reset=False), Sent.SOME, ways=ALL_WAYS
    ),
    "multi-epochs loader of samples": Loop(_repeating(MultiEpochsDataLoader, 0, None, reset=False), ways=FOLLOWED),
    "sequence first": Loop(
        steps(
            of(lambda rows: rows.transpose(0, 1)),
            model=SequenceFirst,
            data=lambda t: Sequences(t.reads, 48),
            epochs=1,
        ),
        Sent.NONE,
    ),
    "copies of the model in threads": Loop(replicas, Sent.NONE),
}
