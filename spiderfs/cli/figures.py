"""The figures of `stats.json` as rows for people: `spiderfs status` shows all of them, `spiderfs top` some.

What people look for first has a row of its own here. Every other figure, such as those of a component that this module
has never met, is shown by its name, whose end says the unit. A missing key, or one of a newer version, does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

from spiderfs.metrics import TROUBLES
from spiderfs.options.units import counted, round_size
from spiderfs.shared.escapes import escaped

Figures = Mapping[str, Any]

# The components that rows below show in their own words.
_LAID_OUT = ("sections", "cache_dirs", "pins", "forms", "jobs", "plans", "fetches_ahead", "peers", "cluster", "metrics")
# Numbers that name something.
_NAMES = ("pid", "pids", "port", "trainer")
# Of more peers those are shown that fail most, unless all are asked for.
_SHOWN_PEERS = 16


class Row(NamedTuple):
    name: str
    text: str
    share: float | None = None
    """How far it is, for a bar."""
    bad: bool = False

    def __str__(self) -> str:
        return f"{self.name:16} {self.text}".rstrip()


def all_rows(stats: Figures) -> list[Row]:
    """Everything that a person wants to know at a glance."""
    rest = {name: its for name, its in stats.items() if name not in _LAID_OUT and its and isinstance(its, dict | list)}
    return [
        Row("policy", about(stats)),
        *cache(stats),
        *_sections(stats),
        *_forms(stats),
        *opens(stats),
        *_reads(stats),
        *jobs(stats),
        *plans(stats),
        *ahead(stats),
        *peers(stats, _SHOWN_PEERS),
        *_cluster(stats),
        *(row for name, its in rest.items() for row in section(name, its)),
        *remarks(stats),
    ]


def about(stats: Figures) -> str:
    workers = f"{stats.get('workers', '?')} worker{'' if stats.get('workers') == 1 else 's'}"
    up = timedelta(seconds=int(number(stats, "uptime_s")))
    return f"{stats.get('policy', '?')}, {workers}, pid {stats.get('pid', '?')}, up {up}"


def cache(stats: Figures) -> Iterator[Row]:
    used, capacity, pins = number(stats, "used_bytes"), number(stats, "capacity_bytes"), table(stats, "pins")
    if capacity:
        text = f"{round_size(used)} of {round_size(capacity)}"
        if str(stats.get("capacity", "")).endswith("%"):
            measured = number(stats, "source_bytes")
            of = round_size(measured) if measured else "the source, which is being measured"
            text += f" ({stats['capacity']} of {of})"
        yield Row("cache", f"{text}, {counted(number(stats, 'entries'), 'record')}", used / capacity)
    if number(pins, "files"):
        of = f"{round_size(number(pins, 'bytes'))} of at most {round_size(number(pins, 'limit_bytes'))}"
        yield Row("pinned", f"{counted(number(pins, 'files'), 'file')}, {of}")


def _sections(stats: Figures) -> Iterator[Row]:
    for name, found in table(stats, "sections").items():
        if isinstance(found, dict) and number(found, "entries"):
            records = counted(number(found, "entries"), "record")
            yield Row(f"  {name}", f"{round_size(number(found, 'bytes'))}, {records}")
    yield Row("on disk", round_size(number(stats, "disk_bytes")))
    directories = stats.get("cache_dirs", [])
    for found in directories if len(directories) > 1 else ():
        text = f"{round_size(number(found, 'used_bytes'))} of {round_size(number(found, 'capacity_bytes'))}"
        is_out = bool(found["left_out"])
        yield Row("  directory", f"{found['directory']}: {'left out, see doctor' if is_out else text}", bad=is_out)


def _forms(stats: Figures) -> Iterator[Row]:
    split, following = stats.get("split"), stats.get("next_split")
    shares = number(stats, "view_share"), number(stats, "next_view_share")
    if isinstance(split, str):
        originals, views, augmented = (f"{share}%" for share in split.split("-"))
        yield Row("split", f"{split}: {originals} of the capacity for originals, {views} views, {augmented} augmented")
        # Samples keep their forms as long as a mount lasts.
        if following is not None and (following, shares[1]) != (split, shares[0]):
            of_samples = f", {shares[1]:.1%} of the files as views" if shares[1] else ""
            yield Row("  when remounted", f"{following}{of_samples}, by the capacity and the profile as they are now")
    forms, made = table(stats, "forms"), number(table(stats, "metrics"), "views_made")
    if len(forms) > 1 or made:
        recipe = f" ({stats['recipe']})" if stats.get("recipe") else ""
        of_samples = f" of {shares[0]:.1%} of the files" if recipe and split is not None else ""
        yield Row("view", f"{stats.get('view') if recipe else 'original'}{recipe}{of_samples}, {made:,.0f} made")
        yield Row("  cached", ", ".join(f"{count} {form}" for form, count in forms.items()) + " samples")


def opens(stats: Figures) -> Iterator[Row]:
    """Opens, with those that the page cache answered unseen."""
    counts = table(stats, "metrics")
    unseen, seen = number(counts, "page_cache_reads"), number(counts, "opens")
    hits = f", {number(counts, 'hit_ratio'):.1%} hits" if seen + unseen else ""
    yield Row(
        "opens", f"{seen + unseen:,.0f}{hits}" + (f", {unseen:,.0f} answered by the page cache" if unseen else "")
    )
    for name, counter, remark in (
        ("too new", "opens_young", "of files younger than 2 s: not cached yet"),
        ("around FUSE", "client_opens", "by spiderfs.client"),
        ("substituted", "redirects", "with another sample"),
    ):
        if counts.get(counter):
            yield Row(f"  {name}", f"{counts[counter]:,} of the opens, {remark}")


def _reads(stats: Figures) -> Iterator[Row]:
    counts = table(stats, "metrics")
    if counts.get("reads"):
        size = round_size(number(counts, "read_bytes"))
        yield Row("reads", f"{number(counts, 'reads'):,.0f} ({size}); the page cache answered all others")
    each = f", {round_size(number(counts, 'origin_bytes_per_open'))} per open" if number(counts, "opens") else ""
    yield Row("from the source", f"{round_size(number(counts, 'origin_bytes'))}{each}")
    yield Row("readers waited", f"{number(counts, 'stall_microseconds') / 1e6:.1f} s in total")


def jobs(stats: Figures) -> Iterator[Row]:
    for job in rows(stats, "jobs"):
        samples, hits, exchanged = (number(job, name) for name in ("samples", "hits", "exchanged"))
        name, epochs = job.get("name") or job.get("job", "?"), f" of {job['epochs']}" if job.get("epochs") else ""
        parts = [f"{escaped(str(name))}: epoch {job.get('epoch', '?')}{epochs}"]
        parts.append(f"{rate(number(job, 'samples_per_s'))} samples/s")
        parts += [f"{hits / samples:.1%} hits"] if samples else []
        parts += [f"{exchanged / samples:.1%} exchanged"] if samples and exchanged else []
        parts += [f"{job['substitutes']:,} substitutes"] if job.get("substitutes") else []
        yield Row("job", ", ".join(parts))


def plans(stats: Figures) -> Iterator[Row]:
    for plan in rows(stats, "plans"):
        taken, length, ignored = number(plan, "taken"), number(plan, "length"), not plan.get("trusted", True)
        name = f"{escaped(str(plan.get('list', '?')))}, epoch {plan.get('epoch', '?')}"
        if not length:
            # A loop that leaves an epoch publishes an empty plan in its place.
            yield Row("plan", f"{name}: left before its end")
            continue
        text = f"{name}: {taken:,.0f} of {length:,.0f}, "
        ready_s, late = number(plan, "ready_s"), number(plan, "late_share")
        text += "not followed, so the mount ignores it" if ignored else f"{ready_s:.1f} s ready ahead, {late:.1%} late"
        yield Row("plan", text, taken / length, ignored)


def ahead(stats: Figures) -> Iterator[Row]:
    found = table(stats, "fetches_ahead")
    if number(found, "under_way"):
        each, speed = 1000 * number(found, "latency_s"), round_size(number(found, "bytes_per_s"))
        yield Row("fetches ahead", f"{number(found, 'under_way'):,.0f} in flight, {each:.1f} ms each, {speed}/s")


def peers(stats: Figures, most: int) -> Iterator[Row]:
    """A row for each other node of a cluster, but no more than `most`."""
    found = {url: peer for url, peer in table(stats, "peers").items() if isinstance(peer, dict)}
    if not found:
        if stats.get("is_member") is not None:
            yield Row("from peers", "no other node is known")
        return
    hits, size = (sum(number(peer, name) for peer in found.values()) for name in ("hits", "bytes"))
    outside = "; this node is none of them, and keeps nothing for others" if stats.get("is_member") is False else ""
    yield Row("from peers", f"{round_size(size)} in {hits:,.0f} reads{outside}")
    by_trouble = sorted(found.items(), key=lambda named: (bool(named[1].get("up")), -number(named[1], "timeouts")))
    for url, peer in by_trouble[:most] if len(found) > most else found.items():
        text = f"{'up' if peer.get('up') else 'down'}, {number(peer, 'hits'):,.0f} reads"
        text += f" ({round_size(number(peer, 'bytes'))})"
        text += f", {number(peer, 'absent'):,.0f} absent, {number(peer, 'timeouts'):,.0f} timeouts"
        text += f"; {peer['remark']}" if peer.get("remark") else ""
        yield Row(f"  {escaped(url)}", text, bad=not peer.get("up"))
    if len(found) > most:
        down = sum(not peer.get("up") for peer in found.values())
        yield Row(f"  {len(found) - most} others", f"better than these; of all {len(found)}, {down} down")


def _cluster(stats: Figures) -> Iterator[Row]:
    link, counts = table(stats, "cluster"), table(stats, "metrics")
    if link:
        names = ("rows_sent", "rows_received", "rows_lost", "scores_received", "plans_received")
        sent, received, lost, scores, others = (f"{number(counts, f'cluster_{name}'):,.0f}" for name in names)
        state = "up" if link.get("up") else "fails: this mount continues with its scores"
        yield Row("cluster", f"{escaped(str(link.get('url', '?')))} {state}", bad=not link.get("up"))
        yield Row("  batches", f"{sent} samples sent, {received} received, {lost} lost; {scores} scores taken")
        yield Row("  plans", f"{others} of jobs on other nodes")


def remarks(stats: Figures) -> Iterator[Row]:
    """What a person should see to."""
    counts = table(stats, "metrics")
    if counts.get("source_reachable", 1) == 0:
        yield Row("source", "does not answer", bad=True)
    if any(trainer.get("pid") == 0 for trainer in rows(stats, "trainers")):
        yield Row("trainer", "of another pid namespace: never redirected", bad=True)
    met = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in sorted(TROUBLES) if counts.get(name)]
    yield Row("troubles", ", ".join(met) or "none", bad=bool(met))


def section(name: str, value: object, depth: int = 0) -> Iterator[Row]:
    """Rows of any status by the names in it; what is nested has rows of its own below."""
    label = "  " * depth + name.replace("_", " ")
    if not isinstance(value, dict) and not _is_of_tables(value):
        yield Row(label, figure(name, value))
        return
    items = value if isinstance(value, dict) else {str(place): item for place, item in enumerate(value, 1)}
    nested = {key: inner for key, inner in items.items() if isinstance(inner, dict) or _is_of_tables(inner)}
    facts = [
        f"{_label(key)} {figure(key, its)}".removeprefix(f"{name} ")
        for key, its in items.items()
        if key not in nested and its is not None
    ]
    yield Row(label, ", ".join(facts))
    for key, inner in nested.items():
        yield from section(key, inner, depth + 1)


def figure(name: str, value: object) -> str:
    if isinstance(value, list):
        return " and ".join(figure(name, one) for one in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if not is_number(value):
        return escaped(str(value))
    if "bytes" in name.split("_"):
        return round_size(value) + ("/s" if name.endswith("_per_s") else "")
    if name.endswith(("_share", "ratio")):
        return f"{value:.1%}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{1000 * value:.1f} ms" if 0 < value < 1 else f"{value:,.1f} s"
    return str(value) if name in _NAMES else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _label(name: str) -> str:
    text = name.removesuffix("_bytes")
    return escaped(text if text.endswith("_per_s") else text.removesuffix("_s")).replace("_", " ")


def _is_of_tables(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)


def rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def rows(stats: Figures, key: str) -> list[dict[str, Any]]:
    found = stats.get(key)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def table(stats: Figures, key: str) -> dict[str, Any]:
    found = stats.get(key)
    return found if isinstance(found, dict) else {}


def number(stats: Figures, key: str) -> float:
    value = stats.get(key)
    return value if is_number(value) else 0.0


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
