"""The hook protocol's framing: round trips, cuts anywhere, and bytes that make no sense."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiderfs.protocol import (
    MESSAGES,
    PREFIX_BYTES,
    VERSION,
    Batch,
    Cached,
    CachedRequest,
    Decoder,
    EpochEnd,
    Error,
    Exchange,
    Given,
    Goodbye,
    Hello,
    Keep,
    Limits,
    Message,
    Ok,
    PartialSamples,
    Pin,
    Pinned,
    Plan,
    Progress,
    ProtocolError,
    Room,
    Samples,
    Scores,
    ScoresRequest,
    Turn,
    Turns,
    WarmUp,
    Warn,
    encode,
)


def batch(rows: int = 3, width: int = 4, **changes: Any) -> Batch:
    values: dict[str, Any] = {
        "list": "train",
        "epoch": 1,
        "step": 2,
        "indices": np.arange(rows, dtype=np.uint32),
        "embeddings": np.linspace(-1, 1, rows * width, dtype=np.float16).reshape(rows, width),
        "losses": np.ones(rows, np.float16),
        "labels": np.arange(rows, dtype=np.int32),
    }
    return Batch(**values | changes)


def samples(*paths: bytes, total: int | None = None, first: int = 0, sends_batches: bool | None = None) -> Samples:
    text = np.frombuffer(b"".join(path + b"\0" for path in paths), np.uint8)
    return Samples("train", "train", total or len(paths), first, np.zeros(len(paths), np.int32), text, sends_batches)


EXAMPLES: tuple[Message, ...] = (
    Hello("pytest", "job-1", "the best one", 1, 2, 3, 90, True, "job-0"),
    Hello("pytest", "job-1"),
    samples(b"a/1.png", b"\xff/2", total=5, first=3),
    samples(b"a/1.png", sends_batches=True),
    batch(),
    batch(losses=None, labels=None),
    EpochEnd(3, 0.5),
    EpochEnd(3),
    Plan("train", 3, 1, True, np.array([2, 0, 2], np.uint32)),
    Progress("train", 3, 64, 32),
    Exchange("train", 9, 3, 64, 32, np.array([4, 5], np.uint32), np.array([6], np.uint32)),
    Exchange("train", 9, 3, 0, 0, np.zeros(0, np.uint32), np.zeros(0, np.uint32), "transforms-1", "a-job"),
    Given("train", 9, np.array([7], np.uint32)),
    ScoresRequest("train", 7),
    CachedRequest("train", 8),
    Pin("train", 9, np.array([3, 0], np.uint32)),
    WarmUp("train", True),
    WarmUp("train", True),
    PartialSamples("pytest", "transforms-1", 2.0**40),
    PartialSamples("pytest", "transforms-1", 2.0**40, "job-1", 1_281_167),
    Turn(np.array([2**63 - 1], np.uint64), np.array([3, 5], np.uint32)),
    Turns(np.array([2**63 - 1, 7], np.uint64), np.array([0, 6], np.uint64)),
    Keep(262_144, np.array([2**63 + 5, 2**63 + 4], np.uint64)),
    Room(2.0**40, 8 << 20),
    Goodbye(),
    Ok("hello"),
    Error("refused", "no"),
    Warn("two paths"),
    Scores("train", 7, True, np.array([0.5, 0], np.float32)),
    Cached("train", 8, 9, np.array([255, 1], np.uint8)),
    Pinned("train", 9, 2),
)


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    assert isinstance(one, Message)
    for field in fields(one):
        mine, yours = getattr(one, field.name), getattr(other, field.name)
        if mine is None or yours is None or not isinstance(mine, np.ndarray):
            if mine != yours:
                return False
        elif mine.dtype != yours.dtype or not np.array_equal(mine, yours):
            return False
    return True


def decoded(data: bytes, limits: Limits = Limits()) -> list[Message | ProtocolError]:  # noqa: B008
    return Decoder(limits).feed(data)


def refused(data: bytes, limits: Limits = Limits()) -> ProtocolError:  # noqa: B008
    (error,) = decoded(data, limits)
    assert isinstance(error, ProtocolError), error
    assert "\n" not in str(error)
    return error


def frame(header: object, body: bytes = b"") -> bytes:
    packed: bytes = msgpack.packb(header)
    return struct.pack("<2sBBII", b"sf", VERSION, 0, len(packed), len(body)) + packed + body


def test_every_message_survives_the_round_trip() -> None:
    assert {type(message) for message in EXAMPLES} == set(MESSAGES.values())
    for message in EXAMPLES:
        (back,) = decoded(encode(message))
        assert same(message, back), message
    assert Cached("x", 0, 9, np.array([1, 1], np.uint8)).flags().tolist() == [True, *[False] * 7, True]
    assert samples(b"a/b", b"c").split_paths() == [b"a/b", b"c"]


@given(st.lists(st.integers(0, 600), max_size=6))
def test_may_be_cut_anywhere(cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in EXAMPLES)
    edges = [0, *sorted(cut * len(stream) // 600 for cut in cuts), len(stream)]
    decoder = Decoder()
    received = [item for a, b in itertools.pairwise(edges) for item in decoder.feed(stream[a:b])]
    assert len(received) == len(EXAMPLES)
    assert all(same(*pair) for pair in zip(EXAMPLES, received, strict=True))
    assert not decoder.in_frame


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_any_finite_batch_survives(rows: int, width: int, data: st.DataObject) -> None:
    bits = data.draw(st.binary(min_size=rows * width * 2, max_size=rows * width * 2))
    embeddings = np.nan_to_num(np.frombuffer(bits, "<f2").reshape(rows, width), posinf=0, neginf=0)
    message = batch(rows, embeddings=embeddings)
    assert same(decoded(encode(message))[0], message)


@given(st.binary(max_size=300))
def test_any_bytes_give_errors_at_worst(data: bytes) -> None:
    for prefix in (b"", b"sf\x01\0", frame({"type": "batch"})[:4]):
        for item in decoded(prefix + data):
            assert isinstance(item, Message | ProtocolError)


@settings(max_examples=300)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_changed_frame_gives_a_good_message_or_an_error(message: Message, data: st.DataObject) -> None:
    good = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    for item in decoded(bytes(good)):
        if isinstance(item, Message):
            encode(item)
        else:
            assert isinstance(item, ProtocolError)
            assert "\n" not in str(item)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
)
_ANY = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)


@given(st.sampled_from(sorted(MESSAGES)), st.data(), st.binary(max_size=20))
def test_any_header_gives_a_good_message_or_an_error(name: str, data: st.DataObject, body: bytes) -> None:
    kind = MESSAGES[name]
    header = {"type": name} | {key: data.draw(_ANY) for key in kind.SCALARS}
    header["arrays"] = data.draw(_ANY | st.lists(st.tuples(st.sampled_from([*kind.ARRAYS, "x"]), _ANY, _ANY)))
    for item in decoded(frame(header, body)):
        assert isinstance(item, Message | ProtocolError)


def test_an_error_takes_the_place_of_its_frame_only() -> None:
    first, error, last = decoded(encode(Hello("a", "a")) + frame({"type": "gift"}) + encode(Goodbye()))
    assert isinstance(first, Hello)
    assert isinstance(last, Goodbye)
    assert isinstance(error, ProtocolError)
    assert (error.code, error.fatal, str(error)) == ("unknown", False, "no message 'gift'")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n", "malformed"),
        (struct.pack("<2sBBII", b"sf", 1, 0, 0, 0), "version"),
        (struct.pack("<2sBBII", b"sf", VERSION, 0, 10, 2**32 - 1), "too-large"),
        (struct.pack("<2sBBII", b"sf", VERSION, 0, 1 << 20, 0), "too-large"),
    ],
)
def test_a_lost_stream_stays_lost(data: bytes, code: str) -> None:
    decoder = Decoder()
    hello, error = decoder.feed(encode(Hello("a", "a")) + data)
    assert isinstance(hello, Hello)
    assert isinstance(error, ProtocolError)
    assert (error.code, error.fatal) == (code, True)
    assert decoder.feed(encode(Goodbye())) == []
    assert not decoder.in_frame


def test_a_claimed_length_allocates_nothing() -> None:
    decoder = Decoder()
    assert decoder.feed(struct.pack("<2sBBII", b"sf", VERSION, 0, 100, 60 << 20)) == []
    assert len(decoder._buffer) == PREFIX_BYTES
    scalars = {"type": "plan", "list": "x", "epoch": 0, "position": 0, "begun": True}
    header = scalars | {"arrays": [["order", "<u4", [2**31]]]}
    assert "longer than the body" in str(refused(frame(header, b"1234")))


def test_no_more_is_pinned_than_a_list_may_have() -> None:
    limits = Limits(samples=3)
    (message,) = decoded(encode(Pin("x", 1, np.arange(3, dtype=np.uint32))), limits)
    assert isinstance(message, Pin)
    error = refused(encode(Pin("x", 1, np.arange(4, dtype=np.uint32))), limits)
    assert (error.code, error.fatal) == ("too-large", False)


HELLO = {"type": "hello", "client": "x", "job": "y", "rank": 0, "world_size": 1}
# Nothing that a line of a control file could not have as its first word; a path is a text like any other.
MALFORMED_JOBS = ("", " ", "a b", "a\n", "a\0b", "\u200b", "\x1b[2J", "x" * 129, "\u00e4" * 65, 7, ["a"])
GOOD_BATCH = {"type": "batch", "list": "x", "epoch": 0, "step": 0}


@pytest.mark.parametrize(
    ("arrays", "body", "words"),
    [
        ([["indices", "<u4", [1]]], bytes(4), "needs embeddings"),
        ([["indices", "<u4", [1]], ["embeddings", "<f4", [1, 1]]], bytes(8), "must be <f2"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [2]]], bytes(8), "2 dimensions"),
        ([["indices", "<u4", [1]], ["indices", "<u4", [1]]], bytes(8), "twice"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [2, 1]]], bytes(8), "another number of embeddings"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [1, 4097]]], bytes(8198), "dimension 4097"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [1, 1]]], bytes(4) + b"\0\x7e", "not finite"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [1, 1]]], bytes(9), "beyond the arrays"),
        ([["indices", "<u4", [0]], ["embeddings", "<f2", [0, 4]]], b"", "a batch of 0"),
        ([["indices", "<u4", [1]], ["embeddings", "<f2", [1, -1]]], bytes(4), "dimensions"),
        ([["embeddings", "<f2", [0, 2**32]]], b"", "longer than the body"),
        ("indices", b"", "no list"),
    ],
)
def test_arrays_that_do_not_fit(arrays: object, body: bytes, words: str) -> None:
    assert words in str(refused(frame(GOOD_BATCH | {"arrays": arrays}, body)))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1], "no map"),
        ({"kind": "hello"}, "no map"),
        (HELLO | {"rank": -1}, "rank: int, not -1"),
        (HELLO | {"rank": True}, "rank"),
        (HELLO | {"rank": 1}, "rank 1 of a world of 1"),
        (HELLO | {"client": "x" * 1025}, "client"),
        ({"type": "hello", "client": "x", "rank": 0, "world_size": 1}, "a good job: str, not None"),
        *((HELLO | {"job": job}, "job") for job in MALFORMED_JOBS),
        *((HELLO | {"scores_from": job}, "scores_from") for job in MALFORMED_JOBS),
        (HELLO | {"name": "two\nlines"}, "name"),
        (HELLO | {"epoch": -1}, "epoch: int, not -1"),
        (HELLO | {"epochs": 0}, "epochs 0"),
        (HELLO | {"resume": 1}, "resume: bool, not 1"),
        ({"type": "goodbye", "now": 1}, "no 'now'"),
        ({"type": "plan", "list": "x", "epoch": 0, "position": 0, "begun": 1}, "begun: bool, not 1"),
        ({"type": "plan", "list": "x", "epoch": 0, "position": 0}, "begun: bool, not None"),
        ({"type": "pin", "list": "x", "request": 1}, "needs indices"),
        ({"type": "pin", "list": "x", "arrays": []}, "request: int, not None"),
        ({"type": "pin", "list": 7, "request": 1, "arrays": []}, "list: str, not 7"),
        ({"type": "pinned", "list": "x", "request": 1, "count": -1}, "count: int, not -1"),
        ({"type": "epoch_end", "epoch": 0, "accuracy": float("nan")}, "accuracy"),
        ({"type": "epoch_end", "epoch": 0, "accuracy": 71.0}, "between 0 and 1"),
    ],
)
def test_headers_that_make_no_sense(header: object, words: str) -> None:
    assert words in str(refused(frame(header)))


@pytest.mark.parametrize(
    "message",
    [
        samples(b"a", total=2, first=2),
        samples(b"x" * 4097),
        Samples("t", "t", 1, 0, np.zeros(1, np.int32), np.frombuffer(b"no end", np.uint8)),
        Samples("t", "t", 1, 0, np.zeros(0, np.int32), np.zeros(0, np.uint8)),
        Plan("t", 0, 3, False, np.zeros(2, np.uint32)),
        Progress("t", 0, 2, 3),
        Exchange("t", 1, 0, 1, 0, np.zeros(2, np.uint32), np.zeros(1, np.uint32)),
        Exchange("t", 1, 0, 1, 0, np.zeros(1, np.uint32), np.zeros(1, np.uint32), "transforms-1"),
        Scores("t", 0, True, np.array([np.inf], np.float32)),
        Scores("t", 0, True, np.array([-1], np.float32)),
        Cached("t", 0, 9, np.zeros(1, np.uint8)),
        batch(losses=np.array([1, np.nan, 1])),
        Error("x", "\udcff"),
    ],
)
def test_nothing_is_sent_that_the_other_side_would_refuse(message: Message) -> None:
    with pytest.raises(ProtocolError):
        encode(message)


def test_needs_nothing_but_numpy_and_msgpack() -> None:
    heavy = "{'torch', 'trio', 'lmdb', 'pydantic'}"
    program = f"import spiderfs.protocol, sys; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
