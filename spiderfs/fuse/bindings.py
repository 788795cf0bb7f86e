"""Mounting: which binding speaks to the kernel is chosen here, and known nowhere else."""

from __future__ import annotations

from pathlib import Path

from spiderfs.fuse import session
from spiderfs.fuse.kernel import Kernel
from spiderfs.fuse.kernel_binding import KernelBinding


def mount(at: Path, source: str, allow_other: bool, programs_run: bool) -> Kernel:
    """Mount, and answer the kernel's first question (INIT); raises MountError."""
    return KernelBinding(session.mount(at, source, allow_other, programs_run))
