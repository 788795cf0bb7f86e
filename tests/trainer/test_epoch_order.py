"""The order of one rank: whatever is proposed, each sample of the epoch is handed on exactly once."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from trainer_hook.loader.epoch_order import EpochOrder

SAMPLES = 12


def test_a_proposed_sample_changes_places_with_the_one_whose_turn_it_is() -> None:
    order = EpochOrder([4, 2, 0, 3], samples=5)
    assert order.hand_on([3, 2], 2) == [3, 2]
    assert order.coming(9) == [0, 4]
    assert order.order.tolist() == [3, 2, 0, 4]


def test_a_sample_of_the_same_batch_may_be_proposed_for_another_position() -> None:
    order = EpochOrder([0, 1, 2], samples=3)
    assert order.hand_on([1, 2], 2) == [1, 2]
    assert order.coming(9) == [0]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 0], "more than once, so its samples cannot be exchanged"),
        ([5], "sample 5 of a list of 5"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochOrder(order, samples=5)


@given(st.data())
def test_each_sample_is_handed_on_exactly_once(data: st.DataObject) -> None:
    planned = data.draw(st.lists(st.integers(0, SAMPLES - 1), unique=True))
    order = EpochOrder(planned, SAMPLES)
    handed: list[int] = []
    while order.position < len(order):
        proposed = data.draw(st.lists(st.integers(-2, SAMPLES + 2), max_size=5))
        count = data.draw(st.integers(1, 4))
        coming = order.coming(count)
        batch = order.hand_on(proposed, count)
        assert len(batch) == len(coming)
        handed += batch
    assert sorted(handed) == sorted(planned)
    assert order.order.tolist() == handed
