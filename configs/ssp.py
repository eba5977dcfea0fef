"""Search self-play as published (arXiv:2510.18821, table 4 and section 3): the schema's defaults.

    python -m sspjax.train --config=configs/ssp.py --workdir=runs/ssp \\
        --config.model.weights=QWEN2.5_FOLDER --config.seeds.path=answers.jsonl \\
        --config.retrieval.corpus=wiki18.jsonl.gz --config.retrieval.index=INDEX

It needs a Hugging Face model folder, an answers file (rows with `ground_truth` and `search_turns`),
and passages with their index (the paper's: E5 over Wikipedia of 2018, three passages a search).
E5 cannot be read yet, and the command says so.

From the paper: 256 answers a step, one proposer trajectory and five solver trajectories each; at
most 10 generations and 8,192 tokens of response after a prompt of at most 4,096; questions are
verified among 4 noise passages; places of rejected questions are filled from a replay pool that is
emptied every 10 steps. The solver is updated first (algorithm 1), then the proposer, with equal
weight: advantages are right or wrong minus the group's mean (equation 4), and 1 - success rate as
it is (equation 5), 0 for an invalid question. Mini-batches of half the solver's trajectories, k3
divergence from the start at 0.01, learning rate 1e-6 after 5 steps of warm-up.

Where the paper is silent, verl's defaults hold. Both losses are means over a trajectory's tokens,
then over trajectories; equation 5 as printed, a sum over tokens, is
`proposer.aggregation=seq-mean-token-sum`.
"""

from ml_collections import ConfigDict

from sspjax.config import default


def get_config() -> ConfigDict:
    return default()
