"""The tables of documents, made from the kept results: no figure in them is typed by hand.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, and `python -m benchmarks.all --tables`
writes it. Below it stand date, commit and machine of the result. A figure that has a target is followed by it in
brackets, with **missed** if it was not reached. Benchmarks print the same tables of what they have measured, which may
lack some rows.
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
from benchmarks.serving.stall_report import Run as StallRun
from benchmarks.serving.stall_report import against, of_case
from benchmarks.training.systems_report import Trainings
from benchmarks.training.train_report import Epoch, Run, against_baseline, by_configuration

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
    "spdl": "plain files, SPDL's 32 threads",
    "spdl immutable": "immutable, SPDL's 32 threads, no plan",
    "mosaicml": "MosaicML Streaming",
    "litdata": "LitData",
    "webdataset": "WebDataset",
}


def streaming_formats(result: Result) -> str:
    far, fifth = (result["readings"].get(case, {}) for case in ("remote", "fifth"))
    rows = []
    for system, name in FORMATS.items():
        if system not in far or any(one["refused"] for one in far[system]):
            continue
        first, second, whole_s = (median(one[field] for one in far[system]) for field in ("first", "second", "whole_s"))
        cells = [name, f"{first:,.0f}"]
        for peer in ("mosaicml", "litdata"):
            if system == "webdataset" or any(one["refused"] for one in far.get(peer, [{"refused": "left out"}])):
                cells.append("")
            else:
                ratio = rounds((one["first"] for one in far[system]), (one["first"] for one in far[peer]))
                cells.append(aimed(ratio, 0.9 if "planned" in system else None))
        found = fifth.get(system, [])
        small = ", ".join(f"{median(one[epoch] for one in found):,.0f}" for epoch in ("first", "second") if found)
        if system == "webdataset":
            small += " (keeps everything)"
        rows.append([*cells, f"{second:,.0f}", f"{whole_s:.1f}", "" if system in ("direct", "spdl") else small])
    headings = ["images/s", "first epoch", "x MosaicML", "x LitData", "second", "whole s", "20 % cached: first, second"]
    return markdown(headings, rows)


EPOCHS = {
    "direct": ("direct", None),
    "spiderfs": ("spiderfs", 0.9),
    "planned": ("with a plan", 1.4),
    "immutable": ("immutable", 0.93),
    "immutable planned": ("immutable with a plan", 2),
    "immutable planned to a fifth": ("the same, 20 % cached", 2.6),
    "served planned": ("a plan without FUSE", None),
}


def epoch(result: Result) -> str:
    figures, rows = result["figures"], []
    for system, (name, target) in EPOCHS.items():
        if system not in figures:
            continue
        if system == "served planned":
            mounts = rounds(figures[system]["epoch"], figures["planned"]["epoch"])
            name += f": {aimed(mounts, 0.9, words='at least ')} x a mount with a plan"
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


WAYS = ("direct", "planned", "immutable")


def planned_ranges(result: Result) -> str:
    rows, samples = [], result["extent"]["samples"]
    with_learned = any("learned" in found for found in result["kinds"].values())
    for kind, name in KINDS.items():
        found = result["kinds"].get(kind, {})
        later_s = {way: sum(one["seconds"] for one in epochs[1:]) for way, epochs in found.items() if way in WAYS}
        cells = [""] * (2 + len(WAYS))
        if "direct" in found:
            rate = mean(samples / one["seconds"] for one in found["direct"][1:])
            ratios = (aimed(later_s["direct"] / later_s[way], 5, ".1f") if way in later_s else "" for way in WAYS[1:])
            cells = [f"{rate:.0f}", *ratios, "", ""]
        if "planned" in found:
            fetched = [one["fetched_bytes"] / found["wanted_bytes"] for one in found["planned"]]
            cells[3:] = f"{fetched[0]:.2f}", f"{mean(fetched[1:]):.2f}"
        if "planned" in found and "learned" in found:
            planned_s, learned_s = (mean(one["seconds"] for one in found[way][2:]) for way in ("planned", "learned"))
            cells.append(aimed(planned_s / learned_s, 0.8))
        if found:
            rows.append([name, *cells])
    headings = ["", "direct, samples/s", "planned, x direct", "immutable, x direct", "bytes, first epoch", "later"]
    return markdown([*headings, *["learned, x planned, third epoch"] * with_learned], rows)


STORES = {
    "obstore": "obstore alone",
    "opened": "a mount without a plan",
    "planned": "**with a plan**",
    "immutable planned": "with `immutable` and a plan",
    "rclone": "rclone, whole files cached",
    "s3fs": "s3fs, whole files cached without a limit",
}


def object_store(result: Result) -> str:
    """Files a second of each epoch as multiples of obstore's, and the share that is fetched in the second one."""
    found, rows = result["cases"]["far"], []
    for system, name in STORES.items():
        if system in found and "obstore" in found:
            rates = [[[one[epoch]["files_s"] for one in found[of]] for of in (system, "obstore")] for epoch in (0, 1)]
            times = [f"{rounds(*of):.2f}" for of in rates]
            times[0] += f" ({median(rates[0][0]):,.0f} files/s)" * (system == "obstore")
            rows.append([name, *times, f"{median(one[1]['share'] for one in found[system]):.2f}"])
    return markdown(["x obstore", "first epoch", "second epoch", "of all bytes, fetched in the second"], rows)


RECIPES = {
    "Pillow": "[Pillow](#pillow)",
    "torchvision.io": "[torchvision.io](#torchvisionio)",
    "DALI": "[DALI](#dali), on the processor",
    "OpenCV": "[OpenCV](#opencv)",
    "simplejpeg and OpenCV": "[simplejpeg and OpenCV](#simplejpeg-and-opencv)",
    "NumPy and OpenCV": "[NumPy and OpenCV](#numpy-and-opencv)",
    "Whole batches by threads": "[Whole batches by threads](#whole-batches-by-threads)",
}
READ_AS = {"original": "originals", "jpeg256": "`jpeg256`", "bmp256": "`bmp256`", "npy256": "`npy256`"}


def decoding(result: Result) -> str:
    times, sizes = result["of_local_disk"], result["bytes_of_original"]
    cells = {recipe: [times.get(f"{form}, {recipe}") for form in READ_AS] for recipe in RECIPES}
    rows = [[RECIPES[recipe], *("" if of is None else f"{of:.2f}" for of in row)] for recipe, row in cells.items()]
    of_form = [next((size for name, size in sizes.items() if name.startswith(f"{form}, ")), None) for form in READ_AS]
    rows.append(["bytes of a file, × original", *("" if size is None else f"{size:.2f}" for size in of_form)])
    return markdown(["x local disk", *READ_AS.values()], [row for row in rows if any(row[1:])])


ARCHIVES = {"loose": "the same files outside of an archive", "tar": "uniform shuffle"}
ARCHIVES |= {"tar, pool": "PoolSampler, blocks of 4 (default)"}


def archives(result: Result) -> str:
    """Of small members, in two epochs: requests and bytes for each sample, and images a second."""
    found, rows = result["epochs"].get("requests", {}), []
    for system, name in ARCHIVES.items():
        if system in found:
            cells = [f"{found[system][field]:.2f}" for field in ("reads", "bytes")]
            rows.append([name, *cells, "" if system == "loose" else f"{found[system]['second x loose']:.1f}"])
    return markdown(["a fifth cached, per sample", "requests", "bytes", "second epoch, times as fast"], rows)


CLUSTERS = {
    "one": "one node alone",
    "apart": "three independent nodes",
    "apart-planned": "three independent nodes with plans",
    "homes": "three with `peers`",
    "homes-planned": "three with `peers` and plans",
    "immutable": "three with `peers` and `immutable`",
}


def cluster(result: Result) -> str:
    found = result.get("rates", {})
    rows = [
        [
            name,
            f"{median(found[system]['samples_s']):.0f}",
            f"{median(found[system]['samples_s']) / median(found['apart']['samples_s']):.2f}",
            f"{median(found[system]['later']):.2f}",
        ]
        for system, name in CLUSTERS.items()
        if system in found
    ]
    return markdown(["", "samples/s, all nodes together", "relative", "share from the source"], rows)


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
        if "spiderfs" in case["runs"] and not case.get("dropped"):
            readers, runs = case["readers"], case["runs"]["spiderfs"]
            aims = {"bindfs": {1: 1.5, 4: 1.2}[readers], "rclone": 8, "native": 0.25 if readers == 4 else None}
            times = {
                peer: aimed(files_ratio(case, "spiderfs", peer), aim, words="at least " * (peer == "bindfs"))
                for peer, aim in aims.items()
                if peer in case["runs"]
            }
            bindfs, rclone, native = (times.get(peer, "") for peer in aims)
            rate = f"{median(run['files_per_s'] for run in runs):,.0f}"
            waits = ", ".join(f"{median(run[field] for run in runs):.0f}" for field in ("p50_us", "p99_us"))
            rows.append([f"{case['file_set']}, {readers}", bindfs, rclone, rate, waits, native])
    return markdown(["files, readers", "x bindfs", "x rclone", "files/s", "p50, p99 us", "x native"], rows)


# The ways around FUSE, and their targets as multiples of native reading.
CLIENT_TARGETS = {"client.read_bytes": 0.5, "client.open": None, "served": 0.6}


def client(result: Result) -> str:
    """Files a second as multiples of native reading; the last column is of the last case."""
    cases, rows = result["cases"], []
    for way, target in {"mount": None, **CLIENT_TARGETS}.items():
        times = [aimed(files_ratio(case, way, "native"), target) for case in cases]
        runs = cases[-1]["runs"][way]
        cpu = (1e3 * median(run[f"{whose}_cpu_s_per_1000"] for run in runs) for whose in ("client", "daemon"))
        rows.append([way, *times, " + ".join(f"{one:.0f}" for one in cpu)])
    readers = [f"{case['readers']} reader{'s' * (case['readers'] > 1)}, {case['process']}" for case in cases]
    return markdown(["x native", *readers, "us of CPU: reader + daemon"], rows)


def serve_immutable(result: Result) -> str:
    rows = []
    for case in result["cases"]:
        dropped = case.get("dropped", False)
        aims = {"native": 0.6, "bindfs": 1.3 if dropped else 3, "spiderfs": 1.4 if dropped else None}
        if "immutable" in case["runs"]:
            cells = [""] * len(aims)
            for number, (peer, aim) in enumerate(aims.items()):
                if peer in case["runs"]:
                    form, words = (".2f", "at least ") if peer == "native" else (".2f" if dropped else ".1f", "")
                    cells[number] = aimed(files_ratio(case, "immutable", peer), aim, form, words)
            rows.append([f"{case['file_set']}, {case['readers']}{', dropped' * dropped}", *cells])
    return markdown(["files, readers", "x native", "x bindfs", "x opened mount"], rows)


def jobs_mount(result: Result) -> str:
    rows = []
    for situation in ("1 job", "2 jobs", "3 jobs", "4 jobs"):
        cells = []
        for system in ("no sharing", "plan", "exchange"):
            runs = [run for run in result["runs"] if (run["situation"], run["system"]) == (situation, system)]
            if not runs:
                continue
            fetched, bound, waits, epoch_s = (
                mean(run[field] for run in runs) for field in ("fetched", "bound", "waits", "epoch_s")
            )
            cells.append(f"{fetched:.3f} ({fetched / bound:.2f}), {waits:.1%}, {epoch_s:.2f} s".replace("%", " %"))
        if cells:
            rows.append([situation.partition(" ")[0], *cells])
    return markdown(["jobs", "LRU, no sharing", "plan", "exchange"], rows)


AGED = {
    "gigabytes": ("GB", ".1f"),
    "files_per_s": ("files/s", ",.0f"),
    "fetch_us": ("us for a fetch", ",.0f"),
    "fetch_p99_us": ("p99", ",.0f"),
    "disk_mb": ("MB on disk", ",.1f"),
    "memory_mb": ("MB (PSS)", ",.1f"),
    "own_mb": ("of no file", ",.1f"),
    "descriptors": ("descriptors", ".0f"),
    "known_names": ("names", ",.0f"),
}


def churn(result: Result, most: int = 5) -> str:
    """At most so many of the parts, the last among them; and the growth for a million files, and for 10 GB."""
    parts, grown = result["parts"], result["per_million_files"]
    shown = parts[:: -max(1, -(-len(parts) // most))][::-1]
    rows = [[f"{part['files']:,}", *(format(part[name], form) for name, (_, form) in AGED.items())] for part in shown]
    for name, times in (("for 1,000,000 more", 1.0), ("for 10 GB more", 10 / result["extent"]["kilobytes"])):
        cells = [format(grown[of] * times, f"+{form}") if of in grown else "" for of, (_, form) in AGED.items()]
        rows += [[name, *cells]] if grown else []
    return markdown(["files", *(heading for heading, _ in AGED.values())], rows)


STALLS = ("direct", "lru", "no plan", "wrong plan", "plan+uniform", "plan+spider", "oracle")


def stall(result: Result) -> str:
    runs = [StallRun.of(run) for run in result["runs"]]
    rows = []
    for system in STALLS:
        cells = []
        for factor in (1.3, 0.7):
            ran = list(of_case(runs, system, factor).values())
            times = against(runs, system, "oracle", factor) if factor > 1 else [run.of_bound for run in ran]
            cells.append(f"{mean(run.later(lambda epoch: epoch.stall_s) for run in ran):.2f}" if ran else "")
            cells.append(f"{mean(times):.2f}" if times else "")
            hits, fetched = "", ""
            if ran and system != "oracle":
                hits = f"{100 * mean(run.later(lambda epoch: epoch.hit_ratio) for run in ran):.1f}"
                own, least = (
                    mean(run.later(of) / run.draws / 1000 for run in ran)
                    for of in (lambda epoch: epoch.origin_bytes, lambda epoch: epoch.min_bytes)
                )
                fetched = f"{own:.1f} ({least:.1f})"
            cells += [hits, fetched] if factor > 1 else [hits]
        if any(cells):
            rows.append([named(system, ("plan+uniform", "plan+spider")), *cells])
    cases = ["1.3 times: stall s", "x oracle", "hits, %", "kB", "0.7 times: stall s", "x bound", "hits, %"]
    return markdown(["", *cases], rows)


def partition(result: Result) -> str:
    names = [name for name in result["settings"] if name != "seneca"]
    rows: list[Row] = [["originals alone"], ["the best of six"], ["`auto`"]]
    for name in names:
        *given, auto = result["settings"][name]["splits"]
        best = max(given, key=lambda split: median(split["measured"]))
        for row, split in zip(rows, (given[0], best, auto), strict=True):
            predicted = "" if split is auto else f" ({split['predicted']:.0f})"
            row.append(f"{median(split['measured']):.0f}{predicted}")
    return markdown(["", *names], rows)


def figure_8(result: Result) -> str:
    """Of each split the correlation over the sizes of the data set: of the law, and of equation 9."""
    names, rows = list(result["settings"]), []
    for split in result["settings"][names[0]]["splits"]:
        found = [result["settings"][name]["splits"][split] for name in names]
        rows.append([split, *(f"{of['pearson']:.2f} ({of['pearson_of_equation_9']:.2f})" for of in found)])
    return markdown(["E-D-A", *names], rows)


# -- trainings


def points(differences: list[float]) -> str:
    """Differences of top-1 with their interval; in words if both are the same training."""
    return "the same run" if differences and not any(differences) else intervals.shown(differences)


# What `spider` has to reach: bytes as a multiple of lru's, and epochs, times as fast.
MOST_BYTES, LEAST_SPEEDUP = 0.5, 2.2


def train(result: Result) -> str:
    runs, rows = runs_of(result), []
    for name, ran in by_configuration(runs).items():
        seconds, waiting = (mean(run.figure(field) for run in ran) for field in ("seconds", "waiting_share"))
        bytes_, faster, top1 = "", "", ""
        if saved := [ours / theirs for ours, theirs in against_baseline(runs, name, "origin_bytes_per_sample")]:
            aims = (MOST_BYTES, LEAST_SPEEDUP) if name == "spider" else (None, None)
            bytes_ = aimed(mean(saved), aims[0], most=True)
            faster = aimed(mean(lru / own for own, lru in against_baseline(runs, name, "seconds")), aims[1])
            gained = [100 * (ours - theirs) for ours, theirs in against_baseline(runs, name, "top1")]
            top1 = "" if name == "lru" else points(gained)
            if name == "spider":
                reached = intervals.is_equivalent(intervals.interval_of(gained))
                top1 += f" (above -{intervals.MARGIN_POINTS:g}{'' if reached else ': **missed**'})"
        cells = [bytes_, f"{seconds:.1f}", f"{100 * waiting:.0f}", faster, top1]
        rows.append([named(name, ("uniform+plan", "spider", "echo 2")), *cells])
    return markdown(["", "bytes, x lru", "s per epoch", "waiting, %", "times as fast", "top-1, points"], rows)


def runs_of(result: Result) -> list[Run]:
    return [Run(**run | {"epochs": [Epoch(**one) for one in run["epochs"]]}) for run in result["runs"]]


WORKERS = ("lru", "uniform+plan", "spider", "all local")


def loader_workers(result: Result, names: Iterable[str] = WORKERS) -> str:
    seconds: dict[int, dict[str, float]] = {}
    for run in result["runs"]:
        seconds.setdefault(run["workers"], {})[run["configuration"]] = mean(one["seconds"] for one in run["epochs"][1:])
    rows = (
        [str(count), *(f"{found[name]:.1f}" if name in found else "" for name in names)]
        for count, found in sorted(seconds.items())
    )
    return markdown(["workers", *names], rows)


def equivalence(result: Result) -> str:
    runs = by_seed(result)
    base, rows = runs.get("uniform", {}), []
    for name, found in sorted(runs.items(), key=lambda run: run[0] != "uniform"):
        fetched = [
            mean(mean(run["list_origin"][cache][1:]) / mean(base[seed]["list_origin"]["LRU"][1:]) for seed, run in own)
            for cache in ("MIN", "MIN by epoch")
            if (own := [(seed, run) for seed, run in found.items() if seed in base])
        ]
        top1 = spread([run["top1"] for run in found.values()], ".1f", 100)
        gained = "" if name == "uniform" else intervals.shown(differences(found, base))
        rows.append([name, " / ".join(f"{times:.2f}" for times in fetched), top1, gained])
    return markdown(["", "bytes with MIN / MIN by epoch, x LRU", "top-1, %", "less uniform's, 95 %"], rows)


def by_seed(result: Result) -> dict[str, dict[int, Result]]:
    """The runs of each configuration."""
    runs: dict[str, dict[int, Result]] = {}
    for run in sorted(result["runs"], key=lambda run: int(run["seed"])):
        runs.setdefault(run["configuration"], {})[run["seed"]] = run
    return runs


def differences(runs: dict[int, Result], base: dict[int, Result]) -> list[float]:
    """Of top-1, in points, for each seed that both have."""
    return [100 * (run["top1"] - base[seed]["top1"]) for seed, run in runs.items() if seed in base]


POOLS = {
    "pool 4": "PoolSampler, blocks of 4 (default)",
    "pool 16": "blocks of 16",
    "pool 64": "blocks of 64",
    "buffer of sorted shards": "a shuffle buffer over shards sorted by class",
}


def pool_sampler(result: Result) -> str:
    runs = by_seed(result)
    rows = [[name, intervals.shown(differences(runs[of], runs["uniform"]))] for of, name in POOLS.items()]
    return markdown(["top-1 against a uniform shuffle, points", "difference [95 %]"], rows)


SYSTEMS: tuple[str, ...] = ("lru", "lfu", "minio", "uniform+plan", "quiver", "echo 2", "shade", "icache", "impact")
SYSTEMS += ("spider-imp", "spider-paper", "spider-released", "spider", "spider+plan")
# As the papers report them.
PAPERS = {"shade": " (72)", "impact": " (43)"}


def systems(result: Result, names: Iterable[str] = SYSTEMS) -> str:
    trainings, rows = Trainings(result), []
    for system in names:
        equal = trainings.as_accurate(system)
        times = "below 3 epochs" if equal is None else f"{trainings.fetched(system) / equal:.2f}"
        hits = trainings.percent(system, "hit_ratio") + PAPERS.get(system, "")
        cells = [hits, trainings.percent(system, "redirected_share"), trainings.times_lru(system)]
        rows.append([named(system, ("echo 2", "spider+plan")), *cells, points(trainings.gained(system)), times])
    headings = ["", "hits, %", "substitutes, %", "bytes, x lru", "top-1 less uniform, 95 %", "x uniform+plan"]
    return markdown(headings, rows)


SIZED = ("minio", "icache", "shade", "spider-imp", "spider-paper")


def cache_sizes(result: Result, names: Iterable[str] = SIZED) -> str:
    trainings = Trainings(result)
    shares = sorted({share for _, share in trainings.group})
    rows = ([system, *(trainings.percent(system, "hit_ratio", share) for share in shares)] for system in names)
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


def samplers_10k(result: Result) -> str:
    trainings, rows = Trainings(result), []
    for system, name in SAMPLERS.items():
        cells = [f"{trainings.fetched(system):.2f}", trainings.times_lru(system), f"{trainings.steps(system):.1f}"]
        cells.append(spread([run.top1 for run in trainings.of(system)], ".1f", 100))
        rows.append([name, *cells, "" if system == "uniform+plan" else points(trainings.gained(system))])
    return markdown(["", "bytes", "x LRU", "steps", "top-1, %", "minus uniform, points"], rows)


def samplers(*results: Result) -> str:
    """What each sampler saves and costs, and what uniform sampling costs that stops as early."""
    rows = []
    for system, name in [*SAMPLERS.items(), ("spider+plan", "`SpiderSampler`")]:
        for result in results:
            trainings, extent = Trainings(result), result["extent"]
            if system.startswith("uniform") or not trainings.of(system):
                continue
            setting = f"{extent['training']:,}, {extent['epochs']}, {len(trainings.of(system))}"
            cells = []
            for amount in (trainings.fetched, trainings.steps):
                cells.append(f"{100 * (1 - amount(system) / amount('uniform+plan')):.0f}")
            cells.append(points(trainings.gained(system)))
            for lost in (
                trainings.at_equal(system, lambda run: run.whole),
                trainings.at_equal(system, lambda run: run.steps),
            ):
                cells.append(f"{mean(lost):+.1f}" if lost else "more than was measured")
            # With as many steps, uniform sampling is what the costs are compared with.
            cells[-1] = "" if cells[1] == "0" else cells[-1]
            rows.append([name, setting, *cells])
    headings = ["", "images, epochs, seeds", "saves bytes, %", "saves steps, %", "costs, points (95 %)"]
    return markdown([*headings, "uniform with as many bytes", "uniform with as many steps"], rows)


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
        cells += [trainings.times_lru(name), points(trainings.gained(name))]
        rows.append([name if drawn else "" if suffix else system, RADII.get(suffix, ""), *cells])
    headings = ["", "`radius`", "hits, %", "substitutes, %", "different samples, %", "x_same", "beta", "bytes, x lru"]
    return markdown([*headings, "top-1 less uniform, 95 %"], rows)


def refurbish(speed: Result, accuracy: Result) -> str:
    """Either may be empty."""
    runs, rows = by_seed(accuracy or {"runs": []}), []
    for name, configuration, least in (
        ("two uses", "r=2", 1.4),
        ("three uses", "r=3", 1.9),
        ("data echoing, two uses", "echo 2", None),
        ("data echoing, three uses", "echo 3", None),
    ):
        times = speed.get("of_standard", {}).get(f"both {configuration}")
        cells = ["" if times is None else aimed(times, least).replace(" (", " x ("), ""]
        if found := differences(runs.get(configuration, {}), runs.get("standard", {})):
            of = intervals.interval_of(found)
            cells[1] = f"{of.mean:.1f} ({of.low:.1f} to {of.high:.1f})"
        if any(cells):
            rows.append([name, *cells])
    return markdown(["", "images/s", "top-1, points (95 %)"], rows)


# Times standard in table 1 of Revamper's paper (VGG-16, CIFAR-10), which has no row for balanced eviction alone.
REVAMPER = {"naive": 4746.91 / 4125.07, "balanced, cache-aware shuffle": 5839.08 / 4125.07}


def schedules(result: Result) -> str:
    rows: list[Row] = []
    for name, rates in result["images_per_s"].items():
        times, paper = f"{result['of_standard'][name]:.2f}", REVAMPER.get(name)
        rows.append([name, f"{median(rates):.0f}", times, "" if paper is None else f"{paper:.2f}"])
    return markdown(["", "images/s", "x standard", "paper"], rows)


# -- documents


class Rendered(NamedTuple):
    """A table, the kept results that it is made of, and whether their date and commit stand below it."""

    of: Callable[..., str]
    results: tuple[str, ...]
    dated: bool = True


def never_slower(result: Result) -> str:
    """Of each setting the multiples of the direct rate, by epoch."""
    ways, epochs = result["extent"]["ways"], result["extent"]["epochs"]
    rows = []
    for cells in result["settings"]:
        row = [cells["setting"], f"{median(cells['direct']['rate']):,.0f}"]
        for way in ways:
            found = [median(cells[f"{way}: {epoch}"]["times"]) for epoch in epochs]
            row.append("/".join(f"{times:.2f}" if times >= 1 else f"**{times:.2f}**" for times in found))
        rows.append(row)
    return markdown(["", "direct, files/s", *ways], rows)


def soak(result: Result) -> str:
    events, usages = result["events"], [usage["megabytes"] for usage in result["usages"]]
    kills = sum(number for name, number in events.items() if name.startswith("kill"))
    rows = [
        ["minutes", f"{result['seconds'] / 60:.0f}"],
        ["reads, each compared", f"{sum(result['reads'].values()):,} ({result['read_bytes'] / 1e9:.0f} GB)"],
        ["changes at the source, faults and others", f"{sum(events.values()):,}, of these {kills} kills of a process"],
        ["wrong bytes, forbidden errors, leaks", f"{len(result['findings'])}"],
        ["longest wait of a call, s", aimed(result["longest_wait_s"], result["limit_s"], ".1f", "at most ", most=True)],
        [
            "memory of all processes in calms, MB",
            f"{usages[0]:.0f} first, {max(usages):.0f} most, {usages[-1]:.0f} last",
        ],
    ]
    return markdown(["", f"seed {result['seed']}"], rows)


TABLES = {
    "never-slower": Rendered(never_slower, ("never_slower",)),
    "soak": Rendered(soak, ("soak",)),
    "object-store": Rendered(object_store, ("object_store",)),
    "decoding": Rendered(decoding, ("decoding",)),
    "archives": Rendered(archives, ("archives",)),
    "pool-sampler": Rendered(pool_sampler, ("pool_sampler",)),
    "cluster": Rendered(cluster, ("cluster",)),
    "photos": Rendered(photos, ("streaming_formats",)),
    "photos-short": Rendered(photos_short, ("streaming_formats",), dated=False),
    "streaming-formats": Rendered(streaming_formats, ("streaming_formats",)),
    "epoch": Rendered(epoch, ("epoch",)),
    "scan": Rendered(scan, ("scan",)),
    "large": Rendered(large, ("large",)),
    "idle": Rendered(idle, ("idle",)),
    "planned-ranges": Rendered(planned_ranges, ("planned_ranges",)),
    "image-loader": Rendered(image_loader, ("image_loader",)),
    "client": Rendered(client, ("client",)),
    "serve": Rendered(serve, ("serve",)),
    "serve-immutable": Rendered(serve_immutable, ("serve-immutable",)),
    "jobs-mount": Rendered(jobs_mount, ("jobs_mount",)),
    "stall": Rendered(stall, ("stall",)),
    "partition": Rendered(partition, ("partition",)),
    "train": Rendered(train, ("train",)),
    "loader-workers": Rendered(loader_workers, ("loader_workers",)),
    "equivalence": Rendered(equivalence, ("equivalence",)),
    "samplers-10k": Rendered(samplers_10k, ("samplers-10k",)),
    "samplers": Rendered(samplers, ("samplers-10k", "full_size")),
    "full-size": Rendered(full_size, ("full_size",)),
    "systems": Rendered(systems, ("systems",)),
    "cache-sizes": Rendered(cache_sizes, ("systems",)),
    "radius": Rendered(radius, ("radius",)),
    "refurbish": Rendered(refurbish, ("refurbish_speed", "refurbish_accuracy")),
    "schedules": Rendered(schedules, ("refurbish_schedules",)),
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
