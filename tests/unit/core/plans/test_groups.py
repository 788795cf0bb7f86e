"""Samples in groups, against a dictionary."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from spiderfs.core.plans.exchange import NOWHERE, Groups

SIZE = 6


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(NOWHERE, 2) | st.none())), st.floats(0, 0.999))
def test_groups_are_what_was_put_last(steps: list[tuple[int, int | None]], chance: float) -> None:
    groups, model = Groups(SIZE), dict[int, int]()
    for sample, group in steps:
        if group is None:  # all at once
            groups.refill(np.array([model.get(number, NOWHERE) for number in range(SIZE)]))
        elif group == NOWHERE:
            groups.discard(sample)
            model.pop(sample, None)
        else:
            groups.put(sample, group)
            model[sample] = group
        assert sorted(groups) == sorted(model)
        assert len(groups) == len(model)
        assert groups.numbers() == sorted(set(model.values()))
        for number in range(3):
            assert sorted(groups.members(number)) == sorted(key for key, value in model.items() if value == number)
            drawn = groups.drawn(number, chance)
            assert (drawn is None) == (number not in model.values())
            assert drawn is None or (model[drawn] == number and drawn in groups)


def test_every_sample_of_a_group_is_drawn_as_often() -> None:
    groups = Groups(10)
    for sample in range(0, 10, 2):
        groups.put(sample, 7)
    drawn = Counter(groups.drawn(7, number / 1000) for number in range(1000))
    assert drawn == dict.fromkeys(range(0, 10, 2), 200)
