"""The tables of documents, made from the kept results: no figure in them is typed by hand.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, and `python -m benchmarks.all --tables`
writes it. Below it stand date, commit and machine of the result. A figure that has a target is followed by it in
brackets, with **missed** if it was not reached.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import intervals
from benchmarks.common.results import ROOT, spread
from benchmarks.serving import never_slower as matrix
from benchmarks.serving.stall_report import Epoch as StallEpoch
from benchmarks.serving.stall_report import Run as StallRun
from benchmarks.serving.stall_report import against, of_case
from benchmarks.training.train_report import (
    LEAST_ORIGIN_SAVING,
    LEAST_SPEEDUP,
    Epoch,
    Run,
    against_baseline,
    by_configuration,
)

RESULTS = ROOT / "docs/results"
Result = dict[str, Any]
Row = list[str]
_PART = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
median, mean = statistics.median, statistics.fmean


def kept(name: str) -> Result:
    """The kept result of that name."""
    result: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def provenance(result: Result) -> str:
    """When, by which commit, on which machine and beside which load a result was measured, as far as it names them."""
    machine = result.get("machine", {})
    words = [machine.get("time", "")[:10], f"commit {machine.get('commit') or 'unknown'}"]
    words.append(f"{machine['cores']} cores" if "cores" in machine else "")
    words.append(f"Linux {machine['kernel'].partition('-')[0]}" if "kernel" in machine else "")
    words.append(machine.get("gpu") or "")
    words.append(f"others used {machine['others_cores']:.1f} cores" if machine.get("loaded") else "")
    return ", ".join(filter(None, words))


def aimed(figure: float, least: float | None, form: str = ".2f", words: str = "", most: bool = False) -> str:
    """A figure with its target; `most` if the target is the largest that is allowed."""
    if least is None:
        return f"{figure:{form}}"
    reached = figure <= least if most else figure >= least
    return f"{figure:{form}} ({words}{least:g}{'' if reached else ': **missed**'})"


def rounds(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios within the rounds."""
    return median(one / other for one, other in zip(ours, theirs, strict=False))


def markdown(headings: Row, rows: Iterable[Row]) -> str:
    head, *body = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n" for line in (headings, *rows))
    return "".join([head, f"{'|---' * len(headings)}|\n", *body])


def named(system: str, bold: Iterable[str]) -> str:
    return f"**{system}**" if system in bold else system


# -- serving

PHOTOS = {
    "straight from the source": ("fifth", "direct"),
    "spiderfs": ("fifth", "spiderfs"),
    "**spiderfs with a plan**": ("fifth", "planned"),
    "**the same with `immutable`**": ("fifth", "immutable planned"),
    "LitData, from shards made beforehand": ("fifth", "litdata"),
    "WebDataset, which keeps everything": ("fifth", "webdataset"),
    "MosaicML Streaming": ("fifth", "mosaicml"),
    "the local disk": ("local", "direct"),
}
SHORT = [name for name in PHOTOS if "immutable" not in name and name not in ("spiderfs", "MosaicML Streaming")]


def photos(result: Result, names: Iterable[str] = PHOTOS, heading: str = "images/s") -> str:
    readings = result["readings"]
    rows = (
        [name, *(f"{median(one[epoch] for one in readings[case][system]):,.0f}" for epoch in ("first", "second"))]
        for name in names
        for case, system in [PHOTOS[name]]
    )
    return markdown([heading, "first epoch", "second epoch"], rows)


def photos_short(result: Result) -> str:
    return photos(result, SHORT, "images/s, a source 20 ms away, a fifth cached")


FORMATS = {
    "direct": "plain files, one request each",
    "spiderfs": "spiderfs",
    "planned": "**with a plan**",
    "immutable planned": "**immutable with a plan**",
    "mosaicml": "MosaicML Streaming",
    "litdata": "LitData",
    "webdataset": "WebDataset",
}


def streaming_formats(result: Result) -> str:
    far, fifth = result["readings"]["remote"], result["readings"]["fifth"]
    rows = []
    for system, name in FORMATS.items():
        first, second, whole_s = (median(one[field] for one in far[system]) for field in ("first", "second", "whole_s"))
        cells = [name, f"{first:,.0f}"]
        for peer in ("mosaicml", "litdata"):
            ratio = rounds((one["first"] for one in far[system]), (one["first"] for one in far[peer]))
            cells.append("" if system == "webdataset" else aimed(ratio, 0.9 if "planned" in system else None))
        small = ", ".join(f"{median(one[epoch] for one in fifth[system]):,.0f}" for epoch in ("first", "second"))
        if system == "webdataset":
            small += " (keeps everything)"
        rows.append([*cells, f"{second:,.0f}", f"{whole_s:.1f}", "" if system == "direct" else small])
    headings = ["images/s", "first epoch", "x MosaicML", "x LitData", "second", "whole s", "20 % cached: first, second"]
    return markdown(headings, rows)


EPOCHS = {
    "direct": ("direct", None),
    "spiderfs": ("spiderfs", 0.9),
    "planned": ("with a plan", 1.4),
    "immutable": ("immutable", 0.93),
    "immutable planned": ("immutable with a plan", 2),
    "immutable planned to a fifth": ("the same, 20 % cached", 2.6),
}


def epoch(result: Result) -> str:
    figures, rows = result["figures"], []
    for system, (name, target) in EPOCHS.items():
        rate, cost = (median(figures[system][what]) for what in ("epoch", "cpu_us"))
        times, costs = (rounds(figures[system][what], figures["direct"][what]) for what in ("epoch", "cpu_us"))
        own = system == "direct"
        cells = ["" if own else aimed(times, target), f"{cost:,.0f}", "" if own else f"{costs:.1f}"]
        rows.append([name, f"{rate:,.0f}", *cells])
    return markdown(["", "files/s", "x direct", "us/file", "x direct"], rows)


SCANS = {"first": "first walk", "walk": "walk and stat again", "index": "ImageFolder index again"}


def scan(result: Result) -> str:
    figures, rows = result["figures"], []
    systems = ("native", "bindfs", "rclone", "spiderfs", "immutable")
    for what, name in SCANS.items():
        cells = []
        for system in systems:
            seconds = median(figures[system][what])
            cell = "" if (system, what) == ("native", "first") else f"{seconds:.{1 if seconds >= 1 else 2}f}"
            if system == "immutable" and what != "first":
                reached = rounds(figures["native"][what], figures[system][what]) >= 0.9
                cell += f" (0.9 x native{'' if reached else ': **missed**'})"
            cells.append(cell)
        rows.append([name, *cells])
    return markdown(["", *systems[:-1], "**immutable**"], rows)


def large(result: Result) -> str:
    figures, systems = result["figures"], ("spiderfs", "bindfs", "rclone")
    rows = [
        [name, *(f"{median(figures[system][what]) / 1e9:.2f}" for system in systems)]
        for what, name in (("cold", "first read, which stores it"), ("cache", "without pages in memory"))
    ]
    shares = [f"{rounds(figures[system]['memory'], figures['native']['memory']):.2f} x native" for system in systems]
    shares[0] = f"{median(figures['spiderfs']['memory']) / 1e9:.2f} ({shares[0]})"
    return markdown(["GB/s", *systems], [*rows, ["from memory", *shares]])


IDLE = {"bindfs": "bindfs", "rclone": "rclone", "spiderfs": "**spiderfs**", "immutable": "**immutable**"}
IDLE |= {"spiderfs, pyfuse3": "**pyfuse3**"}


def idle(result: Result) -> str:
    rows = []
    for system, name in IDLE.items():
        found, own = result["figures"][system], system not in ("bindfs", "rclone")
        cpu, wakings, memory = (median(found[what]) for what in ("cpu percent", "wakings/s", "pss MB"))
        used = aimed(cpu, 0.1 if own else None, ".3f", most=True).replace("0.000", "0")
        rows.append([name, used, f"{wakings:.2g}", aimed(memory, 150 if own else None, ".0f", most=True)])
    return markdown(["", "% of a core", "wake-ups a second", "MB (PSS)"], rows)


KINDS = {
    "tokens": "tokens, 32 KiB, mapped",
    "parquet": "Parquet, row groups of 100 KiB",
    "arrow": "Arrow of `datasets`, 31 KiB, mapped",
}


def planned_ranges(result: Result) -> str:
    rows, samples = [], result["extent"]["samples"]
    for kind, name in KINDS.items():
        found = result["kinds"][kind]
        later_s = {way: sum(one["seconds"] for one in found[way][1:]) for way in ("direct", "planned", "immutable")}
        rate = mean(samples / one["seconds"] for one in found["direct"][1:])
        times = [aimed(later_s["direct"] / later_s[way], 5, ".1f") for way in ("planned", "immutable")]
        fetched = [one["fetched_bytes"] / found["wanted_bytes"] for one in found["planned"]]
        rows.append([name, f"{rate:.0f}", *times, f"{fetched[0]:.2f}", f"{mean(fetched[1:]):.2f}"])
    headings = ["", "direct, samples/s", "planned, x direct", "immutable, x direct", "bytes, first epoch", "later"]
    return markdown(headings, rows)


LOADERS = {"opened mount": ("spiderfs", None), "**immutable**": ("immutable", 0.97)}
LOADERS |= {"view `jpeg256`": ("view jpeg256", 1.9), "view `bmp256`": ("view bmp256", 2.6)}


def image_loader(result: Result) -> str:
    rows = []
    for name, (system, target) in LOADERS.items():
        ways = (result["of_native"].get(way) for way in (system, f"{system}, buffered"))
        rows.append([name, *("" if times is None else aimed(times, target) for times in ways)])
    return markdown(["", "as `open` reads", "buffered"], rows)


def files_ratio(case: Result, system: str, peer: str) -> float:
    return rounds(*((run["files_per_s"] for run in case["runs"][name]) for name in (system, peer)))


def serve(result: Result) -> str:
    rows = []
    for case in result["cases"]:
        readers, runs = case["readers"], case["runs"]["spiderfs"]
        times = {peer: files_ratio(case, "spiderfs", peer) for peer in ("bindfs", "rclone", "native")}
        rows.append(
            [
                f"{case['file_set']}, {readers}",
                aimed(times["bindfs"], {1: 1.5, 4: 1.2}[readers], words="at least "),
                aimed(times["rclone"], 8),
                f"{median(run['files_per_s'] for run in runs):,.0f}",
                ", ".join(f"{median(run[field] for run in runs):.0f}" for field in ("p50_us", "p99_us")),
                aimed(times["native"], 0.25 if readers == 4 else None),
            ]
        )
    return markdown(["files, readers", "x bindfs", "x rclone", "files/s", "p50, p99 us", "x native"], rows)


def serve_immutable(result: Result) -> str:
    rows = []
    for case in result["cases"]:
        dropped = case["dropped"]
        native = "" if dropped else aimed(files_ratio(case, "immutable", "native"), 0.6, words="at least ")
        bindfs, opened = (files_ratio(case, "immutable", peer) for peer in ("bindfs", "spiderfs"))
        form = ".2f" if dropped else ".1f"
        cells = [aimed(bindfs, 1.3 if dropped else 3, form), aimed(opened, 1.4 if dropped else None, form)]
        rows.append([f"{case['file_set']}, {case['readers']}{', dropped' * dropped}", native, *cells])
    return markdown(["files, readers", "x native", "x bindfs", "x opened mount"], rows)


def fuse_library(result: Result) -> str:
    rows: dict[str, dict[str, list[str]]] = {}
    for row in result["rows"]:
        if row["unit"] == "files/s" and "readers" in row["what"] and "epoch" not in row["what"]:
            size = row["what"].partition(" x ")[2].partition(",")[0]
            for system in ("pyfuse3", "pyfuse3-polled"):
                rows.setdefault(size, {}).setdefault(system, []).append(f"{median(row['ratios'][system]):.2f}")
    cells = ([size, *(", ".join(figures) for figures in found.values())] for size, found in rows.items())
    return markdown(["", "as released", "polled"], cells)


def jobs_mount(result: Result) -> str:
    rows = []
    for situation in ("1 job", "2 jobs", "3 jobs", "4 jobs"):
        cells = []
        for system in ("no sharing", "plan", "exchange"):
            runs = [run for run in result["runs"] if (run["situation"], run["system"]) == (situation, system)]
            fetched, bound, waits, epoch_s = (
                mean(run[field] for run in runs) for field in ("fetched", "bound", "waits", "epoch_s")
            )
            cells.append(f"{fetched:.3f} ({fetched / bound:.2f}), {waits:.1%}, {epoch_s:.2f} s".replace("%", " %"))
        rows.append([situation.partition(" ")[0], *cells])
    return markdown(["jobs", "LRU, no sharing", "plan", "exchange"], rows)


STALLS = ("direct", "lru", "no plan", "wrong plan", "plan+uniform", "plan+spider", "oracle")


def stall(result: Result) -> str:
    runs = [StallRun(**run | {"epochs": [StallEpoch(**one) for one in run["epochs"]]}) for run in result["runs"]]
    rows = []
    for system in STALLS:
        cells = [named(system, ("plan+uniform", "plan+spider"))]
        for factor in (1.3, 0.7):
            ran = list(of_case(runs, system, factor).values())
            times = against(runs, system, "oracle", factor) if factor > 1 else [run.of_bound for run in ran]
            hits = 100 * mean(run.later(lambda epoch: epoch.hit_ratio) for run in ran)
            fetched, least = (
                mean(run.later(of) / run.draws / 1000 for run in ran)
                for of in (lambda epoch: epoch.origin_bytes, lambda epoch: epoch.min_bytes)
            )
            cells += [f"{mean(run.later(lambda epoch: epoch.stall_s) for run in ran):.2f}", f"{mean(times):.2f}"]
            more = [f"{hits:.1f}"] + ([f"{fetched:.1f} ({least:.1f})"] if factor > 1 else [])
            cells += [""] * len(more) if system == "oracle" else more
        rows.append(cells)
    cases = ["1.3 times: stall s", "x oracle", "hits, %", "kB", "0.7 times: stall s", "x bound", "hits, %"]
    return markdown(["", *cases], rows)


def partition(result: Result) -> str:
    names = ("slow source", "slow processor", "small cache", "narrow line")
    rows: list[Row] = [["originals alone"], ["the best of six"], ["`auto`"]]
    for name in names:
        *given, auto = result["settings"][name]["splits"]
        best = max(given, key=lambda split: median(split["measured"]))
        for row, split in zip(rows, (given[0], best, auto), strict=True):
            predicted = "" if split is auto else f" ({split['predicted']:.0f})"
            row.append(f"{median(split['measured']):.0f}{predicted}")
    return markdown(["", *names], rows)


# -- trainings


def points(differences: list[float]) -> str:
    """Differences of top-1 with their interval; in words if both are the same training."""
    return "the same run" if not any(differences) else intervals.shown(differences)


def train(result: Result) -> str:
    runs = [Run(**run | {"epochs": [Epoch(**one) for one in run["epochs"]]}) for run in result["runs"]]
    rows = []
    for name, ran in by_configuration(runs).items():
        aims = (LEAST_ORIGIN_SAVING, LEAST_SPEEDUP) if name == "spider" else (None, None)
        saved = mean(ours / theirs for ours, theirs in against_baseline(runs, name, "origin_bytes_per_sample"))
        faster = mean(theirs / ours for ours, theirs in against_baseline(runs, name, "seconds"))
        gained = [100 * (ours - theirs) for ours, theirs in against_baseline(runs, name, "top1")]
        top1 = "" if name == "lru" else points(gained)
        if name == "spider":
            reached = intervals.is_equivalent(intervals.interval_of(gained))
            top1 += f" (above -{intervals.MARGIN_POINTS:g}{'' if reached else ': **missed**'})"
        seconds, waiting = (mean(run.figure(field) for run in ran) for field in ("seconds", "waiting_share"))
        cells = [f"{seconds:.1f}", f"{100 * waiting:.0f}", aimed(faster, aims[1]), top1]
        rows.append([named(name, ("uniform+plan", "spider", "echo 2")), aimed(saved, aims[0], most=True), *cells])
    return markdown(["", "bytes, x lru", "s per epoch", "waiting, %", "times as fast", "top-1, points"], rows)


def loader_workers(result: Result) -> str:
    names = ("lru", "uniform+plan", "spider", "all local")
    seconds: dict[int, dict[str, float]] = {}
    for run in result["runs"]:
        seconds.setdefault(run["workers"], {})[run["configuration"]] = mean(one["seconds"] for one in run["epochs"][1:])
    rows = [[str(count), *(f"{found[name]:.1f}" for name in names)] for count, found in sorted(seconds.items())]
    return markdown(["workers", *names], rows)


def equivalence(result: Result) -> str:
    runs: dict[str, dict[int, Result]] = {}
    for run in result["runs"]:
        runs.setdefault(run["configuration"], {})[run["seed"]] = run
    base, rows = runs["uniform"], []
    by_lru = {seed: mean(run["list_origin"]["LRU"][1:]) for seed, run in base.items()}
    for name in ("uniform", "echo 2", "weights + coverage 0.3 + settled 0.25"):
        found = sorted(runs[name].items())
        fetched = [
            mean(mean(run["list_origin"][cache][1:]) / by_lru[seed] for seed, run in found)
            for cache in ("MIN", "MIN by epoch")
        ]
        top1 = spread([run["top1"] for _, run in found], ".1f", 100)
        gained = intervals.shown([100 * (run["top1"] - base[seed]["top1"]) for seed, run in found])
        rows.append([name, "{:.2f} / {:.2f}".format(*fetched), top1, "" if name == "uniform" else gained])
    return markdown(["", "bytes with MIN / MIN by epoch, x LRU", "top-1, %", "less uniform's, 95 %"], rows)


class Trainings:
    """The trainings of a result of benchmarks.training.systems or full_size, with a fifth of the bytes cached."""

    def __init__(self, result: Result) -> None:
        # Imported here: they bring torch, which takes seconds.
        from benchmarks.training import systems_report
        from benchmarks.training.in_process import Epoch as InProcess

        runs = []
        for run in result["measured"]:
            epochs = [
                InProcess(**{name: one[name] for name in InProcess.__dataclass_fields__ if name in one})
                for one in run["epochs"]
            ]
            runs.append(systems_report.Measured(**run | {"epochs": epochs}))
        self.group, self._report = systems_report.grouped(runs), systems_report

    def of(self, system: str, share: float = 0.2) -> list[Any]:
        """The runs of a system, in the order of their seeds."""
        return self.group[system, share]

    def percent(self, system: str, field: str, share: float = 0.2) -> str:
        """The mean of a share over the second half of the epochs."""
        return f"{100 * mean(run.settled(field) for run in self.of(system, share)):.0f}"

    def fetched(self, system: str) -> float:
        """Bytes of a whole training, as multiples of the dataset's."""
        return mean(run.whole for run in self.of(system))

    def times_lru(self, system: str) -> str:
        seeds = {run.seed for run in self.of(system)}
        return f"{self.fetched(system) / mean(run.whole for run in self.of('lru') if run.seed in seeds):.2f}"

    def steps(self, system: str) -> str:
        return f"{mean(sum(epoch.reads_share for epoch in run.epochs) for run in self.of(system)):.1f}"

    def gained(self, system: str) -> str:
        found = (self._report.gained(self.group, run) for run in self.of(system))
        return points([difference for difference in found if difference is not None])

    def as_accurate(self, system: str) -> float | None:
        """Bytes that uniform sampling with a plan fetches for the same accuracy; None if no training is so short."""
        found = [self._report.at_equal_accuracy(self.group, run) for run in self.of(system)]
        return None if None in found else mean(filter(None, found))


SYSTEMS: tuple[str, ...] = ("lru", "lfu", "minio", "uniform+plan", "quiver", "echo 2", "shade", "icache", "impact")
SYSTEMS += ("spider-imp", "spider-paper", "spider-released", "spider", "spider+plan")
# As the papers report them.
PAPERS = {"shade": " (72)", "impact": " (43)"}


def systems(result: Result) -> str:
    trainings, rows = Trainings(result), []
    for system in SYSTEMS:
        equal = trainings.as_accurate(system)
        times = "below 3 epochs" if equal is None else f"{trainings.fetched(system) / equal:.2f}"
        hits = trainings.percent(system, "hit_ratio") + PAPERS.get(system, "")
        cells = [hits, trainings.percent(system, "redirected_share"), trainings.times_lru(system)]
        rows.append([named(system, ("echo 2", "spider+plan")), *cells, trainings.gained(system), times])
    headings = ["", "hits, %", "substitutes, %", "bytes, x lru", "top-1 less uniform, 95 %", "x uniform+plan"]
    return markdown(headings, rows)


def cache_sizes(result: Result) -> str:
    trainings, shares = Trainings(result), (0.1, 0.2, 0.4, 0.6, 0.8)
    rows = (
        [system, *(trainings.percent(system, "hit_ratio", share) for share in shares)]
        for system in ("minio", "icache", "shade", "spider-imp", "spider-paper")
    )
    return markdown(["cached", *(f"{100 * share:.0f} %" for share in shares)], rows)


SAMPLERS = {
    "uniform+plan": "uniform, with a plan",
    "uniform+plan, 3/4 of the epochs": "three quarters of the epochs",
    "uniform+plan, 1/2 of the epochs": "half of the epochs",
    "infobatch": "`InfoBatchSampler`",
    "echo 2": "`EchoSampler`, `times=2`",
    "infobatch, echo 2": "`InfoBatchSampler`, `times=2`",
    "echo 3": "`EchoSampler`, `times=3`",
}


def samplers(result: Result) -> str:
    """Bytes, steps and hits are those of the first seed, which has all rows."""
    first = Trainings(result | {"measured": [run for run in result["measured"] if run["seed"] == 1]})
    top1 = {(run["system"], run["seed"]): f"{100 * run['top1']:.1f}" for run in result["measured"]}
    rows = []
    for system, name in SAMPLERS.items():
        if (system, 1) in top1:
            cells = [f"{first.fetched(system):.1f}", first.times_lru(system), first.steps(system)]
            cells.append(first.percent(system, "hit_ratio"))
            rows.append([name, *cells, *(top1.get((system, seed), "") for seed in (1, 2))])
    headings = ["", "bytes", "x LRU", "steps", "hits in the second half, %", "top-1, %, seed 1", "seed 2"]
    return markdown(headings, rows)


def samplers_10k(result: Result) -> str:
    trainings, rows = Trainings(result), []
    for system, name in SAMPLERS.items():
        cells = [f"{trainings.fetched(system):.2f}", trainings.times_lru(system), trainings.steps(system)]
        cells.append(spread([run.top1 for run in trainings.of(system)], ".1f", 100))
        rows.append([name, *cells, "" if system == "uniform+plan" else trainings.gained(system)])
    return markdown(["", "bytes", "x LRU", "steps", "top-1, %", "minus uniform, points"], rows)


def full_size(result: Result) -> str:
    trainings, rows = Trainings(result), []
    parts = [f"uniform+plan, {part} of the epochs" for part in ("3/4", "1/2")]
    for system in ("lru", "uniform+plan", *parts, "echo 2", "spider+plan", "spider-paper", "shade", "impact"):
        equal, top1 = trainings.as_accurate(system), 100 * mean(run.top1 for run in trainings.of(system))
        cells = [f"{trainings.fetched(system):.2f}", trainings.times_lru(system), f"{top1:.1f}"]
        least = "less than half of the epochs" if equal is None else f"{equal:.2f}"
        rows.append([named(system, ("echo 2", "spider+plan")), *cells, least])
    return markdown(["", "bytes", "x lru", "top-1, %", "uniform+plan, as accurate"], rows)


RADII = {
    "": "`nearest`",
    ", radius of 5 % of a class": "`class`, 5 %",
    ", radius of 1 % of a class": "`class`, 1 %",
    ", released radius": "1.42, raw",
}


def radius(result: Result) -> str:
    trainings, rows = Trainings(result), []
    names = [("spider-paper", suffix) for suffix in RADII] + [("spider+plan", suffix) for suffix in list(RADII)[:3]]
    for system, suffix in (*names, ("uniform+plan", ", 3/4 of the epochs")):
        name, drawn = system + suffix, system == "uniform+plan"
        runs = [run for run in result["measured"] if (run["system"], run["cached_share"]) == (name, 0.2)]
        turned = sorted(next((number for number, one in enumerate(run["epochs"], 1) if one["beta"]), 0) for run in runs)
        beta = f"{turned[0]} to {turned[-1]}" if turned[0] != turned[-1] else f"{turned[0] or 'never'}"
        cells = [trainings.percent(name, of) for of in ("hit_ratio", "redirected_share", "served_share")]
        cells += ["", ""] if drawn else [f"{mean(run['epochs'][-1]['mean_same'] for run in runs):.0f}", beta]
        cells += [trainings.times_lru(name), trainings.gained(name)]
        rows.append([name if drawn else "" if suffix else system, RADII.get(suffix, ""), *cells])
    headings = ["", "`radius`", "hits, %", "substitutes, %", "different samples, %", "x_same", "beta", "bytes, x lru"]
    return markdown([*headings, "top-1 less uniform, 95 %"], rows)


def embedding_width(result: Result) -> str:
    rows = []
    for width in (512, 128, 64, 16, "the epoch before"):
        found = [row for row in result["rows"] if row["width"] == width]
        correlation, top = mean(row["rank_correlation"] for row in found), mean(row["top_fifth"] for row in found)
        speeds = [row["rows_per_s"] for row in found if row["rows_per_s"] is not None]
        name = {64: "**64**", "the epoch before": "512, the epoch before"}.get(width, str(width))
        rate = f"{mean(speeds):,.0f}" if speeds else ""
        rows.append([name, f"{correlation:.3f}".replace("1.000", "1"), f"{100 * top:.0f}", rate])
    return markdown(["numbers", "rank correlation with 512", "same top fifth, %", "rows/s"], rows)


def refurbish(speed: Result, accuracy: Result) -> str:
    top1: dict[str, dict[int, float]] = {}
    for run in accuracy["runs"]:
        top1.setdefault(run["configuration"], {})[run["seed"]] = run["top1"]
    rows = []
    for name, configuration, way, least in (
        ("two uses", "r=2", "both r=2", 1.4),
        ("three uses", "r=3", "both r=3", 1.9),
        ("data echoing, two uses", "echo 2", "", None),
        ("data echoing, three uses", "echo 3", "", None),
    ):
        base = top1["standard"]
        found = intervals.interval_of([100 * (top1[configuration][seed] - base[seed]) for seed in base])
        times = aimed(speed["of_standard"][way], least).replace(" (", " x (") if way else ""
        rows.append([name, times, f"{found.mean:.1f} ({found.low:.1f} to {found.high:.1f})"])
    return markdown(["", "images/s", "top-1, points (95 %)"], rows)


# -- documents


class Rendered(NamedTuple):
    """A table, the kept results that it is made of, and whether their date and commit stand below it."""

    of: Callable[..., str]
    results: tuple[str, ...]
    dated: bool = True


def never_slower(result: Result) -> str:
    """Of each source and file size the least multiple over the numbers of loader workers, by epoch."""
    settings, ways = matrix.settings_of(result), result["extent"]["ways"]
    rows = []
    for place in dict.fromkeys(setting.rpartition(", ")[0] for setting in settings):
        ran = [cells for setting, cells in settings.items() if setting.rpartition(", ")[0] == place]
        row = [place]
        for way in ways:
            least = [min(median(cells[f"{way}: {epoch}"]["times"]) for cells in ran) for epoch in matrix.EPOCHS]
            row.append(" / ".join(f"{times:.2f}" if times >= 1 else f"**{times:.2f}**" for times in least))
        rows.append(row)
    return markdown(["", *ways], rows)


TABLES = {
    "never-slower": Rendered(never_slower, ("never_slower",)),
    "photos": Rendered(photos, ("streaming_formats",)),
    "photos-short": Rendered(photos_short, ("streaming_formats",), dated=False),
    "streaming-formats": Rendered(streaming_formats, ("streaming_formats",)),
    "epoch": Rendered(epoch, ("epoch",)),
    "scan": Rendered(scan, ("scan",)),
    "large": Rendered(large, ("large",)),
    "idle": Rendered(idle, ("idle",)),
    "planned-ranges": Rendered(planned_ranges, ("planned_ranges",)),
    "image-loader": Rendered(image_loader, ("image_loader",)),
    "serve": Rendered(serve, ("serve",)),
    "serve-immutable": Rendered(serve_immutable, ("serve-immutable",)),
    "fuse-library": Rendered(fuse_library, ("fuse_library",)),
    "jobs-mount": Rendered(jobs_mount, ("jobs_mount",)),
    "stall": Rendered(stall, ("stall",)),
    "partition": Rendered(partition, ("partition",)),
    "train": Rendered(train, ("train",)),
    "loader-workers": Rendered(loader_workers, ("loader_workers",)),
    "equivalence": Rendered(equivalence, ("equivalence",)),
    "samplers": Rendered(samplers, ("samplers",)),
    "samplers-10k": Rendered(samplers_10k, ("samplers-10k",)),
    "full-size": Rendered(full_size, ("full_size",)),
    "systems": Rendered(systems, ("systems",)),
    "cache-sizes": Rendered(cache_sizes, ("systems",)),
    "radius": Rendered(radius, ("radius",)),
    "embedding-width": Rendered(embedding_width, ("embedding_width",)),
    "refurbish": Rendered(refurbish, ("refurbish_speed", "refurbish_accuracy")),
}


def rendered(name: str) -> str:
    """A table as it stands between its markers."""
    table = TABLES[name]
    found = [kept(result) for result in table.results]
    measured = "; ".join(dict.fromkeys(map(provenance, found)))
    return f"\n{table.of(*found)}\n" + (f"Measured {measured}.\n\n" if table.dated else "")


def renewed(text: str) -> str:
    """A document with its tables as the kept results say."""
    return _PART.sub(lambda part: f"{part[1]}{rendered(part[2])}{part[4]}", text)


def names_in(text: str) -> list[str]:
    return [part[2] for part in _PART.finditer(text)]


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def write() -> list[Path]:
    """Write the tables of all documents; returns the documents that have changed."""
    changed = []
    for path in documents():
        text = path.read_text()
        if names_in(text) and (new := renewed(text)) != text:
            path.write_text(new)
            changed.append(path)
    return changed
