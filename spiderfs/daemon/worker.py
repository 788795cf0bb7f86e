"""A worker: one process that answers the kernel. It holds nothing that another one could not rebuild."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import trio

from spiderfs.core.events import FORGOTTEN
from spiderfs.daemon.context import FIRST_WORKER_ROW, MountContext
from spiderfs.daemon.control.channel import ControlClient
from spiderfs.daemon.pipes import EventWriter
from spiderfs.daemon.published_options import published_options, settings_of
from spiderfs.fuse.kernel import Handles, Kernel, Serving
from spiderfs.fuse.passthrough import BackingFiles, Passthrough
from spiderfs.linux.memory import give_back_freed_memory, keep_freed_memory
from spiderfs.shared.published import published_trainers
from spiderfs.sources.members import salt_of
from spiderfs.sources.read_process import ReadProcess
from spiderfs.store.content import LmdbContent
from spiderfs.store.store import BLOCK_BYTES
from spiderfs.vfs.control_files import Control, ImmutableControl
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem
from spiderfs.vfs.large_files import Parts, ReadAhead
from spiderfs.vfs.lister import WalkAhead
from spiderfs.vfs.on_demand import Supply
from spiderfs.vfs.redirects import Redirects

log = logging.getLogger(__name__)

TIDY_INTERVAL_S = 1.0
# How long the first question may take, before which no one reads: with an empty cache a process imports what asks a
# store, which takes longer than `source.timeout_s` may be. It is less than the supervisor's START_S.
FIRST_ANSWER_S = 8.0


async def work(context: MountContext, kernel: Kernel, index: int, again: bool = False) -> None:
    """Answer requests until the file system is unmounted; `again`: in the place of a worker that has died."""
    keep_freed_memory(context.memory.freed)
    counters = context.row(FIRST_WORKER_ROW + index)
    # A worker that replaces another one does not know which handles the other one has given to the kernel.
    sole = context.options.workers == 1 and not counters.value("process_starts")
    immutable = context.options.immutable
    # A READ is answered without knowing anything of handles.
    reading = context.reading(FIRST_WORKER_ROW + index, kernel, delivers=sole or immutable, cautious=again)
    handles = Handles(sole)
    layout = context.layout
    supply = context.supply(
        counters,
        reading.read,
        context.open_content(),
        context.open_records(),
        Episode(layout.run.full_disk),
        reading.caught_up,
        index + 1,
        reading.in_flight,
    )
    events = EventWriter(context.event_writer, counters)
    redirects = Redirects(supply.records, context.pending_reads, pushed=context.pushed_samples)
    options = published_options(layout.run, context.options)
    async with trio.open_nursery() as nursery:
        channel = ControlClient(layout.run.control_socket)
        make_control: Callable[..., Control] = Control
        make_filesystem: Callable[..., Filesystem] = Filesystem
        if immutable:
            make_control = partial(ImmutableControl, forget_name=kernel.forget_name)
            make_filesystem = partial(ImmutableFilesystem, doubt=kernel.doubt, pusher_threads=context.pusher_threads)
        filesystem = make_filesystem(
            supply=supply,
            read_ahead=_read_ahead(nursery, context, supply, reading),
            touches=context.touches,
            walk_ahead=WalkAhead(nursery, supply.client, supply.catalogue, supply.lister),
            redirects=redirects,
            unstored=context.unstored,
            control=make_control(channel, layout.run, os.getuid(), index),
            events=events,
            settings=settings_of(options, context.mounted_at_s),
            scattered=lambda: context.spare_nodes.in_use,
            asked_by_peers=context.asked_by_peers if context.members is not None else None,
            source_salt=salt_of(context.shared_identity),
            push=kernel.push,
        )

        def follow_options() -> None:
            nonlocal options
            options = published_options(layout.run, options)
            filesystem.settings = settings_of(options, context.mounted_at_s)

        def follow_trainers() -> None:
            redirects.set_trainers(published_trainers(layout.run.trainers), context.options.substitute)
            if not immutable:
                return
            # From here on the kernel has to ask for each name, and no open puts right what it has trusted so far.
            if redirects.gives and index + 1 not in context.names_asked:
                if not kernel.forget_names():
                    log.warning("this kernel cannot forget names: files that were looked up before get no substitute")
                else:
                    events.record_access(0, 0, FORGOTTEN, 0)
            if redirects.gives:
                context.names_asked.put(index + 1)
            else:
                context.names_asked.discard(index + 1)

        # A worker that replaces another one must not tell the kernel to trust a name.
        follow_trainers()
        await supply.lister.root(FIRST_ANSWER_S)
        for task in (reading.attend, reading.watch, supply.client.watch, events.flush_in_time):
            nursery.start_soon(task)
        nursery.start_soon(context.flights.attend, index + 1)
        nursery.start_soon(supply.fetcher.rest, give_back_freed_memory)
        published = {layout.run.options: follow_options, layout.run.trainers: follow_trainers}
        nursery.start_soon(context.notice.follow, index, published)
        # Several workers do not know of each other's handles; and where no open is asked for, no one knows of any.
        passthrough = None
        if context.options.workers == 1 and not immutable and kernel.descriptor is not None:
            passthrough = Passthrough(BackingFiles(kernel.descriptor), filesystem.large_files, layout.run)
            nursery.start_soon(_tidy, passthrough)
        counters.add("process_starts")
        held = context.resent.of_worker(index, counters)
        await kernel.serve(Serving(filesystem, counters, supply.content.end_read, handles, held, passthrough))
        await supply.fetcher.drain()
        events.flush()
        nursery.cancel_scope.cancel()
    # The store is not closed: a thread that was given up on may still come back from the source and write to it.


def _read_ahead(nursery: trio.Nursery, context: MountContext, supply: Supply, reading: ReadProcess) -> ReadAhead:
    options, parts = context.options, None
    if isinstance(supply.content, LmdbContent):
        # At most 64 workers.
        room_blocks = context.memory.parts // BLOCK_BYTES // options.workers
        lock = FetchLock(context.layout.run.fetch_lock)
        parts = Parts(nursery, supply, supply.content, lock, reading.read, room_blocks)
    return ReadAhead(nursery, supply.fetcher, supply.counters, options.read_ahead, parts)


async def _tidy(passthrough: Passthrough) -> None:
    while True:
        await passthrough.lingers()
        await trio.sleep(TIDY_INTERVAL_S)
        passthrough.tidy()
