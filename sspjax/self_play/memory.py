"""The host state as JSON and back, exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sspjax.types import Document, HostState, Question, Replayed


def host_state_to_json(state: HostState) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers, for `json.dumps`. Skills must be such themselves."""
    return dataclasses.asdict(state)


def host_state_from_json(values: Mapping[str, Any]) -> HostState:
    """The state `values` was made from, through `json.loads` or not.

    Raises ValueError when a field is missing or unknown: the file is of another version.
    """
    state = _fields(HostState, values)
    return HostState(
        seed_cursor=state["seed_cursor"],
        replay=tuple(map(_replayed, state["replay"])),
        skills=tuple(state["skills"]),
        attempt=state["attempt"],
        last_row=dict(state["last_row"]),
    )


def _replayed(values: Mapping[str, Any]) -> Replayed:
    fields = _fields(Replayed, values)
    return Replayed(**{**fields, "question": _question(fields["question"])})


def _question(values: Mapping[str, Any]) -> Question:
    fields = _fields(Question, values)
    return Question(
        uid=fields["uid"],
        text=fields["text"],
        answer=fields["answer"],
        aliases=tuple(fields["aliases"]),
        evidence=tuple(Document(**_fields(Document, d)) for d in fields["evidence"]),
        chain=tuple(fields["chain"]),
        waypoints=tuple(fields["waypoints"]),
    )


def _fields(kind: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    expected = {f.name for f in dataclasses.fields(kind)}
    if set(values) != expected:
        raise ValueError(
            f"{kind.__name__}: expected fields {sorted(expected)}, got {sorted(values)}; "
            "the host state was written by another version, start from a checkpoint of this one"
        )
    return values
