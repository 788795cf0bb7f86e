"""A store of moto's in a process of its own: it knows the semantics of S3, also those that no one thinks of.

It forgets everything at its end. It accepts any credentials and any signature.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_PROGRAM = """
import os, sys, time, warnings
from spiderfs.linux.process_table import end_with_parent
if not end_with_parent(int(sys.argv[1])):
    sys.exit()
warnings.simplefilter("ignore")
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def moto_store() -> Iterator[str]:
    """The URL of a store that has no buckets yet."""
    command = [sys.executable, "-c", _PROGRAM, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def client_of(url: str, key: str = "key", secret: str = "secret") -> Any:
    """A client that may write to the store."""
    import botocore.session

    session = botocore.session.Session()
    session.set_credentials(key, secret)
    return session.create_client("s3", region_name="us-east-1", endpoint_url=url)
