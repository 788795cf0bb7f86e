"""Runs cells of the table of faults and prints the outcome of each; see scripts/faults."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fault_cells import QUICK, Outcome, Setting, run_all
from fault_table import SIGNALS, SOURCES, TRAINERS, VICTIMS, Cell, all_cells, covering


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    cells = covering() if arguments.quick else all_cells()
    wanted = (arguments.victim, arguments.signal, arguments.source, arguments.trainer)
    return [
        cell for cell in cells if all(value is None or part in value for part, value in zip(cell, wanted, strict=True))
    ]


def line_of(outcome: Outcome) -> str:
    verdict = "FAIL" if outcome.problems else "ok"
    errors = " ".join(f"{name}({waited_s:.1f})" for name, waited_s in sorted(outcome.errors.items()))
    waited = f"{outcome.longest_s:5.1f} of {outcome.limit_s:4.1f} s {outcome.longest_call:4}"
    ends = f"killed {outcome.killed_s:3.1f} end {outcome.end_s:4.1f}"
    head = f"{verdict:4} {outcome.took_s:5.1f} s  {waited}  {ends}  {outcome.cell!s:55} {errors}"
    return "\n".join([head.rstrip(), *(f"        {problem}" for problem in outcome.problems)])


def summary(outcomes: Sequence[Outcome], took_s: float) -> str:
    passed = sum(not outcome.problems for outcome in outcomes)
    lines = [f"{passed} of {len(outcomes)} cells hold; {took_s:.0f} s"]
    for source in SOURCES:
        of_it = [outcome for outcome in outcomes if outcome.cell.source == source]
        if of_it:
            worst = max(of_it, key=lambda outcome: outcome.longest_s / outcome.limit_s)
            lines.append(
                f"  source {source:8} longest wait against its limit: {worst.longest_s:.1f} of {worst.limit_s:.1f} s "
                f"({worst.longest_call}; {worst.cell})"
            )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/faults",
        description="Kill or stop processes of a mount while its source fails, and compare what readers see.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run a few cells that cover all pairs of values, with shorter stops"
    )
    for name, values in (("victim", VICTIMS), ("signal", SIGNALS), ("source", SOURCES), ("trainer", TRAINERS)):
        parser.add_argument(
            f"--{name}", action="append", choices=values, help="run only cells with this value; can be repeated"
        )
    parser.add_argument(
        "--jobs", type=int, default=4, help="number of cells that run at the same time (default %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=0, help="workers of each mount (default: 1 and 2 in turns)")
    parser.add_argument(
        "--stop",
        type=float,
        help=f"seconds for which SIGSTOP lasts (default {Setting.stop_s:g}, quick {QUICK.stop_s:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of every cell to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the directories and logs of the mounts in DIR")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    setting = replace(QUICK if arguments.quick else Setting(), workers=arguments.workers)
    if arguments.stop is not None:
        setting = replace(setting, stop_s=arguments.stop)
    cells = chosen(arguments)
    outcomes = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sf-faults.", ignore_cleanup_errors=True) as temporary:
        scratch = arguments.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for outcome in run_all(cells, scratch, setting, arguments.jobs):
            outcomes.append(outcome)
            print(line_of(outcome), flush=True)
            if outcome.problems and arguments.keep:
                print(f"        {scratch}/{cells.index(outcome.cell)}/log", flush=True)
    outcomes.sort(key=lambda outcome: cells.index(outcome.cell))
    took_s = time.monotonic() - began
    print(summary(outcomes, took_s))
    if arguments.json is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "took_s": took_s}
        rows = [asdict(outcome) | {"cell": outcome.cell._asdict()} for outcome in outcomes]
        arguments.json.write_text(json.dumps({"machine": machine, "setting": asdict(setting), "cells": rows}, indent=1))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
