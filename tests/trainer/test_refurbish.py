"""refurbish: which transforms run when, what is the same as in standard training, and what it refuses."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from composing import Compose
from hook_daemon import HookDaemon, until
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
)

import trainer_hook
from trainer_hook.connection.sample_list import declaration
from trainer_hook.refurbishing.loader import RefurbishedDataset
from trainer_hook.refurbishing.sampler import RefurbishedDraw
from trainer_hook.refurbishing.stores import Missing, PartialStore, pickled

SAMPLES, BATCH = 40, 10


class Noise:
    """A transform that adds a random number, and counts how often it ran in this process."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.runs = 0

    def __call__(self, sample: Any) -> Any:
        self.runs += 1
        drawn = self.scale * (torch.rand(1).item() + np.random.rand() + random.random())
        return {**sample, "image": sample["image"] + drawn} if isinstance(sample, dict) else sample + drawn


class Numbers(Dataset[Any]):
    """Sample i is the number 1000 i, and its label i."""

    def __init__(self, transform: Any, kind: str = "tuple") -> None:
        self.transform = transform
        self.kind = kind
        self.samples = [(f"{index}.jpg", index) for index in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = torch.tensor(1000.0 * index, dtype=torch.float64)
        if self.kind == "mapping":
            return self.transform({"image": image, "label": int(index)})
        return self.transform(image), int(index)


def numbers(kind: str = "tuple") -> tuple[Numbers, Noise, Noise]:
    first, last = Noise(100), Noise(1)
    return Numbers(Compose([first, last]), kind), first, last


def loader_of(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, BATCH, shuffle=True, **options)


def epoch_of(loader: DataLoader[Any]) -> list[tuple[int, float]]:
    return [
        (int(label), float(image)) for images, labels in loader for image, label in zip(images, labels, strict=True)
    ]


def test_each_partial_sample_is_used_as_often_as_asked() -> None:
    dataset, first, last = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=2)
    made = []
    for epoch in range(1, 6):
        drawn = epoch_of(loader)
        assert sorted(label for label, _ in drawn) == list(range(SAMPLES))
        assert last.runs == epoch * SAMPLES
        made.append(first.runs)
    assert np.diff(made).tolist() == [SAMPLES // 2] * 4
    assert made[0] == SAMPLES


def test_a_plan_has_the_samples_that_are_made_alone(daemon: HookDaemon) -> None:
    dataset, first, _ = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=2)

    def begun(epoch: int) -> list[list[int]]:
        return [plan.order.tolist() for _, plan in daemon.sink.plans if plan.epoch == epoch]

    def come(epoch: int) -> list[tuple[int, int]]:
        return [(said.dispatched, said.taken) for _, said in daemon.sink.progress if said.epoch == epoch]

    with trainer_hook.plan(daemon.mount, loader):
        # One epoch is left early, so the next one makes the others of its samples.
        for epoch, batches in enumerate((4, 4, 1, 4, 4)):
            before, taking = first.runs, iter(loader)
            drawn = next(taking)[1].tolist()
            until(lambda epoch=epoch: len(begun(epoch)) == 1)  # type: ignore[misc]
            for _, labels in itertools.islice(taking, batches - 1):
                drawn += labels.tolist()
            del taking
            (order, *_), runs = begun(epoch), first.runs - before
            assert len(order) == (SAMPLES, SAMPLES // 2, SAMPLES // 2, SAMPLES - BATCH // 2, SAMPLES // 2)[epoch]
            assert [label for label in drawn if label in order] == order[:runs]
            until(lambda epoch=epoch, runs=runs: (runs, runs) in come(epoch))  # type: ignore[misc]


def test_the_final_part_is_drawn_again_at_each_use() -> None:
    dataset, _, _ = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=3)
    forms: dict[int, list[float]] = {}
    for _ in range(9):
        for label, image in epoch_of(loader):
            forms.setdefault(label, []).append(image - 1000 * label)
    apart = 0
    for values in forms.values():
        assert len(set(values)) == len(values)
        # The partial part adds 0 to 300, the final part 0 to 3: uses of one generation lie close together.
        apart += sum(after - before > 3 for before, after in itertools.pairwise(sorted(values)))
    # Nine uses are of three generations, or of four where the first one is not whole.
    assert 1.5 * SAMPLES < apart <= 3 * SAMPLES


def test_the_rest_of_the_training_draws_what_it_would_have_drawn() -> None:
    """Making a partial sample leaves the global generators where they were."""
    dataset, _, last = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=2)
    refurbished = loader.dataset
    last.scale = 0.0
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    last(torch.tensor(0.0))
    expected = torch.rand(1), np.random.rand(), random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    refurbished[RefurbishedDraw(3, 0)]
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_a_training_that_resumes_and_one_that_lost_its_store_see_the_same_partial_samples(tmp_path: Path) -> None:
    def partials(store: Path, epochs: range) -> dict[tuple[int, int], float]:
        dataset, _, last = numbers()
        last.scale = 0.0
        loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=2, seed=4, store=store)
        found = {}
        for epoch in epochs:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            found |= {(epoch, label): image for label, image in epoch_of(loader)}
        return found

    whole = partials(tmp_path / "one", range(6))
    assert partials(tmp_path / "two", range(3, 6)).items() <= whole.items()
    assert partials(tmp_path / "one", range(5, 6)).items() <= whole.items()


class Pair(NamedTuple):
    image: Any
    label: int


def test_a_named_tuple_stays_one() -> None:
    class Pairs(Numbers):
        def __getitem__(self, index: int) -> Pair:
            return Pair(*super().__getitem__(index))

    loader = trainer_hook.refurbish(loader_of(Pairs(Compose([Noise(1), Noise(1)]))), split=1)
    assert isinstance(next(iter(loader)), Pair)


def test_a_draw_is_an_index_and_the_data_set_is_what_it_was() -> None:
    draw = pickle.loads(pickle.dumps(RefurbishedDraw(7, 3)))
    assert (draw, draw.generation, draw + 1, [*range(9)][draw]) == (7, 3, 8, 7)
    dataset, first, _ = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1)
    assert isinstance(loader.dataset, RefurbishedDataset)
    declared = declaration(loader.dataset, Path("/mnt"), Path("/mnt"), "name", "train")
    assert declared.paths[:2] == [b"0.jpg", b"1.jpg"]
    assert first.runs == 0
    loader.dataset[3]
    assert first.runs == 1


def test_the_store_goes_with_the_loader() -> None:
    dataset, _, _ = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1)
    directory = loader.dataset._store.directory  # type: ignore[attr-defined]
    epoch_of(loader)
    assert len(list(directory.iterdir())) == SAMPLES
    del loader
    gc.collect()
    assert not directory.exists()


def test_a_store_without_room_or_with_damage_costs_only_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset, first, _ = numbers()
    loader = trainer_hook.refurbish(loader_of(dataset), split=1, store=tmp_path)
    epoch_of(loader)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        path.write_bytes(path.read_bytes()[: 3 + number])
    assert sorted(label for label, _ in epoch_of(loader)) == list(range(SAMPLES))
    assert first.runs > SAMPLES
    tmp_path.rename(tmp_path.with_name("away"))
    before = first.runs
    assert sorted(label for label, _ in epoch_of(loader)) == list(range(SAMPLES))
    assert first.runs == before + SAMPLES
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "bad", [b"cnowhere\nThing\n.", b"c__main__\nThing\n.", b"I1x\n.", b"\x80\x05\x8c\x01\xff.", b"0."]
)
def test_what_cannot_be_unpickled_is_missing(tmp_path: Path, bad: bytes) -> None:
    store = PartialStore(tmp_path)
    store.put(7, 3, "sample")
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    pickled = pickle.dumps("sample", protocol=pickle.HIGHEST_PROTOCOL)
    assert content.endswith(pickled)
    path.write_bytes(content.removesuffix(pickled) + bad)
    with pytest.raises(Missing):
        store.get(7, 3)


def test_a_sample_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    loader = trainer_hook.refurbish(loader_of(Numbers([lambda sample: lambda: sample, int])), split=1, store=tmp_path)
    with pytest.raises(ValueError, match=r"cannot be kept .*lambda.* by another split"):
        next(iter(loader))


def test_a_training_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def drawn(*resumed: int) -> list[list[tuple[int, float]]]:
        dataset, _, last = numbers()
        last.scale = 0.0
        loader = trainer_hook.refurbish(loader_of(dataset), split=1, reuse=2, seed=4, store=tmp_path / str(resumed))
        if resumed:
            loader.sampler.set_epoch(*resumed)  # type: ignore[attr-defined]
            # As Lightning does before each epoch.
            loader.sampler.set_epoch(resumed[0])  # type: ignore[attr-defined]
        return [epoch_of(loader) for _ in range(3)]

    whole, resumed = drawn(), drawn(1, 2 * BATCH)
    assert resumed[0] == whole[1][2 * BATCH :]
    assert resumed[1] == whole[2]
    sampler = trainer_hook.refurbish(loader_of(numbers()[0]), split=1).sampler
    with pytest.raises(ValueError, match="an epoch has 40 samples"):
        sampler.set_epoch(0, SAMPLES + 1)  # type: ignore[attr-defined]


def test_ranks_are_those_of_the_distributed_sampler() -> None:
    dataset = numbers()[0]
    drawn = []
    for rank in range(3):
        ranks: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=3, rank=rank)
        loader = trainer_hook.refurbish(DataLoader(dataset, BATCH, sampler=ranks), split=1)
        # Programs that deal samples out to ranks themselves leave such a sampler alone.
        assert isinstance(loader.sampler, DistributedSampler)
        assert (loader.sampler.rank, loader.sampler.num_replicas, len(loader.sampler)) == (rank, 3, SAMPLES // 3)
        drawn += [label for label, _ in epoch_of(loader)]
    assert len(set(drawn)) == len(drawn) == SAMPLES // 3 * 3


class OwnLoader(DataLoader[Any]):
    """As those that Accelerate and others make of a loader."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_training_that_was_killed_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_hook.refurbishing.stores._MEMORY", tmp_path)
    ours = PartialStore.in_memory()
    said, say = os.pipe()
    killed = os.fork()
    if killed == 0:
        PartialStore.in_memory().put(0, 0, "kept")
        os.write(say, b"1")
        signal.pause()
    os.close(say)
    assert os.read(said, 1)
    os.close(said)
    later = PartialStore.in_memory()
    assert len(list(tmp_path.iterdir())) == 3
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    last = PartialStore.in_memory()
    assert {*tmp_path.iterdir()} == {ours.directory, later.directory, last.directory}
    for store in (ours, later, last):
        pickle.loads(pickle.dumps(store)).close()
        assert not store.directory.exists()
        store.close()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_loaders_that_cannot_be_refurbished_are_refused() -> None:
    dataset = numbers()[0]
    weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    for loader, said in (
        (DataLoader(dataset, BATCH), "SequentialSampler"),
        (DataLoader(dataset, BATCH, sampler=weighted), "WeightedRandomSampler may repeat"),
        (DataLoader(dataset, BATCH, sampler=trainer_hook.EchoSampler(SAMPLES)), "EchoSampler may repeat"),
        (DataLoader(Stream(), BATCH), "iterable"),
        (loader_of(Numbers(abs)), "no list of transforms"),
        (OwnLoader(dataset, BATCH, shuffle=True), "OwnLoader is no DataLoader of torch"),
        (trainer_hook.refurbish(loader_of(dataset), split=1), "refurbished already"),
    ):
        with pytest.raises(ValueError, match=said):
            trainer_hook.refurbish(loader, split=1)
    for options, said in (
        ({"reuse": 0}, "reuse=0"),
        ({"kept": 0}, "kept=0"),
        ({"split": 0}, "there are 2 transforms"),
        ({"split": 3}, "there are 2 transforms"),
    ):
        with pytest.raises(ValueError, match=said):
            trainer_hook.refurbish(loader_of(dataset), **{"split": 1, **options})  # type: ignore[arg-type]
    assert not trainer_hook.refurbish(loader_of(dataset, in_order=False), split=1).in_order
    ranks = DistributedSampler(dataset, num_replicas=2, rank=0)
    assert trainer_hook.refurbish(DataLoader(dataset, BATCH, sampler=ranks), split=1).batch_size == BATCH


def test_a_crop_is_kept_without_its_image() -> None:
    image = torch.arange(3 * 200 * 200, dtype=torch.uint8).view(3, 200, 200)
    crop = image[:, 50:60, 50:60]
    kept = pickled((crop, {"again": crop}))
    assert len(kept) < 2 * crop.numel() + 1000 < image.numel()
    back, again = pickle.loads(kept)
    assert torch.equal(back, crop)
    assert again["again"] is back
    assert torch.equal(pickle.loads(pickled(image)), image)
