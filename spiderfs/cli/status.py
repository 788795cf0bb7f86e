"""`spiderfs status` lists the mounts, or shows the figures of one; `spiderfs config` shows and changes its options."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from spiderfs.cli import control_files
from spiderfs.errors import ConfigError, UsageError
from spiderfs.linux.mounts import Mount
from spiderfs.options.units import round_size


@click.command()
@click.argument("mountpoint", required=False, shell_complete=control_files.mountpoints)
@click.option("--section", metavar="NAME", help="Show one part in full, such as jobs, plans or ratio.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def status(mountpoint: str | None, section: str | None, as_json: bool) -> None:
    """List every spiderfs mount, or show the figures of the one at MOUNTPOINT, or of spiderfs://NAME."""
    # This import takes longer than the list of mounts.
    from spiderfs.cli import figures

    if mountpoint is None:
        if section is not None:
            raise UsageError("--section is of one mount: name its MOUNTPOINT")
        _list_mounts(as_json)
        return
    mount = control_files.find_mount(mountpoint)
    with control_files.explaining(mount):
        stats = control_files.read_stats(mount)
    if section is not None and section not in stats:
        parts = sorted(name for name, value in stats.items() if isinstance(value, dict | list))
        raise UsageError(f"--section {section}: choose one of {', '.join(parts)}")
    if as_json:
        click.echo(json.dumps(stats if section is None else stats[section], indent=2))
        return
    if section is None:
        click.echo(
            click.style(control_files.printable(f"{mount.source} on {control_files.place_of(mount)}"), bold=True)
        )
    for row in figures.all_rows(stats) if section is None else figures.section(section, stats[section]):
        text = control_files.printable(str(row))
        if sys.stdout.isatty():
            width, indent = max(60, shutil.get_terminal_size().columns), " " * 17
            text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        click.echo(click.style(text, fg="red") if row.bad else text)


def _list_mounts(as_json: bool) -> None:
    listed = []
    for place, mount in control_files.every_place().items():
        state = _state(mount)
        source = state.get("stats", {}).get("source", mount.source)
        listed.append({"source": source, "mountpoint": place, **state})
    if as_json:
        click.echo(json.dumps(listed, indent=2))
    elif not listed:
        click.echo("there is no spiderfs mount")
    for entry in [] if as_json else listed:
        click.echo(control_files.printable(f"{entry['source']} on {entry['mountpoint']}: {entry['state']}"))


def _state(mount: Mount) -> dict[str, Any]:
    try:
        stats = control_files.read_stats(mount)
    except TimeoutError:
        return {"state": "does not answer"}
    except OSError as exc:
        return {"state": "its daemon is dead" if exc.errno == errno.ENOTCONN else f"not readable ({exc.strerror})"}
    used, capacity, fill = stats.get("used_bytes"), stats.get("capacity_bytes"), "cache unknown"
    if isinstance(used, int) and isinstance(capacity, int) and capacity > 0:
        fill = f"{round_size(used)} of {round_size(capacity)} cached ({used / capacity:.0%})"
    return {"state": f"{fill}, policy {stats.get('policy', '?')}, pid {stats.get('pid', '?')}", "stats": stats}


@click.command()
@click.argument("mountpoint", shell_complete=control_files.mountpoints)
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
def config(mountpoint: str, changes: tuple[str, ...]) -> None:
    """Show the options of the mount at MOUNTPOINT, or change them: capacity=10GiB, policy=lru, ..."""
    from spiderfs.options.model import check_change
    from spiderfs.options.paths import capacity_remark
    from spiderfs.options.units import Capacity

    mount = control_files.find_mount(mountpoint)
    for change in changes:
        name, equals, value = (part.strip() for part in change.partition("="))
        if not equals:
            raise ConfigError(f"{change}: write a change like {name}=VALUE")
        # If the daemon refuses the write, it can answer with an error number only. So the same check runs here first,
        # which has a reason to show.
        check_change(name, value)
    try:
        for change in changes:
            control_files.write_control(mount, "config", f"{change}\n")
            name, _, value = change.partition("=")
            if name.strip() == "capacity":
                stats = control_files.read_stats(mount)
                others = [Path(found["directory"]) for found in stats.get("cache_dirs", [])[1:]]
                control_files.warn(capacity_remark(Capacity.parse(value), Path(stats["cache_dir"]), *others))
        text = "" if changes else control_files.read_control(mount, "config")
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(f"the daemon refused {change}: see its log for the reason") from exc
        raise control_files.explained(mount, exc) from exc
    click.echo(text, nl=False)
