"""The program `spiderfs`: the command line, or one line that names a missing package."""

from __future__ import annotations

import errno
import sys


def main() -> None:
    try:
        from spiderfs.cli.main import main as command

        command()
    except KeyboardInterrupt:  # while the command line is imported, which has its own answer to Ctrl-C
        sys.exit("Aborted!")
    except OSError as exc:
        # Who prints to a pipe that no one reads is seen to already.
        if exc.errno != errno.ENOSPC:
            raise
        sys.exit(f"spiderfs: its output cannot be written: {exc.strerror}")
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package in ("", "spiderfs"):
            raise
        sys.exit(f"spiderfs: {package} is not installed: run `pip install .` in a checkout of spiderfs")


if __name__ == "__main__":
    main()
