"""`spiderfs bench`: reads the user's own data in several ways, and recommends mount options."""

from __future__ import annotations

import os
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spiderfs.cli.control_files import explained, mount_at, printable, read_control
from spiderfs.cli.signals import ended_by_signals
from spiderfs.cli.simulate import json_file, write_json
from spiderfs.errors import UsageError

# rich and what measures are imported where they are used, so that `spiderfs --help` does not wait for them.
if TYPE_CHECKING:
    from spiderfs.options.model import Options
    from spiderfs.profiling.bench import BenchFindings

_CAPACITY = "capacity=20%"


@click.command()
@click.argument("place", metavar="DIR|URL|MOUNTPOINT")
@click.option("-o", "given", multiple=True, metavar="NAME=VALUE,...", help="Options to mount with; capacity above all.")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Workers of the training's loader [default: one for each core]"
)
@json_file
def bench(place: str, given: tuple[str, ...], workers: int | None, json_path: Path | None) -> None:
    """Measure reads of your data in at most two minutes, recommend mount options, and estimate the speed-up.

    It reads and decodes some of the files as a training's loader does: directly, through a mount with an LRU cache,
    through one that follows a plan, and if decoding is the bottleneck, as views, which are smaller images. The ways
    take turns, several times each; ± is the 95% confidence interval. The mounts and their caches are temporary. Without
    a capacity in -o the caches hold 20% of the files.
    """
    from rich.console import Console

    from spiderfs.profiling.bench import bench as measure

    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="spiderfs-bench-") as point:
        options = _options(place, given, point)
    console = Console(highlight=False, soft_wrap=True)
    with ended_by_signals(), console.status("") as status:
        try:
            found = measure(
                options,
                workers or len(os.sched_getaffinity(0)),
                status.update,
            )
        except OSError as exc:
            raise UsageError(f"{exc.filename or place} cannot be read ({exc.strerror}): check its permissions") from exc
    _show(found)
    if json_path is not None:
        write_json(_report(found), json_path)


def _options(place: str, given: tuple[str, ...], point: str) -> Options:
    """The options of the mounts that are measured."""
    from spiderfs.options.model import Options
    from spiderfs.options.mount_strings import option_string, options_in
    from spiderfs.profiling.private_mount import SETTINGS, settings_in

    mount = mount_at(place)
    if mount is not None:
        try:
            theirs = settings_in(read_control(mount, "config"))
        except OSError as exc:
            raise explained(mount, exc) from exc
        place = theirs["source"]
        kept = {name: theirs[name] for name in (*SETTINGS, "capacity") if theirs.get(name)}
        given = (option_string(kept), *given)
    names = {name for name, _ in options_in(given)}
    given = given if names & {"immutable", "binding"} else ("immutable", *given)
    return Options.load(given if "capacity" in names else (_CAPACITY, *given), None, place, point)


def _show(found: BenchFindings) -> None:
    from spiderfs.options.units import round_size
    from spiderfs.profiling.bench import DIRECT

    more = "" if found.whole else " and more"
    work = "reading and decoding" if found.images else "reading"
    click.echo(printable(f"{found.named}: {found.files_seen:,} files, {round_size(found.bytes_seen)}{more}"))
    rounds = len(found.direct.passes)
    click.echo(
        f"{found.workers} workers, {work} {found.files_read:,} of them in {rounds} rounds; {found.share:.0%} cached\n"
    )
    for way, speed in found.speeds.items():
        name = _WAYS.get(way) or (f"mount, plan, view={way}" if way in found.mounted else f"{way} in memory")
        times = f"{speed.per_s / found.direct.per_s:.1f} x" if way in (DIRECT, *found.mounted) else ""
        figures = f"{speed!s:>15} {found.noun}/s {round_size(speed.bytes_per_s):>11}/s {times:>8}"
        click.echo(f"{name:26} {figures}".rstrip())
    click.echo("\n" + textwrap.fill(found.verdict(), 80, break_on_hyphens=False))
    if found.one_disk:
        said = "The source is on the disk of the cache, so caching does not speed it up: set cache_dir to another disk."
        click.echo(textwrap.fill(said, 80))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if found.whole and found.bytes_seen < memory / 2:
        said = (
            f"All {round_size(found.bytes_seen)} fit into the memory of this machine ({round_size(memory)}), so only"
            " the first epoch waits for the source. The figures above are for more data of this kind than fits."
        )
        click.echo(textwrap.fill(said, 80))


_WAYS = {
    "loader": "loader, files in memory",
    "source": "source, not decoding",
    "direct": "directly from the source",
    "lru": "mount, LRU cache",
    "plan": "mount, plan",
}


def _report(found: BenchFindings) -> dict[str, Any]:
    return {
        "source": printable(found.named),
        "files": found.files_seen,
        "bytes": found.bytes_seen,
        "whole": found.whole,
        "workers": found.workers,
        "cached_share": found.share,
        "images": found.images,
        "on_the_disk_of_the_cache": found.one_disk,
        "passes": {
            way: {"per_s": speed.per_s, "error": speed.error, "passes": [done._asdict() for done in speed.passes]}
            for way, speed in found.speeds.items()
        },
        "best": found.best() or "direct",
        "verdict": found.verdict(),
    }
