"""Search self-play as its authors' code runs it, where that differs from their paper.

    python -m sspjax.train --config=configs/ssp_reference.py --workdir=runs/ssp_reference \\
        --config.model.weights=QWEN2.5_FOLDER --config.seeds.path=answers.jsonl \\
        --config.retrieval.corpus=wiki18.jsonl.gz --config.retrieval.index=INDEX \\
        --config.judge.url=http://HOST:PORT/v1

`configs/ssp.py` is the paper (arXiv:2510.18821), and what is the same in both is said there. Here
are the settings of the released launch script, and of the libraries' defaults under it. Each line
below says what the code does; docs/ssp.md has the whole list beside the paper's.

What it does and this does not, or does otherwise:
- A judge that fails makes an answer wrong, and "incorrect" contains "correct"; here a rollout
  without a clear verdict is left out.
- A place that the replay pool cannot fill gets a dummy question; here it stays empty. A dummy has
  advantage 0 and adds to the divergence term only.
- Trajectories are sorted by length before they are cut into mini-batches; here groups stay whole.
- A proposer's question does not end its turn; here it does.
- An answer with more than ten answer tags earns a quarter; here tags end the turn.
- Prompts are cut from the left at 4,096 tokens; here a question that does not fit is rejected.
"""

from ml_collections import ConfigDict

from sspjax.config import default


def get_config() -> ConfigDict:
    c = default()

    # The proposer is updated first, and its step changes what the solver's ratios start from.
    c.learner.order = "proposer_first"
    c.learner.old_logprobs = "role_start"

    # The rate rises over 5 update calls, two a step, and the first of them has rate 0.
    c.learner.warmup = 5
    c.learner.warmup_unit = "call"

    # 256 proposer trajectories are divided by the 640 of a solver's mini-batch.
    c.proposer.role_weight = 0.4

    # verl's GRPO divides by the sample deviation; the paper's equation 4 does not.
    c.solver.std = "sample"

    # Both losses are means over a trajectory's tokens, then over trajectories, because
    # micro-batches hold one trajectory; the paper's equation 5 sums over the proposer's.
    c.proposer.aggregation = "seq-mean-token-mean"
    c.solver.aggregation = "seq-mean-token-mean"

    # The paper gives no bounds; the script raises the upper one.
    c.learner.clip_low = 0.2
    c.learner.clip_high = 0.285

    # Two distinct searches and none repeated, where the paper asks for one search.
    c.proposer.min_searches = 2
    c.filters.repeated_searches = "reject"

    # What does not equal the answer is put to a model, which also reads in the verification; the
    # paper has the solver read. The paper's judge, and the code's settings of a verdict.
    c.judge.kind = "llm"
    c.judge.model = "Qwen/Qwen2.5-32B-Instruct"
    c.judge.temperature = 0.1
    c.judge.max_tokens = 10
    c.verify.reader = "judge"

    # A noise document is all that another proposer was shown. Four of them are long: the reader
    # gets what an episode gets.
    c.verify.noise_unit = "blob"
    c.verify.prompt_tokens = 12160

    # The pool is emptied when the count of steps, already raised, is a multiple of 10. What was
    # replayed is stored again, and every place draws on its own.
    c.shortfall.clear_every = 10
    c.shortfall.first_clear = 9
    c.shortfall.duplicates = True

    # The script's value for invalid questions; the code's own default is -1.
    c.proposer.invalid = 0.0
    return c
