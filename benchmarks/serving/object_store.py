"""A mount over a bucket that answers after some milliseconds, against obstore alone.

    .venv/bin/python -m benchmarks.serving.object_store --json FILE     some minutes
    .venv/bin/python -m benchmarks.serving.object_store --quick         half a minute, for a look

A store of this benchmark's own, in a process of its own, answers each request after `--latency-ms` and limits nothing
else. It counts what it is asked. Eight processes read all objects, each its share, in an order of its own:

    obstore       each process GETs its objects with obstore, whose keys it knows
    opened        the same through a mount with an empty cache, then once more with all of it cached
    immutable     the same through a mount with -o immutable

The systems take turns, each round in another order, and every round has a mount of its own. A figure is the median of
the rounds. "Requests" are those of all rounds, for each object. Then find(1) lists a tree of directories: first, again,
and after a remount, which has the names of the mount before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from rich.console import Console

from benchmarks.common.command import add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import spiderfs
from benchmarks.common.results import machine, plain_table, save

BUCKET, OBJECT_BYTES, READERS = "bucket", 110_000, 8
PAGE_KEYS = 1000
SYSTEMS = ("obstore", "opened", "immutable")


class Extent(NamedTuple):
    objects: int
    rounds: int
    latency_ms: int
    directories: int
    names: int


FULL = Extent(objects=3_000, rounds=5, latency_ms=20, directories=100, names=1_000)
QUICK = Extent(objects=600, rounds=1, latency_ms=20, directories=20, names=200)


# -- the store


class Store(asyncio.Protocol):
    """One connection of a reader; every object has the same bytes."""

    def __init__(self, extent: Extent, asked: list[int]) -> None:
        self._extent = extent
        self._asked = asked
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._asked[0] += 1
            answer = answer_to(head.split(b" ", 2)[1].decode(), self._extent)
            asyncio.get_running_loop().call_later(self._extent.latency_ms / 1000, self._transport.write, answer)


def answer_to(target: str, extent: Extent) -> bytes:
    address = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
    body = listing(query, extent) if "list-type" in query else OBJECT
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nContent-Type: application/xml\r\n"
        f'ETag: "{E_TAG}"\r\nLast-Modified: Tue, 14 Nov 2023 22:13:20 GMT\r\n\r\n'
    )
    return head.encode() + body


def listing(query: dict[str, str], extent: Extent) -> bytes:
    """A page of what lies in a directory, or of what a name means; the token is the number of the next name."""
    prefix = unquote(query.get("prefix", ""))
    root, _, below = prefix.partition("/")
    if root == "objects":
        names = object_keys(extent)
    elif below.endswith("/"):
        names = [f"tree/{below}{number:05}.jpg" for number in range(extent.names)]
    else:
        names = directory_keys(extent)
    names = [name for name in names if name.startswith(prefix)]
    first = int(query.get("continuation-token", "0"))
    shown = names[first : first + min(PAGE_KEYS, int(query.get("max-keys", "1000")))]
    rows = [
        f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
        if name.endswith("/")
        else f"<Contents><Key>{name}</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
        f"<ETag>&quot;{E_TAG}&quot;</ETag><Size>{OBJECT_BYTES}</Size></Contents>"
        for name in shown
    ]
    last = first + len(shown)
    more = f"<NextContinuationToken>{last}</NextContinuationToken>" if last < len(names) else ""
    is_truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
    return f"<ListBucketResult>{is_truncated}{''.join(rows)}</ListBucketResult>".encode()


E_TAG = "0123456789abcdef0123456789abcdef"
OBJECT = random.Random(0).randbytes(OBJECT_BYTES)


def object_keys(extent: Extent) -> list[str]:
    return [f"objects/{number:06}.jpg" for number in range(extent.objects)]


def directory_keys(extent: Extent) -> list[str]:
    return [f"tree/{number:04}/" for number in range(extent.directories)]


def serve(extent: Extent, connection: Connection) -> None:
    """Say at which port the store is; then, for each message, how many requests there were since the last one."""
    asked = [0]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Store(extent, asked), "127.0.0.1", 0)
        connection.send(server.sockets[0].getsockname()[1])
        ended = loop.create_future()

        def told() -> None:
            try:
                connection.recv()
            except EOFError:
                loop.remove_reader(connection.fileno())
                ended.set_result(None)
                return
            connection.send(asked[0])
            asked[0] = 0

        loop.add_reader(connection.fileno(), told)
        await ended

    asyncio.run(run())


@contextmanager
def store(extent: Extent) -> Iterator[tuple[str, Callable[[], int]]]:
    """The URL of the store, and a function that says how many requests it has had since it was called last."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(extent, there), daemon=True)
    process.start()
    there.close()
    port = here.recv()

    def asked() -> int:
        here.send(None)
        number: int = here.recv()
        return number

    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        here.close()
        process.join(5)
        process.terminate()


# -- readers


def read(task: tuple[str, list[str], float]) -> float:
    """Read a share of the objects, from a URL or below a mount point, from a time on; returns the time of the end."""
    where, keys, begin = task
    wait_s = begin - time.time()
    if where.startswith("http"):
        import obstore
        from obstore.store import S3Store

        client: Any = {"allow_http": True}
        bucket = S3Store(BUCKET, endpoint=where, region="us-east-1", skip_signature=True, client_options=client)
        time.sleep(max(0.0, wait_s))
        for key in keys:
            assert len(obstore.get(bucket, key).bytes()) == OBJECT_BYTES
    else:
        time.sleep(max(0.0, wait_s))
        for key in keys:
            with open(f"{where}/{key.removeprefix('objects/')}", "rb", buffering=0) as file:
                assert len(file.readall()) == OBJECT_BYTES
    return time.time()


def reading_s(readers: ProcessPoolExecutor, where: str, extent: Extent) -> float:
    """How long the readers take for all objects together."""
    keys = object_keys(extent)
    random.Random(1).shuffle(keys)
    begin = time.time() + 1.0
    return max(readers.map(read, [(where, keys[share::READERS], begin) for share in range(READERS)])) - begin


def walk_s(root: Path, names: int) -> float:
    begin = time.perf_counter()
    done = subprocess.run(["find", root, "-type", "f", "-printf", "%s\n"], capture_output=True, check=True)
    assert done.stdout.count(b"\n") == names
    return time.perf_counter() - begin


# -- the measurement


@contextmanager
def shown(prefix: str, place: Path, url: str, options: str = "") -> Iterator[Path]:
    """A mount of what lies below a prefix; its cache stays in `place`."""
    mount = place / "mnt"
    mount.mkdir(parents=True, exist_ok=True)
    given = f"cache_dir={place / 'cache'},log_file={place / 'log'},source.endpoint={url},source.anonymous{options}"
    spiderfs("mount", f"s3://{BUCKET}/{prefix}", mount, "-o", given)
    try:
        yield mount
    finally:
        spiderfs("umount", mount)


def measure_reads(extent: Extent, url: str, asked: Callable[[], int], scratch: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {"first_s": [], "again_s": [], "requests": 0} for name in SYSTEMS}
    with ProcessPoolExecutor(READERS, multiprocessing.get_context("spawn")) as readers:
        for turn in range(extent.rounds):
            for system in [*SYSTEMS[turn % 3 :], *SYSTEMS[: turn % 3]]:
                asked()
                if system == "obstore":
                    found[system]["first_s"].append(reading_s(readers, url, extent))
                else:
                    options = ",immutable" if system == "immutable" else ""
                    with shown("objects", scratch / f"{system}{turn}", url, options) as mount:
                        found[system]["first_s"].append(reading_s(readers, str(mount), extent))
                        found[system]["again_s"].append(reading_s(readers, str(mount), extent))
                found[system]["requests"] += asked()
    return found


def measure_walks(extent: Extent, url: str, asked: Callable[[], int], scratch: Path) -> dict[str, tuple[float, int]]:
    found = {}
    for walks in (("first", "again"), ("after a remount",)):
        with shown("tree", scratch / "walked", url) as mount:
            for walk in walks:
                asked()
                found[walk] = walk_s(mount, extent.directories * extent.names), asked()
    return found


def run(extent: Extent, console: Console) -> dict[str, Any]:
    with scratch_directory("object_store") as scratch, store(extent) as (url, asked):
        reads = measure_reads(extent, url, asked, scratch)
        walks = measure_walks(extent, url, asked, scratch)
    direct_s = statistics.median(reads["obstore"]["first_s"])
    title = f"{extent.objects} objects of {OBJECT_BYTES} bytes, {extent.latency_ms} ms away, {READERS} readers"
    table = plain_table(title, "", "files/s", "x obstore", "files/s again", "requests an object")
    for system, row in reads.items():
        first_s = statistics.median(row["first_s"])
        again = f"{extent.objects / statistics.median(row['again_s']):.0f}" if row["again_s"] else ""
        requests = row["requests"] / extent.objects / extent.rounds
        table.add_row(system, f"{extent.objects / first_s:.0f}", f"{direct_s / first_s:.2f}", again, f"{requests:.3f}")
    console.print(table)
    title = f"A walk of {extent.directories} directories of {extent.names} names"
    table = plain_table(title, "", "s", "requests")
    for walk, (took_s, requests) in walks.items():
        table.add_row(walk, f"{took_s:.2f}", str(requests))
    console.print(table)
    return {"extent": extent._asdict(), "reads": reads, "walks": walks}


def main() -> int:
    parser = command_line(__doc__)
    fields = {name: name for name in Extent._fields}
    add_numbers(parser, FULL, QUICK, **fields)
    arguments = parser.parse_args()
    chosen = {name: value for name in Extent._fields if (value := getattr(arguments, name)) is not None}
    extent = (QUICK if arguments.quick else FULL)._replace(**chosen)

    def measure() -> None:
        result = run(extent, Console())
        save(arguments.json, {"machine": machine()} | result)

    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    return exit_status("object_store", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
