"""The command line that all benchmarks share: --quick and --json FILE, and for some --data DIR."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path


def command_line(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, whose --help begins with a benchmark's whole docstring."""
    module = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {module.name}" if module is not None else None,
        description=documentation,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="measure less of everything, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    return parser


def add_data(parser: argparse._ActionsContainer, holds: str, required: bool = False, option: str = "--data") -> None:
    """Add --data DIR to a parser or to a group of its options; `holds` is the help: what DIR holds."""
    parser.add_argument(option, type=_directory, required=required, metavar="DIR", help=holds)


def add_numbers(parser: argparse.ArgumentParser, full: object, quick: object, **fields: str) -> None:
    """Add an option with a whole number for each field of an extent, by the option's name; the help names defaults."""
    for option, field in fields.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=int,
            dest=field,
            metavar="N",
            help=f"default {getattr(full, field)}, quick {getattr(quick, field)}",
        )


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


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a directory")
    return path.resolve()
