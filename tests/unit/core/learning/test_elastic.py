"""Equations 5 to 8 by hand, and what holds whatever training does."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from spiderfs.core.feed import Elastic, ElasticOptions


def elastic(sigmas: list[float], accuracies: list[float], **options: Any) -> Elastic:
    subject = Elastic(ElasticOptions(**options))
    for sigma in sigmas:
        subject.observe_sigma(sigma)
    for accuracy in accuracies:
        subject.observe_accuracy(accuracy)
    return subject


def test_beta_takes_a_window_that_falls_and_stays() -> None:
    subject = elastic([0.1, 0.2, 0.19, 0.3], [])
    assert subject.beta == 0
    subject.observe_sigma(0.29)
    assert subject.beta == 0
    for sigma in (0.25, 0.2, 0.15):
        subject.observe_sigma(sigma)
    assert subject.beta == 1
    for sigma in (0.3, 0.5, 0.7, 0.9, 1.1):
        subject.observe_sigma(sigma)
    assert (subject.beta, subject.sigma) == (1, 1.1)


def test_delta_and_u_by_hand() -> None:
    # A straight line is its own smoothed self: 0.02 per epoch, and u = 0.02 / (0.01 + 0.02).
    subject = elastic([], [0.5 + 0.02 * epoch for epoch in range(10)])
    assert subject.delta == pytest.approx(0.02)
    assert subject.u == pytest.approx(2 / 3)
    # So is a parabola: 0.001 t^2 grows by (81 - 16) / 5 thousandths per epoch over the last five.
    subject = elastic([], [0.001 * epoch**2 for epoch in range(10)])
    assert subject.delta == pytest.approx(0.013)


def test_ratio_by_hand() -> None:
    falling, flat = [5.0, 4.0, 3.0, 2.0, 1.0], [0.5, 0.5]
    assert elastic([1.0, 2.0], flat).ratio(0.5) == 0.9
    assert elastic(falling, flat).ratio(0.5) == pytest.approx(0.85)
    assert elastic(falling, []).ratio(0.5) == pytest.approx(0.9 - 0.1 * 0.25)
    assert elastic(falling, flat).ratio(1) == pytest.approx(0.8)
    assert elastic(falling, flat, end=0.5).ratio(1) == pytest.approx(0.5)
    assert elastic(falling, flat).ratio(7) == pytest.approx(0.8)


@given(
    sigmas=st.lists(st.floats(0, 5), max_size=20),
    accuracies=st.lists(st.floats(0, 1), max_size=80),
    progress=st.lists(st.floats(0, 1), min_size=2, max_size=6).map(sorted),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_the_ratio_moves_from_start_to_end(
    sigmas: list[float], accuracies: list[float], progress: list[float], ends: tuple[float, float]
) -> None:
    subject = elastic(sigmas, accuracies, start=ends[0], end=ends[1])
    assert 0 <= subject.u <= 1
    ratios = [subject.ratio(t) for t in progress]
    assert all(min(ends) - 1e-9 <= ratio <= max(ends) + 1e-9 for ratio in ratios)
    towards_end = sorted(ratios, reverse=ends[0] > ends[1])
    assert ratios == towards_end
    again = Elastic(subject.options)
    again.restore(msgpack.unpackb(msgpack.packb(subject.state())))
    assert [again.ratio(t) for t in progress] == ratios
    assert (again.beta, again.sigma, again.delta) == (subject.beta, subject.sigma, subject.delta)
