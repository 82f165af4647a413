"""A server process for test_start_and_stop: MODEL DIRECTORY [hang]. Prints its address once it answers.

With `hang` every read and write of a block waits for ever from then on.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from app import announce, serving, startup
from app.main import create_app
from tests.faults.server import settings
from tests.kvstore.faulty_files import FaultyFiles


def main() -> None:
    model, root, *more = sys.argv[1:]
    files = FaultyFiles()
    configured = settings(Path(model), Path(root))
    sock = serving.bind("127.0.0.1", 0)

    async def ready() -> None:
        if "hang" in more:
            for name in ("read", "write", "zero", "resize"):
                files.hang(name)
        print(announce.base_url(*sock.getsockname()[:2]), flush=True)

    serving.serve(create_app(configured, functools.partial(startup.opened, files=files)), sock, configured, ready)


if __name__ == "__main__":
    main()
