"""The same program over a real corpus: 9,302 Wikipedia passages."""

import os
import pathlib

import pytest

from sspjax.retrieval.corpus import read_corpus


@pytest.mark.slow
def test_a_step_of_self_play_over_real_passages(taught, tmp_path):
    """The miniature agent knows nothing of the world, but it searches, reads, asks and learns."""
    if "SSPJAX_DATA" not in os.environ:
        pytest.skip("SSPJAX_DATA is not set: no real passages")
    path = pathlib.Path(os.environ["SSPJAX_DATA"]) / "corpus" / "wiki-small.jsonl.gz"
    run = taught.copy(tmp_path / "run")
    settings = {"retrieval.corpus": path, "steps": 1, "eval.every": 0}
    run.train(settings, "--force")
    (row,) = [row for row in run.rows() if row["step"] == 1]
    assert row["proposer/searches/mean"] > 0
    known = {document.id for document in read_corpus(path)}
    shown = [
        document
        for record in run.trajectories()[1]
        for turn in record["turns"]
        for document in turn["documents"]
    ]
    assert shown
    assert set(shown) <= known
