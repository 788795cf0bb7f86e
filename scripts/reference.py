"""Writes the parts of the documents that follow from the code: options, control files, commands, functions, metrics.

    .venv/bin/python scripts/reference.py           writes them
    .venv/bin/python scripts/reference.py --check   says which are not what the code says, and ends with 1

Such a part stands between the lines `<!-- NAME: written by scripts/reference.py -->` and `<!-- end -->`. Everything
around it is written by hand and stays. A test compares every part with the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import trainer_hook
from spiderfs import client, errors
from spiderfs.cli.main import main
from spiderfs.metrics import BUCKETS_US, COUNTERS, GAUGES, HISTOGRAMS, SECTION_BYTES, Definition
from spiderfs.options.model import default_rows
from spiderfs.protocol import MESSAGES, Message, Ok
from spiderfs.vfs.control_files import FILES

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- ([\w-]+): written by scripts/reference\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def options() -> str:
    return _table(
        ("option", "default", "live", "meaning"),
        ((f"`{row.name}`", row.value, "yes" if row.live else "", row.help) for row in default_rows()),
    )


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
        shown = [flag.get_help_record(context) for flag in flags]
        rows = ((f"`{words}`", " ".join(meaning.split())) for words, meaning in filter(None, shown))
        said = inspect.cleandoc(command.help or "")
        parts.append(f"## {name}\n\n`{usage}`\n\n{said}\n\n{_table(('flag', 'meaning'), rows)}")
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


def _functions(module: Any, public: dict[str, tuple[str, ...]]) -> str:
    """Functions and classes with what they say of themselves; of a class those methods that are meant for users."""
    parts = []
    for name, methods in public.items():
        found = getattr(module, name)
        call = "" if name in GIVEN else f"`{name}{_signature(found)}`\n\n"
        parts.append(f"### {name}\n\n{call}{inspect.getdoc(found)}\n")
        lines = []
        for inner in methods:
            method = inspect.getattr_static(found, inner)
            call = inner if isinstance(method, property) else f"{inner}{_signature(method)}"
            lines.append(f"- **`{call}`**: {' '.join((inspect.getdoc(method) or '').split())}\n")
        if lines:
            parts.append("".join(lines))
    return "\n".join(parts)


# What a training calls, and the methods that it may call; other methods are for the hook's own parts.
HOOK: dict[str, tuple[str, ...]] = {
    "attach": (),
    "Hook": ("epoch_end", "losses", "weights", "batch", "indices", "counts", "job", "epoch", "close"),
    "plan": (),
    "Planning": ("close",),
    "lightning_callback": (),
    "hugging_face_callback": (),
    "SpiderSampler": ("set_epoch", "state_dict", "load_state_dict", "probabilities", "weights"),
    "EchoSampler": (),
    "refurbish": (),
    "ShadeSampler": ("observe", "repeats"),
    "ImpactSampler": (),
}
CLIENT: dict[str, tuple[str, ...]] = {
    "read_bytes": (),
    "open": (),
    "Client": ("open", "read_bytes", "stat", "exists", "listdir"),
}
# Nobody makes these; a function gives them.
GIVEN = {"Hook", "Planning"}


def hook_functions() -> str:
    return _functions(trainer_hook, HOOK)


def client_functions() -> str:
    return _functions(client, CLIENT)


def error_tree() -> str:
    """As the module of errors draws it; it is complete, for each class is in it with its errno."""
    drawn = inspect.getdoc(errors) or ""
    tree = drawn.split("\n\n")[1]
    for kind in vars(errors).values():
        if inspect.isclass(kind) and issubclass(kind, errors.SpiderfsError):
            assert f"{kind.__name__} ({errno.errorcode[kind.errno]})" in tree, kind
    return f"```text\n{inspect.cleandoc(tree)}\n```\n"


def _metrics(definitions: tuple[Definition, ...], ending: str = "") -> str:
    rows = ((f"`spiderfs_{found.name}{ending}`", found.help, found.use) for found in definitions)
    return _table(("name", "meaning", "how to use it"), rows)


def counters() -> str:
    return _metrics(COUNTERS, "_total")


def gauges() -> str:
    return _metrics((*GAUGES, SECTION_BYTES))


def histograms() -> str:
    bounds = ", ".join(f"{bound / 1e6:g}" for bound in BUCKETS_US)
    return f"{_metrics(HISTOGRAMS)}\nUpper bounds of the buckets, in seconds: {bounds}; one more has all above.\n"


_SCALARS = {str: "text", int: "integer", float: "number", bool: "true or false"}


def _message_row(kind: type[Message]) -> tuple[str, str, str, str]:
    """Its type, the first paragraph of what it says of itself, and its fields as a frame has them."""
    may_be_nil = {field.name for field in dataclasses.fields(kind) if field.default is None}
    scalars = [
        f"`{name}` {_SCALARS[scalar]}{' or nil' if name in may_be_nil else ''}" for name, scalar in kind.SCALARS.items()
    ]
    arrays = [
        f"`{name}` `{array.dtype}` [{', '.join('nd'[: array.dimensions])}]{'' if array.required else ' (optional)'}"
        for name, array in kind.ARRAYS.items()
    ]
    said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("None", "nil")
    return f"`{kind.TYPE}`", said, ", ".join(scalars), ", ".join(arrays)


def _messages(kinds: list[type[Message]]) -> str:
    return _table(("type", "what it says", "scalars", "arrays"), map(_message_row, kinds))


def trainer_messages() -> str:
    kinds = list(MESSAGES.values())
    return _messages(kinds[: kinds.index(Ok)])


def daemon_answers() -> str:
    kinds = list(MESSAGES.values())
    return _messages(kinds[kinds.index(Ok) :])


def rooms() -> str:
    """Each folder of code with the first sentence that its `__init__.py` says."""
    lines = []
    for top in ("spiderfs", "trainer_hook", "benchmarks"):
        for path in sorted((ROOT / top).rglob("__init__.py"), key=lambda path: path.parent.parts):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            room = path.parent.relative_to(ROOT).as_posix()
            lines.append((f"`{room}/`", " ".join(said.split("\n\n")[0].split())))
    return _table(("room", "what is in it"), iter(lines))


def results() -> str:
    """The kept results, and whether the code that decides each is still the one that was measured."""
    sys.path.insert(0, str(ROOT))  # Benchmarks are not installed.
    from benchmarks.common import code_behind

    rows = []
    for path in sorted((ROOT / "docs/results").glob("*.json")):
        places = ", ".join(f"`{place}`" for place in code_behind.DECIDED_BY[path.stem])
        rows.append((f"`{path.name}`", places, code_behind.state_of(path)))
    return _table(("result", "the code that decides it", "is it the code of today"), iter(rows))


PARTS: dict[str, Callable[[], str]] = {
    "options": options,
    "control-files": control_files,
    "commands": commands,
    "hook-functions": hook_functions,
    "client-functions": client_functions,
    "error-tree": error_tree,
    "rooms": rooms,
    "results": results,
    "trainer-messages": trainer_messages,
    "daemon-answers": daemon_answers,
    "counters": counters,
    "gauges": gauges,
    "histograms": histograms,
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
    old = [path for path in documents() if renewed(path.read_text()) != path.read_text()]
    for path in old:
        print(f"{'old' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(renewed(path.read_text()))
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(run())
