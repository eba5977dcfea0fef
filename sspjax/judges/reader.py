"""The judge's model as the reader of the verification, as in SSP's code.

It gets the messages that a policy would get, and its answer is read by the same rule. The paper
lets the solver's policy read: `Players.play` with `Role.READER`.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

from sspjax.config import JudgeConfig, VerifyConfig
from sspjax.judges.chat import Request, chat_request, said
from sspjax.judges.clerk import Clerk
from sspjax.rollout.acts import parse_act
from sspjax.types import Act, Prompt, Question, Stop, Trajectory, Turn


class ChatReader:
    """Prompts to finished trajectories of one turn, which nobody is trained on."""

    def __init__(self, clerk: Clerk, judge: JudgeConfig, verify: VerifyConfig) -> None:
        self._clerk = clerk
        self._judge = judge
        self._verify = verify

    def read(
        self, prompts: Sequence[Prompt], *, randomness: Sequence[object]
    ) -> tuple[Trajectory, ...]:
        """One trajectory a prompt, in order; without a reply it has failed, as one whose tool
        failed.

        `randomness` and a trajectory's uid make the seed that the model is asked to sample by.
        """
        seen: collections.Counter[str] = collections.Counter()
        uids = []
        for prompt in prompts:
            uids.append(f"reader/{prompt.group}/{seen[prompt.group]}")
            seen[prompt.group] += 1
        requests = [
            self._request(prompt, "/".join(map(str, (*randomness, uid))))
            for prompt, uid in zip(prompts, uids, strict=True)
        ]
        return tuple(
            _trajectory(uid, prompt, reply)
            for uid, prompt, reply in zip(uids, prompts, self._clerk.replies(requests), strict=True)
        )

    def _request(self, prompt: Prompt, name: str) -> Request:
        asked = prompt.subject.text if isinstance(prompt.subject, Question) else ""
        return chat_request(
            prompt.messages,
            model=self._judge.model,
            temperature=self._verify.temperature,
            max_tokens=self._verify.answer_tokens,
            seed=int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) >> 1,
            about={"model": self._judge.model, "question": asked},
        )


def _trajectory(uid: str, prompt: Prompt, reply: str | None) -> Trajectory:
    """Its turn has a text but no tokens, and no step of ours: they are another model's."""
    act, answer = (Act.NONE, "") if reply is None else parse_act(said(reply), {Act.ANSWER})
    turn = Turn(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        sampled=False,
        text=reply or "",
        act=act,
        argument=answer,
    )
    if reply is None:
        turns, stop = (), Stop.TOOL_FAILED
    else:
        turns, stop = (turn,), Stop.ANSWER if act is Act.ANSWER else Stop.NO_ACTION
    return Trajectory(uid=uid, prompt=prompt, turns=turns, stop=stop, policy_step=0)
