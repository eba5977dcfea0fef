"""Replies that were paid for once: an append-only file, one JSON object a line.

Losing it costs time and money and changes nothing. A line that was cut off, as by a kill, is
forgotten; so is one that cannot be read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sspjax import processes

log = logging.getLogger(__name__)


class Journal:
    """Replies by the keys of their requests; the same in every process of the run.

    All processes open it at the same time: process 0 reads the file, and writes to it where
    `records` allows.
    """

    def __init__(self, path: Path, *, records: bool) -> None:
        self.path = path
        self._records = records and processes.is_main()
        own = path.read_bytes() if processes.is_main() and path.exists() else b""
        text = processes.exchange(own)[0]
        whole, newline, torn = text.rpartition(b"\n")
        self._torn_at = len(whole) + len(newline) if torn else None
        """Bytes before half a line, which must not become the beginning of the next one."""
        if torn:
            log.warning("%s: its last line was cut off while it was written; left out", path)
        self._replies = _read(whole, path)

    def __len__(self) -> int:
        return len(self._replies)

    def __contains__(self, key: str) -> bool:
        return key in self._replies

    def __getitem__(self, key: str) -> str:
        return self._replies[key]

    def put(self, key: str, reply: str, about: Mapping[str, Any]) -> None:
        """Remembers a reply; a line is with the system when this returns."""
        if key in self._replies:
            return
        self._replies[key] = reply
        if self._records:
            line = json.dumps({"key": key, "reply": reply, **about}) + "\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._torn_at is not None:
                os.truncate(self.path, self._torn_at)
                self._torn_at = None
            with self.path.open("a", encoding="ascii") as file:
                file.write(line)


def _read(text: bytes, path: Path) -> dict[str, str]:
    replies, bad = {}, 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        match row:
            case {"key": str(key), "reply": str(reply)}:
                replies[key] = reply
            case _:
                bad += 1
    if bad:
        log.warning("%s: %d lines cannot be read; left out", path, bad)
    return replies
