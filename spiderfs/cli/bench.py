"""`spiderfs bench` reads the user's own data in several ways, and recommends mount options.

`spiderfs demo` reads made-up images from a simulated slow source, and compares three ways.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from spiderfs.cli.control_files import explaining, mount_at, printable, read_control
from spiderfs.cli.simulate import json_file, write_json
from spiderfs.errors import UsageError
from spiderfs.linux.process_table import ended_by_signals

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
            found = measure(options, workers or len(os.sched_getaffinity(0)), status.update)
        except OSError as exc:
            raise UsageError(f"{exc.filename or place} cannot be read ({exc.strerror}): check its permissions") from exc
    _show(found)
    if json_path is not None:
        write_json(_report(found), json_path)


def _options(place: str, given: tuple[str, ...], point: str) -> Options:
    from spiderfs.options.model import Options
    from spiderfs.options.mount_strings import option_string, options_in
    from spiderfs.profiling.private_mount import SETTINGS, settings_in

    if (mount := mount_at(place)) is not None:
        with explaining(mount):
            theirs = settings_in(read_control(mount, "config"))
        place = theirs["source"]
        kept = {name: theirs[name] for name in (*SETTINGS, "capacity") if theirs.get(name)}
        given = (option_string(kept), *given)
    names = {name for name, _ in options_in(given)}
    given = given if names & {"immutable", "binding"} else ("immutable", *given)
    return Options.load(given if "capacity" in names else (_CAPACITY, *given), None, place, point)


def _show(found: BenchFindings) -> None:
    from spiderfs.options.units import round_size
    from spiderfs.profiling.bench import DIRECT, WAYS

    more = "" if found.whole else " and more"
    work = "reading and decoding" if found.images else "reading"
    click.echo(printable(f"{found.named}: {found.files_seen:,} files, {round_size(found.bytes_seen)}{more}"))
    rounds = len(found.direct.passes)
    click.echo(
        f"{found.workers} workers, {work} {found.files_read:,} of them in {rounds} rounds; {found.share:.0%} cached\n"
    )
    for way, speed in found.speeds.items():
        name = WAYS.get(way) or (f"mount, plan, view={way}" if way in found.mounted else f"{way} in memory")
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


_NEXT = """
With a plan, each image is cached before the loader opens it. Next, with your data for /nfs/imagenet:
  spiderfs bench /nfs/imagenet                 which options to mount with, and the speed-up to expect
  spiderfs mount /nfs/imagenet /mnt/imagenet   mount it; add -o immutable,capacity=200GiB
In train.py, for PyTorch: trainer_hook.plan("/mnt/imagenet", loader)
"""


@click.command()
@click.option("--epochs", type=click.IntRange(2, 20), default=3, show_default=True, help="Epochs to read.")
def demo(epochs: int) -> None:
    """Compare direct reads, an LRU cache and a plan on made-up images, in a minute and without torch.

    Two loader workers read and decode 480 images from a simulated source 20 ms away: directly, through a mount with an
    LRU cache, and through a mount that follows a plan. Each cache holds 20% of the bytes. Images, mounts and caches
    are temporary.
    """
    from spiderfs.linux.mounts import check_fuse_available
    from spiderfs.options.units import counted, round_size
    from spiderfs.profiling.bench import CACHED_SHARE, IMAGES, LATENCY_MS
    from spiderfs.profiling.bench import demo as measure

    check_fuse_available(False)
    workers = min(2, len(os.sched_getaffinity(0)))
    click.echo(
        f"{IMAGES} images, a source {LATENCY_MS:g} ms away, {counted(workers, 'loader worker')}, a cache of"
        f" {CACHED_SHARE:.0%}; {epochs} epochs each way\n\n"
        f"{'':26}{'first epoch':>12}{'later epochs':>14}{'hits':>7}{'fetched':>12}"
    )
    with ended_by_signals():
        # The name of each way stands there while it is measured.
        for first, *later in measure(epochs, workers, lambda way: click.echo(f"{way:26}", nl=False)):
            seconds, hits = mean(epoch.seconds for epoch in later), mean(epoch.hits for epoch in later) / IMAGES
            fetched = round_size(sum(epoch.fetched_bytes for epoch in (first, *later)))
            click.echo(f"{first.seconds:>10.1f} s{seconds:>12.1f} s{hits:>7.0%}{fetched:>12}")
    click.echo(_NEXT, nl=False)
