"""What a person may write after an option of a benchmark that takes names."""

import argparse

import pytest

from benchmarks.common.command import add_names

KNOWN = ("lru", "minio", "impact, twice the epochs", "5 % cached")


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_names(parser, "--configs", KNOWN, "to run (default all)", default=KNOWN)
    return parser


def test_names_come_in_the_order_in_which_they_are_written(parser):
    assert parser.parse_args(["--configs", "minio,lru"]).configs == ["minio", "lru"]


def test_without_the_option_there_are_the_default_ones(parser):
    assert parser.parse_args([]).configs == list(KNOWN)


def test_a_name_may_hold_a_comma_before_a_space(parser):
    assert parser.parse_args(["--configs", "impact, twice the epochs,lru"]).configs == [KNOWN[2], "lru"]


@pytest.mark.parametrize("text", ["fifo", "lru,fifo", "lru,,minio", ""])
def test_a_name_that_is_not_known_is_named_with_those_to_choose_from(parser, capsys, text):
    with pytest.raises(SystemExit):
        parser.parse_args(["--configs", text])
    assert f"there is no {'fifo' if 'fifo' in text else ''!r}; choose from lru,minio," in capsys.readouterr().err


def test_the_help_shows_all_names(parser):
    assert all(name in " ".join(parser.format_help().split()) for name in KNOWN)
