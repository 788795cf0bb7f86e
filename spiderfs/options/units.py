"""Sizes, durations and capacities as people write them: `20GiB`, `5min`, `20%`.

Each `format_*` function writes a text that its `parse_*` function reads back unchanged, so that lines of
`.spiderfs/config` can be used as options. The parsers also take a number in place of a text, as TOML files have them,
and raise ValueError with a message of one line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

# K, M, G and T alone are binary units, as in dd(1) and in the option `size=` of tmpfs (mount(8)).
SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    SIZE_UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}

# A size is written in one of these units that divides it, so that nothing is rounded.
WRITTEN_SIZE_UNITS = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB")

DURATION_UNITS = {
    "ms": Fraction(1, 1000),
    "": Fraction(1),
    "s": Fraction(1),
    "sec": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}

WRITTEN_DURATION_UNITS = ("d", "h", "min", "s", "ms")

# A number has at most 30 digits, so that it never overflows a float.
_NUMBER = r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*"
_NUMBER_AND_UNIT = re.compile(_NUMBER + r"([A-Za-z]*)\s*", re.ASCII)
_PERCENTAGE = re.compile(_NUMBER + r"%\s*", re.ASCII)

# 64-bit file offsets end at 8 EiB; a larger size can only be a typing error.
MAX_SIZE_BYTES = 2**63 - 1


def counted(number: float, noun: str) -> str:
    """The number with its noun, such as `1 file` or `1,234 files`."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def parse_size(value: str | int | float) -> int:
    """The number of bytes in a size such as `4096`, `100MB` (decimal), `20GiB` or `20G` (binary)."""
    number, unit = _split(value, "a size", "20GiB, 100MB or 4096")
    if (factor := SIZE_UNITS.get(unit.upper())) is None:
        raise ValueError(f"unknown unit {unit!r} of a size: write it like 20GiB, 100MB or 4096")
    size = number * factor
    if size.denominator != 1:
        raise ValueError("a size must be a whole number of bytes: write it like 20GiB, 100MB or 4096")
    if size > MAX_SIZE_BYTES:
        raise ValueError("the size is too large: write at most 8388607TiB")
    return int(size)


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a number of bytes."""
    units = [unit for unit in WRITTEN_SIZE_UNITS if size_bytes and not size_bytes % SIZE_UNITS[unit.upper()]]
    return min((f"{size_bytes // SIZE_UNITS[unit.upper()]}{unit}" for unit in [*units, ""]), key=len)


def round_size(size_bytes: float) -> str:
    """A rounded size for a person to read, such as `3.2 GiB`; no parser reads it back."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def parse_duration(value: str | int | float) -> float:
    """The seconds in a duration such as `30s`, `5min`, `1h`, `250ms`, `2` (seconds) or `inf` (math.inf)."""
    if value == math.inf or (isinstance(value, str) and value.strip().lower() in ("inf", "infinite")):
        return math.inf
    number, unit = _split(value, "a duration", "30s, 5min, 1h or inf")
    if (factor := DURATION_UNITS.get(unit.lower())) is None:
        raise ValueError(f"unknown unit {unit!r} of a duration: write it like 30s, 5min, 1h or inf")
    return float(number * factor)


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration."""
    if math.isinf(seconds):
        return "inf"
    exact = Fraction(repr(seconds)) if seconds else Fraction(0)
    for unit in WRITTEN_DURATION_UNITS if exact else ():
        count = exact / DURATION_UNITS[unit]
        if count.denominator == 1:
            return f"{count}{unit}"
    return f"{seconds:.12f}".rstrip("0").rstrip(".") + "s" if exact else "0s"


@dataclass(frozen=True)
class Capacity:
    """How many bytes the cache may hold: a number of bytes, or a share of the source's size."""

    amount: int | float
    unit: Literal["bytes", "percent"]
    bare: bool = field(default=False, compare=False)
    """Whether it was written as a number without a unit, which may have been forgotten."""

    def __post_init__(self) -> None:
        if not self.amount > 0:
            raise ValueError("a capacity must be more than 0: write it like 20GiB or 20%")
        if self.unit == "percent" and self.amount > 100:
            raise ValueError("this is more than the whole source: write at most 100%")

    @classmethod
    def parse(cls, value: Capacity | str | int | float) -> Capacity:
        """A capacity from `20GiB`, `100MB`, a number of bytes, or `20%`."""
        if isinstance(value, Capacity):
            return value
        if isinstance(value, str) and value.rstrip().endswith("%"):
            if (match := _PERCENTAGE.fullmatch(value)) is None:
                raise ValueError(f"{value!r} is not a percentage: write it like 20% or 2.5%")
            return cls(float(match[1]), "percent")
        return cls(parse_size(value), "bytes", bare=str(value).strip().isdigit())

    def budget_bytes(self, source_bytes: int) -> int:
        """The capacity in bytes, at least 1; `source_bytes` matters only for a percentage."""
        if self.unit == "bytes":
            return int(self.amount)
        return max(1, min(int(source_bytes * self.amount / 100), MAX_SIZE_BYTES))

    def __str__(self) -> str:
        return format_size(int(self.amount)) if self.unit == "bytes" else f"{self.amount:.12g}%"


def _split(value: str | int | float, what: str, examples: str) -> tuple[Fraction, str]:
    """The number and the unit of a value; `what` and `examples` are for the message if it has none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"this is not {what}: write it like {examples}")
    if not isinstance(value, str):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"this is not {what}: write it like {examples}")
        return Fraction(repr(value)), ""
    match = _NUMBER_AND_UNIT.fullmatch(value.removeprefix("-"))
    if match and value.startswith("-"):
        raise ValueError(f"{what} is not negative: write it like {examples}")
    if match is None:
        raise ValueError(f"{value!r} is not {what}: write it like {examples}")
    return Fraction(match[1]), match[2]
