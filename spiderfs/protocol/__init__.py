"""The messages of the hook protocol, their checks, and their frames; no input or output.

Other rooms import them from `spiderfs.protocol`. A frame is a prefix of 12 bytes, a header, and a body:

    prefix   b"sf", version (u8), 0 (u8), header_bytes (u32), body_bytes (u32), integers little-endian
    header   one msgpack map: "type", the message's scalars by name, and "arrays", a list of [name, dtype, shape]
    body     the arrays' elements in that order, little-endian, in C order, back to back

The decoder allocates no memory because a frame claims a length: it collects a frame only up to `Limits`, and the arrays
must fill the body exactly. For any bytes, it returns messages that keep the rules of their classes (shapes that agree,
finite numbers, texts within limits), or raises ProtocolError.

Prefix and header are the same in all versions, and so is the message `error`: one side can report to the other, in a
frame of the other's version, that it speaks another one.
docs/reference/hook-protocol.md is the reference for other languages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import numpy.typing as npt

from spiderfs.errors import ProtocolError as ProtocolError

PATH_MAX_BYTES = 4096  # PATH_MAX of Linux
# Of a job's id: it is a column of a control file. A UUID has 36.
JOB_MAX_BYTES = 128
# Of a room: an exbibyte, which a float holds exactly.
MOST_BYTES = 1 << 60

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """The most that messages may hold."""

    frame_bytes: int = 64 << 20
    """Of one frame. The largest messages are plans and scores: 4 bytes for each sample."""
    samples: int = 16_000_000
    """Samples of one list, or draws of one plan."""
    list_bytes: int = 1 << 30
    """Of all paths of one list: ten million paths of a hundred bytes. The paths of ImageNet take 97 MB."""
    batch: int = 65_536
    """Rows of one batch."""
    dimension: int = 4096
    """Numbers of one embedding: the widest classifier's input of the papers' networks (AlexNet)."""
    text_bytes: int = 1024
    """Of one text, in UTF-8."""


DEFAULT_LIMITS = Limits()


class Field(NamedTuple):
    """The type of an array in a frame; `dtype` is NumPy's name of it."""

    dtype: str
    dimensions: int
    required: bool = True


Uint8s = Annotated[Array, Field("|u1", 1)]
Uint32s = Annotated[Array, Field("<u4", 1)]
Uint64s = Annotated[Array, Field("<u8", 1)]
Int32s = Annotated[Array, Field("<i4", 1)]
Float16s = Annotated[Array, Field("<f2", 1)]
Float16Rows = Annotated[Array, Field("<f2", 2)]
Float32s = Annotated[Array, Field("<f4", 1)]


@dataclass_transform(frozen_default=True, eq_default=False)
class Message:
    """The base of all messages, frozen dataclasses, each of which names its `kind`, the "type" of its header.

    `SCALARS` and `ARRAYS` are the types of the fields in a frame, by the annotations.
    """

    TYPE: ClassVar[str]
    SCALARS: ClassVar[Mapping[str, type]] = {}
    ARRAYS: ClassVar[Mapping[str, Field]] = {}

    def __init_subclass__(cls, kind: str) -> None:
        cls.TYPE = kind
        scalars: dict[str, type] = {}
        arrays: dict[str, Field] = {}
        hints = get_type_hints(cls, include_extras=True)
        for name in cls.__annotations__:
            hint = hints[name]
            is_optional = type(None) in get_args(hint)
            if is_optional:
                hint = get_args(hint)[0]
            if get_origin(hint) is Annotated:
                arrays[name] = hint.__metadata__[0]._replace(required=not is_optional)
            else:
                scalars[name] = hint
        cls.SCALARS, cls.ARRAYS = scalars, arrays
        dataclass(frozen=True, eq=False)(cls)

    def check(self, limits: Limits) -> None:
        """Raise ProtocolError unless the fields agree with each other and with the limits."""


def demand(condition: bool, text: str, code: str = "malformed") -> None:
    """Raise ProtocolError unless the condition is true."""
    if not condition:
        raise ProtocolError(text, code)


def _is_job(text: str) -> bool:
    """Whether a text can be the id of a job; control files have it in one column of a line."""
    return 0 < len(text.encode(errors="surrogatepass")) <= JOB_MAX_BYTES and all(
        letter.isprintable() and not letter.isspace() for letter in text
    )


# -- from the trainer


class Hello(Message, kind="hello"):
    """Open the connection of one process of a training run.

    `job` is the id of the training: all its ranks give the same, and no other training does. `client` names the
    program, `name` the training, both for people. The training begins, or goes on, with its epoch number `epoch`, and
    has `epochs` of them in all; None if that is not known. With `resume` the trainer expects that the daemon knows the
    job from before. `scores_from` is another job, whose scores this one begins with.
    """

    client: str
    job: str
    name: str | None = None
    rank: int = 0
    world_size: int = 1
    epoch: int | None = None
    epochs: int | None = None
    resume: bool | None = None
    scores_from: str | None = None

    def check(self, limits: Limits) -> None:
        demand(self.rank < self.world_size, f"rank {self.rank} of a world of {self.world_size}")
        for field, job in (("job", self.job), ("scores_from", self.scores_from)):
            demand(
                job is None or _is_job(job),
                f"{field} {job!r:.40}: give an id of 1 to {JOB_MAX_BYTES} bytes that can be printed, without spaces",
            )
        good = self.name is None or self.name.isprintable()
        demand(good, f"name {self.name!r:.40}: give a text that can be printed on one line")
        demand(self.epochs is None or self.epochs > 0, "epochs 0: give 1 or more")


class Samples(Message, kind="samples"):
    """Samples `first`, `first + 1`, ... of a list of `total`: paths below the mount, each ended by a NUL byte.

    The path of a sample that lies outside of the mount is empty, and the sample is ignored. A label of -1 means that
    the sample has none. A long list takes several of these messages, sent in order. With `sends_batches` the trainer is
    going to send batches of the list; the first message of a list says so.
    """

    list: str
    split: str
    total: int
    first: int
    labels: Int32s
    paths: Uint8s
    sends_batches: bool | None = None

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

    def split_paths(self) -> Sequence[bytes]:
        """The paths, without their NUL bytes."""
        return self.paths.tobytes().split(b"\0")[:-1]


class Batch(Message, kind="batch"):
    """Embeddings and losses that the model computed: one row for each index.

    The rows are in the order in which the samples went through the model. `losses` and `labels` may be left out;
    without `labels` the samples have the labels of the list.
    """

    list: str
    epoch: int
    step: int
    indices: Uint32s
    embeddings: Float16Rows
    losses: Float16s | None = None
    labels: Int32s | None = None

    def check(self, limits: Limits) -> None:
        rows = len(self.indices)
        demand(0 < rows <= limits.batch, f"a batch of {rows} samples: 1 to {limits.batch}", "too-large")
        width = self.embeddings.shape[1]
        demand(0 < width <= limits.dimension, f"embeddings of dimension {width}: 1 to {limits.dimension}", "too-large")
        for name, array in (("embeddings", self.embeddings), ("losses", self.losses), ("labels", self.labels)):
            demand(array is None or len(array) == rows, f"{rows} indices, but another number of {name}")
        demand(bool(np.isfinite(self.embeddings).all()), "an embedding is not finite")
        demand(self.losses is None or bool(np.isfinite(self.losses).all()), "a loss is not finite")


class EpochEnd(Message, kind="epoch_end"):
    """End an epoch; `accuracy` is between 0 and 1.

    `unmatched` counts the forward passes since the last epoch end whose samples the trainer did not know.
    """

    epoch: int
    accuracy: float | None = None
    unmatched: int | None = None

    def check(self, limits: Limits) -> None:
        good = self.accuracy is None or 0.0 <= self.accuracy <= 1.0
        demand(good, f"accuracy {self.accuracy}: give a share between 0 and 1")


class Plan(Message, kind="plan"):
    """Publish the samples that this process will read in an epoch, in order.

    If `begun`, the trainer begins this epoch now, or goes on with it, at `position`. If not, the trainer will read the
    epoch later, after those of lower numbers, and sends its plan again when it begins.
    """

    list: str
    epoch: int
    position: int
    begun: bool
    order: Uint32s

    def check(self, limits: Limits) -> None:
        demand(len(self.order) <= limits.samples, f"a plan of {len(self.order)} samples", "too-large")
        demand(self.position <= len(self.order), f"position {self.position} in a plan of {len(self.order)}")


class Progress(Message, kind="progress"):
    """Report how far the loader and the loop are in the current plan.

    `dispatched` of the plan's samples were handed to the loader's workers, and the loop has taken `taken` of these.
    """

    list: str
    epoch: int
    dispatched: int
    taken: int

    def check(self, limits: Limits) -> None:
        demand(self.taken <= self.dispatched, f"{self.taken} samples taken of {self.dispatched} dispatched")


class Exchange(Message, kind="exchange"):
    """Ask which samples to take in place of `wanted`, the next ones of the plan.

    `position` samples of the epoch have been dispatched; the last of them were `dispatched`, since the question before.
    The loop has taken `taken` of them. `store` and `job` are those of `partials`, if jobs share partial samples too.
    """

    list: str
    request: int
    epoch: int
    position: int
    taken: int
    dispatched: Uint32s
    wanted: Uint32s
    store: str | None = None
    job: str | None = None

    def check(self, limits: Limits) -> None:
        demand((self.store is None) == (self.job is None), "give store and job, or neither")
        demand(len(self.wanted) <= limits.batch, f"{len(self.wanted)} wanted samples", "too-large")
        demand(len(self.dispatched) <= self.position, f"{len(self.dispatched)} samples of {self.position} dispatched")


class ScoresRequest(Message, kind="scores_request"):
    """Ask for the scores of a list."""

    list: str
    request: int


class CachedRequest(Message, kind="cached_request"):
    """Ask which samples of a list are cached."""

    list: str
    request: int


class Pin(Message, kind="pin"):
    """Pin these samples in place of those that this process pinned before.

    A trainer pins samples that it reads again and again beside its epochs.
    """

    list: str
    request: int
    indices: Uint32s

    def check(self, limits: Limits) -> None:
        demand(len(self.indices) <= limits.samples, f"{len(self.indices)} samples pinned", "too-large")


class WarmUp(Message, kind="warm_up"):
    """Begin or end a warm-up, in which the reads of this run evict nothing."""

    list: str
    active: bool


class PartialSamples(Message, kind="partials"):
    """Open the connection of a loader process that caches partly augmented samples.

    `store` names what it keeps: the transforms that make it, and their seed. Processes that give the same name share
    `wanted_bytes`, if there is as much room. It is answered by `room`. Jobs that share a list of `samples` samples, so
    that each uses a partial sample once, name themselves as `job`.
    """

    client: str
    store: str
    wanted_bytes: float
    job: str | None = None
    samples: int | None = None

    def check(self, limits: Limits) -> None:
        demand(_is_job(self.store), f"store {self.store!r:.40}: give a name of 1 to {JOB_MAX_BYTES} bytes, no spaces")
        demand(0 <= self.wanted_bytes <= MOST_BYTES, f"wanted_bytes {self.wanted_bytes}: 0 to {MOST_BYTES}")
        demand(self.job is None or _is_job(self.job), f"job {self.job!r:.40}: give an id as in hello")
        demand((self.job is None) == (self.samples is None), "give job and samples, or neither")
        demand(self.samples is None or 0 < self.samples <= limits.samples, f"{self.samples} samples", "too-large")


class Keep(Message, kind="keep"):
    """Keep a partial sample: `bytes` bytes of the memory file whose descriptor comes with this message.

    `inodes` are that of the sample and, if there is one, that of the sample that it replaces. It is answered in its
    turn by `ok` or `error`.
    """

    bytes: int
    inodes: Uint64s

    def check(self, limits: Limits) -> None:
        demand(1 <= len(self.inodes) <= 2, f"{len(self.inodes)} inodes: 1 or 2")


class Turn(Message, kind="turn"):
    """Ask which generations of these partial samples to use next.

    Those that it has to make are the one in `generation`, which is above 0. It is answered by `turns`.
    """

    generation: Uint64s
    indices: Uint32s

    def check(self, limits: Limits) -> None:
        demand(len(self.generation) == 1 and bool(self.generation[0]), "give one generation, of 1 or more")
        demand(len(self.indices) <= limits.batch, f"{len(self.indices)} samples: at most {limits.batch}", "too-large")


class Goodbye(Message, kind="goodbye"):
    """End the connection."""


# -- answers


class Ok(Message, kind="ok"):
    """Confirm `hello`, the last chunk of `samples`, `keep` or `goodbye`; `answers` is its type."""

    answers: str


class Error(Message, kind="error"):
    """Refuse a message: `code` for programs, `text` for people."""

    code: str
    text: str


class Warn(Message, kind="warning"):
    """Confirm a message of which only a part could be used."""

    text: str


class Scores(Message, kind="scores"):
    """One finite score of 0 or more for each sample of the list; empty while there are none.

    `follows_plans` is whether the daemon follows plans now (the option `plan`): if not, a trainer gains nothing by
    drawing its next epoch before that begins.
    """

    list: str
    request: int
    follows_plans: bool
    scores: Float32s

    def check(self, limits: Limits) -> None:
        demand(bool((np.isfinite(self.scores) & (self.scores >= 0)).all()), "a score is negative or not finite")


class Cached(Message, kind="cached"):
    """One bit for each sample of the list, 1 if cached, lowest bit first; `count` bits."""

    list: str
    request: int
    count: int
    bitmap: Uint8s

    def check(self, limits: Limits) -> None:
        demand(len(self.bitmap) == (self.count + 7) // 8, f"{len(self.bitmap)} bytes for {self.count} bits")

    def flags(self) -> npt.NDArray[np.bool_]:
        """The bits as an array, one element for each sample."""
        return np.unpackbits(self.bitmap, count=self.count, bitorder="little").astype(bool)


class Pinned(Message, kind="pinned"):
    """Answer `pin`: `count` samples are pinned; those not cached yet stay once read."""

    list: str
    request: int
    count: int


class Given(Message, kind="given"):
    """Answer `exchange`: one sample for each in `wanted`; empty: keep the plan."""

    list: str
    request: int
    indices: Uint32s


class Room(Message, kind="room"):
    """Answer `partials`: the bytes that may be kept, and the most of one sample."""

    room_bytes: float
    most_bytes: int


class Turns(Message, kind="turns"):
    """Answer `turn`: the generation of each sample, and the one that it replaces (0: none)."""

    generations: Uint64s
    replaces: Uint64s

    def check(self, limits: Limits) -> None:
        demand(len(self.generations) == len(self.replaces), "two numbers for each sample")


MESSAGES: Mapping[str, type[Message]] = {
    kind.TYPE: kind
    for kind in (
        *(Hello, Samples, Batch, EpochEnd, Plan, Progress, Exchange, ScoresRequest, CachedRequest, Pin, WarmUp),
        *(PartialSamples, Keep, Turn, Goodbye),
        *(Ok, Error, Warn, Scores, Cached, Pinned, Given, Room, Turns),
    )
}


VERSION = 3
_MAGIC = b"sf"
_PREFIX = struct.Struct("<2sBBII")
PREFIX_BYTES = _PREFIX.size
# A header holds a few scalars and the arrays' shapes: some 200 bytes.
_HEADER_MAX_BYTES = 1 << 16
_UINT32_MAX = 2**32 - 1


def encode(message: Message, limits: Limits = DEFAULT_LIMITS, version: int = VERSION) -> bytes:
    """The frame of a message; raises ProtocolError for a message that the other side would refuse.

    `version` is for an `error` about the version, which goes to the other side in a frame of its own version.
    """
    header: dict[str, Any] = {"type": message.TYPE}
    for name in message.SCALARS:
        header[name] = getattr(message, name)
    described, pieces = [], []
    for name, spec in message.ARRAYS.items():
        array = getattr(message, name)
        if array is None:
            continue
        array = np.ascontiguousarray(array, dtype=spec.dtype)
        described.append([name, spec.dtype, list(array.shape)])
        pieces.append(array.tobytes())
    if message.ARRAYS:
        header["arrays"] = described
    try:
        packed: bytes = msgpack.packb(header)
    except (ValueError, TypeError, OverflowError) as exc:
        raise ProtocolError(f"{message.TYPE}: {exc}") from exc
    body = b"".join(pieces)
    demand(PREFIX_BYTES + len(packed) + len(body) <= limits.frame_bytes, "the message is too large", "too-large")
    _message(packed, body, limits, {message.TYPE: type(message)})
    return _PREFIX.pack(_MAGIC, version, 0, len(packed), len(body)) + packed + body


class Decoder:
    """Turns bytes into messages, however the bytes were cut into pieces."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, kinds: Mapping[str, type[Message]] = MESSAGES) -> None:
        self._limits = limits
        self._kinds = kinds
        self._buffer = bytearray()
        self._lost = False
        self.version = VERSION
        """The version of the last frame: another one than ours after the error "version"."""

    def feed(self, data: bytes) -> list[Message | ProtocolError]:
        """The messages that these bytes complete, in order.

        For an invalid frame there is a ProtocolError in the list, and the next frame is read as usual. A fatal error is
        the last item: after it, this method returns nothing more.
        """
        received: list[Message | ProtocolError] = []
        if self._lost:
            return received
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= PREFIX_BYTES:
            try:
                header_bytes, body_bytes = self._lengths(at)
            except ProtocolError as exc:
                self._lost = True
                self._buffer.clear()
                return [*received, exc]
            body = at + PREFIX_BYTES + header_bytes
            end = body + body_bytes
            if len(self._buffer) < end:
                break
            try:
                with memoryview(self._buffer) as view:
                    frame = bytes(view[at + PREFIX_BYTES : body]), bytes(view[body:end])
                received.append(_message(*frame, self._limits, self._kinds))
            except ProtocolError as exc:
                received.append(exc)
            at = end
        del self._buffer[:at]
        return received

    @property
    def in_frame(self) -> bool:
        """A frame has begun and not ended."""
        return bool(self._buffer)

    def _lengths(self, at: int) -> tuple[int, int]:
        magic, version, zero, header_bytes, body_bytes = _PREFIX.unpack_from(self._buffer, at)
        if magic != _MAGIC or zero != 0:
            raise ProtocolError("not a frame of the hook protocol", fatal=True)
        self.version = version
        if version != VERSION:
            text = f"it speaks version {version} of the hook protocol, and this is {VERSION}: update the older spiderfs"
            raise ProtocolError(text, "version", fatal=True)
        if header_bytes > _HEADER_MAX_BYTES or PREFIX_BYTES + header_bytes + body_bytes > self._limits.frame_bytes:
            size = PREFIX_BYTES + header_bytes + body_bytes
            raise ProtocolError(f"a frame of {size} bytes: at most {self._limits.frame_bytes}", "too-large", fatal=True)
        return header_bytes, body_bytes


def _message(packed: bytes, body: bytes, limits: Limits, kinds: Mapping[str, type[Message]]) -> Message:
    try:
        header = msgpack.unpackb(packed, strict_map_key=True)
    except (ValueError, TypeError, OverflowError) as exc:
        raise ProtocolError("the header is not msgpack") from exc
    demand(isinstance(header, dict) and isinstance(header.get("type"), str), 'the header is no map with a "type"')
    kind = kinds.get(header["type"])
    if kind is None:
        raise ProtocolError(f"no message {_shown(header['type'])}", "unknown")
    known = {"type", *kind.SCALARS} | ({"arrays"} if kind.ARRAYS else set())
    for name in header:
        demand(name in known, f"{kind.TYPE} has no {_shown(name)}")
    values: dict[str, Any] = {name: _scalar(kind, name, header, limits) for name in kind.SCALARS}
    values |= _arrays(kind, header.get("arrays", []), body)
    message = kind(**values)
    message.check(limits)
    return message


def _scalar(kind: type[Message], name: str, header: Mapping[str, Any], limits: Limits) -> Any:
    expected, value = kind.SCALARS[name], header.get(name)
    # A scalar may be nil if its default is None.
    if value is None and vars(kind).get(name, kind) is None:
        return None
    if expected is int:
        good = type(value) is int and 0 <= value <= _UINT32_MAX
    elif expected is bool:
        good = type(value) is bool
    elif expected is float:
        good = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    else:
        good = isinstance(value, str) and len(value.encode(errors="surrogatepass")) <= limits.text_bytes
    demand(good, f"{kind.TYPE} needs a good {name}: {expected.__name__}, not {_shown(value)}")
    return value


def _arrays(kind: type[Message], described: Any, body: bytes) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    at = 0
    demand(isinstance(described, list), f"{kind.TYPE}: arrays is no list")
    for entry in described:
        demand(isinstance(entry, list) and len(entry) == 3, f"{kind.TYPE}: an array is [name, dtype, shape]")
        name, dtype, shape = entry
        spec = kind.ARRAYS.get(name) if isinstance(name, str) else None
        if spec is None or name in arrays:
            raise ProtocolError(f"{kind.TYPE} has no such array, or has it twice: {_shown(name)}")
        demand(dtype == spec.dtype, f"{kind.TYPE}: {name} must be {spec.dtype}")
        good = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
        demand(good and len(shape) == spec.dimensions, f"{kind.TYPE}: {name} must have {spec.dimensions} dimensions")
        size = math.prod(shape) * np.dtype(spec.dtype).itemsize
        # Beside an empty dimension any other would fit the body.
        demand(size <= len(body) - at and max(shape) <= _UINT32_MAX, f"{kind.TYPE}: {name} is longer than the body")
        arrays[name] = np.frombuffer(body, spec.dtype, math.prod(shape), at).reshape(shape)
        at += size
    demand(at == len(body), f"{kind.TYPE}: {len(body) - at} bytes beyond the arrays")
    for name, spec in kind.ARRAYS.items():
        demand(name in arrays or not spec.required, f"{kind.TYPE} needs {name}")
    return arrays


def _shown(value: object) -> str:
    return repr(value)[:40]
