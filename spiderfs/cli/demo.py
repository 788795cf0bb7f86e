"""`spiderfs demo`: reads made-up images from a simulated slow source in three ways, and compares them."""

from __future__ import annotations

import os
from statistics import mean

import click

from spiderfs.cli.signals import ended_by_signals

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
    from spiderfs.profiling.demo import CACHED_SHARE, IMAGES, LATENCY_MS
    from spiderfs.profiling.demo import demo as measure

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
