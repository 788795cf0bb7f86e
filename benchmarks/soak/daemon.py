"""The daemon of a soak: the module mounts, changes options, kills processes, and counts what the daemon uses."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.common.mounts import counts, is_mounted, spiderfs
from benchmarks.fakes.faulty_source import FAULTS, Faults
from benchmarks.serving.process_cost import children, process_tree, pss_bytes
from benchmarks.soak.weather import Weather
from spiderfs.protocol.extents import DIRECTORY as RANGES
from spiderfs.shared.layout import CacheLayout
from spiderfs.store.content import LmdbContent
from spiderfs.store.environment import is_sound
from spiderfs.store.records import LmdbRecords
from spiderfs.vfs.catalogue import OWN_DIRECTORIES, TABLES

T = TypeVar("T")

# How the keys of the tables of names begin, and how values of the table `dentry` begin.
_KEY, _INODE = struct.Struct(">Q"), struct.Struct("<Q")

# A control file answers EAGAIN while there is no manager, and waits while the manager is stopped.
PATIENCE_S = 20.0
POLL_S = 0.05
# The time within which a daemon must have ended after SIGKILL or SIGTERM.
ENDING_S = 25.0
# The most that a daemon may use: three workers, the manager, of each the reading process and the processes that make
# views and index archives, and the supervisor.
MOST_MB, MOST_DESCRIPTORS, MOST_THREADS, MOST_PROCESSES = 1200, 600, 200, 20
_NEVER = ("internal_errors", "checksum_failures", "store_rebuilds")
# How a line of the log begins.
_ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)
# If the reading process of a worker or of the manager is killed, the worker or manager ends with a traceback.
_EXPECTED = ("the process that reads from the source",)
_CONTROL_FILES = ("cache", "config", "graph", "metrics", "ratio", "redirects", "scores", "stats.json", "warm", "log")


@dataclass(frozen=True)
class Usage:
    """The resources that all processes of the daemon use together."""

    processes: int
    megabytes: float  # PSS, so that shared memory is counted once
    descriptors: int
    threads: int
    run_files: int
    known_names: int

    def described(self) -> str:
        return (
            f"{self.processes} processes, {self.megabytes:.0f} MB, {self.descriptors} descriptors, "
            f"{self.threads} threads, {self.known_names} names"
        )


class Daemon:
    def __init__(self, source: Path, scratch: Path, weather: Weather) -> None:
        self.mountpoint = scratch / "mnt"
        self.log = scratch / "daemon.log"
        self._source = source
        self._cache = scratch / "cache"
        self._weather = weather
        self._supervisor = 0
        self._faults = Faults.made()
        self._log_at = 0
        self.rows: dict[str, int] = {}
        """The number of rows in each table of the store, counted after the mount has ended."""
        self.mountpoint.mkdir()

    def mount(self, options: dict[str, str]) -> None:
        given = {"cache_dir": self._cache, "log_file": self.log, **options}
        options_text = ",".join(f"{k}={v}" for k, v in given.items())
        spiderfs("mount", self._source, self.mountpoint, "-o", options_text, faults=self._faults)
        self._supervisor = int(json.loads(self._patiently(lambda: self._control("stats.json").read_bytes()))["pid"])

    def befall(self, kind: str, given: dict[str, Any]) -> None:
        _EVENTS[kind](self, given)

    # -- what befalls it

    def _set(self, given: dict[str, Any]) -> None:
        if given["name"] in FAULTS:
            self._faults.set(given["name"], given["value"])
            return
        self._patiently(lambda: self._write("config", f"{given['name']}={given['value']}"))

    def _fault(self, given: dict[str, Any]) -> None:
        with self._weather.during("source"):
            self._set(given)
            time.sleep(given["for_s"])
            self._set({"name": given["name"], "value": given["back"]})

    def _write_line(self, name: str, given: dict[str, Any]) -> None:
        self._patiently(lambda: self._write(name, given["line"]))

    def _look(self, given: dict[str, Any]) -> None:
        for name in _CONTROL_FILES:
            self._patiently(self._control(name).read_bytes)

    def _kill_reading(self, given: dict[str, Any]) -> None:
        reading = [child for pid in children(self._supervisor) for child in children(pid)]
        _kill(_one_of(reading, given["which"]))

    def _stop_manager(self, given: dict[str, Any]) -> None:
        if manager := self._manager():
            with suppress(ProcessLookupError):
                os.kill(manager, signal.SIGSTOP)
                time.sleep(given["for_s"])
                os.kill(manager, signal.SIGCONT)

    def _kill_supervisor(self, given: dict[str, Any]) -> None:
        self._remount(signal.SIGKILL, given)

    def _unmount(self, given: dict[str, Any]) -> None:
        self._never_wrong()
        # A mount with readers is busy and cannot be unmounted, so SIGTERM ends the daemon, which detaches it.
        self._remount(signal.SIGTERM, given)

    def _remount(self, number: signal.Signals, given: dict[str, Any]) -> None:
        family = self.family()
        with self._weather.during("unmounted"):
            os.kill(self._supervisor, number)
            self._await_end(family)
            self._log_is_good()
            self.mount(given["options"])

    # -- the calm

    def calm(self) -> None:
        """End all faults: the source is fast and well again, and names expire within a second."""
        for name, value in (
            ("source.hang", "off"),
            ("source.gone", "off"),
            ("source.error_rate", "0"),
            ("source.latency_ms", "0"),
            ("source.bandwidth", "0"),
            ("ttl", "1s"),
        ):
            self._set({"name": name, "value": value})

    def usage(self) -> tuple[Usage, list[str]]:
        """The resources that the daemon uses now, and a line for each figure that is too high or wrong."""
        family = self.family()
        found = Usage(
            processes=len(family),
            megabytes=pss_bytes(family) / 1e6,
            descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family),
            threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in family),
            run_files=len(os.listdir(CacheLayout(self._cache).run.directory)),
            known_names=self._metric("known_files"),
        )
        wrong = [
            f"{figure} {what}: at most {most} were to be expected"
            for what, figure, most in (
                ("MB", found.megabytes, MOST_MB),
                ("descriptors", found.descriptors, MOST_DESCRIPTORS),
                ("threads", found.threads, MOST_THREADS),
                ("processes", found.processes, MOST_PROCESSES),
            )
            if figure > most
        ]
        try:
            self._never_wrong()
            self._log_is_good()
        except RuntimeError as exc:
            wrong.append(str(exc))
        return found, wrong

    def _metric(self, name: str) -> int:
        return int(self._patiently(lambda: counts(self.mountpoint))[name])

    def _never_wrong(self) -> None:
        """Raise RuntimeError if a metric counted something that no event of a soak should cause."""
        found = self._patiently(lambda: counts(self.mountpoint))
        if bad := {name: found[name] for name in _NEVER if found[name]}:
            raise RuntimeError(f"the daemon counts {bad}")

    def _log_is_good(self) -> None:
        """Raise RuntimeError if the log holds a traceback that no event of a soak should cause."""
        text = self.log.read_text(errors="replace")
        fresh, self._log_at = text[self._log_at :], len(text)
        for entry in _ENTRY.split(fresh):
            if "Traceback" in entry and not any(words in entry for words in _EXPECTED):
                raise RuntimeError("the daemon's log says: " + entry)

    # -- the end

    def end(self) -> list[str]:
        """Unmount, unless that has been done; returns a line for each thing that was left behind or is wrong."""
        if not self._supervisor:
            return []
        wrong: list[str] = []
        family = self.family()
        try:
            if is_mounted(self.mountpoint):
                spiderfs("umount", self.mountpoint)
            self._await_end(family)
            self._log_is_good()
            wrong += self._check_store()
        except RuntimeError as exc:
            wrong.append(str(exc))
        finally:
            self._supervisor = 0
            if is_mounted(self.mountpoint):
                wrong.append("it is still mounted")
                subprocess.run(["umount", "-l", "-f", self.mountpoint], check=False)
            for pid in family:
                _kill(pid)
        return wrong

    def _check_store(self) -> Iterator[str]:
        """A line for each thing that is wrong with the store after the mount has ended."""
        layout = CacheLayout(self._cache)
        for path in layout.environments:
            if not is_sound(path):
                yield f"{path} is damaged"
        content, records = LmdbContent(layout.content), LmdbRecords(layout.names, TABLES)
        members = list(content.members())
        usage = content.usage()
        if sum(member.size for member in members) != usage.used_bytes:
            yield f"{sum(member.size for member in members)} bytes are there, and {usage.used_bytes} are counted"
        if usage.used_bytes > usage.capacity_bytes:
            yield f"{usage.used_bytes} bytes in a cache of {usage.capacity_bytes}"
        if damaged := [member.key for member in members if content.read(member.key) is None]:
            yield f"{len(damaged)} records fail their checksums, as {damaged[0]}"
        content.end_read()
        kept = {member.key.inode for member in members}
        named = {_INODE.unpack_from(value)[0] for _, value in _all_rows(records, "dentry")} | set(OWN_DIRECTORIES)
        leaving = {_KEY.unpack(key)[0] for key, _ in _all_rows(records, "gone")}
        inodes = {_KEY.unpack(key)[0]: row for key, row in _all_rows(records, "inode")}
        # No directory lists an extent of a large file.
        extents = {inode for inode, row in inodes.items() if RANGES in row}
        known = inodes.keys() - extents
        self.rows = {
            "inode": len(known),
            "extent": len(extents),
            "dentry": len(named - set(OWN_DIRECTORIES)),
            "gone": len(leaving),
            "member": len(members),
        }
        if left := known - named - kept - leaving:
            yield f"{len(left)} of {len(known)} inodes are known that no name means, and nothing is cached of"
        belong = {
            extent
            for key, row in _all_rows(records, "extents")
            if _KEY.unpack(key)[0] in known
            for extent in np.frombuffer(row, "<u8").tolist()
        }
        if left := extents - belong - leaving:
            yield f"{len(left)} of {len(extents)} extents are known of files that are not"
        content.close()
        records.close()

    # -- processes

    def family(self) -> list[int]:
        """All processes of the daemon."""
        return process_tree(self._supervisor)

    def _manager(self) -> int:
        """The pid of the supervisor, the process that handles SIGTERM; 0 while there is none."""
        return next((pid for pid in children(self._supervisor) if _catches_sigterm(pid)), 0)

    def _workers(self) -> list[int]:
        return [pid for pid in children(self._supervisor) if not _catches_sigterm(pid)]

    def _await_end(self, family: list[int]) -> None:
        """Wait until these processes have ended; raises RuntimeError if one has not after a time limit."""
        deadline_s = time.monotonic() + ENDING_S
        while left := [pid for pid in family if _is_running(pid)]:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the processes {left} of the daemon have not ended in {ENDING_S:.0f} s")
            time.sleep(POLL_S)

    # -- control files

    def _control(self, name: str) -> Path:
        return self.mountpoint / ".spiderfs" / name

    def _write(self, name: str, line: str) -> None:
        descriptor = os.open(self._control(name), os.O_WRONLY)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """The answer of a control file, which is read again while the manager is being started."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask()
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EBUSY) or time.monotonic() > deadline_s:
                    raise
            time.sleep(POLL_S)


def _all_rows(records: LmdbRecords, table: str) -> list[tuple[bytes, bytes]]:
    return records.scan(table, b"", records.count(table) + 1)


_EVENTS: dict[str, Callable[[Daemon, dict[str, Any]], None]] = {
    "set": Daemon._set,
    "fault": Daemon._fault,
    "warm": lambda daemon, given: daemon._write_line("warm", given),
    "evict": lambda daemon, given: daemon._write_line("evict", given),
    "look": Daemon._look,
    "kill worker": lambda daemon, given: _kill(_one_of(daemon._workers(), given["which"])),
    "kill manager": lambda daemon, given: _kill(daemon._manager()),
    "kill reading process": Daemon._kill_reading,
    "stop manager": Daemon._stop_manager,
    "kill supervisor": Daemon._kill_supervisor,
    "unmount": Daemon._unmount,
}


def _one_of(pids: list[int], which: float) -> int:
    """The pid that a number from 0 to 1 chooses; 0 if there is none."""
    return sorted(pids)[int(which * len(pids))] if pids else 0


def _kill(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _catches_sigterm(pid: int) -> bool:
    try:
        return bool(int(_status(pid)["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)
    except (OSError, KeyError):
        return False


def _is_running(pid: int) -> bool:
    try:
        return not _status(pid)["State"].startswith("Z")
    except OSError:
        return False
