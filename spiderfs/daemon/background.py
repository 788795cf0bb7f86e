"""Puts the daemon into the background, reports when the mount is ready, and decides where the log goes.

A log stays bounded whatever fails: of the warnings of one place in the code so many are logged in a minute, by each
process, and a log file that has grown to `_LOG_MAX_BYTES` is renamed to `*.1`.
"""

from __future__ import annotations

import fcntl
import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spiderfs.errors import ConfigError, MountError
from spiderfs.linux import steady_clock
from spiderfs.shared.escapes import escaped
from spiderfs.shared.layout import CacheLayout

_SYSLOG = Path("/dev/log")
_LOG_MAX_BYTES = 10 << 20
# Enough to see what fails, and of which files; a training that gets errors may meet thousands in a second.
_MOST_ALIKE, _ALIKE_S = 20, 60.0
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
        raise MountError(reason or "the daemon ended before it was ready: see its log")
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
    """Send systemd a state such as READY=1 (sd_notify(3)), if it has started this process; a failure is logged."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    # A leading @ is an abstract address, written as a NUL byte (unix(7)).
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            # The process at the other end may not read.
            notify.settimeout(NOTIFY_S)
            notify.connect("\0" + address[1:] if address.startswith("@") else address)
            notify.sendall(state.encode())
    except OSError as exc:
        log.warning("systemd was not sent %s at NOTIFY_SOCKET=%s (%s): the mount continues", state, address, exc)


class _Printable(logging.Formatter):
    """Formats a message as one line, whatever bytes the paths in it have; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(escaped, super().formatException(ei).split("\n")))


class _Limit(logging.Filter):
    """Lets through _MOST_ALIKE warnings of each place in the code in _ALIKE_S seconds, and says what it left out."""

    def __init__(self) -> None:
        super().__init__()
        # Place in the code -> when its first warning came, and how many came since.
        self._since: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, place, said = steady_clock.now(), (record.pathname, record.lineno), ""
        began, count = self._since.get(place, (now, 0))
        if now - began >= _ALIKE_S:
            if count > _MOST_ALIKE:
                said = f"{count - _MOST_ALIKE:,} lines like this were left out"
            began, count = now, 0
        self._since[place] = began, count + 1
        if count + 1 == _MOST_ALIKE:
            said = f"further lines like this are left out and counted, for {_ALIKE_S:.0f} s"
        if said:
            record.msg, record.args = f"{record.getMessage()} ({said})", ()
        return count < _MOST_ALIKE


class _LogFile(logging.handlers.WatchedFileHandler):
    """A file to which several processes append, and which the first that finds it too long renames."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
            self._rename_if_long()
        except OSError:
            # The file cannot be made again: its directory is gone, or full. That costs the line, and not the process.
            pass

    def _rename_if_long(self) -> None:
        assert self.stream is not None
        fd, name = self.stream.fileno(), self.baseFilename
        if os.fstat(fd).st_size <= _LOG_MAX_BYTES:
            return
        # All other processes open the new file with their next line, and wait here if they want to rename it too.
        fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.stat(name), os.fstat(fd)):
                os.replace(name, f"{name}.1")
        except FileNotFoundError:
            pass
        except OSError:  # its directory may not be written
            os.ftruncate(fd, 0)
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)


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
            handler, place = _LogFile(file), f"the log {file}"
        except OSError as exc:
            raise ConfigError(
                f"log_file={file} cannot be written ({exc.strerror}): name a file in a directory that exists"
            ) from exc
    handler.setFormatter(_Printable(form))
    handler.addFilter(_Limit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return place
