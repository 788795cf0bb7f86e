"""Runs spiderfs on a real NFS: nfsd, two clients and their faults, in a virtual machine that needs no KVM.

The first run downloads some 100 MB of Debian's packages (a kernel, qemu, the programs of NFS) and unpacks them below
.nfs/; nothing is installed. The cases are the tests of tests/nfs. Each runs for each way to mount: NFS version 3 and 4,
hard and soft, with the default caching of attributes and with actimeo=1. The result is a table; the exit status is 0 if
all cases are right. Whatever ends the run, Ctrl-C included, ends the machine.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nfs_machine import CACHE, ROOT, NoMachine, Parts, get_parts, machine
from rich.console import Console
from rich.table import Table

CASES = ROOT / "tests" / "nfs"
# Version, hard, short caching of attributes: see Way in tests/nfs/nfs_server.py.
ALL_WAYS = {
    f"v{version},{'hard' if hard else 'soft'}{',actimeo=1' if short else ''}": (version, hard, short)
    for version, hard, short in itertools.product(("3", "4.2"), (True, False), (False, True))
}
QUICK_WAYS = ["v4.2,hard,actimeo=1", "v3,soft,actimeo=1"]
# All ways take an hour on two idle cores.
LIMIT_S = 3 * 3600.0
BOOT_S = 300.0

console = Console(highlight=False)


def main() -> int:
    arguments = command_line().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if os.geteuid() != 0:
        return refuse("only root can share all of this machine's files with another: run it as root")
    if unknown := [name for name in arguments.case if name not in cases()]:
        return refuse(f"there is no case {', '.join(unknown)}; choose from {', '.join(cases())}")
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        return refuse(f"{arguments.json} cannot be written: choose another file with --json")
    CACHE.mkdir(exist_ok=True)
    try:
        parts = get_parts(arguments.kernel)
    except NoMachine as exc:
        return refuse(str(exc))
    ways = arguments.way or (QUICK_WAYS if arguments.quick else list(ALL_WAYS))
    console.print(f"Linux {parts.release}; mounted in {len(ways)} ways: {'  '.join(ways)}")
    work = Path(tempfile.mkdtemp(prefix="work.", dir=CACHE))
    results: list[dict[str, Any]] = []
    ended = False
    try:
        ended = run(parts, work, ways, arguments.case, results)
    finally:
        if arguments.keep:
            console.print(f"the machine's files are in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
        show(results)
        if arguments.json:
            found = {"kernel": parts.release, "quick": arguments.quick, "results": results}
            sys.path.insert(0, str(ROOT))  # Benchmarks are not installed.
            from benchmarks.common.results import save

            save(arguments.json, found)
    if not ended:
        return refuse("the machine ended before its tests did; run it again with --keep and look into console.log")
    return 0 if results and all(result["outcome"] in ("passed", "skipped") for result in results) else 1


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/nfs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two ways to mount, and not all eight")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    parser.add_argument(
        "--way", action="append", default=[], choices=list(ALL_WAYS), help="only this way to mount; may be repeated"
    )
    parser.add_argument("--keep", action="store_true", help="keep the machine's files and its log")
    parser.add_argument(
        "--kernel", choices=["stable", "backports"], default="stable", help="which kernel of Debian (default: stable)"
    )
    return parser


def cases() -> list[str]:
    """The names of all cases: the tests of tests/nfs, without `test_`."""
    modules = [ast.parse(path.read_text()) for path in sorted(CASES.glob("test_*.py"))]
    functions = [node.name for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("test_") for name in functions if name.startswith("test_")]


def run(parts: Parts, work: Path, ways: list[str], chosen: list[str], results: list[dict[str, Any]]) -> bool:
    """Add the results of the machine's tests as they come, and show them; whether the tests came to their end."""
    given = ";".join(json.dumps(ALL_WAYS[way]) for way in ways)
    log, done = work / "results.jsonl", work / "done"
    began = time.monotonic()
    with machine(parts, work, inside(parts, given, chosen)) as process:
        running = True
        while running:
            lasted_s = time.monotonic() - began
            late = lasted_s > LIMIT_S or (lasted_s > BOOT_S and not (work / "booted").exists())
            running = process.poll() is None and not done.exists() and not late
            time.sleep(0.5)
            for result in read_results(log)[len(results) :]:
                results.append(result)
                print_result(result)
    # Pytest says 1 where a test failed; from 2 on it could not run them.
    return done.exists() and done.read_text().strip() in ("0", "1")


def inside(parts: Parts, ways: str, chosen: list[str]) -> str:
    """What the machine's first process does."""
    # dpkg-deb -x leaves the old places of programs as they are in the packages; here they are links to those in /usr.
    return f"""
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 OMP_NUM_THREADS=1
export PYTHONPATH={ROOT}:{ROOT}/tests:{ROOT}/tests/trainer:{ROOT}/tests/fuse
export SPIDERFS_NFS_RESULTS=/run/machine/results.jsonl
export SPIDERFS_NFS_WAYS={shlex.quote(ways)} SPIDERFS_NFS_CASES={shlex.quote(" ".join(chosen))}
touch /run/machine/booted
mkdir -p /dev/shm /dev/pts /srv/export /srv/local
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount /dev/vda /srv/export
mount /dev/vdb /srv/local
for part in bin sbin lib usr etc; do
  to=/usr/$part; case $part in usr|etc) to=/$part; esac
  [ ! -d {parts.inside}/$part ] || cp -an {parts.inside}/$part/. $to/
done
ldconfig
# Their packages make these users when they are installed.
grep -q ^_rpc: /etc/passwd || echo _rpc:x:65533:65534::/run/rpcbind:/usr/sbin/nologin >> /etc/passwd
ip link set lo up
cd {ROOT}
.venv-dev/bin/python -m pytest -p no:cacheprovider -n0 -v --color=no --basetemp=/srv/local/t tests/nfs
echo $? > /run/machine/done
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


def read_results(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def print_result(result: dict[str, Any]) -> dict[str, Any]:
    word = {"passed": "right", "skipped": "skipped"}.get(result["outcome"], "WRONG")
    case = f"{result['case']} [{result['parameter']}]"
    if result["outcome"] != "skipped":
        print(f"{word:8}{result['seconds']:6.1f} s  {case} {result['note']}".rstrip(), flush=True)
    if result["said"]:
        print(result["said"], flush=True)
    return result


def show(results: list[dict[str, Any]]) -> None:
    """The table: a row for each case, a column for each way to mount."""
    ways = list(dict.fromkeys(result["way"] for result in results))
    table = Table("case", *(way or "all" for way in ways), title="right/all, seconds")
    for case in dict.fromkeys(result["case"] for result in results):
        row = []
        for way in ways:
            of = [result for result in results if (result["case"], result["way"]) == (case, way)]
            right = sum(result["outcome"] == "passed" for result in of)
            counted = [result for result in of if result["outcome"] != "skipped"]
            seconds = sum(result["seconds"] for result in of)
            colour = "" if right == len(counted) else "[red]"
            row.append(f"{colour}{right}/{len(counted)}, {seconds:.0f} s" if of else "")
        table.add_row(case, *row)
    console.print(table)


def refuse(why: str) -> int:
    print(f"nfs: {why}", file=sys.stderr)
    return 2


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
