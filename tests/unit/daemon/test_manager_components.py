"""The manager's components together, without a mount: control files, and what a new manager makes of the last one's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.daemon.context import MountContext
from spiderfs.daemon.manager import Manager
from spiderfs.daemon.published_options import publish_options, published_options
from spiderfs.errors import ConfigError, StoreFull
from spiderfs.metrics import GAUGES
from spiderfs.options.model import Options
from spiderfs.shared.published import published_terms
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.open import open_source
from spiderfs.sources.read_process import ReadProcess
from spiderfs.sources.slow import SLOW_SETTINGS
from spiderfs.store import environment
from spiderfs.vfs.control_files import FILES


class NoReading(ReadProcess):
    """Nothing here reads content."""

    def __init__(self) -> None:
        self.in_flight = InFlight()


CHANGE = {"capacity": "1MiB", "policy": "lru", "ttl": "7s", "substitute_when": "miss", "source.latency_ms": "3"}


class Mount:
    """What the supervisor has made, and one manager after the other."""

    def __init__(self, directory: Path) -> None:
        for name in ("source", "m", "cache"):
            (directory / name).mkdir()
        options = Options(source=directory / "source", mountpoint=directory / "m", cache_dir=directory / "cache")
        self.context = MountContext(options, open_source(options.source))
        environment.claim(self.context.layout.store)
        publish_options(self.context.layout.run, options)
        self.manager = self.next_manager()

    def next_manager(self) -> Manager:
        manager = Manager(self.context, NoReading())
        manager._cache.restore(manager._capacity.budget_bytes, None)
        manager._training.begin(None)
        return manager

    def end(self) -> None:
        """Let go of what a process lets go of when it ends."""
        self.manager._content.close()
        self.manager._records.close()
        self.manager._prefetcher._fetcher._fetch_lock.close()

    async def write(self, name: str, text: str) -> None:
        await self.manager._table.apply(name, text.encode())

    async def text(self, name: str) -> str:
        pieces: list[bytes] = []

        async def send(piece: bytes) -> None:
            pieces.append(piece)

        await self.manager._table.render(name, send)
        return b"".join(pieces).decode()

    def workers_options(self) -> Options:
        return published_options(self.context.layout.run, self.context.options)

    def check(self) -> None:
        """Every component of the manager, the faults and the clients' terms agree with what workers follow."""
        options, manager = self.workers_options(), self.manager
        assert manager._options.current == options
        assert manager._content.usage().capacity_bytes == options.capacity.amount
        assert manager._cache.engine.policy.name == options.policy
        assert manager._prefetcher._leaves_substitutes == (options.substitute_when == "miss")
        faults = self.context.slow
        assert {name: faults.get(name) for name in SLOW_SETTINGS} == options.slow_settings()
        terms, _ = published_terms(self.context.layout.run.client_terms)
        assert (terms.ttl_s, terms.wait_for_fetches) == (options.ttl, options.substitute_when == "late")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path)
    yield mount
    mount.end()
    mount.context.source.close()
    mount.context.control_listener.close()


def settings() -> str:
    return "".join(f"{name}={value}\n" for name, value in CHANGE.items())


async def test_every_control_file_says_something(mount: Mount) -> None:
    texts = {file.name.decode(): await mount.text(file.name.decode()) for file in FILES}
    # Nothing is cached, scored or redirected yet, and the log is read from its file.
    assert {name for name, text in texts.items() if not text} == {"cache", "scores", "redirects", "log", "epochs"}
    figures = json.loads(texts["stats.json"])
    assert figures["capacity_bytes"] == 10 << 30
    assert {gauge.name for gauge in GAUGES} <= set(figures["metrics"])
    written = {file.name.decode() for file in FILES if file.mode & 0o200}
    assert set(mount.manager._table._acts) == written


async def test_a_change_reaches_every_component(mount: Mount) -> None:
    mount.check()
    await mount.write("config", settings())
    options = mount.workers_options()
    assert (options.capacity.amount, options.policy, options.ttl) == (1 << 20, "lru", 7.0)
    mount.check()


async def test_a_refused_change_leaves_everything_as_it_was(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mount.workers_options()

    def full(terms: object) -> None:
        raise StoreFull("no space left")

    with monkeypatch.context() as patched:
        # The last component, when all others have taken the change over.
        patched.setattr(mount.manager._client_pipe, "change", full)
        with pytest.raises(StoreFull):
            await mount.write("config", settings())
    assert mount.workers_options() == mount.manager._options.current == before
    await mount.manager._options.settle()
    mount.check()
    assert "# no space left\n" in await mount.text("config")
    with pytest.raises(ConfigError, match="cannot be changed while mounted"):
        await mount.write("config", "ttl=9s\nworkers=4")
    assert mount.workers_options() == before
    await mount.write("config", settings())
    mount.check()
    assert "was refused" not in await mount.text("config")
