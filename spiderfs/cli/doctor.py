"""`spiderfs doctor`: checks each requirement of a mount on this machine, and prints its state and remedy.

A finding is `ok`, a `note` (a mount works, with less than it could have) or `wrong` (a mount fails, or readers get
errors). What was found out stands before what to do about it, behind a colon.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import textwrap
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from spiderfs import __version__
from spiderfs.cli import control_files
from spiderfs.errors import MountError, SpiderfsError, UsageError
from spiderfs.linux.mounts import Mount, canonical, check_fuse_available, mounts, within
from spiderfs.linux.process_table import ended_by_signals, signals_wait

# What needs more than `spiderfs --help` is imported where it is used.
if TYPE_CHECKING:
    from spiderfs.options.model import Options

# What each limit is on, its flag of ulimit, and the least that suffices; None: LMDB maps the whole cache, so no limit
# does. A worker has a file open for each request at the source, and distributions allow 1,024.
_LIMITS = (
    ("open files", resource.RLIMIT_NOFILE, "n", 1024),
    ("bytes in a file", resource.RLIMIT_FSIZE, "f", None),
    ("bytes of memory", resource.RLIMIT_AS, "v", None),
)
# NFS clients and servers agree on 1 MiB if they may; a file of 100 kB should be one request.
_READ_BYTES = 128 << 10
# Names of a directory that are looked at for times in the future.
_NAMES, _AHEAD_S = 200, 2.0
_PATIENCE_S = 10.0
# Files that are read to see how fast the source is, the most bytes of each, and the longest that this may take.
_TRIED, _TRIED_BYTES, _TRIED_S = 20, 1 << 20, 2.0
NEAR_S = 1e-3
"""Where a file takes less, readers in a mount's first epoch are slower (benchmarks/serving/never_slower.py)."""
# Linux has this number for the pid namespace of the machine itself (include/linux/proc_ns.h).
_MACHINES_PIDS = "pid:[4026531836]"
# spiderfs was written later, so the clock cannot be before it.
_BEFORE_ALL_S = 1_735_689_600
_REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "beegfs", "fuse.", "glusterfs")


class Finding(NamedTuple):
    what: str
    state: Literal["ok", "note", "wrong"]
    said: str


@click.command()
@click.argument("place", metavar="[MOUNTPOINT|SOURCE]", required=False, shell_complete=control_files.mountpoints)
@click.option("-o", "options", multiple=True, metavar="NAME=VALUE,...", help="Options with which SOURCE is mounted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def doctor(place: str | None, options: tuple[str, ...], as_json: bool) -> None:
    """Check this machine, a source and mounts, and say how to fix what is missing.

    With a MOUNTPOINT it checks that mount too, with a SOURCE whether and how it can be mounted. Each line is ok, a note
    (it works, but could work better) or wrong. The exit status is 1 if a line is wrong.
    """
    mount = None if place is None else control_files.mount_at(place)
    if options and (place is None or mount is not None):
        raise UsageError("-o is for a SOURCE that is not mounted yet: name one, or leave -o out")
    found = []
    with ended_by_signals():
        for finding in _findings(place, mount, options):
            found.append(finding)
            if not as_json:
                _show(finding)
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in found], indent=2))
    click.get_current_context().exit(int(any(finding.state == "wrong" for finding in found)))


def _show(finding: Finding) -> None:
    colour = {"ok": "green", "note": "yellow", "wrong": "red"}[finding.state]
    width = max(60, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(
        control_files.printable(finding.said), width - 20, break_long_words=False, break_on_hyphens=False
    )
    click.echo(f"{click.style(f'{finding.state:5}', fg=colour)} {finding.what:13} {lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':20}{line}")


def _findings(place: str | None, mount: Mount | None, given: tuple[str, ...]) -> Iterator[Finding]:
    from spiderfs.options.paths import capacity_remark, missing_remark

    options = None
    if place is not None and mount is None:
        options = yield from _chosen(place, given)
    yield from _kernel(options is not None and options.allow_other)
    yield from _machine()
    yield from _mounted([mount] if mount is not None else control_files.every_place().values())
    if mount is not None:
        yield from _one_mount(mount)
    elif options is not None:
        yield from _cache(options.cache_dir.first, capacity_remark(options.capacity, *options.cache_dir.all))
        if remark := missing_remark(options.cache_dir.others):
            yield Finding("cache", "wrong", remark)
        for directory in options.cache_dir.others:
            if not missing_remark([directory]):
                yield from _cache(directory, "")
        if isinstance(options.source, Path):
            yield from _source(options.source, options.cache_dir.first)


def _machine() -> Iterator[Finding]:
    met = []
    for name, number, flag, least in _LIMITS:
        allowed = resource.getrlimit(number)[0]
        if allowed != resource.RLIM_INFINITY and (least is None or allowed < least):
            remedy = f"run 'ulimit -{flag} {least or 'unlimited'}' before you mount"
            met.append(Finding("limits", "wrong", f"a process may have {allowed:,} {name}: {remedy}"))
    yield from met or [Finding("limits", "ok", "open files, file sizes and memory of a process suffice")]
    now_s = time.time()
    if now_s < _BEFORE_ALL_S:
        yield Finding("clock", "wrong", f"it says {time.ctime(now_s)}: set it, or new files are cached late or not")
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s)))
    if Path("/proc/self/ns/pid").is_symlink() and os.readlink("/proc/self/ns/pid") != _MACHINES_PIDS:
        yield Finding(
            "container",
            "note",
            "this is a pid namespace of its own, so a daemon here cannot identify training runs outside: mount on the"
            " host, or start the container with the host's pids (docker run --pid host, hostPID in Kubernetes)",
        )


def _mounted(there: Iterable[Mount]) -> Iterator[Finding]:
    for mount in there:
        here = control_files.place_of(mount)
        try:
            stats = control_files.read_stats(mount)
        except OSError as exc:
            yield Finding("mount", "wrong", str(control_files.explained(mount, exc)))
            continue
        version = stats.get("version")
        if version != __version__:
            said = f"{here} is served by version {version}, and this is {__version__}: mount it again when it is idle"
            yield Finding("mount", "note", said)
        else:
            yield Finding("mount", "ok", f"{here} shows {stats.get('source', mount.source)}, and answers")


def _one_mount(mount: Mount) -> Iterator[Finding]:
    """What one mount has met, and what lies under it."""
    from spiderfs.options.paths import capacity_remark
    from spiderfs.options.units import Capacity
    from spiderfs.profiling.private_mount import settings_in

    try:
        stats = control_files.read_stats(mount)
    except OSError:
        # The finding that it does not answer says so (`_mounted`).
        return
    try:
        options = settings_in(control_files.read_control(mount, "config"))
    except OSError as exc:
        yield Finding("control files", "wrong", str(control_files.explained(mount, exc)))
        return
    yield from _troubles(stats["metrics"])
    for url, peer in stats["peers"].items():
        if peer.get("remark"):
            yield Finding("peers", "wrong", f"{control_files.printable(url)} {peer['remark']}")
    # A mount of an earlier version does not say it.
    for found in stats.get("cache_dirs", ()):
        directory = Path(found["directory"])
        if found["left_out"]:
            said = f"{directory} was missing at the mount, or has failed since: see to its disk, then mount again"
            yield Finding("cache", "wrong", said)
        else:
            part = Capacity(max(1, found["capacity_bytes"]), "bytes")
            yield from _cache(directory, capacity_remark(part, directory))
    if options["source"].startswith("/"):
        yield from _source(Path(options["source"]), Path(stats["cache_dir"]))


def _troubles(figures: Mapping[str, float]) -> Iterator[Finding]:
    from spiderfs.metrics import COUNTERS, TROUBLES

    if not figures["source_reachable"]:
        yield Finding("source", "wrong", "it does not answer: check its server; cached files are served meanwhile")
    met = [counter for counter in COUNTERS if counter.name in TROUBLES and figures[counter.name]]
    for counter in met:
        yield Finding("since mounted", "note", f"{figures[counter.name]:,} {counter.name}. {counter.trouble}")
    if not met:
        yield Finding("since mounted", "ok", "no errors, restarts, or damage")


def _chosen(source: str, given: tuple[str, ...]) -> Generator[Finding, None, Options | None]:
    """Whether the source can be mounted so; returns the options of that mount."""
    from spiderfs.options.model import Options

    with tempfile.TemporaryDirectory(prefix="spiderfs-doctor-") as point:
        try:
            options = Options.load(given, None, source, point)
        except SpiderfsError as exc:
            yield Finding("source", "wrong", str(exc))
            return None
    if isinstance(options.source, Path) and not _newest(options.source):
        said = "is empty, and nothing is mounted there: if it is a mount point, its mount has ended, so mount it again"
        yield Finding("source", "wrong", f"{options.source} {said}")
        return None
    yield Finding("source", "ok", f"{options.source} answers, and can be mounted")
    return options


def _kernel(allow_other: bool) -> Iterator[Finding]:
    """Whether this user can mount, and what the kernel can do: asked of the kernel by a mount that ends at once."""
    from spiderfs.fuse.session import kernel_offer
    from spiderfs.fuse.wire import InitFlag

    try:
        check_fuse_available(allow_other)
        # Whoever touches a mount that was left half made waits for ever.
        with signals_wait(), tempfile.TemporaryDirectory(prefix="spiderfs-doctor-") as point:
            offer = kernel_offer(Path(point))
    except (MountError, OSError) as exc:
        said = str(exc)
        if os.geteuid() == 0 and "not permitted" in said:
            said += ": start the container with '--cap-add SYS_ADMIN', or mount on the host"
        yield Finding("fuse", "wrong", said)
        return
    yield Finding("fuse", "ok", f"this user can mount; Linux {platform.release()} speaks FUSE 7.{offer.minor}")
    if offer.flags & InitFlag.NO_OPEN_SUPPORT:
        yield Finding("immutable", "ok", "small files in memory are read without a request to spiderfs")
    else:
        yield Finding("immutable", "wrong", "this kernel sends a request for each open: mount without immutable")
    if offer.flags & InitFlag.HAS_RESEND:
        yield Finding("resend", "ok", "when a worker dies, another answers its readers")
    else:
        said = "when a worker dies, the mount ends with errors: use Linux 6.9 or later"
        yield Finding("resend", "note", said)
    if not offer.flags & InitFlag.PASSTHROUGH or os.geteuid() != 0:
        who = "root" if offer.flags & InitFlag.PASSTHROUGH else "Linux 6.9 and later"
        said = f"cached large files are read through spiderfs; reading them directly is faster, but needs {who}"
        yield Finding("passthrough", "note", said)
    else:
        yield Finding("passthrough", "ok", "cached large files are read by the kernel itself, unless immutable")


def _cache(directory: Path, remark: str) -> Iterator[Finding]:
    """A disk of the cache; `remark` is on its room."""
    from spiderfs.options.paths import nearest_directory
    from spiderfs.options.units import round_size

    there = nearest_directory(directory)
    free = shutil.disk_usage(there).free
    kind = _file_system_of(there).fstype
    if not os.access(there, os.W_OK):
        yield Finding("cache", "wrong", f"this user may not write to {there}: choose another directory by cache_dir")
    elif kind.startswith(_REMOTE):
        yield Finding("cache", "wrong", f"{directory} lies on {kind}: choose a directory on a local disk by cache_dir")
    elif kind in ("tmpfs", "ramfs"):
        yield Finding("cache", "note", f"{directory} lies in memory ({kind}), and is lost at a reboot")
    elif kind == "overlay":
        said = f"{directory} lies on the container's own file system, and is lost with it: put it on a volume"
        yield Finding("cache", "note", said)
    else:
        yield Finding("cache", "ok", f"{directory} lies on {kind}, where {round_size(free)} are free")
    if remark:
        yield Finding("capacity", "note", remark)


def _source(source: Path, cache: Path) -> Iterator[Finding]:
    """How the directory of the source is mounted, and by which clock its files are dated."""
    from spiderfs.options.paths import on_one_disk

    try:
        ahead_s, one_disk = within(_PATIENCE_S, lambda: (_newest(source) - time.time(), on_one_disk(source, cache)))
    except TimeoutError:
        yield Finding("source", "wrong", f"{source} hangs: check its server")
        return
    except OSError as exc:
        yield Finding("source", "wrong", f"{source} cannot be read ({exc.strerror}): check its permissions")
        return
    below = _file_system_of(source)
    if below.fstype.startswith("nfs"):
        yield from _nfs(below)
    elif one_disk:
        said = "the source is on the disk of the cache, so caching does not speed it up: set cache_dir to another disk"
        yield Finding("source", "note", said)
    else:
        yield Finding("source", "ok", f"{below.fstype}, {below.source}")
    yield from _speed(source)
    if ahead_s > _AHEAD_S:
        yield Finding(
            "source's clock",
            "note",
            f"files are dated {ahead_s:,.0f} s ahead: set the clocks of both machines, or files are cached late",
        )


def _speed(source: Path) -> Iterator[Finding]:
    """Whether a file of the source takes long enough that a cache pays."""
    try:
        times = within(_PATIENCE_S, lambda: list(_timed_files(source)))
    except (TimeoutError, OSError):
        # A finding before this one says so, or one file alone cannot be read.
        return
    if not times:
        return
    median_s = statistics.median(times)
    said = f"{len(times)} files took {median_s * 1000:.2f} ms each"
    if median_s < NEAR_S:
        said += ": a mount's first epoch is slower than that; run 'spiderfs bench' to see whether your loader waits"
    yield Finding("speed", "note" if median_s < NEAR_S else "ok", said)


def _files(directory: Path | str) -> Iterator[str]:
    """Files below a directory, of the first names of each directory alone: there may be millions."""
    with os.scandir(directory) as names:
        first = list(islice(names, _NAMES))
    yield from (entry.path for entry in first if entry.is_file())
    for entry in first:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)


def _timed_files(source: Path) -> Iterator[float]:
    """The seconds that some files of a directory took, each read from where it lies and not from the page cache."""
    ends_at = time.monotonic() + _TRIED_S
    for path in islice(_files(source), _TRIED):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            file.read(_TRIED_BYTES)
            yield time.monotonic() - began
        if time.monotonic() > ends_at:
            return


def _nfs(below: Mount) -> Iterator[Finding]:
    """The options of an NFS client that matter to a cache before it (docs/howto/nfs.md)."""
    options = dict(option.partition("=")[::2] for option in below.options.split(","))
    faults = []
    if "soft" in options or "softerr" in options:
        faults.append("soft gives readers errors while the server is slow: mount it hard, for spiderfs limits waits")
    if "noac" in options or options.get("acregmax") == "0":
        faults.append("noac sends each lookup to the server: leave it out, and set ttl of spiderfs instead")
    if int(options.get("rsize") or _READ_BYTES) < _READ_BYTES:
        faults.append(f"rsize={options['rsize']} makes many requests of a file: leave it out")
    for fault in faults:
        yield Finding("NFS", "note", fault)
    if not faults:
        yield Finding("NFS", "ok", f"{below.source} by {below.fstype}, hard, rsize={options.get('rsize', '?')}")


def _newest(directory: Path) -> float:
    """The latest mtime among the first names; may hang."""
    with os.scandir(directory) as names:
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in islice(names, _NAMES)), default=0.0)


def _file_system_of(path: Path) -> Mount:
    """The mount in which a path lies, as the table of mounts says; nothing is asked of it."""
    here = canonical(path)
    return max(
        (mount for mount in mounts() if here.is_relative_to(mount.mountpoint)),
        key=lambda mount: len(mount.mountpoint.parts),
    )
