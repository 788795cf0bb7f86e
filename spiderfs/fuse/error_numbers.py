"""What the kernel is told of an exception, whichever binding tells it."""

from __future__ import annotations

import errno
import logging

from spiderfs.errors import SpiderfsError
from spiderfs.metrics import Counters

log = logging.getLogger(__name__)


def error_number(exc: Exception, counters: Counters) -> int:
    """The errno for what a handler has raised."""
    if isinstance(exc, SpiderfsError):
        if exc.errno == errno.EIO:
            log.warning("%s", exc)
        return exc.errno
    counters.add("internal_errors")
    log.error("unexpected error in a request handler", exc_info=exc)
    return errno.EIO
