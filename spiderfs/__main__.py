"""The program `spiderfs`: the command line, or one line that names what is not installed."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from spiderfs.cli.main import main as command  # it needs the packages of [mount]

        command()
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "spiderfs"):
            raise
        sys.exit(f"spiderfs: {package} is not installed: run `pip install '.[mount]'` in a checkout of spiderfs")


if __name__ == "__main__":
    main()
