"""Kinds of values that several commands take."""

from __future__ import annotations

from typing import Any

import click


class Number(click.FloatRange):
    """A number in a range; click alone lets nan pass, for it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        if converted != converted:
            self.fail(f"{value!r} is no number.", param, ctx)
        return converted
