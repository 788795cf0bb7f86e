"""The texts of control files: each function turns the status of a component into one.

Texts that may be of any length come in pieces, and other tasks run between two.

The module is long because there are many control files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import trio

from spiderfs import __version__
from spiderfs.core.learning.teaching import RatioStatus
from spiderfs.daemon.caching.cache_control import PinsStatus
from spiderfs.daemon.caching.prefetcher import PlanStatus, PrefetcherStatus
from spiderfs.daemon.chosen_partition import Partition
from spiderfs.daemon.control.status import MountStatus
from spiderfs.daemon.training.courses.courses import Courses
from spiderfs.daemon.training.courses.job_accounts import JobStatus
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.metrics import SharedCounters, prometheus_text
from spiderfs.options.model import Options
from spiderfs.options.units import round_size
from spiderfs.shared.escapes import escaped, escaped_path
from spiderfs.shared.warming import Warming
from spiderfs.store.store import Content, ContentKey, Member, Records
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.redirects import each_redirect
from spiderfs.views.recipe import NO_VIEW, ORIGINAL


def stats(status: MountStatus) -> bytes:
    """The figures that a person wants to know at a glance."""
    options, cache, counters, gauges = status.options, status.cache, status.counters, status.gauges()
    opens = counters["opens"]
    rows = [
        ("source", f"{options.source}" + ("" if status.source_reachable else "  (does not answer)")),
        ("mount point", str(options.mountpoint)),
        ("up", f"{status.uptime_s:.0f} s, pid {status.pid}, {options.workers} worker(s)"),
        ("policy", options.policy),
        ("cache", f"{round_size(cache.used_bytes)} of {_capacity(status)}, {cache.entries:,} records"),
        *(
            (f"  {name}", f"{round_size(section.bytes)}, {section.entries:,} records")
            for name, section in cache.sections.items()
            if section.entries
        ),
        *_pin_rows(cache.pins),
        *_split_rows(status),
        *_view_rows(status),
        ("on disk", round_size(status.disk_bytes)),
        ("opens", f"{opens:,}, {counters['opens_hit'] / max(1, opens):.1%} served without waiting for the source"),
        *(
            [
                (
                    "page cache",
                    f"{counters['page_cache_reads']:,} reads more; {gauges['hit_ratio']:.1%} of all served without"
                    " waiting",
                )
            ]
            if options.immutable
            else []
        ),
        *(
            (name, f"{counters[counter]:,} of the opens{remark}")
            for name, counter, remark in (
                ("too new", "opens_young", ", of files younger than 2 s: not cached yet"),
                ("around FUSE", "client_opens", ", by spiderfs.client"),
                ("redirected", "redirects", f", {counters['redirects'] / max(1, opens):.1%} of them"),
            )
            if counters[counter]
        ),
        *(("trainer", _trainer_line(trainer)) for trainer in status.trainers),
        *(("plan", _plan_line(plan)) for plan in status.prefetcher.plans),
        ("reads", f"{counters['reads']:,} ({round_size(counters['read_bytes'])}); the page cache served the others"),
        (
            "from the source",
            f"{round_size(counters['origin_bytes'])}, {round_size(int(gauges['origin_bytes_per_open']))} per open"
            + (", unseen ones counted" if options.immutable else ""),
        ),
        *_peer_rows(status),
        *_cluster_rows(status),
        ("waited for it", f"{counters['stall_microseconds'] / 1e6:.1f} s in all readers together"),
        ("troubles", _troubles(counters)),
    ]
    return "".join(f"{name:16} {text}\n" for name, text in rows).encode(errors="surrogateescape")


def _troubles(counters: Mapping[str, int]) -> str:
    met = (
        (counters["source_retries"], "retries of the source"),
        (counters["source_timeouts"], "timeouts"),
        (counters["source_errors"], "errors of the source"),
        (counters["store_failures"], "failures of the cache"),
        (counters["checksum_failures"], "checksums"),
        (counters["events_dropped"], "events dropped"),
        (counters["worker_restarts"] + counters["manager_restarts"], "processes restarted"),
        (counters["deadly_requests"], "deadly requests"),
    )
    return "; ".join(f"{count:,} {what}" for count, what in met if count) or "none"


# Of more peers those are shown that fail most; `stats.json` has all.
_SHOWN_PEERS = 16


def _peer_rows(status: MountStatus) -> list[tuple[str, str]]:
    if not status.options.peers:
        return []
    if not status.peers:
        return [("from peers", "no other node is known")]
    hits, size = (sum(getattr(peer, name) for peer in status.peers.values()) for name in ("hits", "bytes"))
    none_of_them = "" if status.is_member else "; this node is none of them, and keeps nothing for others"
    by_trouble = sorted(status.peers.items(), key=lambda named: (named[1].up, -named[1].timeouts))
    shown = dict(by_trouble[:_SHOWN_PEERS]) if len(by_trouble) > _SHOWN_PEERS else status.peers
    down = sum(not peer.up for peer in status.peers.values())
    others = len(status.peers) - len(shown)
    return [
        ("from peers", f"{round_size(size)} in {hits:,} reads{none_of_them}"),
        *(
            (
                f"  {escaped(url)}",
                f"{'up' if peer.up else 'down'}, {peer.hits:,} reads ({round_size(peer.bytes)}),"
                f" {peer.absent:,} not there, {peer.timeouts:,} not in time",
            )
            for url, peer in shown.items()
        ),
        *([(f"  {others} others", f"better than these; of all {len(status.peers)}, {down} down")] if others else []),
    ]


def _cluster_rows(status: MountStatus) -> list[tuple[str, str]]:
    if status.link is None:
        return []
    names = ("rows_sent", "rows_heard", "rows_lost", "scores_heard", "plans_heard")
    sent, heard, lost, scores, plans = (f"{status.counters[f'cluster_{name}']:,}" for name in names)
    state = "up" if status.link.up else "fails: this mount goes on with the scores that it has"
    return [
        ("cluster", f"{escaped(status.link.url)} {state}"),
        ("  batches", f"{sent} samples sent, {heard} heard, {lost} lost; {scores} scores taken"),
        ("  plans", f"{plans} of jobs on other nodes"),
    ]


def _peer_figures(status: MountStatus) -> dict[str, dict[str, int]]:
    return {url: {name: int(value) for name, value in peer._asdict().items()} for url, peer in status.peers.items()}


def _view_rows(status: MountStatus) -> list[tuple[str, str]]:
    shown, made = status.options.shown_form, status.counters["views_made"]
    if status.forms.keys() == {ORIGINAL} and not made:
        return []
    recipe = f" ({status.options.recipes[shown]})" if shown != ORIGINAL else ""
    split, of = status.partition.split, status.partition.view_share
    of_samples = f" of {of:.1%} of the files" if shown != ORIGINAL and split is not None else ""
    cached = ", ".join(f"{count} {form}" for form, count in status.forms.items())
    return [("view", f"{shown}{recipe}{of_samples}, {made} made"), ("  cached", f"{cached} samples")]


def _pin_rows(pins: PinsStatus) -> list[tuple[str, str]]:
    of = f"{round_size(pins.bytes)} of at most {round_size(pins.limit_bytes)}"
    return [("pinned", f"{pins.files:,} files, {of}, which is half of the cache")] if pins.files else []


def _split_rows(status: MountStatus) -> list[tuple[str, str]]:
    split = status.partition.split
    if split is None:
        return []
    originals, views, augmented = (f"{share:.0%}" for share in split)
    rows = [("split", f"{split}: {originals} of the capacity for originals, {views} views, {augmented} augmented")]
    # Samples keep their forms as long as a mount lasts.
    new = status.next_partition
    if new is not None and new != status.partition:
        of_samples = f", {new.view_share:.1%} of the files as views" if status.options.view != NO_VIEW else ""
        rows.append(("  when remounted", f"{new.split}{of_samples}, by the capacity and the profile as they are now"))
    return rows


def _split_text(partition: Partition | None) -> str | None:
    return None if partition is None or partition.split is None else str(partition.split)


def _capacity(status: MountStatus) -> str:
    capacity = round_size(status.cache.capacity_bytes)
    if status.options.capacity.unit == "bytes":
        return capacity
    of = round_size(status.survey.source_bytes) if status.survey.done else "the source, which is being measured"
    return f"{capacity} ({status.options.capacity} of {of})"


def _trainer_line(trainer: Trainer) -> str:
    lists = ", ".join(f"{escaped(name)} with {count} samples" for name, count in trainer.lists.items()) or "no list"
    # The kernel has no number here for a process of another pid namespace.
    who = f"pid {trainer.pid}" if trainer.pid else "of another pid namespace: never redirected"
    return f"{escaped(trainer.hello.client)} ({who}, rank {trainer.rank}): {lists}; {trainer.batches} batches"


def _trainer_figures(trainer: Trainer) -> dict[str, Any]:
    figures = {"client": trainer.hello.client, "pid": trainer.pid, "rank": trainer.rank}
    return figures | {"lists": trainer.lists, "batches": trainer.batches}


def jobs(statuses: Sequence[JobStatus]) -> bytes:
    """A line for each job that has a trainer: who it is, how far it has come, and what it reads."""
    if not statuses:
        return b"no trainer is attached\n"
    return "".join(f"{_job_line(job)}\n" for job in statuses).encode(errors="surrogateescape")


def _job_line(job: JobStatus) -> str:
    named = f" ({job.name})" if job.name else ""
    who = f"pid {', '.join(map(str, job.pids))}; rank {', '.join(map(str, job.ranks))} of {job.world_size}"
    lists = ", ".join(f"{escaped(name)} with {count} samples" for name, count in job.lists.items())
    of_epochs = f" of {job.epochs}" if job.epochs else ""
    return (
        f"{job.job_id}{named}: {who}; {lists or 'no list'}; epoch {job.epoch}{of_epochs}; "
        f"{job.samples_per_s:.1f} samples/s, {job.samples} in all, {job.hits / max(1, job.samples):.1%} hits, "
        f"{job.page_cache_reads} from the page cache, {round_size(job.origin_bytes)} from the source, "
        f"{job.stand_ins} stand-ins, {job.exchanged} exchanged, which saved {round_size(job.saved_bytes)}"
    )


def epochs(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A line of JSON for each epoch of each training."""
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _job_figures(job: JobStatus) -> dict[str, Any]:
    figures = dataclasses.asdict(job)
    figures["job"] = figures.pop("job_id")
    return figures | {"samples_per_s": round(job.samples_per_s, 1)}


def _plan_line(plan: PlanStatus) -> str:
    doing = "" if plan.believed else "; not followed, so it is not acted on"
    return (
        f"{escaped(plan.list)}, epoch {plan.epoch}: {plan.taken} of {plan.length},"
        f" {plan.ready_s:.1f} s ready ahead, {plan.late_share:.1%} late{doing}"
    )


def stats_json(status: MountStatus) -> bytes:
    """The same figures for programs."""
    options, cache = status.options, status.cache
    figures = {
        "version": __version__,
        "source": str(options.source),
        "mountpoint": str(options.mountpoint),
        "pid": status.pid,
        "cache_dir": str(options.cache_dir),
        "policy": options.policy,
        "capacity": str(options.capacity),
        "capacity_bytes": cache.capacity_bytes,
        "used_bytes": cache.used_bytes,
        "entries": cache.entries,
        "view": options.view,
        "forms": dict(status.forms),
        "split": _split_text(status.partition),
        "next_split": _split_text(status.next_partition),
        "view_share": status.partition.view_share if options.shown_form != ORIGINAL else 0.0,
        "source_bytes": status.survey.source_bytes if status.survey.done else None,
        "sections": {
            name: {"bytes": section.bytes, "entries": section.entries} for name, section in cache.sections.items()
        },
        "pins": dataclasses.asdict(cache.pins),
        "trainers": list(map(_trainer_figures, status.trainers)),
        "jobs": [_job_figures(job) for job in status.jobs],
        "plans": [_plan_figures(plan) for plan in status.prefetcher.plans],
        "fetches_ahead": {
            "under_way": status.prefetcher.under_way,
            "limit": status.prefetcher.limit,
            "most": status.prefetcher.most,
            "latency_s": round(status.prefetcher.latency_s, 6),
            "bytes_per_s": round(status.prefetcher.bytes_per_s),
        },
        "peers": _peer_figures(status),
        "workers": options.workers,
        "uptime_s": round(status.uptime_s, 3),
        "metrics": {**status.counters, **status.gauges()},
    }
    return json.dumps(figures, indent=2).encode() + b"\n"


def _plan_figures(plan: PlanStatus) -> dict[str, Any]:
    return dataclasses.asdict(plan) | {
        "followed_share": round(plan.followed_share, 4),
        "samples_per_s": round(plan.samples_per_s, 1),
        "ready_s": round(plan.ready_s, 3),
        "late_share": round(plan.late_share, 5),
    }


def metrics(status: MountStatus, counters: SharedCounters) -> bytes:
    """Every metric in Prometheus' text format."""
    sections = {name: section.bytes for name, section in status.cache.sections.items()}
    return prometheus_text(counters, status.gauges(), sections, _peer_figures(status))


def config(options: Options, last_refusal: str) -> bytes:
    """Every option with its value, below the reason why the last write to a control file was refused."""
    lines = ["# the last change was refused:\n", f"# {last_refusal}\n"] if last_refusal else []
    lines += [f"{row.name}={row.value}  # {row.help}{'; live' if row.live else ''}\n" for row in options.as_table()]
    return "".join(lines).encode(errors="surrogateescape")


def plan(status: PrefetcherStatus) -> bytes:
    """How each reader that has published a plan is doing, and the fetches ahead of all of them."""
    if not status.plans:
        return b"no training with a plan is connected now; .spiderfs/epochs has the epochs that have ended\n"
    fetches = (
        f"fetches ahead   {status.under_way} under way, {status.limit} at a time (at most {status.most}),"
        f" {1000 * status.latency_s:.1f} ms each, {round_size(int(status.bytes_per_s))}/s\n"
    )
    return "".join([*map(_plan_paragraph, status.plans), fetches]).encode(errors="surrogateescape")


def _plan_paragraph(plan: PlanStatus) -> str:
    known = f", {plan.epochs_ahead} more known" if plan.epochs_ahead else ""
    unseen = f" and {plan.unseen} reads that the kernel answered" if plan.unseen else ""
    followed = "followed" if plan.believed else "NOT FOLLOWED, so the policy alone decides"
    return (
        f"trainer {plan.trainer}, list {escaped(plan.list)}, epoch {plan.epoch}{known}\n"
        f"  dispatched    {plan.dispatched} of {plan.length}\n"
        f"  taken         {plan.taken} of {plan.length}, {round(plan.samples_per_s, 1):g} samples/s\n"
        f"  opens         {plan.followed_share:.1%} of the last ones as planned: {followed}\n"
        f"  ready ahead   {plan.ready_samples} samples, {plan.ready_s:.2f} s\n"
        f"  window        {plan.window_samples} samples\n"
        f"  late          {plan.late_share:.2%} of {plan.opens} opens{unseen}\n"
    )


def ratio(status: RatioStatus) -> bytes:
    """The share of the importance section, and what it follows from."""
    share = "none: the policy has no sections for it" if status.ratio is None else f"{status.ratio:.4f}"
    pinned = "no" if status.pinned is None else f"{status.pinned:g}"
    lines = [f"ratio   {share}", f"pinned  {pinned}"]
    for job in status.jobs:
        lines += [
            f"job     {job.job_id}",
            f"asks    {job.ratio:.4f}",
            f"epochs  {job.epochs_done} of {job.epochs}",
            f"sigma   {job.sigma:.4g}",
            f"beta    {job.beta}",
            f"delta   {job.delta:.4g}",
            f"u       {job.u:.4f}",
        ]
    return "".join(line + "\n" for line in lines).encode()


def warm(status: Warming) -> bytes:
    """How far the files are that were asked for."""
    return status.line().encode()


def pin(pins: PinsStatus) -> bytes:
    """How many files are pinned, and how many may be."""
    return f"{pins.files} files pinned ({pins.bytes} bytes, at most {pins.limit_bytes})\n".encode()


def unpin(files: int) -> bytes:
    """How many files the last request to unpin files has unpinned."""
    return f"{files} files unpinned by the last request\n".encode()


def evict(records: int) -> bytes:
    """How many records the last request to evict files has dropped."""
    return f"{records} records evicted by the last request\n".encode()


def version() -> bytes:
    return f"{__version__}\n".encode()


# The samples by which the recall of an index is judged: 0.1 s for a million.
_RECALL_SAMPLE = 256
# Lines between two chances for events to be folded: some 3 ms.
_AT_A_TIME = 1000


async def cached(content: Content, catalogue: Catalogue, score: Callable[[ContentKey], float]) -> AsyncGenerator[bytes]:
    """Every record of the cache: section, bytes, score and path."""
    members = content.each_member()

    def read() -> tuple[list[Member], list[bytes]]:
        some = list(islice(members, _AT_A_TIME))
        return some, catalogue.paths(member.key.inode for member in some)

    while (rows := await trio.to_thread.run_sync(read))[0]:
        yield b"".join(
            b"%-12s %12d %10s %s%s\n"
            % (
                member.section.encode(),
                member.size,
                f"{score(member.key):.6g}".encode(),
                escaped_path(path),
                b" block %d" % member.key.block if member.key.block else b"",
            )
            for member, path in zip(*rows, strict=True)
        )


async def redirects(records: Records, catalogue: Catalogue) -> AsyncGenerator[bytes]:
    """Every redirect that workers know now: the number of its course, the sample, and the sample's stand-in."""
    published = each_redirect(records)

    def read() -> bytes:
        some = list(islice(published, _AT_A_TIME))
        wanted = catalogue.paths(wanted for wanted, _, _ in some)
        stand_ins = catalogue.paths(stand_in for _, _, stand_in in some)
        return b"".join(
            b"%d %s -> %s\n" % (number, escaped_path(one), escaped_path(other))
            for (_, number, _), one, other in zip(some, wanted, stand_ins, strict=True)
        )

    while piece := await trio.to_thread.run_sync(read):
        yield piece


async def scores(courses: Courses, batch_scoring: BatchScoring, catalogue: Catalogue) -> AsyncGenerator[bytes]:
    """The scores of every course: its number, score and path of each sample."""
    for course in courses:
        scoring = batch_scoring.of(course)
        if scoring is None:
            continue
        # A copy is of one moment: a batch may be scored while the list is written.
        values, inodes = scoring.scores.copy(), course.list.inodes
        for start in range(0, len(values), _AT_A_TIME):
            some = slice(start, start + _AT_A_TIME)
            paths = await trio.to_thread.run_sync(catalogue.paths, inodes[some].tolist())
            yield b"".join(
                b"%d %s %s\n" % (course.number, f"{score:.6g}".encode(), escaped_path(path))
                for score, path in zip(values[some].tolist(), paths, strict=True)
            )


async def graph(courses: Courses, batch_scoring: BatchScoring) -> AsyncGenerator[bytes]:
    """What the scoring of each course knows, which share of its rows it leaves out, and how fast it is."""
    lines = []
    for course in courses:
        thinning, known = course.thinning, course.list
        ages, left_out_share = thinning.ages(), thinning.left_out_share
        scored_per_s = thinning.rows_scored / course.scoring_s if course.scoring_s else 0.0
        lines.append(
            f"course {course.number}: job {course.job_id}, list {escaped(known.name)}, {len(known.keys)} samples\n"
        )
        found = await batch_scoring.described(course, _RECALL_SAMPLE)
        if found is None:
            lines.append("  nothing scored yet\n")
            continue
        found.append(("rows left out", f"{left_out_share:.3f}  (scoring them all takes longer than training)"))
        found.append(("age of scores", f"median {ages.median:.2f}, oldest {ages.oldest:.2f} epochs"))
        found.append(("rows per second", f"{scored_per_s:.0f}  (while it scores)"))
        lines += [f"  {name:18} {text}\n" for name, text in found]
    yield "".join(lines or ["no trainer has declared its samples yet\n"]).encode(errors="surrogateescape")
