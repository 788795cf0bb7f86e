"""`spiderfs status`: lists the mounts of this machine, or shows what one of them does."""

from __future__ import annotations

import errno
import json
import sys
from typing import Any

import click

from spiderfs.cli.control_files import explained, find_mount, printable, read_control, read_stats
from spiderfs.linux.mounts import Mount, spiderfs_mounts
from spiderfs.options.units import round_size


@click.command()
@click.argument("mountpoint", required=False)
@click.option("--watch", is_flag=True, help="Print the figures again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def status(mountpoint: str | None, watch: bool, as_json: bool) -> None:
    """List every spiderfs mount, or show what the one at MOUNTPOINT does."""
    if watch and (mountpoint is None or as_json):
        raise click.UsageError("--watch needs a MOUNTPOINT and no --json")
    if mountpoint is None:
        _list_mounts(as_json)
        return
    mount = find_mount(mountpoint)
    if watch and (sys.stdout is None or not sys.stdout.isatty()):
        # Nobody would see to it that it ends when its reader has gone.
        raise click.UsageError("--watch draws on a terminal: leave it out, or use --json")
    try:
        if watch:
            # This import is here because rich takes as long to import as everything else together.
            from spiderfs.cli.watch import watch_stats

            watch_stats(mount)
            return
        text = read_control(mount, "stats.json" if as_json else "stats")
    except OSError as exc:
        raise explained(mount, exc) from exc
    click.echo(text.rstrip("\n"))


def _list_mounts(as_json: bool) -> None:
    # The topmost spiderfs mount of each mount point.
    on_top = {mount.mountpoint: mount for mount in spiderfs_mounts()}.values()
    listed = [{"source": mount.source, "mountpoint": str(mount.mountpoint), **_state(mount)} for mount in on_top]
    if as_json:
        click.echo(json.dumps(listed, indent=2))
    elif not listed:
        click.echo("there is no spiderfs mount")
    for entry in [] if as_json else listed:
        click.echo(printable(f"{entry['source']} on {entry['mountpoint']}: {entry['state']}"))


def _state(mount: Mount) -> dict[str, Any]:
    try:
        stats = read_stats(mount)
    except TimeoutError:
        return {"state": "does not answer"}
    except OSError as exc:
        return {"state": "its daemon is dead" if exc.errno == errno.ENOTCONN else f"not readable ({exc.strerror})"}
    return {"state": f"{_fill(stats)}, policy {stats.get('policy', '?')}, pid {stats.get('pid', '?')}", "stats": stats}


def _fill(stats: dict[str, Any]) -> str:
    used, capacity = stats.get("used_bytes"), stats.get("capacity_bytes")
    if not isinstance(used, int) or not isinstance(capacity, int) or capacity <= 0:
        return "cache unknown"
    return f"{round_size(used)} of {round_size(capacity)} cached ({used / capacity:.0%})"
