"""The kernel's NFS server and its clients, in network namespaces of one virtual machine.

`server` is the namespace of nfsd; the mounts of this machine's own namespace and of `other` are two clients of it, each
with an address and caches of its own. What the server has lies on ext4 at EXPORT; a test that changes it there changes
it at the server.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXPORT = Path("/srv/export")
# Where this machine's own client has it.
NFS = Path("/mnt/nfs")
RIGHTS = "rw,insecure,no_subtree_check,fsid=0"
SERVER_ADDRESS = {"": "10.77.0.2", "other": "10.77.1.2"}
_THREADS = "8"
# The shortest that nfsd takes: after its start it answers v4's opens only when this has passed.
GRACE_S = 10
_NFSD = Path("/proc/fs/nfsd")


def in_namespace(name: str, *command: str | Path) -> str:
    """Run a command in a network namespace ("" is this machine's own), and return what it printed."""
    prefix = ["nsenter", f"--net=/run/netns/{name}"] if name else []
    done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr or done.stdout}"
    return done.stdout


@dataclass(frozen=True)
class Way:
    """One way to mount: version, hard or soft, and how long attributes are cached."""

    version: str
    hard: bool
    short: bool

    def __str__(self) -> str:
        return f"v{self.version},{'hard' if self.hard else 'soft'}{',actimeo=1' if self.short else ''}"

    @property
    def options(self) -> str:
        # A soft mount gives up after 3 + 6 s here and not after 3 min, so that the cases need not wait as long.
        parts = [f"vers={self.version}", "sec=sys", "hard" if self.hard else "soft,timeo=30,retrans=1"]
        # Version 3 would need one more service, for locks, which spiderfs does not take at a source.
        parts += ["nolock"] if self.version == "3" else []
        parts += ["actimeo=1"] if self.short else []
        return ",".join(parts)

    @property
    def stale_s(self) -> float:
        """The longest for which the kernel's client may trust old attributes: nfs(5), actimeo, acdirmax."""
        return 1.0 if self.short else 60.0


class Server:
    """nfsd with one export, and the lines between it and its clients."""

    def __init__(self) -> None:
        for name in ("server", "other"):
            in_namespace("", "ip", "netns", "add", name)
            in_namespace(name, "ip", "link", "set", "lo", "up")
        for number, client in enumerate(SERVER_ADDRESS):
            here, there = f"line{number}", f"end{number}"
            in_namespace(client, "ip", "link", "add", here, "type", "veth", "peer", "name", there)
            in_namespace(client, "ip", "link", "set", there, "netns", "/run/netns/server")
            for namespace, device, last in ((client, here, 1), ("server", there, 2)):
                in_namespace(namespace, "ip", "address", "add", f"10.77.{number}.{last}/24", "dev", device)
                in_namespace(namespace, "ip", "link", "set", device, "up")
        # Two clients with one name would end each other's state: version 4 knows a client by it.
        identifier = "echo other > /sys/fs/nfs/net/nfs_client/identifier"
        in_namespace("", "ip", "netns", "exec", "other", "sh", "-c", identifier)
        in_namespace("server", "mount", "-t", "nfsd", "nfsd", _NFSD)
        for directory in ("/var/lib/nfs/v4recovery", "/var/lib/nfs/rmtab.d"):
            Path(directory).mkdir(parents=True, exist_ok=True)
        Path("/var/lib/nfs/etab").touch()
        in_namespace("server", "rpcbind", "-w")
        (_NFSD / "nfsv4gracetime").write_text(str(GRACE_S))
        (_NFSD / "nfsv4leasetime").write_text(str(GRACE_S))
        self.export()
        self.start()
        in_namespace("server", "rpc.mountd")

    def start(self) -> None:
        in_namespace("server", "rpc.nfsd", _THREADS)

    def stop(self) -> None:
        in_namespace("server", "rpc.nfsd", "0")

    def export(self, squash: str = "no_root_squash") -> None:
        in_namespace("server", "exportfs", "-i", "-o", f"{RIGHTS},{squash}", f"*:{EXPORT}")
        in_namespace("server", "exportfs", "-f")

    def withdraw(self) -> None:
        in_namespace("server", "exportfs", "-u", f"*:{EXPORT}")
        in_namespace("server", "exportfs", "-f")

    def cut(self) -> None:
        """Lose every packet between the server and this machine's own client, without a word to either."""
        in_namespace("", "tc", "qdisc", "replace", "dev", "line0", "root", "netem", "loss", "100%")
        in_namespace("server", "tc", "qdisc", "replace", "dev", "end0", "root", "netem", "loss", "100%")

    def join(self) -> None:
        """The line carries packets again."""
        for namespace, device in (("", "line0"), ("server", "end0")):
            with contextlib.suppress(AssertionError):
                in_namespace(namespace, "tc", "qdisc", "del", "dev", device, "root")

    def heal(self) -> None:
        """All is as it was at first, whatever a case has left."""
        self.join()
        self.export()
        if (_NFSD / "threads").read_text().strip() == "0":
            self.start()


def mount_export(way: Way, point: Path, name: str = "") -> None:
    """Mount the export at `point`, by the client of that namespace."""
    point.mkdir(parents=True, exist_ok=True)
    # Version 4 names what is exported from its own root, which fsid=0 makes this export.
    what = EXPORT if way.version == "3" else "/"
    in_namespace(name, "mount", "-t", "nfs", "-o", way.options, f"{SERVER_ADDRESS[name]}:{what}", point)


@contextlib.contextmanager
def client(way: Way, point: Path, name: str = "") -> Iterator[Path]:
    """The export at `point` until the context ends."""
    mount_export(way, point, name)
    try:
        yield point
    finally:
        # The forked program, a killed worker: whoever holds a file of the mount needs a moment to end.
        until = time.monotonic() + 20
        while subprocess.run(["umount", point], capture_output=True).returncode:
            if time.monotonic() > until:
                in_namespace("", "umount", "-f", "-l", point)
                break
            time.sleep(0.2)


@contextlib.contextmanager
def clock_off(seconds: float) -> Iterator[None]:
    """The clock shows another time, so that what the server writes has its times from there."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.time() - seconds)
