"""What managers send each other comes out as it went in; anything else is refused, whatever bytes it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.cluster.link import PlanPiece, SharedHub, SharedScores, unpacked
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Batch, Goodbye, Message, encode
from spiderfs.protocol.messages import Decoder

SAMPLES = 100
BATCH = Batch("", 0, 0, np.array([3, 99], np.uint32), np.eye(2, 4, dtype=np.float16), np.ones(2, np.float16))
SCORES = SharedScores(4, np.array([3, 5, 7], np.uint32), np.array([1.5, 0.25, 2.0], np.float32))
HUB = SharedHub(99, np.array([5, 7], np.uint32), np.array([0.1, 0.2], np.float32))

PIECE = PlanPiece("n1 1", 3, 1, 9, 4, np.array([3, 99, 3], np.uint32))


def test_messages_come_out_as_they_went_in() -> None:
    for messages in ([BATCH, BATCH], [SCORES], [SCORES, HUB, HUB], [PIECE]):
        found = unpacked(b"".join(map(encode, messages)), SAMPLES)
        assert [type(message) for message in found] == [type(message) for message in messages]
        for one, other in zip(found, messages, strict=True):
            for name in (*one.SCALARS, *one.ARRAYS):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_no_trainer_says_what_managers_send_each_other() -> None:
    (refused,) = Decoder().feed(encode(SCORES))
    assert isinstance(refused, ProtocolError)
    assert refused.code == "unknown"
    with pytest.raises(ProtocolError):
        unpacked(encode(Goodbye()), SAMPLES)


@pytest.mark.parametrize(("message", "largest"), [(BATCH, 99), (SCORES, 7), (HUB, 99), (PIECE, 99)])
def test_samples_beyond_the_list_are_refused(message: Message, largest: int) -> None:
    unpacked(encode(message), largest + 1)
    with pytest.raises(ProtocolError, match=f"sample {largest} of a list"):
        unpacked(encode(message), largest)


@pytest.mark.parametrize(
    "fields",
    [
        {"dimension": 0},
        {"dimension": 1 << 20},
        {"ids": np.array([3, 3, 7])},
        {"ids": np.array([3])},
        {"scores": np.array([1, 0, 1])},
        {"scores": np.array([1, np.nan, 1])},
    ],
    ids=str,
)
def test_scores_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    parts = {"dimension": SCORES.dimension, "ids": SCORES.ids, "scores": SCORES.scores}
    with pytest.raises(ProtocolError):
        encode(SharedScores(**{**parts, **fields}))


@pytest.mark.parametrize("distances", [np.array([1.0]), np.array([1.0, np.inf])], ids=str)
def test_hubs_that_are_none_are_refused(distances: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(SharedHub(1, HUB.neighbours, distances))


@pytest.mark.parametrize("fields", [{"start": 10}, {"first": 7}, {"draws": 2}, {"order": PIECE.order[:0]}], ids=str)
def test_pieces_of_plans_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        encode(replace(PIECE, **fields))
    assert unpacked(encode(replace(PIECE, start=0, draws=0, first=0, order=PIECE.order[:0])), SAMPLES)


@given(frames=st.binary(max_size=60), cut=st.integers(0, 400))
def test_no_other_bytes_are_taken_for_messages(frames: bytes, cut: int) -> None:
    whole = encode(BATCH) + encode(SCORES)
    for wrong in (frames, whole + frames) if frames else (b"",):
        with pytest.raises(ProtocolError):
            unpacked(wrong, SAMPLES)
    if 0 < cut < len(whole) and cut != len(encode(BATCH)):
        with pytest.raises(ProtocolError):
            unpacked(whole[:cut], SAMPLES)
