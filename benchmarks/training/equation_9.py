"""Equation 9 of Seneca's paper ("Preparation Meets Opportunity", section 5.1), beside which the law was measured.

It predicts the mean of the throughputs of the four places in which a sample may lie, weighted by how many lie in each.
Where one resource is the limit in each place, that is optimistic: of samples of which half come at 100 a second and
half at 10, each takes 55 ms on average, which is 18 a second; the mean says 55. Where the limits are different
resources, it is pessimistic, because one works while another is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from spiderfs.forms.partition import FormSizes, Places, Split
from spiderfs.forms.profile import NO_LIMIT, Profile


def samples_in(split: Split, cache_bytes: float, samples: float, sizes: FormSizes) -> Places[float]:
    """How many of `samples` are in each place; none is in two.

    Equation 2:  N_A = min(N_total, x_A S_mem / (M S_data))
    Equation 4:  N_D = min(N_total - N_A, x_D S_mem / (M S_data))
    Equation 6:  N_E = min(N_total - (N_A + N_D), x_E S_mem / S_data)
    Equation 8:  N_storage = N_total - N_A - N_D - N_E
    """
    augmented = min(samples, split.augmented * cache_bytes / sizes.augmented)
    decoded = min(samples - augmented, split.decoded * cache_bytes / sizes.decoded)
    # Where all are in the first two, their sum may be rounded to a bit more.
    left = max(0.0, samples - (augmented + decoded))
    encoded = min(left, split.encoded * cache_bytes / sizes.encoded)
    return Places(augmented, decoded, encoded, left - encoded)


@dataclass(frozen=True)
class Cluster:
    """The parameters of the paper's table 3; bandwidths in bytes a second, rates in samples a second.

    `gradient_nic_bytes` and `gradient_pcie_bytes` are C_nw and C_PCIe for each sample: what a ring-reduce among n
    members moves for it, 2 (n - 1) / n * model bytes / batch. The paper gives it for a batch and adds it to the bytes
    of a sample; only divided by the batch are both of one kind.
    """

    nodes: int
    gpu_rate: float  # T_GPU, of each node
    augment_rate: float  # T_A, of each node
    decode_augment_rate: float  # T_D+A, of each node
    pcie_bandwidth: float  # B_PCIe, of each node
    nic_bandwidth: float  # B_NIC, of each node
    cache_bandwidth: float  # B_cache
    storage_bandwidth: float  # B_storage
    gradient_nic_bytes: float = 0.0
    gradient_pcie_bytes: float = 0.0


def throughputs(cluster: Cluster, sizes: FormSizes) -> Places[float]:
    """Samples a second if all samples were found in one place.

    Equation 1:  DSI_A = min(B_cache / (M S_data), n B_NIC / (M S_data + C_nw), n B_PCIe / (M S_data + C_PCIe), n T_GPU)
    Equation 3:  DSI_D = min(B_cache / (M S_data), n B_NIC / (M S_data + C_nw), n T_A, n B_PCIe / (M S_data + C_PCIe),
                             n T_GPU)
    Equation 5:  DSI_E = min(B_cache / S_data, n B_NIC / (S_data + C_nw), n T_D+A, n B_PCIe / (M S_data + C_PCIe),
                             n T_GPU)
    Equation 7:  DSI_S = min(DSI_E, B_storage / S_data)

    Each form has its own size here in place of one M. What goes over PCIe is augmented by then, whatever was cached.
    """
    nodes = cluster.nodes
    device = min(
        nodes * cluster.pcie_bandwidth / (sizes.augmented + cluster.gradient_pcie_bytes), nodes * cluster.gpu_rate
    )

    def from_cache(size: float) -> float:
        return min(cluster.cache_bandwidth / size, nodes * cluster.nic_bandwidth / (size + cluster.gradient_nic_bytes))

    encoded = min(from_cache(sizes.encoded), nodes * cluster.decode_augment_rate, device)
    return Places(
        augmented=min(from_cache(sizes.augmented), device),
        decoded=min(from_cache(sizes.decoded), nodes * cluster.augment_rate, device),
        encoded=encoded,
        storage=min(encoded, cluster.storage_bandwidth / sizes.encoded),
    )


def mean_throughput(cluster: Cluster, sizes: FormSizes, split: Split, cache_bytes: float, samples: float) -> float:
    """Samples a second by equation 9.

    DSI_overall = N_A / N_total DSI_A + N_D / N_total DSI_D + N_E / N_total DSI_E + N_storage / N_total DSI_S
    """
    counts = samples_in(split, cache_bytes, samples, sizes)
    return sum(count / samples * rate for count, rate in zip(counts, throughputs(cluster, sizes), strict=True))


def cluster_of(profile: Profile, view: str | None) -> Cluster:
    """The parameters of equations 1 to 7 for the machines of a profile; no network card and no PCIe is a limit."""
    running = min(max(1, profile.workers), profile.cores)
    augment = profile.views[view].cost.cpu_s if view is not None else profile.uncached.cpu_s
    reads = [form.reads.bytes_per_s for form in (profile.encoded, *profile.views.values()) if form.reads is not None]
    return Cluster(
        nodes=profile.nodes,
        gpu_rate=profile.device_rate,
        augment_rate=running / augment,
        decode_augment_rate=profile.preparing_rate,
        pcie_bandwidth=NO_LIMIT,
        nic_bandwidth=NO_LIMIT,
        cache_bandwidth=profile.nodes * max(reads, default=NO_LIMIT),
        storage_bandwidth=profile.source.bytes_per_s,
    )


def by_equation_9(profile: Profile, split: Split, view: str | None) -> float:
    return mean_throughput(cluster_of(profile, view), profile.sizes(view), split, profile.cache_bytes, profile.samples)
