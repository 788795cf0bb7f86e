"""Going to the background, saying when the mount is there, and where the log goes."""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from spiderfs.errors import ConfigError, MountError
from spiderfs.shared.layout import CacheLayout

_SYSLOG = Path("/dev/log")
_LOG_MAX_BYTES = 10 << 20
_READY = "ready"
NOTIFY_S = 1.0

log = logging.getLogger(__name__)


def detach() -> Callable[[str], None] | None:
    """Fork into the background; in the child, returns what to call once with an empty text, or why it failed.

    In the parent, returns None when the child has said that it is ready, and raises MountError with its reason or if it
    dies without a word.
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
        # The report is sent once: after that the number may be that of another file.
        while unreported:
            answer = unreported.pop()
            os.write(answer, f"{failure or _READY}\n".encode(errors="replace"))
            os.close(answer)

    return report


def notify_systemd(state: str) -> None:
    """Tell systemd, if it started us (sd_notify(3)): READY=1, STOPPING=1; a mount lives and ends well without."""
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
    """Messages that can be written down: the paths in them need not be UTF-8."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).encode(errors="backslashreplace").decode()


def start_logging(level: str, file: Path | None, cache_dir: Path, foreground: bool) -> str:
    """Log to `file`; else to the terminal in the foreground, and to syslog, or a file in the cache, behind it.

    Returns where that is, in words. Raises ConfigError where the file cannot be written.
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
            # Several processes append to it, so it can only be turned over while there is one.
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
