"""Mounting: which binding speaks to the kernel is chosen here, and known nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spiderfs.errors import MountError
from spiderfs.fuse import session
from spiderfs.fuse.kernel import Kernel
from spiderfs.fuse.kernel_binding import KernelBinding


def mount(
    binding: str, at: Path, source: str, allow_other: bool, programs_run: bool, opens_are_asked: bool = True
) -> Kernel:
    """Mount, and answer the kernel's first question (INIT); raises MountError.

    `opens_are_asked`: whether the kernel is to ask for each open (`unopened.py`).
    """
    speak = BINDINGS[binding]()
    return speak(session.mount(at, source, allow_other, programs_run, opens_are_asked))


def _kernel() -> Callable[[int], Kernel]:
    return KernelBinding


def _pyfuse3() -> Callable[[int], Kernel]:
    # Here, for spiderfs works without pyfuse3.
    try:
        from spiderfs.fuse.pyfuse3_binding import Pyfuse3Binding
    except ImportError as exc:
        raise MountError(
            f"binding=pyfuse3 cannot be used here ({exc}): "
            "run `pip install '.[pyfuse3]'` in a checkout of spiderfs, or mount with -o binding=kernel"
        ) from exc
    return Pyfuse3Binding


# Each function loads one binding and returns what makes a `Kernel` of the descriptor of a mount. It raises MountError
# if the binding is not installed.
BINDINGS: dict[str, Callable[[], Callable[[int], Kernel]]] = {"kernel": _kernel, "pyfuse3": _pyfuse3}
