"""How much a benchmark measures, and which of its configurations, as its command line says."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Extent:
    epochs: int
    training: int
    held_out: int
    seeds: int


# An epoch has a batch at least.
LEAST_TRAINING = 64


def add_extent(parser: argparse.ArgumentParser, usual: Extent, quick: Extent) -> None:
    """The options that `extent_of` reads."""
    parser.add_argument("--quick", action="store_true", help="less of everything, for a look")
    for name, field in (
        ("epochs", "epochs"),
        ("train-samples", "training"),
        ("test-samples", "held_out"),
        ("seeds", "seeds"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            dest=field,
            metavar="N",
            help=f"default {getattr(usual, field)}, quick {getattr(quick, field)}",
        )


def extent_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace, usual: Extent) -> Extent:
    """The usual one, with what was given in place."""
    extent = asdict(usual)
    extent |= {field: given for field in extent if (given := getattr(arguments, field)) is not None}
    if extent["epochs"] < 2 or extent["seeds"] < 1 or extent["training"] < LEAST_TRAINING:
        parser.error(f"at least 2 epochs (the first fills the cache), 1 seed and {LEAST_TRAINING} training images")
    return Extent(**extent)


def check_names(parser: argparse.ArgumentParser, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := set(given) - set(known):
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}; choose from {','.join(known)}")
