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
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from tiny_training import CLASSES, SIZE, WIDTH, features
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

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


class Numbered(Dataset[Any]):
    """Sample i says by its features who it is; `reads` has what was asked for, in order."""

    def __init__(self, reads: list[int] | None = None, size: int = SIZE, *, first: int = 0, views: int = 0) -> None:
        self.samples = [(f"class{i % CLASSES}/{i}.png", i % CLASSES) for i in range(first, first + size)]
        self.reads = reads
        self.first = first
        self.views = views

    def __len__(self) -> int:
        return len(self.samples)

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
    """`sent` is what has to arrive of a training that is attached; `unmended` are ways that are known to fail."""

    run: Callable[[Training], None]
    sent: Sent = Sent.ALL
    ways: Sequence[Way] = tuple(Way)
    unmended: Sequence[Way] = ()


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


def on_a_device(t: Training) -> None:
    """`clone` for what `.to(device)` does: another tensor with the same content."""
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def augmented(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs * (1 + torch.rand(()))), labels))


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


def single_samples(t: Training) -> None:
    loader = t.follow(t.loader(size=None))  # type: ignore[arg-type]
    for inputs, label in loader:
        t.step(cross_entropy(t.model(inputs[None]), torch.tensor([label])))


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


def accumulation(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            cross_entropy(t.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            if step % 3 == 2:
                t.optimizer.step()
                t.optimizer.zero_grad()


def _in_parts(t: Training, given: Callable[[Tensor], Tensor], parts: Callable[[Tensor], Sequence[Tensor]]) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            inputs = given(inputs)
            for part, wanted in zip(parts(inputs), parts(labels), strict=True):
                cross_entropy(t.model(part), wanted).backward()  # type: ignore[no-untyped-call]
            t.optimizer.step()
            t.optimizer.zero_grad()


def parts(t: Training) -> None:
    _in_parts(t, lambda inputs: inputs, lambda rows: rows.split(3))


def parts_backwards(t: Training) -> None:
    _in_parts(t, lambda inputs: inputs, lambda rows: rows.split(3)[::-1])


def parts_on_a_device(t: Training) -> None:
    _in_parts(t, torch.clone, lambda rows: [rows[1::2], rows[0::2]])


def parts_copied(t: Training) -> None:
    """No one can say which rows a copy of some rows has."""
    _in_parts(t, lambda inputs: inputs, lambda rows: [part.clone() for part in rows.split(3)])


def part_of_a_batch(t: Training) -> None:
    """Hard samples only, whichever those are."""
    loader = t.follow(t.loader())
    for inputs, labels in loader:
        chosen = torch.randperm(len(inputs))[:4]
        t.step(cross_entropy(t.model(inputs[chosen]), labels[chosen]))


# -- several forwards a batch


def r_drop(t: Training) -> None:
    _r_drop(t, lambda inputs: inputs)


def r_drop_on_a_device(t: Training) -> None:
    _r_drop(t, torch.clone)


def _r_drop(t: Training, given: Callable[[Tensor], Tensor]) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            inputs = given(inputs)
            one, other = t.model(inputs), t.model(inputs)
            apart = kl_div(one.log_softmax(1), other.softmax(1), reduction="batchmean")
            t.step(cross_entropy(one, labels) + cross_entropy(other, labels) + apart)


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


def two_views(t: Training) -> None:
    loader = t.follow(t.loader(t.data(views=2)))
    for _ in range(EPOCHS):
        for (one, other), labels in loader:
            t.step(cross_entropy(t.model(one), labels) + cross_entropy(t.model(other), labels))


def two_views_in_one_forward(t: Training) -> None:
    """Twice as many rows as samples, of which no one can say how they lie."""
    loader = t.follow(t.loader(t.data(views=2)))
    for (one, other), labels in loader:
        t.step(cross_entropy(t.model(torch.cat([one, other])), torch.cat([labels, labels])))


def two_views_on_a_device(t: Training) -> None:
    """No one can say that both are of the batch."""
    loader = t.follow(t.loader(t.data(views=2)))
    for (one, other), labels in loader:
        one, other = one.clone(), other.clone()
        t.step(cross_entropy(t.model(one), labels) + cross_entropy(t.model(other), labels))


def adversarial(t: Training) -> None:
    """What is made up comes first, and has as many rows."""
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            made_up = torch.randn(len(inputs), WIDTH)
            t.step(t.model(made_up).square().mean() + cross_entropy(t.model(inputs), labels))


def adversarial_on_a_device(t: Training) -> None:
    loader = t.follow(t.loader())
    for inputs, labels in loader:
        made_up = torch.randn(len(inputs), WIDTH)
        t.step(t.model(made_up).square().mean() + cross_entropy(t.model(inputs.clone()), labels))


# -- what is made up, or of other samples, beside what is the batch's


class Conditional(nn.Module):
    """A discriminator, which is told the class."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.classifier(inputs).gather(1, labels[:, None])  # type: ignore[no-any-return]


def _discriminator(t: Training, given: Callable[[Tensor], Tensor], real_every: int) -> None:
    t.model = Conditional()
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            made_up = torch.randn(len(inputs), WIDTH)
            loss = t.model(made_up, given(labels)).mean()
            if step % real_every == 0:
                loss = loss - t.model(given(inputs), given(labels)).mean()
            t.step(loss)


def conditional_gan(t: Training) -> None:
    _discriminator(t, lambda rows: rows, 1)


def conditional_gan_on_a_device(t: Training) -> None:
    """The generator is trained more often than the discriminator sees a real batch."""
    _discriminator(t, torch.clone, 2)


def only_fakes_with_labels(t: Training) -> None:
    t.model = Conditional()
    for _, labels in t.follow(t.loader()):
        t.step(t.model(torch.randn(len(labels), WIDTH), labels).mean())


def _of_pairs(t: Training, forward: Callable[..., Tensor], given: Callable[[Tensor], Any]) -> None:
    class Paired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(WIDTH, CLASSES)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return forward(self.classifier, one, other)

    t.model = Paired()
    for inputs, _ in t.follow(t.loader(Pairs(t.reads))):
        t.step(t.model(*given(inputs)).square().mean())


class Pairs(Numbered):
    """A sample and another one."""

    def viewed(self, index: int) -> Any:
        return [features(index), features((index + 7) % SIZE)]

    def __init__(self, reads: list[int] | None = None, size: int = SIZE) -> None:
        super().__init__(reads, size, views=2)


def siamese(t: Training) -> None:
    _of_pairs(t, lambda head, one, other: head(one) - head(other), lambda pair: pair)


def siamese_on_a_device(t: Training) -> None:
    _of_pairs(t, lambda head, one, other: head(one) - head(other), lambda pair: [part.clone() for part in pair])


def siamese_whose_classifier_sees_the_other(t: Training) -> None:
    _of_pairs(t, lambda head, one, other: head(other) - one.mean(), lambda pair: pair)


def siamese_on_a_device_whose_classifier_sees_the_other(t: Training) -> None:
    _of_pairs(t, lambda head, one, other: head(other) - one.mean(), lambda pair: [part.clone() for part in pair])


def siamese_of_rows(t: Training) -> None:
    """The first half of the batch against the second."""
    _of_pairs(t, lambda head, one, other: head(other) - head(one), lambda pair: pair[0][: len(pair[0]) & ~1].chunk(2))


def siamese_against_shuffled(t: Training) -> None:
    _of_pairs(t, lambda head, one, other: head(other) - one.mean(), lambda pair: [pair[0], pair[0].roll(1, 0)])


def siamese_against_shuffled_on_a_device(t: Training) -> None:
    _of_pairs(
        t, lambda head, one, other: head(other) - one.mean(), lambda pair: [pair[0].clone(), pair[0].clone().roll(1, 0)]
    )


def the_other_first(t: Training) -> None:
    for (one, other), labels in t.follow(t.loader(Pairs(t.reads))):
        apart = t.model(other).square().mean()
        t.step(apart + cross_entropy(t.model(one), labels))


def pairs_in_one_tensor(t: Training) -> None:
    """The partner first, which is the second entry of each row."""

    class Stacked(Pairs):
        def viewed(self, index: int) -> Any:
            return torch.stack(super().viewed(index))

    for both, labels in t.follow(t.loader(Stacked(t.reads))):
        apart = t.model(both[:, 1]).square().mean()
        t.step(apart + cross_entropy(t.model(both[:, 0]), labels))


class Shuffling(Network):
    """Its classifier runs twice, the second time on the rows in another order."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) - super().forward(inputs.roll(1, 0))


def shuffled_within_the_model(t: Training) -> None:
    t.model = Shuffling()
    for inputs, labels in t.follow(t.loader()):
        t.step(cross_entropy(t.model(inputs), labels))


class Listed(Network):
    def forward(self, inputs: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([*inputs])[:, 0])


def _a_list(t: Training, order: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """A tensor for each sample."""

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[list[Tensor], Tensor]:
        return [row[None, None].clone() for row, _ in rows], torch.tensor([label for _, label in rows])

    t.model = Listed()
    for inputs, labels in t.follow(t.loader(collate_fn=collate)):
        t.step(cross_entropy(t.model(order(inputs)), labels))


def a_list_of_tensors(t: Training) -> None:
    _a_list(t, lambda rows: rows)


def a_list_backwards(t: Training) -> None:
    _a_list(t, lambda rows: rows[::-1])


def mixed_within_the_model(t: Training) -> None:
    """Manifold mixup: the rows that are mixed into others are an argument."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(WIDTH, CLASSES)

        def forward(self, inputs: Tensor, others: Tensor) -> Tensor:
            return self.classifier(inputs + inputs[others])  # type: ignore[no-any-return]

    t.model = Mixing()
    for inputs, labels in t.follow(t.loader()):
        t.step(cross_entropy(t.model(inputs, torch.randperm(len(inputs))), labels))


class Masked(nn.Module):
    """Its embedding is that of the inputs, whatever the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape == inputs.shape
        return self.classifier(inputs)  # type: ignore[no-any-return]


def masked(t: Training) -> None:
    t.model = Masked()
    _epochs(t, t.follow(t.loader()), lambda inputs, labels: cross_entropy(t.model(inputs, inputs > 2), labels))


def _epochs(t: Training, loader: Any, loss: Callable[[Any, Any], Tensor]) -> None:
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(loss(inputs, labels))


# -- what labels say


def _collated(t: Training, labels_of: Callable[[Tensor], Any], **options: Any) -> None:
    """`labels_of` makes of the labels what the training has beside its inputs; the first has one number per class."""

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Any]:
        return torch.stack([row for row, _ in rows]), labels_of(torch.tensor([label for _, label in rows]))

    loader = t.follow(t.loader(collate_fn=collate, **options))
    _epochs(t, loader, lambda inputs, _: t.model(inputs).square().mean())


def numbered_from_one(t: Training) -> None:
    """No one knows the numbers of its classes before the second batch."""
    _collated(t, lambda labels: labels + 1)


def numbered_backwards(t: Training) -> None:
    _collated(t, lambda labels: 2 - labels)


def joined_classes(t: Training) -> None:
    _collated(t, lambda labels: labels // 2)


def one_hot(t: Training) -> None:
    _collated(t, torch.eye(CLASSES, dtype=torch.long).__getitem__)


def labels_and_a_mask(t: Training) -> None:
    """Two classes; the mask, drawn at random, is often the labels in another order."""
    _collated(t, lambda labels: [labels > 0, torch.rand(len(labels)) < 0.5])


def labels_and_shares_of_something_else(t: Training) -> None:
    _collated(t, lambda labels: [labels, torch.rand(len(labels), 2).softmax(1)])


def labels_twice_by_mixup(t: Training) -> None:
    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Any]:
        inputs, labels = torch.stack([row for row, _ in rows]), torch.tensor([label for _, label in rows])
        order = torch.randperm(len(rows))
        return 0.7 * inputs + 0.3 * inputs[order], (labels, labels[order])

    loader = t.follow(t.loader(collate_fn=collate))
    _epochs(t, loader, lambda inputs, labels: cross_entropy(t.model(inputs), labels[0]))


def numbered_samples(t: Training) -> None:
    """No labels, but numbers of samples, and lengths."""

    class Counted(Numbered):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0], (index, index * index % 11)

    _epochs(t, t.follow(t.loader(Counted(t.reads))), lambda inputs, _: t.model(inputs).square().mean())


def labels_at_random(t: Training) -> None:
    """What has the noise of labels drawn again cannot be told from what gives other samples."""
    _collated(t, lambda labels: torch.where(torch.rand(len(labels)) < 0.8, labels.roll(1), labels))


class Retrying(Numbered):
    """Gives the next sample where one cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return super().__getitem__((index + 1) % SIZE if index % 5 == 0 else index)


def another_sample_for_a_broken_one(t: Training) -> None:
    loader = t.follow(t.loader(Retrying(t.reads)))
    _epochs(t, loader, lambda inputs, labels: cross_entropy(t.model(inputs), labels))


def gaps_that_are_filled(t: Training) -> None:
    """All is well before the first broken sample comes."""

    class Broken(Numbered):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return None if index in (14, 43) else sample

    data = Numbered()

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        good = [row for row in rows if row is not None]
        good += [data[index] for index in torch.randint(SIZE, (len(rows) - len(good),)).tolist()]
        return torch.stack([row for row, _ in good]), torch.tensor([label for _, label in good])

    loader = t.follow(t.loader(Broken(t.reads), collate_fn=collate))
    _epochs(t, loader, lambda inputs, labels: cross_entropy(t.model(inputs), labels))


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
    for (inputs, labels), (others, wanted) in zip(one, other, strict=True):
        t.step(cross_entropy(t.model(others), wanted) + cross_entropy(t.model(inputs), labels))


def two_attached_on_a_device(t: Training) -> None:
    one = t.follow(t.loader(t.data(24)), split="one")
    other = t.follow(t.loader(t.data(24, first=24)), split="other")
    for (inputs, labels), (others, wanted) in zip(one, other, strict=True):
        t.step(cross_entropy(t.model(others.clone()), wanted) + cross_entropy(t.model(inputs.clone()), labels))


def two_attached_in_turn(t: Training) -> None:
    one = t.follow(t.loader(t.data(24)), split="one")
    other = t.follow(t.loader(t.data(24, first=24)), split="other")
    for _ in range(EPOCHS):
        for inputs, labels in itertools.chain(one, other):
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def zipped_with_itself(t: Training) -> None:
    loader = t.follow(t.loader())
    for (one, labels), (other, wanted) in zip(loader, loader, strict=True):
        t.step(cross_entropy(t.model(other), wanted) + cross_entropy(t.model(one), labels))


def nested(t: Training) -> None:
    loader = t.follow(t.loader(t.data(16)))
    for outer, labels in loader:
        for inner, wanted in loader:
            t.step(cross_entropy(t.model(inner), wanted))
        t.step(cross_entropy(t.model(outer), labels))


# -- batches that are not trained on, or not at once


def early_break(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            t.step(cross_entropy(t.model(inputs), labels))
            if step == 3:
                break


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


def looked_at_first(t: Training) -> None:
    loader = t.follow(t.loader())
    shape = next(iter(loader))[0].shape
    for inputs, labels in loader:
        assert inputs.shape[1:] == shape[1:]
        t.step(cross_entropy(t.model(inputs.clone()), labels))


def skipped(t: Training) -> None:
    loader = t.follow(t.loader())
    for _ in range(EPOCHS):
        for step, (inputs, labels) in enumerate(loader):
            if step not in (0, 1, 4):
                t.step(cross_entropy(t.model(inputs), labels))


def _ahead(t: Training, ahead: int, given: Callable[[Tensor], Tensor], lookahead: int | None = None) -> None:
    loader = t.follow(t.loader(), options=HookOptions(lookahead=lookahead))
    for _ in range(EPOCHS):
        waiting: list[Any] = []
        for inputs, labels in loader:
            waiting.append((given(inputs), labels))
            if len(waiting) > ahead:
                inputs, labels = waiting.pop(0)
                t.step(cross_entropy(t.model(inputs), labels))
        for inputs, labels in waiting:
            t.step(cross_entropy(t.model(inputs), labels))


def ahead(t: Training) -> None:
    _ahead(t, 2, lambda inputs: inputs)


def ahead_on_a_device(t: Training) -> None:
    _ahead(t, 1, torch.clone, lookahead=1)


def far_ahead_on_a_device(t: Training) -> None:
    _ahead(t, 3, torch.clone, lookahead=3)


def ahead_on_a_device_unsaid(t: Training) -> None:
    _ahead(t, 1, torch.clone)


def all_at_once(t: Training) -> None:
    loader = t.follow(t.loader())
    for inputs, labels in list(loader):
        t.step(cross_entropy(t.model(inputs), labels))


class Damaged(Numbered):
    """Some images cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        if index in (7, 31):
            raise OSError("cannot identify image file")
        return sample


def _failing(t: Training, given: Callable[[Tensor], Tensor], **options: Any) -> None:
    loader = t.follow(t.loader(Damaged(t.reads), 4, **options))
    for _ in range(EPOCHS):
        batches = iter(loader)
        while True:
            try:
                inputs, labels = next(batches)
            except StopIteration:
                break
            except OSError:
                continue
            t.step(cross_entropy(t.model(given(inputs)), labels))


def failing_sample(t: Training) -> None:
    _failing(t, lambda inputs: inputs)


def failing_sample_on_a_device(t: Training) -> None:
    _failing(t, torch.clone)


def failing_sample_in_a_worker(t: Training) -> None:
    _failing(t, torch.clone, num_workers=2, multiprocessing_context="fork")
    t.reads += [*range(SIZE)] * EPOCHS


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


def subset(t: Training) -> None:
    loader = t.follow(t.loader(Subset(t.data(), [*range(1, SIZE, 2)])), samples=Numbered().samples[1::2])
    _train(t, loader)


def concatenated(t: Training) -> None:
    _train(t, t.follow(t.loader(ConcatDataset([t.data(20), t.data(30, first=20)]))))


def _train(t: Training, loader: Any) -> None:
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))
        t.epoch_end()


class Reversed(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1, -1, -1))

    def __len__(self) -> int:
        return SIZE


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


def own_sampler(t: Training) -> None:
    _train(t, t.follow(t.loader(sampler=Reversed())))


def own_batch_sampler(t: Training) -> None:
    _train(t, t.follow(t.loader(batch_sampler=ByClass())))


def eager_batch_sampler(t: Training) -> None:
    _train(t, t.follow(t.loader(batch_sampler=Eager())))


def larger_batches(t: Training) -> None:
    """Some grow as the training does."""
    loader = t.follow(t.loader())
    for epoch in range(EPOCHS):
        assert isinstance(loader.batch_sampler, BatchSampler)
        loader.batch_sampler.batch_size = 4 + epoch
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs), labels))


def batch_sampler(t: Training) -> None:
    _train(t, t.follow(t.loader(batch_sampler=BatchSampler(torch.utils.data.RandomSampler(range(SIZE)), 6, False))))


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
COUNTED = 0
GENERATOR = torch.Generator()


class ShuffledList(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        ORDER[:] = [ORDER[place] for place in torch.randperm(SIZE).tolist()]
        return iter([*ORDER])

    def __len__(self) -> int:
        return SIZE


class OfItsClass(ShuffledList):
    """Its list is an attribute of its class."""

    order: ClassVar = [*range(SIZE)]

    def __iter__(self) -> Iterator[int]:
        self.order[:] = [self.order[place] for place in torch.randperm(SIZE).tolist()]
        return iter([*self.order])


class Counting(ShuffledList):
    """Seeds each epoch by a number of its module."""

    def __iter__(self) -> Iterator[int]:
        global COUNTED
        COUNTED += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(COUNTED)).tolist())


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


class OfAModel(ShuffledList):
    """Its draws follow from the averages that a model keeps."""

    def __init__(self) -> None:
        self.average = nn.BatchNorm1d(SIZE)

    def __iter__(self) -> Iterator[int]:
        self.average(torch.randn(4, SIZE))
        assert self.average.running_mean is not None
        return iter(self.average.running_mean.argsort().tolist())


def _shared_with_a_copy(kind: type[Sampler[int]]) -> Callable[[Training], None]:
    def train(t: Training) -> None:
        global COUNTED
        COUNTED = 0
        ORDER.sort()
        OfItsClass.order.sort()
        GENERATOR.manual_seed(1)
        _train(t, t.follow(t.loader(sampler=kind())))

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


def sequence_first(t: Training) -> None:
    t.model = SequenceFirst()
    loader = t.follow(t.loader(Sequences(t.reads, 48)))
    for inputs, labels in loader:
        t.step(cross_entropy(t.model(inputs.transpose(0, 1)), labels))


def sequence_first_on_a_device(t: Training) -> None:
    t.model = SequenceFirst()
    loader = t.follow(t.loader(Sequences(t.reads, 48)))
    for inputs, labels in loader:
        t.step(cross_entropy(t.model(inputs.transpose(0, 1).contiguous()), labels))


# -- what has rows somewhere else than one thinks


def one_buffer_for_all(t: Training) -> None:
    """A collate function that writes each batch to the same place."""
    buffer = torch.zeros(8, WIDTH)

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        for place, (row, _) in enumerate(rows):
            buffer[place] = row
        return buffer[: len(rows)], torch.tensor([label for _, label in rows])

    _train(t, t.follow(t.loader(collate_fn=collate)))


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


def _soft(t: Training, mix: Callable[[Tensor], Tensor], soften: Callable[[Tensor], Tensor]) -> None:
    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([label for _, label in rows])
        return mix(torch.stack([row for row, _ in rows])), soften(torch.eye(4)[labels])

    t.model.classifier = nn.Linear(WIDTH, 4)
    _train(t, t.follow(t.loader(collate_fn=collate)))


def mixed_by_the_loader(t: Training) -> None:
    """As mixup and CutMix are put into the collate function: no row is of one sample."""
    _soft(t, *[lambda rows: 0.7 * rows + 0.3 * rows.roll(1, 0)] * 2)


def smoothed_labels(t: Training) -> None:
    _soft(t, lambda rows: rows, lambda labels: 0.9 * labels + 0.1 / 4)


def sorted_by_label(t: Training) -> None:
    """As collate functions sort by length: the rows are other samples' than was drawn in their places."""

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        rows = sorted(rows, key=lambda row: row[1])
        return torch.stack([row for row, _ in rows]), torch.tensor([label for _, label in rows])

    _train(t, t.follow(t.loader(size=10, collate_fn=collate)))


def collate_that_leaves_out(t: Training) -> None:
    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return torch.stack([row for row, _ in rows[1:]]), torch.tensor([label for _, label in rows[1:]])

    _train(t, t.follow(t.loader(t.data(48), collate_fn=collate)))


def model_in_parts(t: Training) -> None:
    loader = t.follow(t.loader())
    for inputs, labels in loader:
        t.step(cross_entropy(t.model.classifier(t.model.body(inputs.clone())), labels))  # type: ignore[operator]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.classifier(one), self.classifier(other)


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


def labelled_and_not_in_one_forward(t: Training) -> None:
    t.model = Two()
    loader = t.follow(t.loader())
    unlabelled = DataLoader(Numbered(size=SIZE, first=SIZE), 8)
    for (inputs, labels), (others, _) in zip(loader, unlabelled, strict=True):
        scores, calm = t.model(inputs, others)
        t.step(cross_entropy(scores, labels) + calm.square().mean())


def accelerated_r_drop(t: Training) -> None:
    accelerator = Accelerator(cpu=True)
    t.model, loader = accelerator.prepare(t.model, t.loader())
    t.follow(loader)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            one, other = t.model(inputs), t.model(inputs)
            t.step(cross_entropy(one, labels) + cross_entropy(other, labels))


def accelerated_copies(t: Training) -> None:
    accelerator = Accelerator(cpu=True)
    t.model, loader = accelerator.prepare(t.model, t.loader())
    t.follow(loader)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            t.step(cross_entropy(t.model(inputs.clone()), labels))


def background_thread(t: Training) -> None:
    _in_a_thread(t, lambda inputs: inputs)


def background_thread_to_a_device(t: Training) -> None:
    _in_a_thread(t, torch.clone)


def _in_a_thread(t: Training, given: Callable[[Tensor], Tensor]) -> None:
    loader = t.follow(t.loader())
    waiting: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    while (batch := waiting.get()) is not None:
        t.step(cross_entropy(t.model(given(batch[0])), batch[1]))
    thread.join()


FOLLOWED = (Way.NOTHING, Way.PLAN, Way.ATTACH)
HOOKED = (Way.ATTACH, Way.ATTACH_SAMPLER)

LOOPS: dict[str, Loop] = {
    "plain": Loop(plain),
    "autocast": Loop(autocast),
    "on a device": Loop(on_a_device),
    "augmented": Loop(augmented),
    "next of an iterator": Loop(next_of_an_iterator),
    "single samples": Loop(single_samples),
    "forked workers": Loop(forked_workers),
    "a loader for each epoch": Loop(a_loader_for_each_epoch),
    "accumulation": Loop(accumulation),
    "parts": Loop(parts),
    "parts backwards": Loop(parts_backwards),
    "parts on a device": Loop(parts_on_a_device),
    "parts copied": Loop(parts_copied, Sent.NONE),
    "part of a batch": Loop(part_of_a_batch, Sent.NONE),
    "R-Drop": Loop(r_drop),
    "R-Drop on a device": Loop(r_drop_on_a_device),
    "SAM": Loop(sam),
    "two views": Loop(two_views),
    "two views in one forward": Loop(two_views_in_one_forward, Sent.NONE),
    "two views on a device": Loop(two_views_on_a_device, Sent.NONE),
    "adversarial": Loop(adversarial),
    "adversarial on a device": Loop(adversarial_on_a_device, Sent.NONE),
    "conditional GAN": Loop(conditional_gan),
    "conditional GAN on a device": Loop(conditional_gan_on_a_device, Sent.NONE),
    "only fakes with labels": Loop(only_fakes_with_labels, Sent.NONE),
    "siamese": Loop(siamese, Sent.NONE),
    "siamese on a device": Loop(siamese_on_a_device, Sent.NONE),
    "siamese, the other": Loop(siamese_whose_classifier_sees_the_other, Sent.NONE),
    "siamese on a device, the other": Loop(siamese_on_a_device_whose_classifier_sees_the_other, Sent.NONE),
    "siamese of rows": Loop(siamese_of_rows, Sent.NONE),
    "siamese, shuffled": Loop(siamese_against_shuffled, Sent.NONE),
    "siamese on a device, shuffled": Loop(siamese_against_shuffled_on_a_device, Sent.NONE),
    "the other first": Loop(the_other_first, Sent.ALL),
    "pairs in one tensor": Loop(pairs_in_one_tensor),
    "shuffled within the model": Loop(shuffled_within_the_model, Sent.NONE),
    "a list of tensors": Loop(a_list_of_tensors),
    "a list backwards": Loop(a_list_backwards, Sent.NONE),
    "mixed within the model": Loop(mixed_within_the_model, Sent.NONE),
    "masked": Loop(masked),
    "numbered from one": Loop(numbered_from_one, Sent.SOME),
    "numbered backwards": Loop(numbered_backwards, Sent.SOME),
    "joined classes": Loop(joined_classes, Sent.SOME),
    "one-hot": Loop(one_hot),
    "labels and a mask": Loop(labels_and_a_mask, Sent.SOME),
    "labels and shares of something else": Loop(labels_and_shares_of_something_else),
    "labels twice by mixup": Loop(labels_twice_by_mixup, Sent.NONE),
    "numbered samples": Loop(numbered_samples),
    "labels at random": Loop(labels_at_random, Sent.NONE),
    "another sample for a broken one": Loop(another_sample_for_a_broken_one, Sent.NONE),
    "gaps that are filled": Loop(gaps_that_are_filled, Sent.SOME),
    "zipped with unlabelled": Loop(zipped_with_unlabelled),
    "two attached": Loop(two_attached),
    "two attached on a device": Loop(two_attached_on_a_device, Sent.NONE),
    "two attached in turn": Loop(two_attached_in_turn),
    "zipped with itself": Loop(zipped_with_itself, ways=FOLLOWED),
    "nested": Loop(nested, ways=FOLLOWED),
    "early break": Loop(early_break, Sent.SOME),
    "early break and others": Loop(early_break_and_others, Sent.SOME),
    "looked at first": Loop(looked_at_first, Sent.SOME),
    "skipped": Loop(skipped, Sent.SOME),
    "ahead": Loop(ahead),
    "ahead on a device": Loop(ahead_on_a_device),
    "far ahead on a device": Loop(far_ahead_on_a_device),
    "ahead on a device, unsaid": Loop(ahead_on_a_device_unsaid, Sent.NONE),
    "all at once": Loop(all_at_once),
    "failing sample": Loop(failing_sample, Sent.SOME),
    "failing sample on a device": Loop(failing_sample_on_a_device, Sent.SOME),
    "failing sample in a worker": Loop(failing_sample_in_a_worker, Sent.SOME),
    "validation in the middle": Loop(validation_in_the_middle),
    "iterable": Loop(iterable, ways=(Way.NOTHING, Way.ATTACH)),
    "subset": Loop(subset, Sent.SOME),
    "concatenated": Loop(concatenated),
    "own sampler": Loop(own_sampler, ways=FOLLOWED),
    "own batch sampler": Loop(own_batch_sampler, ways=FOLLOWED),
    "eager batch sampler": Loop(eager_batch_sampler, ways=FOLLOWED),
    "larger batches": Loop(larger_batches),
    "batch sampler": Loop(batch_sampler, ways=FOLLOWED),
    "break with a generator": Loop(break_with_a_generator, Sent.SOME, ways=FOLLOWED),
    "one buffer for all": Loop(one_buffer_for_all),
    "pieces of one tensor": Loop(pieces_of_one_tensor, ways=FOLLOWED),
    "mixed by the loader": Loop(mixed_by_the_loader, Sent.NONE),
    "smoothed labels": Loop(smoothed_labels),
    "sorted by label": Loop(sorted_by_label, Sent.NONE),
    "collate that leaves out": Loop(collate_that_leaves_out, Sent.NONE),
    "model in parts": Loop(model_in_parts),
    "labelled and not in one forward": Loop(labelled_and_not_in_one_forward, Sent.NONE),
    "R-Drop by accelerate": Loop(accelerated_r_drop),
    "copies by accelerate": Loop(accelerated_copies),
    "background thread": Loop(background_thread),
    "background thread to a device": Loop(background_thread_to_a_device, Sent.NONE),
    "a sampler with a list of its module": Loop(_shared_with_a_copy(ShuffledList), ways=FOLLOWED),
    "a sampler with a list of its class": Loop(_shared_with_a_copy(OfItsClass), ways=FOLLOWED),
    "a sampler that counts in its module": Loop(_shared_with_a_copy(Counting), ways=FOLLOWED),
    "a sampler that calls a function": Loop(_shared_with_a_copy(Calling), ways=FOLLOWED),
    "a sampler with a loader": Loop(_shared_with_a_copy(OfALoader), ways=FOLLOWED),
    "a sampler with a model": Loop(_shared_with_a_copy(OfAModel), ways=FOLLOWED),
    "infinite loader": Loop(_repeating(InfiniteDataLoader, 0, 8, reset=False)),
    "infinite loader with workers": Loop(_repeating(InfiniteDataLoader, 2, 4, reset=False), Sent.SOME),
    "infinite loader that is made again": Loop(_repeating(InfiniteDataLoader, 2, 4, reset=True), Sent.SOME),
    "late infinite loader": Loop(_repeating(LateInfiniteDataLoader, 0, 8, reset=True)),
    "late infinite loader with workers": Loop(_repeating(LateInfiniteDataLoader, 2, 4, reset=False)),
    "late infinite loader that is made again": Loop(_repeating(LateInfiniteDataLoader, 2, 4, reset=True)),
    "late multi-epochs loader": Loop(_repeating(LateMultiEpochsDataLoader, 0, 8, reset=False)),
    "late multi-epochs loader with workers": Loop(_repeating(LateMultiEpochsDataLoader, 2, 4, reset=False)),
    "multi-epochs loader": Loop(_repeating(MultiEpochsDataLoader, 0, 8, reset=False)),
    "multi-epochs loader with workers": Loop(_repeating(MultiEpochsDataLoader, 2, 4, reset=False), Sent.SOME),
    "multi-epochs loader of samples": Loop(_repeating(MultiEpochsDataLoader, 0, None, reset=False), ways=FOLLOWED),
    "sequence first": Loop(sequence_first, Sent.NONE),
    "sequence first on a device": Loop(sequence_first_on_a_device, Sent.NONE),
    "copies of the model in threads": Loop(replicas, Sent.NONE),
}
