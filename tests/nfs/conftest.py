"""Cases on a real NFS; they run in the virtual machine of scripts/nfs alone, which no other run of the tests has.

Each test is a case, and runs for each way to mount that SPIDERFS_NFS_WAYS names. A line for each result goes to
SPIDERFS_NFS_RESULTS. A case that lasts too long has the server healed, which ends what hangs, and fails.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from nfs_server import EXPORT, NFS, Server, Way, client

_RESULTS = os.environ.get("SPIDERFS_NFS_RESULTS")
collect_ignore_glob = [] if _RESULTS else ["*"]
# The slowest case takes a third of this.
CASE_S = 420.0


def _ways() -> list[Way]:
    return [Way(*json.loads(text)) for text in os.environ.get("SPIDERFS_NFS_WAYS", "").split(";") if text]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", _ways(), ids=str, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = os.environ.get("SPIDERFS_NFS_CASES", "").split()
    if _RESULTS and chosen:
        items[:] = [item for item in items if item.name.partition("[")[0].removeprefix("test_") in chosen]


@pytest.fixture(scope="session")
def server() -> Server:
    return Server()


@pytest.fixture(scope="session")
def way(request: pytest.FixtureRequest, server: Server) -> Iterator[Way]:
    """The way to mount; the export is mounted so at NFS meanwhile."""
    with client(request.param, NFS):
        yield request.param


@pytest.fixture(autouse=True)
def watched(server: Server) -> Iterator[None]:
    """End a case that lasts too long, and leave a healed server to the next."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the case took more than {CASE_S:g} s")

    def end() -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        server.heal()
        os.kill(os.getpid(), signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    timer = threading.Timer(CASE_S, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        server.heal()


@pytest.fixture
def at_server(way: Way, request: pytest.FixtureRequest) -> Path:
    """A new directory of the export, as the server sees it."""
    place = EXPORT / f"{request.node.originalname}-{time.monotonic_ns()}"
    place.mkdir()
    return place


@pytest.fixture
def source(at_server: Path) -> Path:
    """The same directory as this machine's client sees it."""
    return NFS / at_server.name


@pytest.fixture
def note(request: pytest.FixtureRequest) -> list[str]:
    """What a case has measured, for the table."""
    found: list[str] = []
    request.node.user_properties.append(("note", found))
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not _RESULTS or (report.when != "call" and report.passed):
        return
    name, _, parameters = report.nodeid.partition("::")[2].partition("[")
    ways = [str(way) for way in _ways() if str(way) in parameters]
    result = {
        "case": name.removeprefix("test_"),
        "way": max(ways, key=len) if ways else "",
        "parameter": parameters.rstrip("]"),
        "outcome": report.outcome if report.when == "call" or not report.failed else f"failed at {report.when}",
        "seconds": round(report.duration, 1),
        "note": "; ".join(text for key, texts in report.user_properties if key == "note" for text in texts),
        "said": report.longreprtext[-4000:] if report.failed else "",
    }
    with open(_RESULTS, "a") as file:
        file.write(json.dumps(result) + "\n")
