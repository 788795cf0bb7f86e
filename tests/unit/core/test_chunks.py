"""Which neighbours of a member are read with it: those that are admitted, side by side, and no more than fit."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from spiderfs.core.chunks import MOST_BYTES, MOST_MEMBERS, Member, chunk_of

MEMBERS = [Member(number, 100 * number, 100 * number + 90) for number in range(60)]


def numbers(at: int, admitted: set[int], **limits: int) -> list[int]:
    before, after = reversed(MEMBERS[:at]), iter(MEMBERS[at + 1 :])
    limits = {"most_bytes": MOST_BYTES} | limits
    chunk = chunk_of(MEMBERS[at], before, after, lambda member: member.number in admitted, **limits)
    return [member.number for member in chunk]


def test_a_chunk_is_what_lies_side_by_side_and_is_admitted() -> None:
    assert numbers(5, set()) == [5]
    assert numbers(5, {3, 4, 6, 8}) == [3, 4, 5, 6]
    assert numbers(0, {1, 2}) == [0, 1, 2]
    assert numbers(59, {58, 57, 55}) == [57, 58, 59]


def test_limits_of_a_chunk() -> None:
    everything = set(range(60))
    assert len(numbers(30, everything)) == MOST_MEMBERS
    assert numbers(30, everything, most_members=4) == [29, 30, 31, 32]
    assert numbers(30, everything, most_bytes=290) == [29, 30, 31]
    assert numbers(30, everything, most_bytes=89) == [30]


def test_labels_between_samples_are_passed_over() -> None:
    sizes = [9000, 600, 300, 9000, 600, 300, 9000, 2000, 9000]
    members = [Member(number, sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]

    def samples(at: int) -> list[int]:
        before, after = reversed(members[:at]), iter(members[at + 1 :])
        chunk = chunk_of(members[at], before, after, lambda member: sizes[member.number] == 9000, MOST_BYTES)
        return [member.number for member in chunk]

    assert samples(0) == samples(3) == samples(6) == [0, 3, 6]
    assert samples(8) == [8], "what lies before it is too much to be read in vain"


@given(st.integers(0, 59), st.sets(st.integers(0, 59)), st.integers(1, 40), st.integers(90, 4000))
def test_no_one_is_asked_about_a_member_that_would_not_fit(
    at: int, admitted: set[int], most_members: int, most_bytes: int
) -> None:
    asked: list[int] = []

    def admits(member: Member) -> bool:
        asked.append(member.number)
        return member.number in admitted

    def side(members: list[Member]) -> Iterator[Member]:
        yield from members

    chunk = chunk_of(MEMBERS[at], side(MEMBERS[:at][::-1]), side(MEMBERS[at + 1 :]), admits, most_bytes, most_members)
    assert MEMBERS[at] in chunk
    assert [member.number for member in chunk] == [*range(chunk[0].number, chunk[-1].number + 1)], "none in vain"
    assert len(chunk) <= most_members
    assert chunk[-1].end - chunk[0].begin <= max(most_bytes, 90)
    assert {member.number for member in chunk} - {at} == admitted.intersection(asked), "who is admitted comes along"
