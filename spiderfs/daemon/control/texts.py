"""What control files print: lists, and the state of the mount in `stats.json` and `metrics`.

A component has a `status()` of plain figures: a dataclass, a named tuple, a mapping, or a list of them, whose names end
with the unit (`_bytes`, `_s`, `_share`). The manager gives each a name (`Manager.status`), and nothing here depends on
which there are. `spiderfs status` and `spiderfs top` render the same file (`cli/figures.py`).

Texts of any length are sent in pieces, and other tasks run between two.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import trio

from spiderfs import __version__
from spiderfs.daemon.training.job_datasets.job_datasets import JobDatasets
from spiderfs.daemon.training.job_datasets.scoring import BatchScoring
from spiderfs.metrics import GAUGES, SharedCounters, prometheus_text
from spiderfs.options.model import Options
from spiderfs.shared.escapes import escaped, escaped_path
from spiderfs.store.store import Content, ContentKey, Member, Records
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.redirects import each_redirect
from spiderfs.views.recipe import ORIGINAL


def config(options: Options, last_refusal: str) -> bytes:
    """Every option with its value, below the reason why the last write to a control file was refused."""
    lines = ["# the last change was refused:\n", f"# {last_refusal}\n"] if last_refusal else []
    lines += [f"{row.name}={row.value}  # {row.help}{'; live' if row.live else ''}\n" for row in options.as_table()]
    return "".join(lines).encode(errors="surrogateescape")


def epochs(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A line of JSON for each epoch of each training."""
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


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
    """Every redirect that workers know now: the number of its job dataset, the sample, and the sample's substitute."""
    published = each_redirect(records)

    def read() -> bytes:
        some = list(islice(published, _AT_A_TIME))
        wanted = catalogue.paths(wanted for wanted, _, _ in some)
        substitutes = catalogue.paths(substitute for _, _, substitute in some)
        return b"".join(
            b"%d %s -> %s\n" % (number, escaped_path(one), escaped_path(other))
            for (_, number, _), one, other in zip(some, wanted, substitutes, strict=True)
        )

    while piece := await trio.to_thread.run_sync(read):
        yield piece


async def scores(job_datasets: JobDatasets, batch_scoring: BatchScoring, catalogue: Catalogue) -> AsyncGenerator[bytes]:
    """The scores of every job dataset: its number, score and path of each sample."""
    for job_dataset in job_datasets:
        if (scoring := batch_scoring.of(job_dataset)) is None:
            continue
        # A copy is of one moment: a batch may be scored while the list is written.
        values, inodes = scoring.scores.copy(), job_dataset.list.inodes
        for start in range(0, len(values), _AT_A_TIME):
            some = slice(start, start + _AT_A_TIME)
            paths = await trio.to_thread.run_sync(catalogue.paths, inodes[some].tolist())
            yield b"".join(
                b"%d %s %s\n" % (job_dataset.number, f"{score:.6g}".encode(), escaped_path(path))
                for score, path in zip(values[some].tolist(), paths, strict=True)
            )


async def graph(job_datasets: JobDatasets, batch_scoring: BatchScoring) -> AsyncGenerator[bytes]:
    """What the scoring of each job dataset knows, which share of its rows it leaves out, and how fast it is."""
    lines = []
    for job_dataset in job_datasets:
        thinning, known = job_dataset.thinning, job_dataset.list
        ages, left_out_share = thinning.ages(), thinning.left_out_share
        scored_per_s = thinning.rows_scored / job_dataset.scoring_s if job_dataset.scoring_s else 0.0
        lines.append(
            f"job dataset {job_dataset.number}: job {job_dataset.job_id}, list {escaped(known.name)}, "
            f"{len(known.keys)} samples\n"
        )
        if (found := await batch_scoring.described(job_dataset, _RECALL_SAMPLE)) is None:
            lines.append("  nothing scored yet\n")
            continue
        found.append(("rows left out", f"{left_out_share:.3f}  (scoring them all takes longer than training)"))
        found.append(("age of scores", f"median {ages.median:.2f}, oldest {ages.oldest:.2f} epochs"))
        found.append(("rows per second", f"{scored_per_s:.0f}  (while it scores)"))
        lines += [f"  {name:18} {text}\n" for name, text in found]
    yield "".join(lines or ["no trainer has declared its samples yet\n"]).encode(errors="surrogateescape")


Figures = Mapping[str, Any]


def plain(status: object) -> Any:
    """A status as JSON has it; numbers that are not whole have six digits."""
    if isinstance(status, str | int | None):
        return status
    if isinstance(status, tuple) and hasattr(status, "_asdict"):
        return plain(status._asdict())
    if dataclasses.is_dataclass(status):
        return {field.name: plain(getattr(status, field.name)) for field in dataclasses.fields(status)}
    if isinstance(status, Mapping):
        return {str(name): plain(value) for name, value in status.items()}
    if isinstance(status, Iterable):
        return [plain(value) for value in status]
    return float(f"{status:.6g}") if isinstance(status, float) else str(status)


def options_status(options: Options) -> dict[str, object]:
    """What a mount is: the options that people want to see beside its figures."""
    shown = options.shown_form
    return {
        "version": __version__,
        "source": str(options.source),
        "mountpoint": str(options.mountpoint),
        "cache_dir": str(options.cache_dir.first),
        "policy": options.policy,
        "capacity": str(options.capacity),
        "view": options.view,
        "recipe": str(options.recipes[shown]) if shown != ORIGINAL else None,
        "workers": options.workers,
    }


def with_metrics(figures: Figures, counters: SharedCounters) -> dict[str, Any]:
    """The figures with the counters and gauges below `metrics`; a gauge has the value of the figure of its name."""
    totals = counters.totals()
    found = {**figures, **of_all_opens(totals), "uptime_seconds": figures["uptime_s"]}
    found |= {f"memory_{name}": value or 0 for name, value in figures["memory"].items()}
    # A number where it is a truth, so that a program can add it up.
    gauges = {gauge.name: +found[gauge.name] for gauge in GAUGES}
    return {**figures, "metrics": {**totals, **gauges}}


def of_all_opens(counters: Mapping[str, int]) -> dict[str, float]:
    """The gauges that count by opens, those among them that the page cache of an immutable mount answered unseen."""
    unseen = counters["page_cache_reads"]
    opens = counters["opens"] + unseen
    return {
        "hit_ratio": (counters["opens_hit"] + unseen) / opens if opens else 0.0,
        "origin_bytes_per_open": counters["origin_bytes"] / opens if opens else 0.0,
    }


def metrics(figures: Figures, counters: SharedCounters) -> bytes:
    sections = {name: section["bytes"] for name, section in figures["sections"].items()}
    directories = {found["directory"]: not found["left_out"] for found in figures["cache_dirs"]}
    return prometheus_text(counters, figures["metrics"], sections, figures["peers"], directories)
