"""`spiderfs status`: lists the mounts of this machine, or shows what one of them does."""

from __future__ import annotations

import errno
import json
from typing import Any

import click

from spiderfs.cli.control_files import explained, find_mount, mountpoints, printable, read_control, read_stats
from spiderfs.linux.mounts import Mount, spiderfs_mounts
from spiderfs.options.units import round_size


@click.command()
@click.argument("mountpoint", required=False, shell_complete=mountpoints)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def status(mountpoint: str | None, as_json: bool) -> None:
    """List every spiderfs mount, or show what the one at MOUNTPOINT does."""
    if mountpoint is None:
        _list_mounts(as_json)
        return
    mount = find_mount(mountpoint)
    try:
        text = read_control(mount, "stats.json" if as_json else "stats")
    except OSError as exc:
        raise explained(mount, exc) from exc
    click.echo(text.rstrip("\n"))


def _list_mounts(as_json: bool) -> None:
    listed = [
        {"source": mount.source, "mountpoint": str(point), **_state(mount)}
        for point, mount in spiderfs_mounts().items()
    ]
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
