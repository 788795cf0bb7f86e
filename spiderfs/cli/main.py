"""The command `spiderfs`: a table of subcommands, which are imported when they are called, and how errors are shown.

Every SpiderfsError becomes one line `spiderfs: ...` on stderr. The exit status is 0, or 1 after such an error, 2 if the
command line cannot be understood, and 32 if mount(8) called and the mount failed.
"""

from __future__ import annotations

import difflib
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
    "demo": Lazy("spiderfs.cli.bench", "demo", "Compare direct reads, a cache and a plan on made-up images."),
    "mount": Lazy("spiderfs.cli.mount", "mount", "Show a directory through the cache."),
    "serve": Lazy("spiderfs.cli.mount", "serve", "Serve a directory to spiderfs.client, without a mount."),
    "umount": Lazy("spiderfs.cli.mount", "umount", "Unmount a directory, or all."),
    "status": Lazy("spiderfs.cli.status", "status", "List the mounts, or show what one mount does."),
    "top": Lazy("spiderfs.cli.top", "top", "Show activity of mounts and training runs, every second."),
    "metrics": Lazy("spiderfs.cli.metrics", "metrics", "Serve the metrics of mounts to Prometheus."),
    "config": Lazy("spiderfs.cli.status", "config", "Show the options of a mount, or change some."),
    "warm": Lazy("spiderfs.cli.warm", "warm", "Fetch files into the cache beforehand."),
    "pin": Lazy("spiderfs.cli.warm", "pin", "Keep files in the cache whatever the policy."),
    "unpin": Lazy("spiderfs.cli.warm", "unpin", "Leave pinned files to the policy again."),
    "doctor": Lazy("spiderfs.cli.doctor", "doctor", "Check this machine, a source and mounts; say how to fix them."),
    "bench": Lazy("spiderfs.cli.bench", "bench", "Measure your data, and recommend mount options."),
    "evict": Lazy("spiderfs.cli.warm", "evict", "Drop files from the cache."),
    "profile": Lazy("spiderfs.cli.profile", "profile", "Find the split of the cache that is fastest for a loader."),
    "report": Lazy("spiderfs.cli.report", "report", "Write an HTML page about training runs."),
    "cache": Lazy("spiderfs.cli.cache", "cache", "List the caches on this machine, or remove some."),
    "simulate": Lazy("spiderfs.cli.simulate", "simulate", "Replay a trace with other policies and capacities."),
    "mount-helper": Lazy("spiderfs.cli.mount", "mount_helper", ""),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it is called."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        similar = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        if args[0] not in COMMANDS and similar:
            ctx.fail(f"No such command {args[0]!r}: did you mean {similar[0]}?")
        return super().resolve_command(ctx, args)

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


FIRST_STEPS = """\
spiderfs keeps remote training data in a cache on a local disk. What to try first, with your data for /nfs/imagenet:

  spiderfs demo                                what it gains on made-up images, in a minute
  spiderfs doctor /nfs/imagenet                what is missing on this machine, and how to fix it
  spiderfs bench /nfs/imagenet                 which options to mount with, and the speed-up to expect
  spiderfs mount /nfs/imagenet /mnt/imagenet   mount it; add -o immutable,capacity=200GiB
  spiderfs top                                 watch hits and waits

In train.py: trainer_hook.plan("/mnt/imagenet", loader). All commands: spiderfs --help
"""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, prog_name="spiderfs")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Mounts a directory of training data read-only, with a cache on the local disk.

    \b
    spiderfs mount /nfs/imagenet /mnt/imagenet -o capacity=20GiB
    spiderfs status /mnt/imagenet
    spiderfs umount /mnt/imagenet
    """
    if ctx.invoked_subcommand is None:
        click.echo(FIRST_STEPS, nl=False)
