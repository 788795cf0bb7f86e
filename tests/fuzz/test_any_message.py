"""What trainers and users may say to a mount: whatever it is, the manager lives, counts no error of its own, and reads
go on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from fuzzing import damaged, examples, integers
from hypothesis import given
from hypothesis import strategies as st
from mounting import Mounted, mounted
from reading import write_contents

from spiderfs.options.model import Options
from spiderfs.protocol import MESSAGES, VERSION, Decoder, Goodbye, Hello, Message, Ok, Samples, encode

FILES = {f"{number % 3}/{number}": bytes([number]) * (number * 500) for number in range(1, 25)}
PATIENCE_S = 20.0
# What is refused by a good manager, and how; nothing else may come of a write.
REFUSALS = (errno.EINVAL, errno.EAGAIN)


@pytest.fixture(scope="module", params=["spider", "impact"])
def mount(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    place = tmp_path_factory.mktemp("fuzz")
    source = place / "source"
    write_contents(source, FILES)
    # Whoever says nonsense may be told so in the log.
    with mounted(source, place / "m", policy=request.param, capacity="100kB", allowed=[" WARNING "]) as mount:
        manager = mount.manager()
        yield mount
        assert mount.manager() == manager
        for name, content in FILES.items():
            assert (mount.point / name).read_bytes() == content


def is_well(mount: Mounted) -> None:
    assert mount.metric("internal_errors") == 0, mount.log.read_text()
    assert mount.metric("manager_restarts") == 0, mount.log.read_text()


# -- trainers


def declared() -> Samples:
    paths = b"".join(name.encode() + b"\0" for name in FILES)
    labels = np.array([int(name[0]) for name in FILES], np.int32)
    return Samples("train", "train", len(FILES), 0, labels, np.frombuffer(paths, np.uint8))


SAID = sorted({kind for kind in MESSAGES if kind not in ("hello", "ok", "error", "warning")})
LIST = st.sampled_from(["train", "train", "other"]) | st.text(max_size=5)
# Half of the numbers are places of the list.
NUMBER = {"list": LIST, "split": LIST, "total": st.sampled_from([len(FILES), 1, 0]) | integers(32)}


def _scalar(name: str, kind: type) -> st.SearchStrategy[Any]:
    if name in NUMBER:
        return NUMBER[name]
    good: dict[type, st.SearchStrategy[Any]] = {
        int: st.integers(0, 3) | integers(32),
        bool: st.booleans(),
        float: st.floats(0, 1) | st.floats(),
        str: st.text(max_size=10),
    }
    return good[kind]


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A message by its schema, with arrays that mostly agree with each other."""
    kind = MESSAGES[draw(st.sampled_from(SAID))]
    header: dict[str, Any] = {"type": kind.TYPE}
    header |= {name: draw(_scalar(name, scalar)) for name, scalar in kind.SCALARS.items()}
    rows = draw(st.integers(0, 12))
    described, body = [], b""
    for name, spec in kind.ARRAYS.items():
        if not spec.required and draw(st.booleans()):
            continue
        shape = [rows if draw(st.integers(0, 9)) else draw(st.integers(0, 20)), 4][: spec.dimensions]
        array = _array(draw, name, spec.dtype, shape)
        described.append([name, spec.dtype, shape])
        body += array.tobytes()
    if kind.ARRAYS:
        header["arrays"] = described
    packed = msgpack.packb(header, unicode_errors="surrogatepass")
    lengths = len(packed).to_bytes(4, "little") + len(body).to_bytes(4, "little")
    frame = b"sf" + bytes([VERSION, 0]) + lengths + packed + body
    return draw(damaged(frame)) if draw(st.integers(0, 9)) == 0 else frame


def _array(draw: st.DrawFn, name: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    if draw(st.integers(0, 5)) == 0:
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    if name == "paths":
        return np.frombuffer((b"0/3\0" * count)[:count], dtype)
    if np.issubdtype(np.dtype(dtype), np.integer):
        return rng.integers(0, len(FILES), count).astype(dtype)
    return rng.normal(size=count).astype(dtype)


@examples(25)
@given(said=st.lists(frames(), min_size=1, max_size=12), greets=st.integers(0, 9), leaves=st.booleans())
def test_trainers_may_send_any_messages(mount: Mounted, said: list[bytes], greets: int, leaves: bool) -> None:
    path = os.fsdecode(mount.control("hook").read_bytes().rstrip(b"\n"))
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.settimeout(PATIENCE_S)
        trainer.connect(path)
        if greets:
            trainer.sendall(encode(Hello("fuzz", "fuzz")) + encode(declared()))
            assert _hear(trainer, Ok) == "hello"
            assert _hear(trainer, Ok) == "samples"
        try:
            trainer.sendall(b"".join(said))
            for name in ("0/3", "1/4"):
                assert (mount.point / name).read_bytes() == FILES[name]
            if leaves:
                trainer.sendall(encode(Goodbye()))
            trainer.shutdown(socket.SHUT_WR)
            # Until the daemon has dealt with all of it.
            while trainer.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass  # a stream that cannot be understood any more is closed
    is_well(mount)


def _hear(trainer: socket.socket, kind: type[Message]) -> str:
    decoder = Decoder()
    while True:
        # Frame by frame, so that what follows is not swallowed.
        data = trainer.recv(12, socket.MSG_WAITALL)
        length = int.from_bytes(data[4:8], "little") + int.from_bytes(data[8:12], "little")
        (answer,) = decoder.feed(data + trainer.recv(length, socket.MSG_WAITALL))
        if isinstance(answer, kind):
            return str(getattr(answer, "answers", ""))


# -- users

LIVE = sorted(row.name for row in Options(source="/a", mountpoint="/b", cache_dir="/c").as_table() if row.live)
EXAMPLES = [str(text) for field in Options.model_fields.values() for text in field.examples or ()]
WORDS = st.sampled_from([*EXAMPLES, "0", "-1", "1e400", "nan", "inf", "100%", "1000000000000TiB", "on", "auto", ""])
# Not what makes the source hang or fail: what is read through it is compared.
SETTINGS = st.builds("{}={}".format, st.sampled_from([n for n in LIVE if not n.startswith("source.")]), WORDS)
LINES = st.one_of(
    SETTINGS,
    st.builds("{}={}".format, st.text(max_size=12), WORDS),
    st.sampled_from(["**", "0/*", "[", "[!", "*" * 50, "../..", "/", "0/3", "a\x00b", "{}", "#"]),
    st.text(max_size=40),
    WORDS,
).map(lambda text: text.encode(errors="surrogateescape" if "\udcff" in text else "surrogatepass"))


@examples(40)
@given(
    name=st.sampled_from(["config", "warm", "evict", "ratio"]),
    lines=st.lists(LINES | st.binary(max_size=30), max_size=4),
)
def test_users_may_write_anything(mount: Mounted, name: str, lines: list[bytes]) -> None:
    descriptor = os.open(mount.control(name), os.O_WRONLY)
    try:
        os.write(descriptor, b"\n".join(lines) + b"\n")
    except OSError as exc:
        if exc.errno not in REFUSALS:
            raise
    finally:
        os.close(descriptor)
    assert mount.control("config").read_bytes()
    mount.change("capacity", "100kB")
    mount.change("ttl", "1h")
    for path in ("0/3", "2/5"):
        assert (mount.point / path).read_bytes() == FILES[path]
    is_well(mount)
