"""What the kernel is told of an exception, whichever binding tells it."""

from __future__ import annotations

import errno
import logging

from spiderfs.errors import SpiderfsError, StoreCorrupt
from spiderfs.metrics import Counters
from spiderfs.store.environment import end_as_corrupt

log = logging.getLogger(__name__)


def error_number(exc: Exception, counters: Counters) -> int:
    """The errno for what a handler has raised."""
    if isinstance(exc, StoreCorrupt):
        # The supervisor rebuilds the store and starts the workers again; the kernel then asks anew, so that no reader
        # sees an error. Nothing of this process is worth saving.
        end_as_corrupt(exc)
    if isinstance(exc, SpiderfsError):
        if exc.errno == errno.EIO:
            log.warning("%s", exc)
        return exc.errno
    counters.add("internal_errors")
    log.error("unexpected error in a request handler", exc_info=exc)
    return errno.EIO
