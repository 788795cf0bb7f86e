"""The error number that the kernel gets for an exception, with every binding."""

from __future__ import annotations

import errno
import logging

from spiderfs.errors import SpiderfsError
from spiderfs.metrics import Counters

log = logging.getLogger(__name__)


def error_number(exc: Exception, counters: Counters) -> int:
    """The errno for an exception of a handler. Logs an I/O error; logs and counts an exception that is not our own."""
    if isinstance(exc, SpiderfsError):
        if exc.errno == errno.EIO:
            log.warning("%s", exc)
        return exc.errno
    counters.add("internal_errors")
    log.error("unexpected error in a request handler", exc_info=exc)
    return errno.EIO
