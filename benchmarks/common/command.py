"""The command line that all benchmarks share: --quick and --json FILE, and for some --data DIR."""

from __future__ import annotations

import argparse
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


def add_data(parser: argparse._ActionsContainer, holds: str, required: bool = False) -> None:
    """Add --data DIR to a parser or to a group of its options; `holds` is the help: what DIR holds."""
    parser.add_argument("--data", type=_directory, required=required, metavar="DIR", help=holds)


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


def check_names(parser: argparse.ArgumentParser, chosen: Iterable[str], known: Iterable[str]) -> None:
    """End the program with a message if a name was chosen that is not known."""
    if unknown := set(chosen) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {','.join(known)}")


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a directory")
    return path.resolve()
