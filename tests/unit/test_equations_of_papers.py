"""The papers' equations, computed once more from their text on random small inputs, against what the product does.

Other equations have such tests beside their modules: SpiderCache 1 to 4 (`scorer/test_scorer.py`), SHADE 6
(`scorer/test_scorings.py`), SHADE's algorithm 1 (`policies/test_shade.py`) and Revamper's schedule and theorem 1
(`tests/trainer/test_generations.py`).
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scipy.signal import savgol_filter

from benchmarks.training.equation_9 import Cluster, mean_throughput
from spiderfs.core.feed import Elastic
from spiderfs.forms.partition import FormSizes, Split

share = st.floats(0, 1)


@given(st.lists(st.integers(0, 9), min_size=5, max_size=20), st.lists(share, min_size=6, max_size=20), share)
def test_spidercache_equations_5_to_8(sigmas: list[int], accuracies: list[float], progress: float) -> None:
    elastic = Elastic()
    for sigma in sigmas:
        elastic.observe_sigma(sigma)
    for accuracy in accuracies:
        elastic.observe_accuracy(accuracy)
    # The slope is that of a line through five observations: of whole numbers, so that rounding decides nothing.
    windows = [sigmas[last - 5 : last] for last in range(5, len(sigmas) + 1)]
    beta = int(any(sum((place - 2) * sigma for place, sigma in enumerate(window)) < 0 for window in windows))
    smoothed = savgol_filter(accuracies, 5, 2)
    delta = sum(smoothed[-5 + i] - smoothed[-6 + i] for i in range(5)) / 5
    u = max(0.0, delta) / (0.01 + max(0.0, delta))
    assert (elastic.beta, elastic.delta) == (beta, pytest.approx(delta, abs=1e-9))
    assert elastic.ratio(progress) == pytest.approx(0.9 - beta * (0.9 - 0.8) * progress ** (1 + u))


rate = st.floats(1, 1e5)
bandwidth = st.floats(1e5, 1e10)


@given(
    st.integers(1, 4),
    *[rate] * 3,
    *[bandwidth] * 4,
    st.floats(1e3, 1e6),
    st.floats(1, 8),
    st.integers(0, 100),
    st.integers(0, 100),
    st.floats(1e6, 1e12),
    st.floats(1e3, 1e7),
    st.floats(0, 1e9),
)
def test_seneca_equations_1_to_9(
    n: int,
    t_gpu: float,
    t_a: float,
    t_da: float,
    b_pcie: float,
    b_nic: float,
    b_cache: float,
    b_storage: float,
    s_data: float,
    m: float,
    percent_e: int,
    percent_d: int,
    s_mem: float,
    n_total: float,
    model_bytes: float,
) -> None:
    """With one size for decoded and augmented samples, as the paper has it."""
    x_e = min(percent_e, 100) / 100
    x_d = min(percent_d, 100 - percent_e) / 100
    x_a = 1 - x_e - x_d
    # A ring-reduce of the model for a batch of 256, for each of its samples.
    c_nw = 2 * (n - 1) / n * model_bytes / 256
    # On the network go a cached sample and the gradients; over PCIe always what is augmented.
    pcie = n * b_pcie / m / s_data
    dsi_a = min(b_cache / (m * s_data), n * b_nic / (m * s_data + c_nw), pcie, n * t_gpu)
    dsi_d = min(b_cache / (m * s_data), n * b_nic / (m * s_data + c_nw), n * t_a, pcie, n * t_gpu)
    dsi_e = min(b_cache / s_data, n * b_nic / (s_data + c_nw), n * t_da, pcie, n * t_gpu)
    dsi_s = min(dsi_e, b_storage / s_data)
    n_a = min(n_total, x_a * s_mem / (m * s_data))
    n_d = min(n_total - n_a, x_d * s_mem / (m * s_data))
    n_e = min(n_total - (n_a + n_d), x_e * s_mem / s_data)
    n_storage = n_total - n_a - n_d - n_e
    overall = (n_a * dsi_a + n_d * dsi_d + n_e * dsi_e + n_storage * dsi_s) / n_total
    cluster = Cluster(n, t_gpu, t_a, t_da, b_pcie, b_nic, b_cache, b_storage, gradient_nic_bytes=c_nw)
    sizes = FormSizes(s_data, m * s_data, m * s_data)
    assert mean_throughput(cluster, sizes, Split(x_e, x_d, x_a), s_mem, n_total) == pytest.approx(overall, rel=1e-6)
