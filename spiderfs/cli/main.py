"""The command `spiderfs`: a table of subcommands, which are imported when they are called, and how errors are shown.

Every SpiderfsError becomes one line `spiderfs: ...` on stderr. The exit status is 0, or 1 after such an error, 2 if the
command line cannot be understood, and 32 if mount(8) called and the mount failed.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from spiderfs import __version__
from spiderfs.errors import SpiderfsError


class Lazy(NamedTuple):
    """Where a subcommand is defined, and its short help, so that a list of all commands needs no import."""

    module: str
    attribute: str
    short_help: str


# `mount-helper` is for mount(8); `spiderfs --help` does not list it.
COMMANDS = {
    "mount": Lazy("spiderfs.cli.mount", "mount", "Show a directory through the cache."),
    "umount": Lazy("spiderfs.cli.umount", "umount", "Unmount a directory."),
    "status": Lazy("spiderfs.cli.status", "status", "List the mounts, or show what one mount does."),
    "top": Lazy("spiderfs.cli.top", "top", "Show what mounts and their trainings do, every second."),
    "metrics": Lazy("spiderfs.cli.metrics", "metrics", "Serve the metrics of mounts to Prometheus."),
    "config": Lazy("spiderfs.cli.config", "config", "Show the options of a mount, or change some."),
    "warm": Lazy("spiderfs.cli.warm", "warm", "Fetch files into the cache before they are wanted."),
    "pin": Lazy("spiderfs.cli.warm", "pin", "Keep files in the cache whatever the policy says."),
    "unpin": Lazy("spiderfs.cli.warm", "unpin", "Leave pinned files to the policy again."),
    "doctor": Lazy("spiderfs.cli.doctor", "doctor", "Say what a mount needs here and has, and what to do."),
    "bench": Lazy("spiderfs.cli.bench", "bench", "Say what to mount your data with, and what that brings."),
    "evict": Lazy("spiderfs.cli.warm", "evict", "Drop files from the cache."),
    "profile": Lazy("spiderfs.cli.profile", "profile", "Say which partition of the cache is fastest for a loader."),
    "report": Lazy("spiderfs.cli.report", "report", "Write a page about the trainings of a mount."),
    "simulate": Lazy("spiderfs.cli.simulate", "simulate", "Replay a trace with other policies and capacities."),
    "mount-helper": Lazy("spiderfs.cli.mount", "mount_helper", ""),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, command in COMMANDS.items() if command.short_help]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        lazy = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [
            CompletionItem(name, help=COMMANDS[name].short_help)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ] or super(click.Group, self).shell_complete(ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].short_help) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except SpiderfsError as exc:
            click.echo(f"spiderfs: {' '.join(str(exc).split())}", err=True)
            ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="spiderfs")
def main() -> None:
    """Mounts a directory of training data read-only, with a cache on the local disk.

    \b
    spiderfs mount /nfs/imagenet /mnt/imagenet -o capacity=20GiB
    cat /mnt/imagenet/.spiderfs/stats
    spiderfs umount /mnt/imagenet
    """
