"""Where in a sample the result of its first transforms is: there the other transforms go on, at each use.

A data set calls its transform wherever it likes: once or for each of two views, with an image, with an image and its
boxes, with a mapping, or with keywords as albumentations wants it. What it gets, it puts somewhere into its sample. So
`FirstPart`, which takes the transform's place, notes what it returns, and in the finished sample these very objects are
looked for. A `Seam` says where they are. It is kept with the sample, for whoever finishes it.

A data set that changes what its transform returns has no seam, because the other transforms would run on something
else than in standard training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Transform = Callable[..., Any]
# The way from a sample to something in it: keys of mappings, and numbers in tuples and lists.
Place = tuple[Any, ...]

# How a transform was called: with one value, with several, with keywords, or by Hugging Face with a batch of one row.
ONE, SEVERAL, NAMED, ROW = "one", "several", "named", "row"
# A sample with the results deeper in it than this is none that a data loader collates.
_DEEPEST = 4
# Values of these types may be the same object by chance, such as a label and a small number.
_PLAIN = (int, float, complex, str, bytes, type(None))


class Seam(NamedTuple):
    """One call of the first part: which part that was, how it was called, and where in the sample the result is.

    `whole` are the places of the result. If there are none, `items` has the places of each item of it, which is a
    mapping or a tuple, and `others` are items that the sample does not have.
    """

    part: int
    called: str
    whole: tuple[Place, ...]
    items: dict[Any, tuple[Place, ...]]
    others: dict[Any, Any]


class NoSeam(Exception):
    """The result of a transform is not in the sample; the text says of what kind it is."""


class Call(NamedTuple):
    part: int
    called: str
    result: Any


class FirstPart:
    """The first transforms of the pipeline with the number `part`; it adds each call to `calls`."""

    def __init__(self, transform: Transform, part: int, calls: list[Call], called: str | None = None) -> None:
        """`called` says how it is called, where that cannot be seen."""
        self.transform, self._part, self._calls, self._called = transform, part, calls, called

    def __call__(self, *values: Any, **named: Any) -> Any:
        result = self.transform(*values, **named)
        called = self._called or (NAMED if not values else SEVERAL if len(values) > 1 else ONE)
        self._calls.append(Call(self._part, called, result))
        return result


def seams_of(calls: Sequence[Call], sample: Any) -> tuple[Seam, ...]:
    """Where the results of these calls are in a sample; raises NoSeam."""
    return tuple(_seam(call, sample) for call in calls)


def _seam(call: Call, sample: Any) -> Seam:
    whole = _places(call.result, sample)
    if whole:
        return Seam(call.part, call.called, whole, {}, {})
    items, others = {}, {}
    for key, value in _items(call.result):
        if isinstance(value, _PLAIN):
            others[key] = value
        elif places := _places(value, sample):
            items[key] = places
        else:
            raise NoSeam(type(value).__name__)
    if not items:
        raise NoSeam(type(call.result).__name__)
    return Seam(call.part, call.called, (), items, others)


def _items(result: Any) -> list[tuple[Any, Any]]:
    if isinstance(result, Mapping):
        return list(result.items())
    return list(enumerate(result)) if isinstance(result, tuple | list) else []


def _places(value: Any, sample: Any) -> tuple[Place, ...]:
    found: list[Place] = []

    def look(there: Any, place: Place) -> None:
        if there is value:
            found.append(place)
        elif len(place) < _DEEPEST:
            for key, inner in _items(there):
                look(inner, (*place, key))

    look(sample, ())
    return tuple(found[:1] if isinstance(value, _PLAIN) else found)


def finished(sample: Any, seams: Sequence[Seam], rests: Sequence[Transform | None]) -> Any:
    """The sample with the other transforms applied; `rests` has those of each part, None where there are none."""
    for seam in seams:
        rest = rests[seam.part]
        if rest is None:
            continue
        if seam.whole:
            result = _applied(rest, seam.called, _at(sample, seam.whole[0]))
            for place in seam.whole:
                sample = _with(sample, place, result)
        else:
            values = {key: _at(sample, places[0]) for key, places in seam.items.items()} | seam.others
            result = _applied(rest, seam.called, values if seam.called == NAMED else _in_order(values))
            for key, places in seam.items.items():
                for place in places:
                    sample = _with(sample, place, result[key])
    return sample


def _in_order(values: dict[Any, Any]) -> Any:
    """The items of a tuple as a tuple; a mapping as it is."""
    return tuple(values[key] for key in range(len(values))) if all(type(key) is int for key in values) else values


def _applied(rest: Transform, called: str, value: Any) -> Any:
    if called == NAMED:
        return rest(**value)
    if called == SEVERAL:
        return rest(*value)
    if called == ROW:
        return {key: column[0] for key, column in rest({key: [cell] for key, cell in value.items()}).items()}
    return rest(value)


def _at(sample: Any, place: Place) -> Any:
    for key in place:
        sample = sample[key]
    return sample


def _with(sample: Any, place: Place, value: Any) -> Any:
    """A copy of the sample with this value at this place; what lies beside it is shared."""
    if not place:
        return value
    key, inner = place[0], _with(sample[place[0]], place[1:], value)
    if isinstance(sample, tuple):
        whole = [*sample[:key], inner, *sample[key + 1 :]]
        return sample._make(whole) if hasattr(sample, "_make") else type(sample)(whole)
    changed = copy.copy(sample)
    changed[key] = inner
    return changed
