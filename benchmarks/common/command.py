"""What all benchmarks share as programs: --quick, --json FILE, the numbers of an extent, and how they end."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.interruption import LEFT, exit_status
from benchmarks.common.results import machine, save, wide_console
from spiderfs.errors import SpiderfsError


@dataclass(frozen=True)
class Extent:
    """How much a benchmark that trains measures; raises ValueError if it is too little."""

    epochs: int
    training: int = field(metadata={"option": "train-samples"})
    held_out: int = field(metadata={"option": "test-samples"})
    seeds: int

    def __post_init__(self) -> None:
        if self.epochs < 2 or self.seeds < 1 or self.training < 64:
            raise ValueError("choose at least 2 epochs (the first fills the cache), 1 seed and 64 training images")


def command_line(documentation: str | None, full: Any = None, quick: Any = None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, whose --help begins with a benchmark's whole docstring.

    `full` and `quick` are extents, dataclasses; each of their whole numbers gets an option.
    """
    module = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {module.name}" if module is not None else None,
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="measure less of everything, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    for of in fields(full) if full is not None else ():
        if isinstance(getattr(full, of.name), int):
            option = of.metadata.get("option", of.name.replace("_", "-"))
            defaults = f"default {getattr(full, of.name)}, quick {getattr(quick, of.name)}"
            parser.add_argument(f"--{option}", type=int, dest=of.name, metavar="N", help=defaults)
    parser.set_defaults(extents=(full, quick))
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line; `extent` is the full or the quick one, with the numbers that the user has chosen."""
    arguments = parser.parse_args()
    full, quick = arguments.extents
    if full is not None:
        chosen = {of.name: vars(arguments).get(of.name) for of in fields(full)}
        given = {name: number for name, number in chosen.items() if number is not None}
        try:
            arguments.extent = replace(quick if arguments.quick else full, **given)
        except ValueError as error:
            parser.error(str(error))
    return arguments


def main(
    measure: Callable[[argparse.Namespace, Console], dict[str, Any] | None], parser: argparse.ArgumentParser
) -> None:
    """Measure what the command line asks for, and exit; what `measure` returns goes to --json, with the machine."""
    arguments = parsed(parser)

    def measured() -> None:
        found = measure(arguments, wide_console())
        if found is not None:
            save(arguments.json, {"machine": machine()} | found)

    expected = (OSError, RuntimeError, SpiderfsError)
    name = parser.prog.rpartition(".")[2]
    sys.exit(exit_status(name, measured, "interrupted; everything is unmounted and deleted", expected))


def add_data(parser: argparse._ActionsContainer, holds: str, required: bool = False, option: str = "--data") -> None:
    """Add --data DIR to a parser; `holds` is the help: what DIR holds."""
    parser.add_argument(option, type=_directory, required=required, metavar="DIR", help=holds)


def add_names(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], purpose: str, default: Iterable[str] = ()
) -> None:
    """Add an option for some of the `known` names, as A,B; the result is a list. The help is the purpose, and names.

    A comma before a space belongs to a name, as in "impact, twice the epochs".
    """
    known = list(known)

    def chosen(text: str) -> list[str]:
        names = re.split(r",(?! )", text)
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(map(repr, unknown))}; choose from {shown}")
        return names

    shown = ",".join(known)
    # argparse formats a help with %.
    help_text = f"{purpose}, of {shown}".replace("%", "%%")
    parser.add_argument(option, type=chosen, default=list(default), metavar="A,B", help=help_text)


def add_minutes(parser: argparse.ArgumentParser, piece: str) -> None:
    """Add --minutes N; `piece` is what is not interrupted when they are over."""
    help_text = f"begin no {piece} that would end later, and exit with {LEFT} if something is left (default: no limit)"
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help=help_text)


def numbers_of(kind: Callable[[str], float]) -> Callable[[str], list[Any]]:
    """The `type` of an option for numbers above 0, as A,B."""

    def numbers(text: str) -> list[float]:
        found = [kind(part) for part in text.split(",")]
        if min(found) <= 0:
            raise argparse.ArgumentTypeError("give numbers above 0, as in 2,4")
        return found

    return numbers


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a directory")
    return path.resolve()
