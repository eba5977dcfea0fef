"""The demo in about 25 CPU-seconds: a world of 40 entities, and an agent that has just learnt to
search and is right about nothing.
"""

from ml_collections import ConfigDict

from sspjax.config import default


def get_config() -> ConfigDict:
    c = default()
    c.steps = 2
    c.batch = 4
    c.world.kind = "miniwiki"
    c.world.entities = 40
    c.world.questions = 4
    c.warm_start.steps = 20
    c.warm_start.worlds = 1
    c.warm_start.batch = 16
    c.warm_start.proposer_share = 0.3
    c.warm_start.reader_share = 0.0
    c.warm_start.observation_weight = 0.0
    c.warm_start.learning_rate = 0.02
    c.model.preset = "tiny"
    c.model.prompts = "tiny"
    c.model.dtype = "float32"
    c.model.vocab_size = 640
    c.model.attention_block = 32
    c.model.remat = False
    c.retrieval.encoder = "tfidf"
    c.retrieval.topk = 2
    c.retrieval.document_tokens = 24
    for role in (c.proposer, c.solver):
        role.max_turns = 3
        role.prompt_tokens = 32
        role.response_tokens = 128
        role.turn_tokens = 16
        role.observation_tokens = 56
    c.filters.min_words = 1
    c.filters.min_chars = 1
    c.verify.reader = "none"
    c.verify.prompt_tokens = 144
    c.verify.answer_tokens = 16
    c.learner.order = "joint"
    c.learner.old_logprobs = "behaviour"
    c.learner.minibatches.solver = 1
    c.learner.kl = 0.0
    c.learner.row_tokens = 160
    c.learner.micro_rows = 1
    c.rollout.slots = 8
    c.rollout.extend_rows = 8
    c.rollout.chunk = 32
    c.rollout.decode_tokens = 16
    c.mesh.fsdp = 1
    c.mesh.data = -1
    c.checkpoint.every = 1
    c.checkpoint.keep = 2
    c.eval.every = 2
    return c
