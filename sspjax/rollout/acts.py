"""What a sampled turn did, read from its text.

The rules are those of the reference implementation where it has some, and stated where it has none:

- The first completed closing tag among the allowed acts decides; other tags are text.
- The argument is what stands between that tag and the last opening tag of the same act before it,
  stripped. What follows the closing tag inside the turn's last token is ignored.
- A closing tag that nothing opened is no act: the model has broken the format.
- Tags inside `<think>` count like any other: the model meant to act or it did not close its
  thought, and either way the turn has stopped there.
- An empty argument is an act with an empty argument: an empty search is executed and finds
  nothing, an empty answer is wrong, an empty question is rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sspjax.rollout.stop import STOP_TAGS
from sspjax.types import Act


def parse_act(text: str, allowed: Collection[Act]) -> tuple[Act, str]:
    """The act of one sampled turn and its argument; (Act.NONE, "") when there is none.

    `allowed` are the acts whose closing tags end a turn of this role.
    """
    ends = {act: text.find(STOP_TAGS[act]) for act in STOP_TAGS if act in allowed}
    completed = [(end + len(STOP_TAGS[act]), act) for act, end in ends.items() if end >= 0]
    if not completed:
        return Act.NONE, ""
    _, act = min(completed, key=lambda item: item[0])
    opening = f"<{act.value}>"
    start = text.rfind(opening, 0, ends[act])
    if start < 0:
        return Act.NONE, ""
    return act, text[start + len(opening) : ends[act]].strip()


def act_tokens(pieces: Sequence[bytes], act: Act) -> slice:
    """Which tokens of a turn that `parse_act` reads as `act` write its argument and closing tag.

    `pieces[i]` is what token i stands for. Found over bytes, since a tag has no tokens of its own:
    from the end of the opening tag to the end of the closing one. A token that lies across either
    end is among them, one without bytes is where it stands.

    Raises ValueError where the turn has no such act.
    """
    text = b"".join(pieces)
    opening, closing = f"<{act.value}>".encode(), STOP_TAGS[act].encode()
    end = text.find(closing)
    start = text.rfind(opening, 0, max(end, 0))
    if start < 0:
        raise ValueError(f"expected a turn with {opening!r} before {closing!r}, got {text!r}")
    ends = np.cumsum([len(piece) for piece in pieces])
    start, end = start + len(opening), end + len(closing)
    opened, closed = np.searchsorted(ends, [start, end])
    return slice(int(opened + (ends[opened] == start)), int(closed) + 1)
