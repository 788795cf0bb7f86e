"""Daemons without a mount for tests (`spiderfs serve`), watched as `mounting` watches mounts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mounting import PATIENCE_S, Mounted, Process, eventually, lock_holder, options_text, run_spiderfs, settle

from benchmarks.fakes.faulty_source import Faults, registering
from spiderfs.client.served import Served
from spiderfs.protocol.requests import ENVIRONMENT

NAME = "data"
URL = f"spiderfs://{NAME}"


class ServedDaemon(Mounted):
    """A daemon that serves `spiderfs://NAME`; `point` is its socket, and there are no control files at a path."""

    @property
    def files(self) -> Served:
        return Served(self.point.name)

    def stats(self) -> dict[str, Any]:
        def read() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = json.loads(self.files.read_bytes(".spiderfs/stats.json"))
            except BlockingIOError:
                return None  # the manager is being started
            return found

        found = eventually(read, what="stats.json")
        assert found is not None
        return found

    def is_mounted(self) -> bool:
        return self.point.exists()


@contextlib.contextmanager
def served(
    source: Path,
    place: Path,
    *,
    workers: int = 1,
    allowed: Sequence[str] = (),
    name: str = NAME,
    first: str = "",
    **options: object,
) -> Iterator[ServedDaemon]:
    """Serve `source` as `spiderfs://data`, or another name; all else is as for `mounting.mounted`."""
    faults = Faults.made()
    settle(source)
    place.mkdir(parents=True, exist_ok=True)
    cache, log = place / "cache", place / "daemon.log"
    before = os.environ.get(ENVIRONMENT)
    # A short path: the directory of a test may be longer than the address of a socket.
    os.environ[ENVIRONMENT] = os.fspath(place / "served")
    chosen = options_text({"cache_dir": cache, "log_file": log, "workers": workers, **options})
    try:
        done = run_spiderfs("serve", source, "--name", name, "-o", chosen, first=registering(faults) + first)
        assert done.returncode == 0, done.stderr
        daemon = ServedDaemon(source, place / "served" / name, cache, log, workers, Process(lock_holder(cache)), faults)
        daemon.expect(*allowed)
        try:
            yield daemon
            if not daemon.supervisor.ended():
                assert daemon.metric("internal_errors") == 0, log.read_text()
            daemon.stop()
            assert daemon.unexpected_log_lines() == []
            assert not daemon.is_mounted()
        except BaseException:
            sys.stderr.write(f"--- {log}\n{log.read_text(errors='replace')[-8000:]}")
            raise
        finally:
            daemon.supervisor.signal(signal.SIGTERM)
            if not daemon.supervisor.ended(PATIENCE_S):
                daemon.supervisor.signal(signal.SIGKILL)
            daemon.supervisor.close()
    finally:
        faults.close()
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before
