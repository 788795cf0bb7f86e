"""The messages of the hook protocol: their fields, how these travel, and what makes them sensible.

`frames.py` turns them into bytes and back; everybody else imports them from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from spiderfs.errors import ProtocolError

PATH_MAX_BYTES = 4096  # PATH_MAX of Linux

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """What one message may hold."""

    # The largest messages are plans and scores: 4 bytes a sample.
    frame_bytes: int = 64 << 20
    samples: int = 16_000_000
    # Of all paths of one list: ten million of a hundred bytes. ImageNet's take 97 MB.
    list_bytes: int = 1 << 30
    batch: int = 65_536
    dimension: int = 64
    text_bytes: int = 1024


DEFAULT_LIMITS = Limits()


class Field(NamedTuple):
    dtype: str
    dimensions: int
    required: bool = True


@dataclass(frozen=True, eq=False)
class Message:
    """Base of all messages; `SCALARS` and `ARRAYS` say how the fields travel."""

    TYPE: ClassVar[str]
    SCALARS: ClassVar[Mapping[str, type]] = {}
    ARRAYS: ClassVar[Mapping[str, Field]] = {}

    def check(self, limits: Limits) -> None:
        """Raise ProtocolError unless the fields agree with each other and with the limits."""


def demand(condition: bool, text: str, code: str = "malformed") -> None:
    if not condition:
        raise ProtocolError(text, code)


# -- from the trainer


@dataclass(frozen=True, eq=False)
class Hello(Message):
    """The first message; `client` is for people, `rank` and `world_size` are those of a distributed training."""

    TYPE = "hello"
    SCALARS: ClassVar = {"client": str, "rank": int, "world_size": int}
    client: str
    rank: int = 0
    world_size: int = 1

    def check(self, limits: Limits) -> None:
        demand(self.rank < self.world_size, f"rank {self.rank} of a world of {self.world_size}")


@dataclass(frozen=True, eq=False)
class Samples(Message):
    """Samples `first`, `first + 1`, ... of a list of `total`: paths below the mount, each ended by a NUL byte.

    A label of -1 means that there is none. The chunks of a list follow each other in order.
    """

    TYPE = "samples"
    SCALARS: ClassVar = {"list": str, "split": str, "total": int, "first": int}
    ARRAYS: ClassVar = {"labels": Field("<i4", 1), "paths": Field("|u1", 1)}
    list: str
    split: str
    total: int
    first: int
    labels: Array
    paths: Array

    def check(self, limits: Limits) -> None:
        demand(self.total <= limits.samples, f"a list of {self.total} samples: at most {limits.samples}", "too-large")
        demand(len(self.labels) > 0, "no samples")
        demand(self.first + len(self.labels) <= self.total, "more samples than the list's total")
        ends = np.flatnonzero(self.paths == 0)
        demand(
            len(ends) == len(self.labels) and self.paths[-1] == 0,
            f"{len(ends)} paths ended by NUL for {len(self.labels)} labels",
        )
        lengths = np.diff(ends, prepend=-1) - 1
        demand(int(lengths.max()) <= PATH_MAX_BYTES, f"a path of over {PATH_MAX_BYTES} bytes")
        demand(int(lengths.min()) > 0, "an empty path")

    def split_paths(self) -> Sequence[bytes]:
        return self.paths.tobytes().split(b"\0")[:-1]


@dataclass(frozen=True, eq=False)
class Batch(Message):
    """What the model made of some samples: one row an index, in the order in which they went through the model.

    `losses` and `labels` may be left out; the labels of the list are then the samples' labels.
    """

    TYPE = "batch"
    SCALARS: ClassVar = {"list": str, "epoch": int, "step": int}
    ARRAYS: ClassVar = {
        "indices": Field("<u4", 1),
        "embeddings": Field("<f2", 2),
        "losses": Field("<f2", 1, required=False),
        "labels": Field("<i4", 1, required=False),
    }
    list: str
    epoch: int
    step: int
    indices: Array
    embeddings: Array
    losses: Array | None = None
    labels: Array | None = None

    def check(self, limits: Limits) -> None:
        rows = len(self.indices)
        demand(0 < rows <= limits.batch, f"a batch of {rows} samples: 1 to {limits.batch}", "too-large")
        width = self.embeddings.shape[1]
        demand(0 < width <= limits.dimension, f"embeddings of dimension {width}: 1 to {limits.dimension}", "too-large")
        for name, array in (("embeddings", self.embeddings), ("losses", self.losses), ("labels", self.labels)):
            demand(array is None or len(array) == rows, f"{rows} indices, but another number of {name}")
        demand(bool(np.isfinite(self.embeddings).all()), "an embedding is not finite")
        demand(self.losses is None or bool(np.isfinite(self.losses).all()), "a loss is not finite")


@dataclass(frozen=True, eq=False)
class EpochEnd(Message):
    """An epoch is over; `accuracy` is a share between 0 and 1, or None where it is not known.

    `unmatched` are the forward passes since the epoch's end before of which the trainer could not say the samples.
    """

    TYPE = "epoch_end"
    SCALARS: ClassVar = {"epoch": int, "accuracy": float, "unmatched": int}
    epoch: int
    accuracy: float | None = None
    unmatched: int | None = None

    def check(self, limits: Limits) -> None:
        good = self.accuracy is None or 0.0 <= self.accuracy <= 1.0
        demand(good, f"accuracy {self.accuracy}: give a share between 0 and 1")


@dataclass(frozen=True, eq=False)
class Plan(Message):
    """The samples this trainer will read in the epoch, in order.

    `begun`: it starts or goes on with this epoch now, at `position`. Otherwise the epoch was drawn ahead, and comes
    after it in the order of their numbers; it is said again when it begins.
    """

    TYPE = "plan"
    SCALARS: ClassVar = {"list": str, "epoch": int, "position": int, "begun": bool}
    ARRAYS: ClassVar = {"order": Field("<u4", 1)}
    list: str
    epoch: int
    position: int
    begun: bool
    order: Array

    def check(self, limits: Limits) -> None:
        demand(len(self.order) <= limits.samples, f"a plan of {len(self.order)} samples", "too-large")
        demand(self.position <= len(self.order), f"position {self.position} in a plan of {len(self.order)}")


@dataclass(frozen=True, eq=False)
class ScoresRequest(Message):
    """Ask for the scores of a list; `request` comes back in the answer."""

    TYPE = "scores_request"
    SCALARS: ClassVar = {"list": str, "request": int}
    list: str
    request: int


@dataclass(frozen=True, eq=False)
class CachedRequest(Message):
    """Ask which samples of a list are in the cache; `request` comes back in the answer."""

    TYPE = "cached_request"
    SCALARS: ClassVar = {"list": str, "request": int}
    list: str
    request: int


@dataclass(frozen=True, eq=False)
class Pin(Message):
    """Samples of a list that this trainer reads again and again, beside its epochs: hold these, and no others of it.

    `request` comes back in the answer.
    """

    TYPE = "pin"
    SCALARS: ClassVar = {"list": str, "request": int}
    ARRAYS: ClassVar = {"indices": Field("<u4", 1)}
    list: str
    request: int
    indices: Array

    def check(self, limits: Limits) -> None:
        demand(len(self.indices) <= limits.samples, f"{len(self.indices)} samples pinned", "too-large")


@dataclass(frozen=True, eq=False)
class Goodbye(Message):
    """The trainer is done."""

    TYPE = "goodbye"


# -- answers


@dataclass(frozen=True, eq=False)
class Ok(Message):
    """`answers` is the type of the message that was acted on: hello, the last chunk of samples, goodbye."""

    TYPE = "ok"
    SCALARS: ClassVar = {"answers": str}
    answers: str


@dataclass(frozen=True, eq=False)
class Error(Message):
    """A message was refused; `code` is for programs, `text` is one line for people."""

    TYPE = "error"
    SCALARS: ClassVar = {"code": str, "text": str}
    code: str
    text: str


@dataclass(frozen=True, eq=False)
class Warn(Message):
    """A message was acted on, but not all of it could be used."""

    TYPE = "warning"
    SCALARS: ClassVar = {"text": str}
    text: str


@dataclass(frozen=True, eq=False)
class Scores(Message):
    """One score a sample of the list, finite and not negative; empty while there are none."""

    TYPE = "scores"
    SCALARS: ClassVar = {"list": str, "request": int}
    ARRAYS: ClassVar = {"scores": Field("<f4", 1)}
    list: str
    request: int
    scores: Array

    def check(self, limits: Limits) -> None:
        demand(bool((np.isfinite(self.scores) & (self.scores >= 0)).all()), "a score is negative or not finite")


@dataclass(frozen=True, eq=False)
class Cached(Message):
    """One bit a sample of the list, the first in the lowest bit of the first byte."""

    TYPE = "cached"
    SCALARS: ClassVar = {"list": str, "request": int, "count": int}
    ARRAYS: ClassVar = {"bitmap": Field("|u1", 1)}
    list: str
    request: int
    count: int
    bitmap: Array

    def check(self, limits: Limits) -> None:
        demand(len(self.bitmap) == (self.count + 7) // 8, f"{len(self.bitmap)} bytes for {self.count} bits")

    def flags(self) -> npt.NDArray[np.bool_]:
        return np.unpackbits(self.bitmap, count=self.count, bitorder="little").astype(bool)


@dataclass(frozen=True, eq=False)
class Pinned(Message):
    """`count` of the samples that were named are held, or will be once they were read."""

    TYPE = "pinned"
    SCALARS: ClassVar = {"list": str, "request": int, "count": int}
    list: str
    request: int
    count: int


MESSAGES: Mapping[str, type[Message]] = {
    kind.TYPE: kind
    for kind in (
        *(Hello, Samples, Batch, EpochEnd, Plan, ScoresRequest, CachedRequest, Pin, Goodbye),
        *(Ok, Error, Warn, Scores, Cached, Pinned),
    )
}
