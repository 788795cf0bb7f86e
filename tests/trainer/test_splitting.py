"""Which pipelines refurbish splits, where in a sample the second half goes on, and what it refuses to guess."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from composing import Compose
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import trainer_hook
from trainer_hook.refurbishing.loader import SplitDataset


class Image:
    """An image that knows what was done to it."""

    def __init__(self, index: int, done: tuple[str, ...] = ()) -> None:
        self.index, self.done = index, done


class Step:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, image: Image) -> Image:
        return Image(image.index, (*image.done, self.name))


STEPS = [Step("a"), Step("b"), Step("c")]


class Made(Dataset[Any]):
    """What `sample` makes of an image and the transform."""

    def __init__(self, transform: Any, sample: Callable[[Any, Image], Any] = lambda transform, image: transform(image)):
        self.transform, self.sample = transform, sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.transform, Image(index))


def found(value: Any) -> list[str]:
    """What was done to the images in a sample, in order."""
    if isinstance(value, Image):
        return ["".join(value.done)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for inner in values for text in found(inner)]


def both_halves(dataset: Dataset[Any], split: Any = 1) -> tuple[list[str], list[str]]:
    """What was done half way, and in the end, by way of the bytes in which a sample is kept."""
    halves = SplitDataset(dataset, split)
    half = pickle.loads(pickle.dumps(halves.half_way(1)))
    return found(half[1]), found(halves.finish(half))


@pytest.mark.parametrize(
    "sample",
    [
        lambda transform, image: transform(image),
        lambda transform, image: (transform(image), 7),
        lambda transform, image: [7, transform(image)],
        lambda transform, image: {"label": 7, "image": transform(image)},
        lambda transform, image: (7, {"inputs": [transform(image)]}),
    ],
)
def test_the_rest_goes_on_where_the_data_set_has_put_the_first_part(sample: Any) -> None:
    assert both_halves(Made(Compose(STEPS), sample)) == (["a"], ["abc"])
    assert both_halves(Made(Compose(STEPS), sample), 3) == (["abc"], ["abc"])


def test_each_of_two_views_is_finished_by_itself() -> None:
    twice = Made(Compose(STEPS), lambda transform, image: (transform(image), transform(image), 7))
    assert both_halves(twice) == (["a", "a"], ["abc", "abc"])

    def same(transform: Any, image: Image) -> Any:
        view = transform(image)
        return view, view

    runs: list[Image] = []
    shared = Made([STEPS[0], lambda image: runs.append(image) or STEPS[1](image)], same)
    assert both_halves(shared) == (["a", "a"], ["ab", "ab"])
    assert len(runs) == 1


def test_a_mapping_a_pair_and_keywords_go_through_both_parts_as_they_are() -> None:
    def on_mapping(step: Step) -> Any:
        return lambda sample: {**sample, "image": step(sample["image"])}

    mappings = [on_mapping(step) for step in STEPS]
    assert both_halves(Made(mappings, lambda t, image: t({"image": image, "label": 7}))) == (["a"], ["abc"])

    def taken_apart(transform: Any, image: Image) -> Any:
        made = transform({"image": image, "label": 7, "mask": Image(3)})
        return made["image"], made["mask"], made["label"]

    assert both_halves(Made(mappings, taken_apart)) == (["a", ""], ["abc", ""])

    class Pairs(Compose):
        """As torchvision's v2, and its references for detection: image and label through all."""

        def __call__(self, image: Any, label: Any) -> Any:
            for transform in self.transforms:
                image, label = transform(image, label)
            return image, label

    def on_both(step: Step) -> Any:
        return lambda image, label: (step(image), step(label))

    Pairs.__name__ = "Compose"
    pairs = Pairs([on_both(step) for step in STEPS])
    assert both_halves(Made(pairs, lambda t, image: (*t(image, Image(5)), 7))) == (["a", "a"], ["abc", "abc"])
    assert both_halves(Made(pairs, lambda t, image: t(image, Image(5)))) == (["a", "a"], ["abc", "abc"])


class Named(Compose):
    """As albumentations has it: everything by keywords, a chance for the whole, and what follows boxes."""

    def __init__(self, transforms: list[Any], p: float = 1.0, processors: Any = None) -> None:
        super().__init__(transforms)
        self.p, self.processors = p, processors or {}

    def __call__(self, **named: Any) -> Any:
        for transform in self.transforms:
            named = transform(**named)
        return named


Named.__name__ = "Compose"


def on_named(step: Step) -> Any:
    return lambda image, **others: (
        {"image": step(image)}
        | {name: step(other) if isinstance(other, Image) else other for name, other in others.items()}
    )


def test_keywords_are_handed_on_and_each_result_goes_back_to_its_place() -> None:
    transform = Named([on_named(step) for step in STEPS])

    def masked(transform: Any, image: Image) -> Any:
        made = transform(image=image, mask=Image(9), label=3)
        return made["image"], {"mask": made["mask"]}, made["label"]

    assert both_halves(Made(transform, lambda t, image: (t(image=image)["image"], 7))) == (["a"], ["abc"])
    assert both_halves(Made(transform, masked)) == (["a", "a"], ["abc", "abc"])
    assert both_halves(Made(transform, lambda t, image: t(image=image, label=7))) == (["a"], ["abc"])


def test_what_is_changed_after_the_transform_is_refused_and_left_to_two_functions() -> None:
    changed = Made(Compose(STEPS), lambda transform, image: (STEPS[2](transform(image)), 7))
    with pytest.raises(
        ValueError, match=r"Made changes what its transform returns \(Image\).*split=\(partial, final\)"
    ):
        both_halves(changed)
    assert both_halves(changed, (STEPS[0], STEPS[1])) == (["ac"], ["acb"])
    # A mask that is changed would not be turned with its image.
    part = Made(Named([on_named(step) for step in STEPS]))
    part.sample = lambda t, image: (lambda made: (made["image"], Image(1)))(t(image=image, mask=Image(2)))
    with pytest.raises(ValueError, match="changes what its transform returns"):
        both_halves(part)
    for split in (1, (STEPS[0], STEPS[1])):
        with pytest.raises(ValueError, match="without calling its transform"):
            both_halves(Made(Compose(STEPS), lambda transform, image: (image, 7)), split)


class RandomApply(nn.Module):
    """As torchvision's: all of its transforms, or none."""

    def __init__(self, transforms: list[Any], p: float) -> None:
        super().__init__()
        self.transforms, self.p = transforms, p

    def forward(self, image: Image) -> Image:
        return Compose(self.transforms)(image) if random.random() < self.p else image


class OneOf(Compose):
    """As MONAI's: a Compose that chooses."""

    def __call__(self, image: Any) -> Any:
        return random.choice(self.transforms)(image)


class Augmentation(nn.Sequential):
    """As Kornia's: a Sequential that runs otherwise."""

    def forward(self, image: Any) -> Any:
        return self[0](image)


class Sequence:
    """Something else with `transforms`, which may mean anything."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (RandomApply(STEPS, 0.5), "RandomApply is no list of transforms that run one after the other"),
        (OneOf(STEPS), "OneOf is no list of transforms"),
        (Augmentation(nn.Identity(), nn.Identity()), "Augmentation is no list"),
        (Sequence(STEPS), "Sequence is no list"),
        (Named(STEPS, p=0.5), r"Compose with p=0\.5 leaves some samples as they are"),
        (Named(STEPS, processors={"bboxes": 1}), "Compose follows bboxes through all"),
        (None, "Made has no `transform`"),
    ],
)
def test_what_does_not_run_all_one_after_the_other_is_not_split(pipeline: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SplitDataset(Made(pipeline), 1)


def test_a_part_of_a_pipeline_runs_as_the_whole_and_the_whole_stays() -> None:
    class Module(nn.Module):
        """As torchvision's v2, its transforms may be modules in a table."""

        def __init__(self, transforms: Any) -> None:
            super().__init__()
            self.transforms = transforms
            self.scale = 2

        def forward(self, image: Any) -> Any:
            for transform in self.transforms:
                image = self.scale * transform(image)
            return image

    Module.__name__ = "Compose"
    for steps in ([nn.Identity(), nn.ReLU(), nn.ReLU()], nn.ModuleList([nn.Identity(), nn.ReLU(), nn.ReLU()])):
        whole = Module(steps)
        dataset = Made(whole, lambda transform, image: (transform(torch.ones(1)), 7))
        halves = SplitDataset(dataset, 1)
        half = halves.half_way(0)
        assert (float(half[1][0]), float(halves.finish(half)[0])) == (2, 8)
        assert float(dataset[0][0]) == 8
        assert len(whole.transforms) == 3


def test_data_sets_in_others_are_split_each_by_itself() -> None:
    one, other = Made(Compose(STEPS)), Made(Compose(STEPS[::-1]), lambda transform, image: (transform(image), 7))
    whole = Subset(ConcatDataset([Subset(one, [2, 1]), other]), [0, 3, 1, 5])
    halves = SplitDataset(whole, 1)
    assert [found(halves.half_way(place)[1]) for place in range(4)] == [["a"], ["c"], ["a"], ["c"]]
    assert [found(halves.finish(halves.half_way(place))) for place in range(4)] == [["abc"], ["cba"]] * 2
    with pytest.raises(ValueError, match="TensorDataset has no `transform`"):
        SplitDataset(ConcatDataset([one, TensorDataset(torch.zeros(3))]), 1)


class Rows:
    """As a data set of the library `datasets` with `set_transform`: its transform gets columns, of one row."""

    def __init__(self, transform: Any) -> None:
        self.format = {"type": "custom", "format_kwargs": {"transform": transform}}

    def with_transform(self, transform: Any) -> Rows:
        other = copy.deepcopy(self)
        other.format["format_kwargs"]["transform"] = transform  # type: ignore[index]
        return other

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        columns = self.format["format_kwargs"]["transform"]({"image": [Image(index)], "label": [7]})  # type: ignore[index]
        return {name: column[0] for name, column in columns.items()}


def on_columns(step: Step) -> Any:
    return lambda columns: {**columns, "image": [step(image) for image in columns["image"]]}


def test_a_transform_of_columns_is_split_by_functions_and_by_steps() -> None:
    whole = Rows(Compose([on_columns(step) for step in STEPS]))
    assert both_halves(whole) == (["a"], ["abc"])  # type: ignore[arg-type]
    functions = on_columns(STEPS[1]), on_columns(STEPS[2])
    assert both_halves(whole, functions) == (["b"], ["bc"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="function is no list of transforms"):
        SplitDataset(Rows(on_columns(STEPS[0])), 1)
    loader = DataLoader(whole, 2, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    drawn = [sample for batch in trainer_hook.refurbish(loader, split=2) for sample in batch]
    assert [found(sample) for sample in drawn] == [["abc"]] * 4


class Both:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any, label: Any) -> Any:
        return self.transform(image), label


class Vision(Dataset[Any]):
    """As torchvision's: the transform a second time, beside that of the label, and that alone if none was given."""

    def __init__(self, transform: Any = None, transforms: Any = None) -> None:
        self.transform = transform
        self.transforms = transforms or Both(transform)

    def __getitem__(self, index: int) -> Any:
        return self.transforms(Image(index), 7)


def test_transforms_of_torchvisions_data_sets() -> None:
    assert both_halves(Vision(Compose(STEPS))) == (["a"], ["abc"])
    on_pairs = [lambda image, label, step=step: (step(image), label) for step in STEPS]
    assert both_halves(Vision(transforms=lambda *pair: pair), (on_pairs[0], on_pairs[1])) == (["a"], ["ab"])


def test_generators_of_a_transforms_own_follow_from_the_sample_too() -> None:
    class Own:
        def __init__(self) -> None:
            self.generators = [np.random.default_rng(), random.Random(), np.random.RandomState(), torch.Generator()]
            self.system = random.SystemRandom()

        def __call__(self, image: Any) -> Any:
            rng, python, old, torchs = self.generators
            drawn = rng.random(), python.random(), old.rand(), torch.rand(1, generator=torchs).item()  # type: ignore[union-attr,call-overload]
            return np.array(drawn)

    def halves_of(dataset: Dataset[Any]) -> tuple[Any, list[np.ndarray]]:
        loader = trainer_hook.refurbish(DataLoader(dataset, 4, shuffle=True, collate_fn=list), split=1)
        made = loader.dataset._split  # type: ignore[attr-defined]
        return made, [made.make(index, generation)[1] for index in (0, 1) for generation in (0, 1)]

    one, other = Compose([Own(), Step("b")]), Compose([Own(), Step("b")])
    made, drawn = halves_of(Made(one))
    states = [generator.bit_generator.state for generator in one.transforms[0].generators[:1]]
    # One number of each of the four generators, for each of two generations of two samples.
    assert len({float(number) for numbers in drawn for number in numbers}) == 16
    assert np.array_equal(drawn, halves_of(Made(other))[1])
    made.make(3, 3)
    assert states == [generator.bit_generator.state for generator in one.transforms[0].generators[:1]]
    # They lie where Python lets them lie.
    rng = np.random.default_rng()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._rng = np.random.default_rng()

        def forward(self, _: Any) -> Any:
            return self._rng.random()

    module = nn.Sequential(nn.Sequential(nn.Identity(), Inner()))
    for transform in (lambda image: rng.random(), lambda image, rng=rng: rng.random(), rng.normal, module):
        dataset = Made(Compose([transform, Step("b")]), lambda t, image: (t(1), 7))
        _, drawn = halves_of(dataset)
        assert np.array_equal([half[0] for half in drawn], [half[0] for half in halves_of(dataset)[1]])
