"""Recipes of views: what people write, what is refused, and which sizes follow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.views.recipe import FORMATS, READY, Recipe, format_recipes, parse_recipes

recipes = st.builds(
    lambda form, side, quality: Recipe(form, side, quality if form == "jpeg" else 0),
    st.sampled_from(FORMATS),
    st.integers(8, 8192),
    st.integers(30, 100),
)
names = st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True).filter(lambda name: name != "none" and name not in READY)


@given(st.dictionaries(names, recipes, max_size=4))
def test_written_recipes_read_back_unchanged(found: dict[str, Recipe]) -> None:
    assert parse_recipes(format_recipes(found)) == found
    tables = {name: {key: value for key, value in recipe._asdict().items() if value} for name, recipe in found.items()}
    assert parse_recipes(tables) == found


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("small", "write it like"),
        ("small:jpeg:1:2:3", "write it like"),
        ("small:gif:256", "choose one of jpeg"),
        ("small:jpeg:7", "short_side of a view must be a whole number from 8"),
        ("small:jpeg:256:101", "quality of a view must be"),
        ("small:bmp:256:90", "only jpeg has a quality"),
        ("jpeg256:jpeg:256", "every mount has"),
        ("a b:jpeg:256", "cannot be the name"),
        ("../up:jpeg:256", "cannot be the name"),
        (".:jpeg:256", "cannot be the name"),
        ("ü:jpeg:256", "cannot be the name"),
        ("original:jpeg:256", "cannot be the name"),
        ({"small": {"format": "jpeg"}}, "no short_side"),
        ({"small": {"format": "jpeg", "short_side": 256, "colour": 1}}, "unknown key colour"),
        ({"small": {"format": "jpeg", "short_side": True}}, "must be a whole number"),
        ({"small": 256}, "is no table"),
        (256, "views are tables"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        parse_recipes(value)
    assert "\n" not in str(refused.value)


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.integers(8, 8192))
def test_the_short_side_of_a_view_is_the_recipes_and_its_shape_the_images(width: int, height: int, side: int) -> None:
    small = Recipe("bmp", side).size_of(width, height)
    if min(width, height) <= side:
        assert small == (width, height)
        return
    assert min(small) == side
    exact = max(width, height) * side / min(width, height)
    assert abs(max(small) - exact) <= 0.5
    assert Recipe("bmp", side).size_of(height, width) == small[::-1]
