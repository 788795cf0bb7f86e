"""`spiderfs metrics`: serves the metrics of mounts to Prometheus (OpenMetrics over HTTP).

Nothing is kept between two scrapes: each asks every mount for its control file `metrics`, and adds the label `mount`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Sequence

import click
from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from spiderfs.cli.control_files import every_place, place_of, printable, read_control, served_as, warn
from spiderfs.cli.control_files import mountpoints as complete
from spiderfs.errors import ConfigError
from spiderfs.linux.mounts import canonical
from spiderfs.linux.process_table import ended_by_signals
from spiderfs.metrics import MOUNT_UP
from spiderfs.protocol.requests import SCHEME, address_of

DEFAULT_LISTEN = "127.0.0.1:9464"


@click.command()
@click.argument("mountpoints", metavar="[MOUNTPOINT]...", nargs=-1, shell_complete=complete)
@click.option("--listen", default=DEFAULT_LISTEN, show_default=True, metavar="HOST:PORT", help="Where to serve them.")
def metrics(mountpoints: tuple[str, ...], listen: str) -> None:
    """Serve the metrics of the mounts at MOUNTPOINT, or of all, to Prometheus, until Ctrl-C or SIGTERM.

    A MOUNTPOINT may be spiderfs://NAME, which 'spiderfs serve' serves. Each has the label mount=MOUNTPOINT. Clients
    of the port can read the metrics and these names.
    """
    host, colon, number = listen.rpartition(":")
    if not colon or not number.isdecimal() or int(number) > 65535:
        raise ConfigError(f"--listen {listen}: write HOST:PORT, such as {DEFAULT_LISTEN}")
    host = host.removeprefix("[").removesuffix("]")
    registry = CollectorRegistry(auto_describe=False)
    chosen = [_named(point) for point in mountpoints]
    registry.register(Mounts(chosen))
    try:
        server, thread = start_http_server(int(number), host or "0.0.0.0", registry)
    except OSError as exc:
        raise ConfigError(f"--listen {listen}: {exc.strerror or exc}: choose another address or port") from exc
    except ValueError as exc:
        raise ConfigError(f"--listen {listen}: no host can have this name: choose another address") from exc
    shown = f"[{host}]" if ":" in host else host or "*"
    with ended_by_signals(), contextlib.suppress(KeyboardInterrupt):
        click.echo(f"http://{shown}:{server.server_port}/metrics")
        # One may come later, as in a pod.
        for place in sorted(set(chosen) - every_place().keys()):
            if place.startswith(SCHEME):
                name = place.removeprefix(SCHEME)
                warn(f"nothing is served as {place} yet: 'spiderfs serve SOURCE --name {name}' serves it")
            else:
                warn(f"no spiderfs mount is at {place} yet: 'spiderfs status' lists the mounts")
        signal.pause()
    server.shutdown()
    thread.join()
    server.server_close()


def _named(point: str) -> str:
    """What `every_place` calls what a user has named; raises ConfigError for no possible name."""
    try:
        address = address_of(point)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    return str(canonical(point)) if address is None else place_of(served_as(address.name))


class Mounts(Collector):
    """The metrics of the mounts at these places, or of all that there are; of one that does not answer, that alone."""

    def __init__(self, chosen: Sequence[str]) -> None:
        self._chosen = chosen

    def collect(self) -> Iterable[Metric]:
        there = every_place()
        up = GaugeMetricFamily(f"spiderfs_{MOUNT_UP.name}", MOUNT_UP.help, labels=["mount"])
        families: dict[str, Metric] = {}
        for place in self._chosen or there:
            label = printable(place)
            found: list[Metric] = []
            if place in there:
                # Nothing if it does not answer, or is another user's.
                with contextlib.suppress(OSError, ValueError):
                    found = list(text_string_to_metric_families(read_control(there[place], "metrics")))
            up.add_metric([label], float(bool(found)))
            for family in found:
                together = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for name, labels, value, *_ in family.samples:
                    together.add_sample(name, {"mount": label, **labels}, value)
        return [up, *families.values()]
