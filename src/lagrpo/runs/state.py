"""What state.json of a checkpoint says, and of which type: checked before anything of it is used."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

SCHEMA = "lagrpo.checkpoint/1"

Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
_EXACT = ConfigDict(strict=True, extra="forbid")
_OPEN = ConfigDict(strict=True, extra="allow")

Lengths = TypedDict("Lengths", {"metrics.jsonl": Count, "events.jsonl": Count})
"""How many bytes of these files belong to the run until the checkpoint. No other file is ever cut."""
with_config(_EXACT)(Lengths)


@with_config(_EXACT)
class Loop(TypedDict):
    """The fields of `LoopState`."""

    batch: Count
    alpha: Annotated[int, Field(ge=-1)]
    pi_ref: Count
    since_sync: Count
    spent: float
    prefetched: list[Count]
    sync: dict[str, float | None]


@with_config(_EXACT)
class Versions(TypedDict):
    """Versions of the policies whose weights the checkpoint refers to; None where it needs none."""

    policy: Count
    alpha: Count | None
    pi_ref: Count | None


@with_config(_EXACT)
class ParityMemory(TypedDict):
    """What `WeightSyncCheck.memory` gives."""

    items: list[tuple[list[Count], list[Count]]]
    before: tuple[list[float], list[list[float]]] | None
    likeliest: float


@with_config(_EXACT)
class WarningsMemory(TypedDict):
    """What `Warnings.memory` gives."""

    given: list[str]
    pushed: bool


@with_config(_OPEN)
class State(TypedDict):
    """All of it."""

    schema: str
    batch: Annotated[int, Field(ge=1)]
    files: dict[FileName, Count]
    weights: dict[Count, Count]
    model: str
    data: str
    loop: Loop
    versions: Versions
    announced: dict[Count, list[Count]]
    parity: ParityMemory | None
    warnings: WarningsMemory
    best: tuple[float, Count] | None
    lengths: Lengths
    run: NotRequired[str]
    """identity of the run; checkpoints written before there was one lack it"""
    settings: NotRequired[dict[str, Any]]
    """section.name -> value; checkpoints written before it was kept lack it"""


_SCHEMA_OF = TypeAdapter(TypedDict("_SchemaOf", {"schema": str}))
_STATE = TypeAdapter(State)


def parse_state(text: bytes) -> State:
    """The state in the bytes of a state.json. Raises ValueError, in one line, for another schema, a key that is missing
    or of another type, and values that contradict each other."""
    try:
        if (schema := _SCHEMA_OF.validate_json(text)["schema"]) != SCHEMA:
            raise ValueError(f"it is written in {schema:.80}; this version of lagrpo reads {SCHEMA}")
        state = _STATE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
    if state["loop"]["batch"] != state["batch"]:
        raise ValueError(f"it is of batch {state['batch']}, and its loop of batch {state['loop']['batch']}")
    if not any(name.startswith("learner") for name in state["files"]):
        raise ValueError("it has no file of the learner")
    versions = state["versions"]
    kept = {0, versions["policy"], *state["weights"]}
    for version in (versions["alpha"], versions["pi_ref"]):
        if version is not None and version not in kept:
            raise ValueError(f"it has no weights of version {version}")
    return state
