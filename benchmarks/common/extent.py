"""How much a benchmark that trains measures, as its command line says."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from benchmarks.common.command import add_numbers


@dataclass(frozen=True)
class Extent:
    epochs: int
    training: int
    held_out: int
    seeds: int


# So many training images make at least one batch.
LEAST_TRAINING = 64


def add_extent(parser: argparse.ArgumentParser, full: Extent, quick: Extent) -> None:
    """Add the options that `extent_of` reads."""
    add_numbers(parser, full, quick, epochs="epochs", train_samples="training", test_samples="held_out", seeds="seeds")


def extent_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace, full: Extent, quick: Extent) -> Extent:
    """The full or the quick extent, with the numbers that the user has chosen."""
    extent = asdict(quick if arguments.quick else full)
    extent |= {field: chosen for field in extent if (chosen := getattr(arguments, field)) is not None}
    if extent["epochs"] < 2 or extent["seeds"] < 1 or extent["training"] < LEAST_TRAINING:
        parser.error(
            f"choose at least 2 epochs (the first fills the cache), 1 seed and {LEAST_TRAINING} training images"
        )
    return Extent(**extent)
