"""What each control file says, and what writing to it does: two tables, by name."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from itertools import islice
from typing import TYPE_CHECKING, Any

import trio

from spiderfs import __version__
from spiderfs.daemon.caching.patterns import Pattern
from spiderfs.daemon.control.channel import Send
from spiderfs.errors import ConfigError, NotFound
from spiderfs.metrics import prometheus_text
from spiderfs.options.units import round_size
from spiderfs.shared.redirect_table import each_redirect
from spiderfs.store.store import LANDING, Member

if TYPE_CHECKING:
    from spiderfs.daemon.manager import Manager


# Samples by which the recall of the graph is judged: 0.1 s for a million.
_RECALL_SAMPLE = 256
# Lines between two chances for events to be folded: some 3 ms.
_AT_A_TIME = 1000
# Each takes as much disk as it is long, and half of the manager's time while it is written.
_LISTS_AT_ONCE = 4


class ControlTable:
    """`nursery` is where what a change sets off goes on."""

    def __init__(self, manager: Manager, nursery: trio.Nursery) -> None:
        self._manager = manager
        self._nursery = nursery
        self._last_refusal = ""
        self._renders: dict[str, Callable[[], bytes]] = {
            "stats": self._stats,
            "stats.json": lambda: json.dumps(self._figures(), indent=2).encode() + b"\n",
            "metrics": self._metrics,
            "config": self._config,
            "warm": lambda: self._manager.warmer.warm_progress().encode(),
            "evict": lambda: self._manager.warmer.evict_result().encode(),
            "plan": self._plan,
            "ratio": self._ratio,
            "log": self._log,
            "hook": lambda: os.fsencode(self._manager.context.directories.run.hook_socket) + b"\n",
            "version": lambda: f"{__version__}\n".encode(),
        }
        # These are made of any number of pieces, and give way to events between two of them.
        self._lists: dict[str, Callable[[], AsyncGenerator[bytes]]] = {
            "cache": self._cache,
            "scores": self._scores,
            "redirects": self._redirects,
            "graph": self._graph,
        }
        self._listing = trio.CapacityLimiter(_LISTS_AT_ONCE)
        self._applies: dict[str, Callable[[bytes], Awaitable[None]]] = {
            "config": self._change_config,
            "warm": self._warm,
            "evict": lambda text: self._manager.evict(self._patterns(text)),
            "ratio": self._pin_ratio,
        }

    async def render(self, name: str, send: Send) -> None:
        """Send the text of a control file; raises NotFound."""
        if name in self._lists:
            async with self._listing, aclosing(self._lists[name]()) as pieces:
                async for piece in pieces:
                    await send(piece)
        elif name in self._renders:
            await send(self._renders[name]())
        else:
            raise NotFound(f"no control file {name}")

    async def apply(self, name: str, text: bytes) -> None:
        """Act on what was written to a control file; raises ConfigError with the reason of a refusal."""
        if name not in self._applies:
            raise ConfigError(f"{name} can only be read")
        try:
            await self._applies[name](text)
        except ConfigError as exc:
            self._last_refusal = str(exc)
            raise

    # -- figures

    def _sections(self) -> dict[str, dict[str, int]]:
        usage = self._manager.content.usage()
        engine = self._manager.cache.engine
        return {
            LANDING: {"bytes": usage.landing_bytes, "entries": usage.landing_entries},
            **{
                name: {"bytes": size, "entries": engine.section_entries[name]}
                for name, size in engine.section_bytes.items()
            },
        }

    def _figures(self) -> dict[str, Any]:
        manager = self._manager
        options = manager.options
        gauges = manager.gauges()
        counters = manager.context.counters.totals()
        return {
            "version": __version__,
            "source": str(options.source),
            "mountpoint": str(options.mountpoint),
            "pid": manager.context.supervisor_pid,
            "cache_dir": str(options.cache_dir),
            "policy": options.policy,
            "capacity": str(options.capacity),
            "capacity_bytes": int(gauges["capacity_bytes"]),
            "used_bytes": int(gauges["used_bytes"]),
            "entries": int(gauges["entries"]),
            "source_bytes": manager.survey.source_bytes if manager.survey.done else None,
            "sections": self._sections(),
            "trainers": [
                {
                    "client": trainer.hello.client,
                    "pid": trainer.pid,
                    "rank": trainer.rank,
                    "lists": {name: len(samples) for name, samples in trainer.lists.items()},
                    "batches": trainer.batches,
                    "batches_dropped": trainer.batches_dropped,
                }
                for trainer in manager.hook_server.trainers
            ],
            "plans": self._plans(),
            "workers": options.workers,
            "uptime_s": round(gauges["uptime_seconds"], 3),
            "metrics": {**counters, **gauges},
        }

    def _stats(self) -> bytes:
        figures = self._figures()
        metrics = figures["metrics"]
        opens, reads = metrics["opens"], metrics["reads"]
        measured = figures["source_bytes"]
        capacity = f"{round_size(figures['capacity_bytes'])}"
        if figures["capacity"].endswith("%"):
            capacity += f" ({figures['capacity']} of " + (
                f"{round_size(measured)})" if measured is not None else "the source, which is being measured)"
            )
        rows = [
            ("source", figures["source"] + ("" if metrics["source_reachable"] else "  (does not answer)")),
            ("mount point", figures["mountpoint"]),
            ("up", f"{figures['uptime_s']:.0f} s, pid {figures['pid']}, {figures['workers']} worker(s)"),
            ("policy", figures["policy"]),
            ("cache", f"{round_size(figures['used_bytes'])} of {capacity}, {figures['entries']} records"),
            *(
                (f"  {name}", f"{round_size(section['bytes'])}, {section['entries']} records")
                for name, section in figures["sections"].items()
            ),
            ("on disk", round_size(int(metrics["disk_bytes"]))),
            ("opens", f"{opens}, {metrics['hit_ratio']:.1%} served without waiting for the source"),
            ("around FUSE", f"{metrics['client_opens']} of the opens, by spiderfs.client"),
            ("redirected", f"{metrics['redirects']} opens, {metrics['redirects'] / max(1, opens):.1%} of all"),
            *(("trainer", self._trainer_line(trainer)) for trainer in figures["trainers"]),
            *(("plan", self._plan_line(plan)) for plan in figures["plans"]),
            ("reads", f"{reads} ({round_size(metrics['read_bytes'])}); the page cache served the others"),
            (
                "from the source",
                f"{round_size(metrics['origin_bytes'])}, {round_size(int(metrics['origin_bytes_per_open']))} per open",
            ),
            ("waited for it", f"{metrics['stall_microseconds'] / 1e6:.1f} s in all readers together"),
            (
                "troubles",
                f"{metrics['source_retries']} retries, {metrics['source_timeouts']} timeouts, "
                f"{metrics['source_errors']} errors of the source; {metrics['store_failures']} of the cache; "
                f"{metrics['checksum_failures']} checksums; {metrics['events_dropped']} events dropped; "
                f"{metrics['worker_restarts'] + metrics['manager_restarts']} processes restarted",
            ),
        ]
        return "".join(f"{name:16} {text}\n" for name, text in rows).encode(errors="surrogateescape")

    @staticmethod
    def _trainer_line(trainer: dict[str, Any]) -> str:
        lists = ", ".join(f"{name} with {count} samples" for name, count in trainer["lists"].items()) or "no list"
        # A process that the kernel cannot name here lives in another pid namespace.
        who = f"pid {trainer['pid']}" if trainer["pid"] else "of another pid namespace: never redirected"
        return f"{trainer['client']} ({who}, rank {trainer['rank']}): {lists}; {trainer['batches']} batches"

    @staticmethod
    def _plan_line(plan: dict[str, Any]) -> str:
        doing = "" if plan["believed"] else "; not followed, so it is not acted on"
        return (
            f"{plan['list']}, epoch {plan['epoch']}: {plan['position']} of {plan['length']},"
            f" {plan['ready_s']:.1f} s ready ahead, {plan['late_share']:.1%} late{doing}"
        )

    def _metrics(self) -> bytes:
        sections = {name: section["bytes"] for name, section in self._sections().items()}
        return prometheus_text(self._manager.context.counters, self._manager.gauges(), sections)

    def _config(self) -> bytes:
        lines = [f"# {self._last_refusal}\n"] if self._last_refusal else []
        if self._last_refusal:
            lines.insert(0, "# the last change was refused:\n")
        lines += [
            f"{row.name}={row.value}  # {row.help}{'; live' if row.live else ''}\n"
            for row in self._manager.options.as_table()
        ]
        return "".join(lines).encode(errors="surrogateescape")

    async def _cache(self) -> AsyncGenerator[bytes]:
        members = self._manager.content.each_member()

        def read() -> tuple[list[Member], list[bytes]]:
            some = list(islice(members, _AT_A_TIME))
            return some, self._manager.catalogue.paths(member.key.inode for member in some)

        score = self._manager.cache.score
        while (rows := await trio.to_thread.run_sync(read))[0]:
            yield b"".join(
                b"%-12s %12d %10s %s%s\n"
                % (
                    member.section.encode(),
                    member.size,
                    f"{score(member.key):.6g}".encode(),
                    path,
                    b" block %d" % member.key.block if member.key.block else b"",
                )
                for member, path in zip(*rows, strict=True)
            )

    def _log(self) -> bytes:
        """Nothing by itself: the log is a file that all workers can read, and this brings it up to date."""
        self._manager.access_log.want()
        self._manager.access_log.write()
        return b""

    # -- what training taught

    async def _redirects(self) -> AsyncGenerator[bytes]:
        redirects = each_redirect(self._manager.records)

        def read() -> bytes:
            some = list(islice(redirects, _AT_A_TIME))
            wanted = self._manager.catalogue.paths(wanted for wanted, _, _ in some)
            given = self._manager.catalogue.paths(given for _, _, given in some)
            return b"".join(
                b"%d %s -> %s\n" % (dataset, one, other)
                for (_, dataset, _), one, other in zip(some, wanted, given, strict=True)
            )

        while piece := await trio.to_thread.run_sync(read):
            yield piece

    async def _scores(self) -> AsyncGenerator[bytes]:
        for dataset in self._manager.training.lists:
            scoring = self._manager.training.scoring.of(dataset)
            if scoring is None:
                continue
            # Of one moment: a batch may be scored while they are written down.
            scores, inodes = scoring.scores.copy(), dataset.inodes
            for start in range(0, len(scores), _AT_A_TIME):
                some = slice(start, start + _AT_A_TIME)
                paths = await trio.to_thread.run_sync(self._manager.catalogue.paths, inodes[some].tolist())
                yield b"".join(
                    b"%d %s %s\n" % (dataset.number, f"{score:.6g}".encode(), path)
                    for score, path in zip(scores[some].tolist(), paths, strict=True)
                )

    async def _graph(self) -> AsyncGenerator[bytes]:
        lines = []
        # Of the lists there are now: others may be declared while these are looked at.
        for dataset in self._manager.training.lists:
            lines.append(f"dataset {dataset.number}: {dataset.name}, {len(dataset.labels)} samples\n")
            found = await self._manager.training.scoring.described(dataset, _RECALL_SAMPLE)
            if found is None:
                lines.append("  nothing scored yet\n")
                continue
            left_out = dataset.rows_left_out / max(1, dataset.rows_left_out + dataset.rows_scored)
            found.append(("rows left out", f"{left_out:.3f}  (scoring them all takes longer than training)"))
            found.append(("ms per batch", f"{1000 * dataset.scoring_s / max(1, dataset.scorings_made):.1f}"))
            lines += [f"  {name:18} {text}\n" for name, text in found]
        yield "".join(lines or ["no trainer has declared its samples yet\n"]).encode(errors="surrogateescape")

    def _plans(self) -> list[dict[str, Any]]:
        """How each planned reader and the fetches ahead of it are doing."""
        prefetcher = self._manager.prefetcher
        rows = []
        for (trainer, name), reader in self._manager.cache.engine.schedule.readers.items():
            ready = prefetcher.ready_ahead(reader)
            rows.append(
                {
                    "trainer": trainer,
                    "list": name,
                    "epoch": reader.epoch.number,
                    "position": reader.reached,
                    "length": len(reader.epoch),
                    "epochs_ahead": len(reader.later),
                    "believed": reader.believed,
                    "followed_share": round(reader.followed_share, 4),
                    "samples_per_s": round(1 / reader.pace_s, 1),
                    "ready_samples": ready,
                    "ready_s": round(ready * reader.pace_s, 3),
                    "window_samples": prefetcher.window(reader),
                    "opens": reader.opens,
                    "late_share": round(reader.late / max(1, reader.opens), 5),
                }
            )
        return rows

    def _plan(self) -> bytes:
        lines = []
        for row in self._plans():
            known = f", {row['epochs_ahead']} more known" if row["epochs_ahead"] else ""
            followed = "followed" if row["believed"] else "NOT FOLLOWED, so the policy alone decides"
            lines.append(
                f"trainer {row['trainer']}, list {row['list']}, epoch {row['epoch']}{known}\n"
                f"  position      {row['position']} of {row['length']}, {row['samples_per_s']:g} samples/s\n"
                f"  opens         {row['followed_share']:.1%} of the last ones as planned: {followed}\n"
                f"  ready ahead   {row['ready_samples']} samples, {row['ready_s']:.2f} s\n"
                f"  window        {row['window_samples']} samples\n"
                f"  late          {row['late_share']:.2%} of {row['opens']} opens\n"
            )
        prefetcher = self._manager.prefetcher
        concurrency = prefetcher.concurrency
        lines.append(
            f"fetches ahead   {len(prefetcher.under_way)} under way, {concurrency.limit} at a time"
            f" (at most {concurrency.most}), {1000 * concurrency.latency_s:.1f} ms each,"
            f" {round_size(int(concurrency.bytes_per_s))}/s\n"
            if lines
            else "no trainer has published a plan\n"
        )
        return "".join(lines).encode(errors="surrogateescape")

    def _ratio(self) -> bytes:
        elastic, policy = self._manager.training.ratio.elastic, self._manager.cache.guided
        ratio = "none: the policy has no sections for it" if policy is None else f"{policy.ratio:.4f}"
        pinned = "no" if elastic.pinned is None else f"{elastic.pinned:g}"
        return (
            f"ratio   {ratio}\npinned  {pinned}\nsigma   {elastic.sigma:.4g}\nbeta    {elastic.beta}\n"
            f"delta   {elastic.delta:.4g}\nu       {elastic.u:.4f}\n"
        ).encode()

    async def _pin_ratio(self, text: bytes) -> None:
        word = text.decode(errors="replace").strip()
        try:
            share = None if word == "auto" else float(word)
            self._manager.training.ratio.pin(share)
        except ValueError as exc:
            raise ConfigError(f"{word}: write a share from 0 to 1, or auto") from exc

    # -- changes

    async def _warm(self, text: bytes) -> None:
        self._manager.warmer.warm(self._patterns(text))

    def _patterns(self, text: bytes) -> list[Pattern]:
        mountpoint = os.fsencode(self._manager.options.mountpoint)
        patterns = [Pattern(line, mountpoint) for line in text.split(b"\n") if line]
        if not patterns:
            raise ConfigError("no path: write one path or glob a line")
        return patterns

    async def _change_config(self, text: bytes) -> None:
        options = self._manager.options
        for line in text.decode(errors="surrogateescape").splitlines():
            setting = line.partition("#")[0].strip()
            if not setting:
                continue
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"{setting}: write name=value, for example capacity=10GiB")
            options = options.changed(name.strip(), value.strip())
        self._last_refusal = ""
        self._manager.change(options, self._nursery)
