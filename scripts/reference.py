"""Writes what follows from the code: parts of documents (options, control files, commands, metrics), and man pages.

    .venv-dev/bin/python scripts/reference.py           writes them
    .venv-dev/bin/python scripts/reference.py --check   says which are not what the code says, and ends with 1

Such a part stands between the lines `<!-- NAME: written by scripts/reference.py -->` and `<!-- end -->`. Everything
around it is written by hand and stays. A test compares every part with the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click

import trainer_hook
from spiderfs import client
from spiderfs.cli.main import main
from spiderfs.metrics import (
    BUCKETS_US,
    COUNTERS,
    DIRECTORY_UP,
    GAUGES,
    HISTOGRAMS,
    MOUNT_UP,
    PEER_COUNTERS,
    PEER_UP,
    SECTION_BYTES,
    Definition,
)
from spiderfs.options.model import default_rows
from spiderfs.protocol import MESSAGES, Message, Ok
from spiderfs.vfs.control_files import FILES

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- ([\w-]+): written by scripts/reference\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def options() -> str:
    parts = []
    for group, rows in groupby(default_rows(), lambda row: row.group):
        # Two columns fit a phone.
        cells = ((f"`{row.name}`{'*' if row.live else ''}<br>{row.value}", row.help) for row in rows)
        parts.append(f"## {group}\n\n{_table(('option, default', 'meaning'), cells)}")
    return "\n".join(parts)


def control_files() -> str:
    rows = [(f"`{os.fsdecode(file.name)}`", "yes" if file.mode & 0o200 else "", file.help) for file in FILES]
    rows.append(("`views/`", "", "a directory for each form of the files: `original`, and every view"))
    return _table(("file", "can be written", "what it is for"), iter(rows))


def commands() -> str:
    parts = []
    root = click.Context(main, info_name="spiderfs", **main.context_settings)
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        usage = " ".join(["spiderfs", name, *command.collect_usage_pieces(context)])
        flags = [flag for flag in command.get_params(context) if isinstance(flag, click.Option)]
        # Each command has --help.
        shown = [flag.get_help_record(context) for flag in flags if "--help" not in flag.opts]
        rows = ((f"`{words}`", " ".join(meaning.split())) for words, meaning in filter(None, shown))
        # --help and the man page say the rest.
        said = inspect.cleandoc(command.help or "").partition("\n\n")[0]
        table = f"\n{_table(('flag', 'meaning'), rows)}" if any(shown) else ""
        parts.append(f"## {name}\n\n`{usage}`\n\n{said}\n{table}")
    return "\n".join(parts)


def _signature(owner: Any) -> str:
    """Names and defaults; types are left to the editor, which shows them."""
    parameters = []
    keyword_only = False
    for parameter in inspect.signature(owner).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        stars = (
            "**"
            if parameter.kind is parameter.VAR_KEYWORD
            else "*"
            if parameter.kind is parameter.VAR_POSITIONAL
            else ""
        )
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parameters.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parameters)})"


def _functions(module: Any, public: dict[str, tuple[str, ...]], brief: bool = False) -> str:
    """Functions and classes with what they say of themselves; of a class those methods that are meant for users.

    In brief these are their first sentences; `help()` says the rest.
    """
    parts = []
    for name, methods in public.items():
        found = getattr(module, name)
        call = "" if name in GIVEN else f"`{name}{_signature(found)}`\n\n"
        said = inspect.getdoc(found) or ""
        parts.append(f"### {name}\n\n{call}{said.partition(chr(10) * 2)[0] if brief else said}\n")
        lines = []
        for inner in methods:
            method = inspect.getattr_static(found, inner)
            call = inner if isinstance(method, property) else f"{inner}{_signature(method)}"
            said = " ".join((inspect.getdoc(method) or "").split())
            lines.append(f"- **`{call}`**: {re.split(r'[.;] ', said.rstrip('.'))[0] + '.' if brief else said}\n")
        if lines:
            parts.append("".join(lines))
    return "\n".join(parts)


# What a training calls, and the methods that it may call; other methods are for the hook's own parts.
HOOK: dict[str, tuple[str, ...]] = {
    "attach": (),
    "HookOptions": (),
    "Hook": ("epoch_end", "losses", "weights", "batch", "indices", "counts", "job", "epoch", "close"),
    "plan": (),
    "Planning": ("close",),
    "lightning_callback": (),
    "hugging_face_callback": (),
    "SpiderSampler": ("set_epoch", "state_dict", "load_state_dict", "probabilities", "weights"),
    "EchoSampler": (),
    "InfoBatchSampler": ("trained", "weights"),
    "PoolSampler": (),
    "refurbish": (),
}
PAPERS: dict[str, tuple[str, ...]] = {"ShadeSampler": ("observe", "repeats"), "ImpactSampler": ()}
CLIENT: dict[str, tuple[str, ...]] = {
    "read_bytes": (),
    "open": (),
    "listdir": (),
    "stat": (),
    "Client": ("open", "read_bytes", "stat", "exists", "listdir"),
    "Served": ("open", "read_bytes", "stat", "exists", "listdir", "scandir", "readlink"),
}
# No one makes these; a function gives them.
GIVEN = {"Hook", "Planning"}


def hook_functions() -> str:
    return _functions(trainer_hook, HOOK, brief=True)


def paper_functions() -> str:
    return _functions(trainer_hook, PAPERS, brief=True)


def client_functions() -> str:
    return _functions(client, CLIENT)


def _metrics(definitions: tuple[Definition, ...], ending: str = "") -> str:
    rows = (
        (f"`spiderfs_{found.name}{ending}`", f"{found.help}. **{found.trouble}**" if found.trouble else found.help)
        for found in definitions
    )
    return _table(("name", "meaning"), rows)


def counters() -> str:
    return _metrics((*COUNTERS, *PEER_COUNTERS), "_total")


def gauges() -> str:
    return _metrics((*GAUGES, SECTION_BYTES, DIRECTORY_UP, MOUNT_UP, PEER_UP))


def histograms() -> str:
    bounds = ", ".join(f"{bound / 1e6:g}" for bound in BUCKETS_US)
    return f"{_metrics(HISTOGRAMS)}\nUpper bounds of the buckets, in seconds: {bounds}; the last bucket has no bound.\n"


_SCALARS = {str: "text", int: "integer", float: "number", bool: "boolean"}


def _message_row(kind: type[Message]) -> tuple[str, str, str]:
    """Its type, the first paragraph of its docstring, and its fields as a frame has them."""
    may_be_nil = {field.name for field in dataclasses.fields(kind) if field.default is None}  # type: ignore[arg-type]
    fields = [
        f"`{name}` {_SCALARS[scalar]}{' or nil' if name in may_be_nil else ''}" for name, scalar in kind.SCALARS.items()
    ]
    fields += [
        f"`{name}` `{array.dtype}` [{', '.join('nd'[: array.dimensions])}]{'' if array.required else ' (optional)'}"
        for name, array in kind.ARRAYS.items()
    ]
    meaning = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("None", "nil")
    return f"`{kind.TYPE}`", meaning, ", ".join(fields)


def _messages(kinds: list[type[Message]]) -> str:
    return _table(("type", "meaning", "fields"), map(_message_row, kinds))


def trainer_messages() -> str:
    kinds = list(MESSAGES.values())
    return _messages(kinds[: kinds.index(Ok)])


def daemon_answers() -> str:
    kinds = list(MESSAGES.values())
    return _messages(kinds[kinds.index(Ok) :])


def results() -> str:
    """The kept results with date and commit, and the machine if it is not the usual one of two cores."""
    rows = []
    for path in sorted((ROOT / "docs/results").glob("*.json")):
        measured = json.loads(path.read_text()).get("machine", {})
        cores = measured.get("cores", 2)
        machine = ["" if cores == 2 else f"{cores} cores", measured.get("gpu") or ""]
        machine.append(f"others used {measured['others_cores']:.1f} cores" if measured.get("loaded") else "")
        named = ", ".join(filter(None, (f"[{path.stem}]({path.name})", *machine)))
        rows.append((named, measured.get("time", "")[:10], measured.get("commit", "")))
    return _table(("result", "date", "commit"), iter(rows))


PARTS: dict[str, Callable[[], str]] = {
    "options": options,
    "control-files": control_files,
    "commands": commands,
    "hook-functions": hook_functions,
    "paper-functions": paper_functions,
    "client-functions": client_functions,
    "results": results,
    "trainer-messages": trainer_messages,
    "daemon-answers": daemon_answers,
    "counters": counters,
    "gauges": gauges,
    "histograms": histograms,
}


def _roff(text: str) -> str:
    """Text of a man page: a backslash and a point or a quote at the begin of a line would be commands of roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def _paragraphs(text: str) -> str:
    return "".join(f".PP\n{_roff(' '.join(part.split()))}\n" for part in text.replace("\b", "").split("\n\n") if part)


def _items(rows: Iterator[tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {_roff(words)}\n{_roff(' '.join(meaning.split()))}\n" for words, meaning in rows)


def _mount_options() -> str:
    groups = groupby(default_rows(), lambda row: row.group)
    return "".join(
        f".SS {group}\n"
        + _items((f"{row.name}={row.value}", f"{row.help}{' (live)' if row.live else ''}") for row in rows)
        for group, rows in groups
    )


def man_spiderfs() -> str:
    """spiderfs(1), of the help of all commands."""
    root = click.Context(main, info_name="spiderfs", **main.context_settings)
    parts = [
        ".TH SPIDERFS 1\n.SH NAME\nspiderfs \\- read\\-only mounts of training data with a local cache\n.SH SYNOPSIS\n"
        ".B spiderfs\n.I COMMAND\n[\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...\n.SH COMMANDS\n"
    ]
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root)
        usage = " ".join(["spiderfs", name, *command.collect_usage_pieces(context)])
        flags = [
            flag.get_help_record(context) for flag in command.get_params(context) if isinstance(flag, click.Option)
        ]
        said = _paragraphs(inspect.cleandoc(command.help or ""))
        parts.append(f".SS {_roff(usage)}\n{said}{_items(filter(None, flags))}")
    parts.append(
        f".SH OPTIONS OF A MOUNT\nAs \\-o takes them, with their defaults; spiderfs config changes live ones.\n"
        f"{_mount_options()}.SH FILES\n{_items((f'MOUNTPOINT/.spiderfs/{os.fsdecode(f.name)}', f.help) for f in FILES)}"
        ".SH EXIT STATUS\n0, or 1 after an error, 2 if the command line cannot be understood.\n"
        ".SH SEE ALSO\n.BR mount.spiderfs (8)\n"
    )
    return "".join(parts)


def man_mount_spiderfs() -> str:
    """mount.spiderfs(8), of the table of options."""
    return (
        ".TH MOUNT.SPIDERFS 8\n.SH NAME\nmount.spiderfs \\- mount training data through a local cache\n.SH SYNOPSIS\n"
        ".B mount \\-t spiderfs\n.I SOURCE MOUNTPOINT\n[\\-o \\fINAME=VALUE\\fR,...]\n.SH DESCRIPTION\n"
        "Shows the directory or bucket SOURCE at MOUNTPOINT, read\\-only.\n"
        "mount(8) calls it, also for lines of fstab(5).\n"
        f".SH OPTIONS\n{_mount_options()}.SH EXIT STATUS\n0, or 32 if the mount failed.\n"
        ".SH SEE ALSO\n.BR spiderfs (1),\n.BR mount (8)\n"
    )


# Files that follow from the code as a whole.
MADE: dict[str, Callable[[], str]] = {
    "docs/man/spiderfs.1": man_spiderfs,
    "docs/man/mount.spiderfs.8": man_mount_spiderfs,
}


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(text: str) -> str:
    """A document with its parts as the code says."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[4]}", text)


def parts_of(text: str) -> list[str]:
    return [part[2] for part in _PART.finditer(text)]


def run() -> int:
    parser = argparse.ArgumentParser(prog="scripts/reference.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if something is old")
    check = parser.parse_args().check
    wanted = {path: renewed(path.read_text()) for path in documents()}
    wanted |= {ROOT / name: make() for name, make in MADE.items()}
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"{'old' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path])
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(run())
