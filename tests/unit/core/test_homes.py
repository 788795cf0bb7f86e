"""Each sample has one home, all nodes agree on it, and a change of members moves no more than it has to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiderfs.core.homes import GROUPS, Homes, _drawn

NAMES = st.lists(st.integers(0, 999).map("http://n{}:8443".format), min_size=1, max_size=8, unique=True)
WEIGHTS = st.floats(0.1, 10.0)


def homes_of(homes: Homes) -> list[str]:
    return [homes.members[homes.home(key)] for key in range(GROUPS)]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(names=NAMES, weight=WEIGHTS, data=st.data())
def test_all_nodes_agree_and_each_sample_has_one_home(names: list[str], weight: float, data: st.DataObject) -> None:
    order = data.draw(st.permutations(names))
    here = {name: Homes(dict.fromkeys(names, weight), name) for name in names}
    there = {name: Homes(dict.fromkeys(order, 3 * weight), name) for name in order}
    keys = data.draw(st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=50))
    for key in keys:
        assert {here[name].members[here[name].home(key)] for name in names} == {
            there[name].members[there[name].home(key)] for name in names
        }
        assert [homes.is_remote(key) for homes in here.values()].count(False) == 1


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(names=NAMES, weights=st.lists(WEIGHTS, min_size=9, max_size=9))
def test_a_new_member_takes_its_share_and_nothing_else_moves(names: list[str], weights: list[float]) -> None:
    members = dict(zip(names, weights, strict=False))
    before = homes_of(Homes(members, names[0]))
    with_new = members | {"new": weights[-1]}
    after = homes_of(Homes(with_new, "new"))
    assert all(now in (then, "new") for then, now in zip(before, after, strict=True))
    for name, weight in with_new.items():
        share = weight / sum(with_new.values())
        # Four standard deviations.
        assert after.count(name) / GROUPS == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / GROUPS) + 1e-9)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(names=NAMES, weights=st.lists(st.one_of(WEIGHTS, st.just(1e300), st.just(1e-300)), min_size=8, max_size=8))
def test_of_all_draws_the_soonest_wins_and_of_equal_ones_the_first(names: list[str], weights: list[float]) -> None:
    members = dict(zip(names, weights, strict=False))
    groups = np.arange(GROUPS, dtype=np.uint64)
    times = np.stack([-np.log(_drawn(name, groups)) / members[name] for name in sorted(members)])
    homes = Homes(members, names[0])
    assert [homes.home(key) for key in range(GROUPS)] == times.argmin(axis=0).tolist()


def test_homes_stay_what_they_were() -> None:
    """Nodes with different versions of spiderfs have to agree."""
    homes = Homes({"http://n1:8443": 1.0, "http://n2:8443": 1.0, "http://n3:8443": 2.0}, "http://n1:8443")
    assert [homes.home(key) for key in range(16)] == [0, 2, 1, 2, 2, 2, 1, 0, 2, 1, 0, 2, 0, 2, 2, 1]
