"""What the fuzz tests share: the number of their examples, and strategies for bytes that are almost right."""

from __future__ import annotations

import struct

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_QUICK_EXAMPLES = 100
# Numbers at which lengths and signs overflow.
EDGES = (0, 1, 2, 3, 15, 16, 255, 256, 4095, 4096, 65535, 1 << 20)
EDGES += (*((1 << bits) + by for bits in (31, 32, 63) for by in (-1, 0, 1)), (1 << 64) - 1)


def examples(quick: int) -> settings:
    """Settings for so many examples; the profile `long` takes a hundred times as many, and shrinks what fails."""
    share = settings().max_examples / _QUICK_EXAMPLES
    phases = set(Phase) if share > 1 else {Phase.explicit, Phase.reuse, Phase.generate}
    return settings(
        max_examples=max(1, int(quick * share)),
        deadline=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def integers(bits: int) -> st.SearchStrategy[int]:
    """All integers that fit into so many bits, with those of EDGES more often."""
    most = (1 << bits) - 1
    return st.sampled_from([edge for edge in EDGES if edge <= most]) | st.integers(0, most)


def packed(form: struct.Struct) -> st.SearchStrategy[bytes]:
    """The bytes of a structure whose integers come from `integers`."""
    codes = {"I": 32, "Q": 64, "H": 16, "i": 31, "q": 63}
    letters = [letter for letter in _letters(form.format) if letter in codes]
    return st.tuples(*(integers(codes[letter]) for letter in letters)).map(lambda values: form.pack(*values))


def _letters(text: str) -> str:
    letters, count = "", ""
    for letter in text.lstrip("<>=@!"):
        if letter.isdigit():
            count += letter
        else:
            letters += letter * int(count or 1)
            count = ""
    return letters


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes `whole`, of which some are changed, cut off, inserted or added; or entirely different bytes."""
    data = bytearray(whole)
    how = draw(st.sampled_from(["change", "cut", "add", "insert", "anything"]))
    if how == "anything" or not data:
        return draw(st.binary(max_size=2 * len(whole) + 8))
    at = draw(st.integers(0, len(data) - 1))
    if how == "change":
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    elif how == "cut":
        del data[at:]
    elif how == "add":
        data += draw(st.binary(min_size=1, max_size=64))
    else:
        data[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)
