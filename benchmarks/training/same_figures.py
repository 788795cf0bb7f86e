"""Whether a change of the code changes what trainings measure: small trainings by this checkout and by another.

    .venv-dev/bin/python -m benchmarks.training.same_figures --data DIR --other CHECKOUT
    .venv-dev/bin/python -m benchmarks.training.same_figures --data DIR --other CHECKOUT --quick      with fewer images

DIR holds train/CLASS/NAME and test/CLASS/NAME. A refactoring leaves every figure of each training run as it was, to the
last digit, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.command import add_data, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import ROOT, plain_table
from benchmarks.training.training import IMAGES

RUNS = {
    "accuracy": "uniform,echo 2,importance,loss + weights + coverage 0.3,weights + coverage 0.3 + settled 0.25,spider",
    "systems": "shade,icache,impact,quiver,echo 2,spider-released,spider+plan",
}
CHOOSE = {"accuracy": "--configs", "systems": "--systems"}
FULL, QUICK = ("900", "4"), ("300", "3")
"""Training images and epochs."""
MEASURED = {"accuracy": "runs", "systems": "measured"}
# They differ from run to run, and say nothing of what was trained.
LEFT_OUT = ("seconds", "machine")


def figures(checkout: Path, benchmark: str, arguments: argparse.Namespace, file: Path) -> list[Any]:
    """What a benchmark of this checkout measures in small trainings; raises RuntimeError if it fails."""
    images, epochs = QUICK if arguments.quick else FULL
    extent = ["--train-samples", images, "--test-samples", "300", "--epochs", epochs, "--seeds", "1"]
    command = [sys.executable, "-m", f"benchmarks.training.{benchmark}", "--data", str(arguments.data), *extent]
    command += [CHOOSE[benchmark], RUNS[benchmark], "--json", str(file)]
    command += ["--shares", "0.2"] if benchmark == "systems" else []
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{benchmark} of {checkout} has failed: {done.stderr.strip()[-500:]}")
    found: list[Any] = json.loads(file.read_text())[MEASURED[benchmark]]
    return [{name: value for name, value in run.items() if name not in LEFT_OUT} for run in found]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    table = plain_table("Figures of small trainings by both checkouts", "", "trainings", "equal", words=("",))
    rows = []
    with scratch_directory("same-figures") as scratch:
        for benchmark in RUNS:
            ours, theirs = (
                figures(checkout, benchmark, arguments, scratch / f"{name}-{benchmark}.json")
                for name, checkout in (("ours", ROOT), ("theirs", arguments.other.resolve()))
            )
            equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
            table.add_row(benchmark, str(len(ours)), str(equal))
            rows.append({"benchmark": benchmark, "trainings": len(ours), "equal": equal})
    console.print(table)
    if any(row["equal"] < row["trainings"] for row in rows):
        raise RuntimeError("the checkouts do not train the same")
    return {"rows": rows}


if __name__ == "__main__":
    program = command_line(__doc__)
    add_data(program, IMAGES, required=True)
    program.add_argument("--other", type=Path, required=True, metavar="CHECKOUT", help="the code to compare with")
    main(measure, program)
