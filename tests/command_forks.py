"""Runs commands of `spiderfs` in forks of one process that has imported the program.

To start Python and to import what a mount needs costs more than all else that a mount does in most tests. The process
has imported what `spiderfs mount` imports before it forks the daemon, and nothing else: what a mount's processes import
later, each imports for itself here too. A fork is given what a program inherits: arguments, environment, working
directory, umask and limits.

Tests of the program itself start it (`mounting.SPIDERFS`): those of mount(8), of a mount in the foreground, and the
examples of what docs/reference/semantics.md promises that call it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

# A request is one message, as long as the longest that a Unix socket takes by default.
_REQUEST_BYTES = 200 << 10
# What is answered: the pid of the fork, and when it has ended its exit status as `subprocess` gives it.
_ANSWER = struct.Struct("<i")
_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
# What the program has imported when it forks the daemon.
_IMPORTED = ("spiderfs.cli.main", "spiderfs.cli.mount", "spiderfs.daemon.supervisor")


class CommandForks:
    """The process that is forked, and what asks it; safe for threads. It ends with the process that has made it."""

    def __init__(self) -> None:
        # Here: a program that multiprocessing starts in a fork imports this module, and does not find the tests'.
        from programs import not_ignoring_interrupts

        not_ignoring_interrupts()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def close(self) -> None:
        # Closing is not enough: forks of this process have the socket too.
        self._requests.shutdown(socket.SHUT_RDWR)
        self._requests.close()
        self._process.wait()

    def run(
        self, arguments: list[str], environment: Mapping[str, str], within_s: float, first: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """What subprocess.run() returns of `spiderfs ARGUMENT...`; `first` is Python that the fork runs before it."""
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(open(os.memfd_create(name), "r+")) for name in ("stdout", "stderr"))
            reader, writer = os.pipe()
            stack.callback(os.close, reader)
            request = {
                "arguments": arguments,
                "environment": dict(environment),
                "directory": os.getcwd(),
                "umask": _umask(),
                "limits": [(number, resource.getrlimit(number)) for number in _LIMITS],
                "first": first,
            }
            try:
                message = json.dumps(request).encode()
                socket.send_fds(self._requests, [message], [out.fileno(), err.fileno(), writer])
            finally:
                os.close(writer)
            deadline = time.monotonic() + within_s
            pid = _heard(reader, deadline)
            assert pid is not None, "the process that is forked does not answer"
            status = _heard(reader, deadline)
            if status is None:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["spiderfs", *arguments], within_s)
            texts = []
            for file in (out, err):
                # The offset is that of the forks, which have written.
                file.seek(0)
                texts.append(file.read())
            return subprocess.CompletedProcess(["spiderfs", *arguments], status, *texts)


_making = threading.Lock()


def command_forks() -> CommandForks:
    """The one of this process, made when it is first needed."""
    with _making:
        return _made()


@functools.cache
def _made() -> CommandForks:
    return CommandForks()


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def _heard(reader: int, deadline: float) -> int | None:
    """The next answer; None if there is none in time."""
    if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return None
    answer = os.read(reader, _ANSWER.size)
    assert answer, "the process that is forked has ended"
    number: int = _ANSWER.unpack(answer)[0]
    return number


# -- the process that is forked


def _serve(requests: socket.socket) -> NoReturn:
    """Fork for each request, until whoever asks has gone."""
    for name in _IMPORTED:
        importlib.import_module(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            _attend(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _attend(request: dict[str, Any], out: int, err: int, answers: int) -> NoReturn:
    """Run a command in another fork, and tell how it ended."""
    try:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _run(request, out, err)
        os.close(out)
        os.close(err)
        os.write(answers, _ANSWER.pack(pid))
        os.write(answers, _ANSWER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    finally:
        os._exit(0)


def _run(request: dict[str, Any], out: int, err: int) -> NoReturn:
    status = 1
    try:
        for descriptor, standard in ((out, 1), (err, 2)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.chdir(request["directory"])
        os.umask(request["umask"])
        for number, limits in request["limits"]:
            resource.setrlimit(number, tuple(limits))
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["spiderfs", *request["arguments"]]
        exec(request["first"], {})
        sys.modules["spiderfs.cli.main"].main()
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    # As in the program, whose modules are found without the directory of the tests.
    del sys.path[0]
    _serve(socket.socket(fileno=int(sys.argv[1])))
