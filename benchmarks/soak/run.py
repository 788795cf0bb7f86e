"""Lets readers, writers at the source, trainers, changed options, faults and kills work on one mount at the same time.

    .venv-dev/bin/python -m benchmarks.soak.run --minutes 10 --seed 1 --json FILE
    .venv-dev/bin/python -m benchmarks.soak.run --quick               in a minute, for a look

One seed decides all that happens (`schedule.py`), but two runs of one seed differ, since their processes run side by
side. Each byte that is read is compared with everything that its file has ever held (`contents.py`). Each error and
each late answer is compared with what had happened to the mount until then (`weather.py`). No call of a reader may wait
longer than the limit in the semantics. After each stretch the faults end; as soon as all names have expired, the
mount must show exactly what the source holds, and the daemon's memory, descriptors, processes and files are counted. At
the end nothing of the daemon may be left, and its store must be whole.

The exit status is 1 if anything was wrong; the seed and the last events are printed then.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.command import command_line, main
from benchmarks.common.images import make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import machine, plain_table, save
from benchmarks.soak.contents import MIXED, SAME, WRONG, Seen
from benchmarks.soak.daemon import Daemon, Usage
from benchmarks.soak.reader import Reader, Timed, Waits
from benchmarks.soak.schedule import (
    HOT_LARGE,
    HOT_SMALL,
    PHOTOS,
    READERS,
    TTL_S,
    VIEW,
    Event,
    Schedule,
    Stretch,
    schedule,
)
from benchmarks.soak.source import Source
from benchmarks.soak.weather import LIMIT_S, SLACK_S, Weather
from spiderfs.views.making import make
from spiderfs.views.recipe import READY

ROOT = Path(__file__).resolve().parents[2]
READER_PAUSE_S = 0.005
TRAINER_SLOTS = 32
OWN_SLOT = READERS + TRAINER_SLOTS
SLOTS = OWN_SLOT + 1
LOOK_S = 0.1
# After so long even a version of the largest file has settled, and the mount shows it as it is at the source.
SETTLING_S = 4.0
# Trainers may go on after the end of their stretch for so long; a lane that is late has the same time.
LANE_PATIENCE_S = 90.0
FULL_MINUTES, QUICK_MINUTES = 10.0, 1.0
EVENTS_KEPT = 40
FINDINGS_KEPT = 20


@dataclass
class Tally:
    """The counts of a run."""

    reads: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    longest_wait_s: float = 0.0
    latest_s: float = 0.0
    compared: int = 0
    usages: list[Usage] = field(default_factory=list)


class Soak:
    """One run; `findings` lists what was wrong, `events` lists what has happened lately."""

    def __init__(self, plan: Schedule, seed: int, scratch: Path, console: Console) -> None:
        self._plan = plan
        self._seed = seed
        self._scratch = scratch
        self._console = console
        self._began_s = time.monotonic()
        self.weather = Weather()
        self.source = Source(scratch / "source", scratch / "unfinished", plan.files)
        self.daemon = Daemon(self.source.root, scratch, self.weather)
        self.tally = Tally()
        self.findings: list[str] = []
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._rows: deque[dict[str, Any]] = deque()
        self._waits_path = scratch / "waits"
        self._waits = Waits(self._waits_path, SLOTS)
        self._readers: list[subprocess.Popen[bytes]] = []
        self._trainers: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._reader_seeds = random.Random(seed)
        self._photos = self._make_photos()

    def _make_photos(self) -> dict[str, str]:
        """Make the photos at the source; returns the digests of what the mount is to show of them."""
        digests: dict[str, str] = {}
        for name in make_images(self.source.root / "photos", None, len(PHOTOS), in_a_directory=len(PHOTOS)):
            path = self.source.root / PHOTOS[len(digests)]
            (self.source.root / "photos" / name).rename(path)
            shown: object = path.read_bytes()
            if "view" in self._plan.options:
                shown = make(path.read_bytes(), READY[VIEW], most_pixels=1 << 30)
            assert isinstance(shown, bytes)
            digests[PHOTOS[len(digests)]] = hashlib.sha1(shown).hexdigest()
        return digests

    def run(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.daemon.end)
            self.daemon.mount(self._plan.options)
            stack.callback(self._end_processes)
            for slot in range(READERS):
                self._readers.append(self._start_reader(slot))
            for stretch in self._plan.stretches:
                self._pass(stretch)
                if self.findings:
                    return
                self._compare()
                if self.findings:
                    return
            self._end_processes()
            self._drain(final=True)
            self.findings += self.daemon.end()

    def happened(self, what: str) -> None:
        self.events.append(f"{time.monotonic() - self._began_s:8.3f} s  {what}")

    def found(self, what: str) -> None:
        if len(self.findings) < FINDINGS_KEPT:
            self.findings.append(f"{time.monotonic() - self._began_s:.3f} s: {what}")

    # -- a stretch

    def _pass(self, stretch: Stretch) -> None:
        began_s = time.monotonic()
        lanes = [
            threading.Thread(target=self._lane, args=(began_s, events, act), daemon=True)
            for events, act in (
                (stretch.changes, self._change),
                (stretch.mount, self._befall),
                (stretch.trainers, self._train),
            )
        ]
        for lane in lanes:
            lane.start()
        deadline_s = began_s + stretch.seconds + LANE_PATIENCE_S
        while any(lane.is_alive() for lane in lanes):
            self._look()
            if self.findings:
                return
            if time.monotonic() > deadline_s:
                self.found("an event has not ended: " + self.events[-1])
                return
            time.sleep(LOOK_S)

    def _lane(self, began_s: float, events: Sequence[Event], act: Callable[[Event], None]) -> None:
        for event in events:
            time.sleep(max(0.0, began_s + event.at_s - time.monotonic()))
            if self.findings:
                return
            self.tally.events[event.kind] += 1
            self.happened(f"{event.kind} {event.arguments}")
            try:
                act(event)
            except Exception as exc:
                self.found(f"{event.kind} {event.arguments}: {type(exc).__name__}: {exc}")
                return

    def _change(self, event: Event) -> None:
        self.source.change(event.kind, event.arguments)

    def _befall(self, event: Event) -> None:
        if event.kind == "kill reader":
            self._kill_reader(int(event.arguments["which"] * READERS))
        else:
            self.daemon.befall(event.kind, event.arguments)

    def _kill_reader(self, slot: int) -> None:
        process = self._readers[slot]
        self._killed.add(process.pid)
        process.kill()
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.found(f"reader {process.pid} cannot be killed: {_stack(process.pid)}")
            return
        self._readers[slot] = self._start_reader(slot)

    def _train(self, event: Event) -> None:
        slot = next((slot for slot in range(READERS, OWN_SLOT) if slot not in self._trainers), None)
        if slot is None:
            return
        rng = random.Random(event.arguments["seed"])
        files = rng.sample(self._plan.files, event.arguments["samples"])
        self._trainers[slot] = self._start(
            "trainer", event.arguments | {"slot": slot, "files": [(file.number, file.path) for file in files]}
        )

    # -- processes that read

    def _start_reader(self, slot: int) -> subprocess.Popen[bytes]:
        rng = random.Random(self._reader_seeds.random())
        files = self._plan.files
        hot = files[:HOT_SMALL] + files[-HOT_LARGE:]
        files = rng.sample(hot, len(hot)) + files[HOT_SMALL:-HOT_LARGE]
        given = {"slot": slot, "pause_s": READER_PAUSE_S, "files": [(file.number, file.path) for file in files]}
        return self._start("reader", given | {"seed": rng.randrange(1 << 30)})

    def _start(self, program: str, given: dict[str, Any]) -> subprocess.Popen[bytes]:
        self._waits.put(given["slot"], 0.0, 0)
        given |= {"mount": str(self.daemon.mountpoint), "waits": str(self._waits_path), "slots": SLOTS}
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.soak.{program}", json.dumps(given)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._scratch / f"{program}.log").open("ab"),
        )
        threading.Thread(target=self._receive, args=(process,), daemon=True).start()
        return process

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # A process that was killed may have written half a line.
            if line.endswith(b"\n"):
                self._rows.append(json.loads(line))

    def _end_processes(self) -> None:
        for process in (*self._readers, *self._trainers.values()):
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in (*self._readers, *self._trainers.values()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * LIMIT_S)
            if process.poll() is None:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LIMIT_S)
            if process.poll() is None:
                self.found(f"process {process.pid} cannot be killed: {_stack(process.pid)}")
        self._readers, self._trainers = [], {}

    # -- what they saw

    def _look(self) -> None:
        now_s = time.monotonic()
        for slot, process in [*enumerate(self._readers), *self._trainers.items()]:
            since_s, _ = self._waits.get(slot)
            if since_s and now_s - since_s > LIMIT_S and process.poll() is None:
                self.found(f"a reader has waited for {now_s - since_s:.1f} s: {_stack(process.pid)}")
                return
            if slot < READERS and process.poll() is not None and process.pid not in self._killed:
                self.found(f"reader {slot} has ended with {process.returncode}: see {self._scratch}/reader.log")
                return
        for slot, process in list(self._trainers.items()):
            if (status := process.poll()) is not None:
                if status not in (0, -signal.SIGKILL):
                    self.found(f"a trainer has ended with {status}: {_tail(self._scratch / 'trainer.log')}")
                del self._trainers[slot]
        self._drain()

    def _drain(self, final: bool = False) -> None:
        settled_s = self.source.settled_until()
        later = []
        while self._rows:
            row = self._rows.popleft()
            if row["ended_s"] > settled_s and not final:
                later.append(row)
                continue
            self._judge(row)
        self._rows.extendleft(reversed(later))

    def _judge(self, row: dict[str, Any]) -> None:
        self.tally.longest_wait_s = max(self.tally.longest_wait_s, row["waited_s"])
        if row["waited_s"] > LIMIT_S:
            self.found(f"a reader waited for {row['waited_s']:.1f} s: {row}")
        if "directory" in row or "photo" in row:
            (self._judge_directory if "directory" in row else self._judge_photo)(row)
            return
        seen = Seen.of(row)
        path = self.source.files[seen.file].path
        self.tally.reads[seen.way + (" by a trainer" if seen.by_trainer else "")] += 1
        if self._failed(seen, f"{path}, {seen.way}"):
            return
        self.tally.read_bytes += sum(found.length for found in seen.ranges)
        with self.source.lock:
            verdict = self.source.history.judge(seen)
        self.tally.verdicts[verdict.how] += 1
        if verdict.how == WRONG:
            self.found(
                f"{path}, {seen.way}{' by a trainer' if seen.by_trainer else ''}: {verdict.why} at {self._when(seen)}"
            )
        elif not self.weather.allows_late(seen.began_s, verdict.late_s):
            lengths = [found.length for found in seen.ranges]
            self.found(
                f"{path}, {seen.way}: its bytes of {verdict.late_s:.1f} s before, at {self._when(seen)}: {seen.key}, "
                f"{lengths} bytes; the source has {self.source.history.now(seen.file)}"
            )
        elif not self.weather.source_was_bad(seen.began_s - verdict.late_s, seen.began_s):
            self.tally.latest_s = max(self.tally.latest_s, verdict.late_s)

    def _judge_directory(self, row: dict[str, Any]) -> None:
        self.tally.reads["listdir"] += 1
        seen = Seen(0, "listdir", row["began_s"], row["ended_s"], row["waited_s"], error=row["error"])
        if self._failed(seen, row["directory"]):
            return
        if self.weather.source_was_bad(seen.began_s, seen.ended_s):
            return
        if self.weather.was("unmounted", seen.began_s - SLACK_S, seen.ended_s):
            return
        names = set(row["names"])
        for file in self.source.files.values():
            directory, _, name = file.path.partition("/")
            if directory != row["directory"]:
                continue
            with self.source.lock:
                there, missing = self.source.history.was_there(
                    file.number, seen.began_s - TTL_S - SLACK_S, seen.ended_s
                )
            if not missing and name not in names:
                self.found(f"{file.path} is not listed at {self._when(seen)}")
            if not there and name in names:
                self.found(f"{file.path} is listed although it was deleted, at {self._when(seen)}")

    def _judge_photo(self, row: dict[str, Any]) -> None:
        self.tally.reads["photo"] += 1
        seen = Seen(0, "photo", row["began_s"], row["ended_s"], row["waited_s"], error=row["error"])
        if not self._failed(seen, row["photo"]) and row["digest"] != self._photos[row["photo"]]:
            self.found(f"{row['photo']} is not its view at {self._when(seen)}")

    def _failed(self, seen: Seen, what: str) -> bool:
        """Count the error of a call, if it had one, and note it if nothing that had happened allows it."""
        if not seen.error:
            return False
        self.tally.errors[os.strerror(seen.error)] += 1
        with self.source.lock:
            if not self.weather.allows(seen, self.source.history):
                self.found(f"{what}: {os.strerror(seen.error)} at {self._when(seen)}")
        return True

    def _when(self, seen: Seen) -> str:
        return f"{seen.began_s - self._began_s:.3f} to {seen.ended_s - self._began_s:.3f} s"

    # -- the calm after a stretch

    def _compare(self) -> None:
        """Compare the mount with the source, once the source has no faults or changes and all names have expired."""
        self.daemon.calm()
        deadline_s = time.monotonic() + SETTLING_S + TTL_S
        while time.monotonic() < deadline_s and not self.findings:
            self._look()
            time.sleep(LOOK_S)
        self.happened("compare")
        timed = Timed(self._waits, OWN_SLOT)
        rows: list[dict[str, Any]] = []
        reader = Reader(str(self.daemon.mountpoint), [], timed, random.Random(self._seed), rows.append)
        for file in self._plan.files:
            now = self.source.history.now(file.number)
            reader.see(file.number, file.path, "read")
            seen = Seen.of(rows.pop())
            verdict = None if seen.error else self.source.history.judge(seen)
            self.tally.compared += 1
            if not now.state.is_there:
                if seen.error != errno.ENOENT:
                    self.found(f"{file.path} was deleted at the source, and the mount shows {seen.key}")
            elif verdict is None or verdict.how not in (SAME, MIXED) or seen.key != now.key:
                why = os.strerror(seen.error) if verdict is None else f"{verdict.how} {verdict.why}"
                self.found(f"{file.path} in the calm: {seen.key}, the source has {now.key}: {why}")
        usage, wrong = self.daemon.usage()
        self.tally.usages.append(usage)
        for text in wrong:
            self.found(text)
        self._console.print(
            f"{time.monotonic() - self._began_s:6.0f} s  {sum(self.tally.reads.values()):,} reads, "
            f"{sum(self.tally.events.values()):,} events, all {len(self._plan.files)} files as at the source; "
            f"{usage.described()}",
            highlight=False,
            soft_wrap=True,
        )


# -- the program


def _stack(pid: int) -> str:
    """Where a process waits in the kernel; only root may read its stack."""
    try:
        return f"{Path(f'/proc/{pid}/wchan').read_text()} {Path(f'/proc/{pid}/stack').read_text()}"
    except OSError as exc:
        return f"its stack cannot be read: {exc.strerror}"


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def show(result: dict[str, Any], console: Console) -> None:
    title = f"{result['seconds'] / 60:.1f} minutes, seed {result['seed']}"
    table = plain_table(title, "", "number", " ", words=("", " "))
    table.columns[-1].no_wrap = False
    for what in ("reads", "verdicts", "errors", "events", "rows"):
        counted = Counter(result[what])
        names = ", ".join(f"{number:,} {name}" for name, number in counted.most_common())
        table.add_row(what, f"{sum(counted.values()):,}", names)
    table.add_row("bytes read", f"{result['read_bytes']:,}", "")
    table.add_row("compared in calm", f"{result['compared']:,}", "")
    table.add_row("longest wait", f"{result['longest_wait_s']:.2f} s", f"limit {LIMIT_S:g} s")
    limit = f"TTL {TTL_S:g} s and {SLACK_S:g} s, with the source well"
    table.add_row("oldest answer", f"{result['latest_s']:.2f} s", limit)
    console.print(table)


def result_of(soak: Soak, seed: int, seconds: float, minutes: float) -> dict[str, Any]:
    tally = soak.tally
    return {
        "machine": machine(),
        "seed": seed,
        "minutes": minutes,
        "seconds": seconds,
        "reads": dict(tally.reads),
        "read_bytes": tally.read_bytes,
        "verdicts": dict(tally.verdicts),
        "errors": dict(tally.errors),
        "events": dict(tally.events),
        "compared": tally.compared,
        "longest_wait_s": tally.longest_wait_s,
        "limit_s": LIMIT_S,
        "latest_s": tally.latest_s,
        "usages": [asdict(usage) for usage in tally.usages],
        "rows": soak.daemon.rows,
        "findings": soak.findings,
        "last_events": list(soak.events) if soak.findings else [],
    }


def run(arguments: argparse.Namespace, console: Console) -> None:
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else FULL_MINUTES)
    plan = schedule(arguments.seed, minutes * 60)
    with scratch_directory("soak") as scratch:
        soak = Soak(plan, arguments.seed, scratch, console)
        console.print(f"seed {arguments.seed}, {minutes:g} minutes, {plan.options}", highlight=False)
        began_s = time.monotonic()
        try:
            soak.run()
        finally:
            seconds = time.monotonic() - began_s
            result = result_of(soak, arguments.seed, seconds, minutes)
            show(result, console)
            save(arguments.json, result)
        if not soak.findings:
            console.print("nothing was wrong")
            return
        console.print("the last events:\n  " + "\n  ".join(soak.events), highlight=False, soft_wrap=True, markup=False)
        console.print("the daemon's log:\n" + _tail(soak.daemon.log), highlight=False, soft_wrap=True, markup=False)
        found = "\n  ".join(soak.findings)
        raise RuntimeError(f"with --seed {arguments.seed} --minutes {minutes:g}:\n  {found}")


if __name__ == "__main__":
    program = command_line(__doc__)
    help_text = f"how long it takes, about (default {FULL_MINUTES:g}, quick {QUICK_MINUTES:g})"
    program.add_argument("--minutes", type=float, metavar="N", help=help_text)
    help_text = "the seed of everything that happens (default %(default)s)"
    program.add_argument("--seed", type=int, default=1, metavar="S", help=help_text)
    main(run, program)
