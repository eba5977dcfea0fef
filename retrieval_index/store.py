"""Makes a corpus store, whose text stays on disk, from a JSON Lines corpus.

python -m retrieval_index.store --corpus=corpus.jsonl.gz --out=STORE
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sspjax.command_line import parser, run
from sspjax.retrieval.store import write_store

log = logging.getLogger("retrieval_index.store")


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--corpus", required=True, help="passages, .jsonl or .jsonl.gz")
    arguments.add_argument("--out", required=True, help="folder to make")
    options = arguments.parse_args(argv)
    corpus = write_store(options.corpus, options.out)
    log.info("wrote %s: %d passages, hash %s", options.out, len(corpus), corpus.content_hash)


if __name__ == "__main__":
    run(main)
