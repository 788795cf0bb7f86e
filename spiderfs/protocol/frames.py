"""The hook protocol as bytes: this module turns messages into frames and back, and does no input or output.

A frame is a prefix of 12 bytes, a header, and a body:

    prefix   b"sf", version (u8), 0 (u8), header_bytes (u32), body_bytes (u32), integers little-endian
    header   one msgpack map: "type", the message's scalars by name, and "arrays", a list of [name, dtype, shape]
    body     the arrays' elements in that order, little-endian, in C order, back to back

`messages.py` defines the messages. The decoder allocates no memory because a frame claims a length: it collects a frame
only up to `Limits`, and the arrays must fill the body exactly. For whatever bytes come, the decoder returns messages
that keep the rules of their classes (shapes that agree, finite numbers, texts within limits), or a ProtocolError.

Prefix and header are the same in all versions, and so is the message `error`: one side can tell the other, in a frame
of the other's version, that it speaks another one.
docs/reference/hook-protocol.md is the reference for other languages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from spiderfs.errors import ProtocolError
from spiderfs.protocol.messages import DEFAULT_LIMITS, MESSAGES, Array, Limits, Message, demand

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
