"""Ending with the parent, however that ends: PR_SET_PDEATHSIG of prctl(2)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when its parent has ended.

    Returns whether the parent is still `parent`: one that ended before this call sends nothing.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
