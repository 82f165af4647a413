"""`make docs`: write the tables of docs/ that are made from the code."""

from __future__ import annotations

import tempfile
from pathlib import Path

from app.settings import Settings
from models import embedded
from tests.docs import pages
from tests.faults import tiny
from tests.faults.server import serving, settings

if __name__ == "__main__":
    pages.write("configuration.md", pages.settings_tables())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny.save(folder / "models" / "tiny", embedded.fetch(Settings().cache_dir, progress=print))
        with serving(settings(model, folder / "nvme")) as server:
            pages.write("metrics.md", pages.metric_tables(server.http.get("/metrics").text))
