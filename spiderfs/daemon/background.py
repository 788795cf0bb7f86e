"""Puts the daemon into the background, reports when the mount is ready, and decides where the log goes."""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spiderfs.errors import ConfigError, MountError
from spiderfs.shared.escapes import escaped
from spiderfs.shared.layout import CacheLayout

_SYSLOG = Path("/dev/log")
_LOG_MAX_BYTES = 10 << 20
_READY = "ready"
NOTIFY_S = 1.0

log = logging.getLogger(__name__)


def detach() -> Callable[[str], None] | None:
    """Fork the daemon into the background.

    In the child, this returns a function: call it once, with an empty text if the mount is ready, else with the reason
    of the failure. In the parent, this returns None as soon as the child has reported that it is ready. It raises
    MountError with the reason that the child has reported, or if the child dies without a report.
    """
    # Without these descriptors the pipe, or a file of the daemon, would become the child's standard input or output.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        # The daemon's children hold the pipe as well, so this reads to the end of the line, not of the file.
        with open(reader, "rb") as answer:
            reason = answer.readline().decode(errors="replace").rstrip("\n")
        if reason == _READY:
            return None
        raise MountError(reason or "the daemon ended before it was ready: its log says why")
    os.close(reader)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)

    unreported = [writer]

    def report(failure: str) -> None:
        # The report is sent once: after that the descriptor's number may belong to another file.
        while unreported:
            answer = unreported.pop()
            os.write(answer, f"{failure or _READY}\n".encode(errors="replace"))
            os.close(answer)

    return report


def notify_systemd(state: str) -> None:
    """Tell systemd a state such as READY=1 or STOPPING=1 (sd_notify(3)), if systemd has started this process.

    A failure is logged and does no other harm.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # A leading @ is an abstract address, written as a NUL byte (unix(7)).
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            # The process at the other end may not read.
            notify.settimeout(NOTIFY_S)
            notify.connect("\0" + address[1:] if address.startswith("@") else address)
            notify.sendall(state.encode())
    except OSError as exc:
        log.warning("systemd was not told %s at NOTIFY_SOCKET=%s (%s): the mount goes on", state, address, exc)


class _Printable(logging.Formatter):
    """Formats a message as one line, whatever bytes the paths in it have; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


def start_logging(level: str, file: Path | None, cache_dir: Path, foreground: bool) -> str:
    """Begin to log to `file`; returns the place of the log in words. Raises ConfigError if the file cannot be written.

    Where `file` is None, a daemon in the foreground logs to the terminal. Any other daemon logs to syslog, or to a file
    in the cache directory where there is no syslog.
    """
    handler: logging.Handler
    form = "%(asctime)s %(levelname)s %(processName)s[%(process)d] %(name)s: %(message)s"
    if file is None and foreground:
        handler, place = logging.StreamHandler(sys.stderr), "the log above"
    elif file is None and _SYSLOG.exists():
        handler = logging.handlers.SysLogHandler(str(_SYSLOG), facility=logging.handlers.SysLogHandler.LOG_DAEMON)
        place = "the system's log"
        form = "spiderfs[%(process)d]: %(levelname)s %(name)s: %(message)s"
    else:
        file = file or CacheLayout(cache_dir).log
        try:
            # Several processes will append to the file. It can be renamed only now, while there is one process.
            if file.exists() and file.stat().st_size > _LOG_MAX_BYTES:
                file.replace(file.with_name(file.name + ".1"))
            handler, place = logging.FileHandler(file), f"the log {file}"
        except OSError as exc:
            raise ConfigError(
                f"log_file={file} cannot be written ({exc.strerror}): name a file in a directory that exists"
            ) from exc
    handler.setFormatter(_Printable(form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return place
