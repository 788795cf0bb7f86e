"""Names of any bytes in lines of text: what is shown is one line, moves no cursor, and says which bytes there were."""

from __future__ import annotations

import logging
import re

from hypothesis import given
from hypothesis import strategies as st

from spiderfs.daemon.background import _Printable
from spiderfs.shared.escapes import escaped, escaped_path


def unescaped(shown: bytes) -> bytes:
    return re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), shown)


@given(st.binary())
def test_any_name_is_one_printable_line_that_says_which_bytes_it_has(name: bytes) -> None:
    shown = escaped_path(name)
    assert shown.decode().isprintable()
    assert unescaped(shown) == name


@given(st.text(st.characters(categories=None)))
def test_any_text_can_be_shown(text: str) -> None:
    assert escaped(text).encode().decode().isprintable()


def test_ordinary_names_are_shown_as_they_are() -> None:
    for name in ("train/cat 1.png", "Äpfel", "猫.jpg"):
        assert escaped(name) == name
    assert escaped_path(b"two\nlines \x1b[2J \xc2\x9b \xff a\\b") == rb"two\x0alines \x1b[2J \xc2\x9b \xff a\x5cb"


def test_a_line_of_the_log_stays_one_line_whatever_names_it_has() -> None:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%s is away", ("a\nERROR\x1b]0;t\x07\udcff",), None)
    assert _Printable("%(levelname)s: %(message)s").format(record) == r"WARNING: a\x0aERROR\x1b]0;t\x07\xff is away"


def test_a_traceback_in_the_log_keeps_its_lines_and_no_escape_codes() -> None:
    try:
        raise OSError("\x1b[2J\udcff")
    except OSError as exc:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "bad", (), (OSError, exc, exc.__traceback__))
    lines = _Printable("%(message)s").format(record).split("\n")
    assert lines[0] == "bad"
    assert lines[-1] == r"OSError: \x1b[2J\xff"
    assert len(lines) > 2
