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
def program(name: str, package: str) -> str:
    """The path of a program of this package; raises NotThere."""
    installed = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if installed:
        return installed
    place = Path(sys.prefix) / "debian" / package
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "w") as lock:
        # Several processes run tests.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not (place / "usr").exists():
            try:
                subprocess.run(["apt-get", "download", "-qq", package], cwd=place, capture_output=True, check=True)
                (archive,) = place.glob(f"{package}_*.deb")
                subprocess.run(["dpkg-deb", "-x", archive, place], capture_output=True, check=True)
                archive.unlink()
            except (OSError, subprocess.CalledProcessError, ValueError) as exc:
                raise NotThere(f"there is no {name}, and apt-get gives none ({exc}): install {package}") from exc
    for directory in ("usr/bin", "usr/sbin"):
        if (place / directory / name).exists():
            return str(place / directory / name)
    raise NotThere(f"the package {package} has no {name}: install {name}")
