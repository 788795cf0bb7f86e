"""The texts of control files that may be of any length: each comes in pieces, and other tasks run between two."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from itertools import islice

import trio

from spiderfs.daemon.training.courses.courses import Courses
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.shared.escapes import escaped, escaped_path
from spiderfs.store.store import Content, ContentKey, Member, Records
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.redirect_table import each_redirect

# The recall of an index is judged by so many samples: 0.1 s for a million.
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
        status = course.status()
        lines.append(
            f"course {status.number}: job {status.job_id}, list {escaped(status.name)}, {status.samples} samples\n"
        )
        found = await batch_scoring.described(course, _RECALL_SAMPLE)
        if found is None:
            lines.append("  nothing scored yet\n")
            continue
        found.append(("rows left out", f"{status.left_out_share:.3f}  (scoring them all takes longer than training)"))
        found.append(("age of scores", f"median {status.ages.median:.2f}, oldest {status.ages.oldest:.2f} epochs"))
        found.append(("rows per second", f"{status.scored_per_s:.0f}  (while it scores)"))
        lines += [f"  {name:18} {text}\n" for name, text in found]
    yield "".join(lines or ["no trainer has declared its samples yet\n"]).encode(errors="surrogateescape")
