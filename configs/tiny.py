"""Search self-play in a mini-encyclopaedia, on one CPU machine: what `make demo` runs.

    python -m sspjax.train --config=configs/tiny.py --workdir=runs/tiny

A Qwen3 block of 0.6 million parameters learns the tags and part of the skill from scripted
trajectories of other worlds, then plays against itself in a world it has never seen.

On one CPU core the warm start takes about 6 minutes, a step of self-play 1.5 seconds, an evaluation
of 500 questions 10 seconds. Expect greedy 1-hop exact match of 35 to 55 after the warm start, and
12 points more or better after ten steps of self-play (README.md has the table).
"""

from ml_collections import ConfigDict

from sspjax.config import default


def get_config() -> ConfigDict:
    c = default()
    c.steps = 60
    c.batch = 32

    c.world.kind = "miniwiki"
    c.warm_start.steps = 900
    c.warm_start.worlds = 20
    c.warm_start.batch = 48
    c.warm_start.copy_steps = 300
    c.warm_start.lazy_steps = 200
    c.warm_start.lazy_one_hop = 0.65
    c.warm_start.learning_rate = 5e-3

    c.model.preset = "tiny"
    c.model.prompts = "tiny"
    c.model.dtype = "float32"
    c.model.vocab_size = 1280
    c.model.attention_block = 64
    c.model.remat = False

    c.retrieval.encoder = "tfidf"
    c.retrieval.topk = 2
    c.retrieval.document_tokens = 40

    for role in (c.proposer, c.solver):
        role.max_turns = 3
        role.prompt_tokens = 48
        role.response_tokens = 208
        role.turn_tokens = 32
        role.observation_tokens = 80
    c.filters.min_words = 4
    c.filters.max_chars = 200

    # The reader is weak: under more noise, or in several readings, hardly a question would pass.
    c.verify.noise = 2
    c.verify.samples = 1
    c.verify.prompt_tokens = 240
    c.verify.answer_tokens = 16
    c.verify.temperature = 0.0

    # The paper's raw advantage and equal weights let the proposer run away from so small a solver.
    c.proposer.estimator = "batch_mean"
    c.proposer.role_weight = 0.3

    c.learner.order = "joint"
    c.learner.old_logprobs = "behaviour"
    c.learner.minibatches.solver = 1
    c.learner.kl = 0.0
    c.learner.learning_rate = 5e-4
    c.learner.b2 = 0.95
    c.learner.weight_decay = 0.0
    c.learner.row_tokens = 256
    c.learner.micro_rows = 2

    c.rollout.slots = 32
    c.rollout.extend_rows = 8
    c.rollout.chunk = 32
    c.rollout.decode_tokens = 32
    c.rollout.return_when = 0.5

    c.mesh.fsdp = 1
    c.mesh.data = -1

    c.checkpoint.every = 20
    c.eval.every = 10
    return c
