"""Where models that were fetched live: a leaf that every module may import."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`SSPJAX_CACHE`, or `~/.cache/sspjax`. It need not exist."""
    return Path(os.environ.get("SSPJAX_CACHE") or Path.home() / ".cache" / "sspjax")
