"""The program of a process that finds the members of archives, and the pool of such processes.

To parse a million headers takes some 10 s of processor time. In a thread of a worker it would hold up the answers to
the kernel, since both would share one interpreter's lock. So a process of its own parses. It opens no archive: it asks
the process that has started it for bytes, through a pipe, and that one reads them from the source. What the two say is
one line of JSON each time, and behind a line that asks for bytes these bytes.

    {"kind": "tar", "archive": HEX, "version": [SIZE, MTIME, TAG], "to": PATH}    the job
    [OFFSET, LENGTH]                                                              asks for these bytes
    {"spare": LENGTH}, {"disk": REASON}                                           the end of it: see `Indexers.index`

An index that the disk does not take comes behind the last line, in so many bytes.

The process ends when its standard input does, and so with the process that has started it.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spiderfs.archives.formats import AHEAD, PieceReadAhead, Pieces, Read, add_tar_members, add_zip_members
from spiderfs.archives.index import FAILED, IndexBuilder, index_parts, save
from spiderfs.errors import ArchiveFailed, SourceUnavailable
from spiderfs.sources.source import Version

if TYPE_CHECKING:
    # Not in the process that parses: it would import trio, and take half as long again to start.
    from spiderfs.sources.client import SourceLimits

# Archives are often entered one after the other. A process takes 0.2 s to start, and 35 MB while it waits.
_IDLE_S = 10.0
# Each job has a core to itself, or waits for the source.
_MOST_JOBS = 4
_MOMENT_S = 1.0
# What a process of the mount keeps of indices that the disk does not take: that of an archive of a million members.
MOST_SPARE_BYTES = 128 << 20
FORMATS = {"tar": add_tar_members, "zip": add_zip_members}


class Indexers:
    """The threads of one process that have indices made, and the processes that make them. Safe for threads."""

    def __init__(self, limits: SourceLimits) -> None:
        """Indices take up to `max_concurrent` requests at a time; a fork may come before or after this is made."""
        self.limits = limits
        self._ahead = min(AHEAD, limits.max_concurrent)
        self.threads = ThreadPoolExecutor(max(1, min(_MOST_JOBS, limits.max_concurrent // AHEAD)))
        self.moment_s = min(_MOMENT_S, limits.timeout_s / 4)
        """How long a caller waits for an index before it has to ask again; it has its thread for so long."""
        self._idle: list[tuple[subprocess.Popen[bytes], float]] = []
        self._lock = threading.Lock()
        self._closed = False

    def index(self, kind: str, archive: bytes, version: Version, read: Read, to: Path) -> bytes:
        """Write the index of the archive that `read` reads, or a note in a file `.failed` that there is none.

        Returns the bytes if the disk does not take them, else none; raises OSError if they are more than memory is for.
        Raises SourceUnavailable if the process died or none can be started, and whatever `read` raises.
        """
        ahead = PieceReadAhead(read, version.size, self._ahead)
        with contextlib.closing(ahead), self._process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                job = {"kind": kind, "archive": archive.hex(), "version": list(version), "to": str(to)}
                _write(process.stdin, job)
                while isinstance(answer := json.loads(process.stdout.readline() or "null"), list):
                    process.stdin.write(ahead.read(*answer))
                    process.stdin.flush()
                spare = process.stdout.read(answer.get("spare", 0)) if answer else b""
            except BrokenPipeError:
                answer = None
            if answer is None or len(spare) < answer.get("spare", 0):
                raise SourceUnavailable("the process that looks for the members of an archive has died")
        if "disk" in answer:
            raise OSError(answer["disk"])
        return spare

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        """An idle process, or a new one; it is ended if the job was not."""
        with self._lock:
            process, since_s = self._idle.pop() if self._idle else (None, 0.0)
        # One that has waited for long may end in this moment.
        if process is not None and (process.poll() is not None or time.monotonic() > since_s + _IDLE_S / 2):
            _end(process)
            process = None
        if process is None:
            # -P: whatever lies in the working directory is not imported.
            command = [sys.executable, "-P", "-m", "spiderfs.archives.indexer_process"]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as exc:
                message = f"no process can be started that looks for the members of an archive ({exc.strerror})"
                raise SourceUnavailable(message) from exc
        try:
            yield process
        except BaseException:
            _end(process)
            raise
        with self._lock:
            self._idle.append((process, time.monotonic()))
        if self._closed:
            self.close()

    def close(self) -> None:
        """End the processes that wait, and threads when they have ended what they do."""
        # An index may be there before the process that has made it is idle.
        self._closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            ending, self._idle = self._idle, []
        for process, _ in ending:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:
        pass  # which closes its pipes, and waits


def _write(to: IO[bytes], what: Any) -> None:
    to.write(json.dumps(what).encode() + b"\n")
    to.flush()


def _do(job: dict[str, Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    def read(offset: int, length: int) -> bytes:
        _write(answers, [offset, length])
        found = requests.read(length)
        if len(found) < length:
            raise EOFError
        return found

    archive, version, to = bytes.fromhex(job["archive"]), Version(*job["version"]), Path(job["to"])
    builder, spare = IndexBuilder(), 0
    try:
        FORMATS[job["kind"]](Pieces(read, version.size), builder)
        parts = builder.parts(archive, version)
    except ArchiveFailed as exc:
        parts, to = index_parts(archive, version, str(exc).encode()), to.with_suffix(FAILED)
    try:
        save(parts, to)
    except OSError as exc:
        spare = sum(map(len, parts))
        if spare > MOST_SPARE_BYTES:
            _write(answers, {"disk": exc.strerror or str(exc)})
            return
    _write(answers, {"spare": spare})
    if spare:
        answers.writelines(parts)
        answers.flush()


def main() -> None:
    """Do the jobs that come; returns when the standard input ends, or nothing has come for a while."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while select.select([requests], [], [], _IDLE_S)[0] and (line := requests.readline()):
            _do(json.loads(line), requests, answers)


if __name__ == "__main__":
    main()
