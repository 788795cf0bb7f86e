"""The virtual machine of scripts/nfs: its packages, its first file system, and the one process that it is.

The packages come from Debian by apt and are unpacked, not installed, below `.nfs/`. The machine has this machine's own
files: the root is shared by 9p, to be read only, and the machine writes into an overlay in its memory. So the
project's `.venv-dev` runs in it as it is. The processor is emulated, which shows what is right and not what is fast.
"""

from __future__ import annotations

import ctypes
import gzip
import lzma
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".nfs"
EMULATOR = ("qemu-system-x86",)
INSIDE = ("nfs-kernel-server", "nfs-common", "busybox-static", "iproute2")
KERNEL = "linux-image-amd64"
# Modules of the kernel, with all that they depend on. ext4 asks for crc32c by name and not as a dependency.
MODULES = "virtio_pci virtio_blk crc32c_generic ext4 9pnet_virtio 9p overlay fuse nfs nfsv3 nfsv4 nfsd veth sch_netem"
MEMORY = "4G"
# The overlay, /run and the tests' files share this much of the machine's memory at most.
OVERLAY_SIZE = "2g"
EXPORT_BYTES, LOCAL_BYTES = 1 << 29, 4 << 30
_PR_SET_PDEATHSIG = 1

_INIT = f"""#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /sys /dev /lower /upper /root
$b mount -t proc proc /proc; $b mount -t sysfs sysfs /sys; $b mount -t devtmpfs dev /dev
for module in $($b cat /order); do $b insmod /modules/$module || echo "module $module: refused"; done
share=trans=virtio,version=9p2000.L,msize=262144
$b mount -t 9p -o $share,ro,cache=loose root /lower
$b mount -t tmpfs -o size={OVERLAY_SIZE} upper /upper; $b mkdir -p /upper/u /upper/w
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w overlay /root
for d in proc sys dev; do $b mount --move /$d /root/$d; done
$b mount -t tmpfs run /root/run; $b mkdir -p /root/run/machine
$b mount -t 9p -o $share,cache=none work /root/run/machine
exec $b switch_root /root /bin/bash /run/machine/inside.sh
"""


class NoMachine(Exception):
    """The machine cannot be made; the message is one line for the user."""


@dataclass(frozen=True)
class Parts:
    """What the machine is made of: folders of unpacked packages."""

    emulator: Path
    inside: Path
    kernel: Path

    @property
    def release(self) -> str:
        return next(path.name for path in self._modules.iterdir())

    @property
    def _modules(self) -> Path:
        found = [path for path in (self.kernel / "lib/modules", self.kernel / "usr/lib/modules") if path.is_dir()]
        return found[0]

    def module_files(self) -> dict[str, Path]:
        """The files of all modules, by name."""
        files = (path for path in (self._modules / self.release).rglob("*.ko*"))
        return {path.name.split(".ko")[0].replace("-", "_"): path for path in files}


def get_parts(kernel: str) -> Parts:
    """Download and unpack what is missing; `kernel` is "stable" or "backports". Raises NoMachine."""
    for program in ("apt-get", "dpkg-deb", "mkfs.ext4"):
        if shutil.which(program) is None:
            raise NoMachine(f"there is no {program} here: run scripts/nfs on Debian, where apt has the packages")
    return Parts(
        emulator=_unpacked("emulator", lambda: _missing(*EMULATOR)),
        inside=_unpacked("inside", lambda: _missing(*INSIDE)),
        kernel=_unpacked(f"kernel-{kernel}", lambda: [_image(kernel)], _backports() if kernel == "backports" else []),
    )


def _unpacked(name: str, packages: Callable[[], list[str]], options: list[str] | None = None) -> Path:
    """A folder with the packages' files, made at the first call."""
    place, made = CACHE / name, CACHE / f"{name}.new"
    if place.exists():
        return place
    shutil.rmtree(made, ignore_errors=True)
    (debs := made / "debs").mkdir(parents=True)
    _apt("apt-get", *(options or []), "download", "-qq", *packages(), cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", deb, made], check=True)
    shutil.rmtree(debs)
    made.rename(place)
    return place


def _missing(*packages: str) -> list[str]:
    """The packages, with all that they need and this machine has not installed."""
    # An archive folder of its own: apt does not list the packages that the system's one has.
    (archives := CACHE / "archives").joinpath("partial").mkdir(parents=True, exist_ok=True)
    where = ["-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1"]
    text = _apt("apt-get", *where, "install", "-y", "--no-install-recommends", "--reinstall", "--print-uris", *packages)
    return re.findall(r"^'\S+' ([^_ ]+)_", text, re.MULTILINE)


def _image(kernel: str) -> str:
    """The package of the newest kernel, of which `linux-image-amd64` has only the name."""
    options = _backports() if kernel == "backports" else []
    depends = re.search(r"Depends: (linux-image-\S+)", _apt("apt-cache", *options, "depends", KERNEL))
    if not depends:
        raise NoMachine(f"apt knows no {KERNEL}: run apt-get update, then run this again")
    return str(depends[1])


def _backports() -> list[str]:
    """Options by which apt knows the backports of this Debian alone; raises NoMachine."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    where = CACHE / "backports"
    (where / "lists/partial").mkdir(parents=True, exist_ok=True)
    (where / "archives/partial").mkdir(parents=True, exist_ok=True)
    codename = release[1] if release else "stable"
    suite = f"{codename}-backports"
    # From where this machine has its other packages.
    archives = _apt("apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {codename}", "Component: main")
    if not archives:
        raise NoMachine(f"apt knows no archive of {codename}, so there is no newer kernel: run apt-get update")
    (where / "sources.list").write_text(f"deb {archives.split()[0]} {suite} main\n")
    folders = {
        "Dir::Etc::sourcelist": where / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": where / "lists",
        "Dir::Cache": where,
    }
    options = [part for name, value in folders.items() for part in ("-o", f"{name}={value}")]
    if not any((where / "lists").glob("*Packages*")):
        try:
            _apt("apt-get", *options, "-o", "APT::Update::Error-Mode=any", "update", "-qq")
        except NoMachine as exc:
            raise NoMachine(f"apt cannot reach {suite} here, so there is no newer kernel: {exc}") from exc
    return options


def _apt(*command: str, cwd: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoMachine(f"{' '.join(command[:1])} failed: {said[-1] if said else done.returncode}")
    return done.stdout


def make_initrd(parts: Parts, to: Path) -> None:
    """Write the first file system: busybox, the modules in their order, and `init`."""
    files: dict[str, tuple[int, bytes]] = {
        "init": (0o100755, _INIT.encode()),
        "bin": (0o040755, b""),
        "modules": (0o040755, b""),
        "bin/busybox": (0o100755, next(parts.inside.glob("**/bin/busybox")).read_bytes()),
    }
    order: list[str] = []
    known = parts.module_files()

    def add(name: str) -> None:
        # What the kernel has built in has no file.
        if f"{name}.ko" in order or name not in known:
            return
        path = known[name]
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        needed = re.search(rb"\0depends=([^\0]+)", content)
        for other in needed[1].decode().split(",") if needed else []:
            add(other.replace("-", "_"))
        order.append(f"{name}.ko")
        files[f"modules/{name}.ko"] = (0o100644, content)

    for name in MODULES.split():
        add(name)
    files["order"] = (0o100644, "\n".join(order).encode())
    to.write_bytes(gzip.compress(_cpio(files), 1))


def _cpio(files: dict[str, tuple[int, bytes]]) -> bytes:
    """An archive as cpio(5) describes it: "new ASCII format"."""
    written = bytearray()

    def pad() -> None:
        written.extend(bytes(-len(written) % 4))

    for number, (name, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
        written.extend(b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0")
        pad()
        written.extend(content)
        pad()
    return bytes(written)


@contextmanager
def machine(parts: Parts, work: Path, inside: str) -> Iterator[subprocess.Popen[bytes]]:
    """The running machine, whose first process runs the shell script `inside`, with `work` at /run/machine.

    What it prints is in `work`/console.log. When the context ends, however it ends, so does the machine; it ends too if
    this process is killed.
    """
    (work / "inside.sh").write_text(inside)
    make_initrd(parts, work / "initrd.gz")
    for name, size in (("export", EXPORT_BYTES), ("local", LOCAL_BYTES)):
        image = work / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    found = sorted({str(path.parent) for path in parts.emulator.rglob("*.so*")})
    share = parts.emulator / "usr/share"
    process = subprocess.Popen(
        [
            next(parts.emulator.glob("**/bin/qemu-system-x86_64")),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-m", MEMORY, "-smp", "2", "-no-reboot", "-nic", "none"),
            *("-L", share / "qemu", "-L", share / "seabios", "-display", "none", "-monitor", "none"),
            *("-serial", f"file:{work / 'console.log'}"),
            *("-kernel", next(parts.kernel.glob("boot/vmlinuz-*")), "-initrd", work / "initrd.gz"),
            *("-append", "console=ttyS0 quiet panic=1"),
            *("-fsdev", "local,id=r,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=r,mount_tag=root"),
            *(
                "-fsdev",
                f"local,id=w,path={work},security_model=none",
                "-device",
                "virtio-9p-pci,fsdev=w,mount_tag=work",
            ),
            *("-drive", f"file={work / 'export.img'},format=raw,if=virtio,cache=unsafe"),
            *("-drive", f"file={work / 'local.img'},format=raw,if=virtio,cache=unsafe"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=(work / "emulator.log").open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(found)},
        preexec_fn=_die_with_parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
