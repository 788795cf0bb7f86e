"""Programs of others, from Debian's packages, for benchmarks and tests.

What is not installed is unpacked beside the virtual environment: to install these packages would start servers.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path


class NotThere(Exception):
    """A program is not on this machine; the message says what to do."""


@functools.cache
def program(name: str, package: str, *libraries: str) -> str:
    """The path of a program of this package; raises NotThere.

    What is unpacked finds the libraries of these other packages by `environment_of`.
    """
    installed = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if installed:
        return installed
    place = Path(sys.prefix) / "debian" / package
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        # Several processes run tests.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not any((place / directory / name).exists() for directory in ("usr/bin", "usr/sbin")):
            try:
                command = ["apt-get", "download", "-qq", package, *libraries]
                subprocess.run(command, cwd=place, capture_output=True, check=True)
                # The program last: it is there when all of it is.
                for unpacked in (*libraries, package):
                    (archive,) = place.glob(f"{unpacked}_*.deb")
                    subprocess.run(["dpkg-deb", "-x", archive, place], capture_output=True, check=True)
                    archive.unlink()
            except (OSError, subprocess.CalledProcessError, ValueError) as exc:
                raise NotThere(f"there is no {name}, and apt-get gives none ({exc}): install {package}") from exc
    for directory in ("usr/bin", "usr/sbin"):
        if (place / directory / name).exists():
            return str(place / directory / name)
    raise NotThere(f"the package {package} has no {name}: install {name}")


def environment_of(path: str) -> dict[str, str]:
    """The environment of a program of this path: one that was unpacked has its libraries beside it."""
    found = sorted(map(str, Path(path).parents[1].glob("lib/*-linux-gnu"))) if "/debian/" in path else []
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(found)} if found else dict(os.environ)
