"""The description of the HTTP interface: OpenAPI 3.1, with schemas made from the very structs that cross it."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from weightsync.errors import ConfigurationError
from weightsync.protocol.messages import decoding
from weightsync.server.problems import Problem

T = TypeVar("T")

_NUMBER = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}


class RoundRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bring replicas to the version that the trainer's regions hold."""

    replicas: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=200)], ...], msgspec.Meta(max_length=1 << 16)] | None = None
    """Names; ``null`` for every replica that does not serve that version."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    """Seconds for the whole round, at most the coordinator's own limit."""


class Revocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Close the connection of a rank, and refuse the credential that its process has."""

    member: Annotated[str, msgspec.Meta(min_length=1, max_length=250)]
    """As in the status: ``trainer/0``, or the replica's name and the rank."""


def decode_body(body: bytes, kind: type[T], what: str) -> T:
    """Return the request in a body; an empty one is ``{}``. Raises :class:`~weightsync.errors.ConfigurationError`: not ``what``."""
    with decoding(f"not {what}", ConfigurationError):
        return msgspec.json.decode(body or b"{}", type=kind)


class Operation(NamedTuple):
    """One route, as the description needs it. ``body`` and ``answer`` are types; ``media`` is the answer's."""

    method: str
    path: str
    summary: str
    answer: Any = None
    media: str = "application/json"
    body: Any = None
    errors: tuple[int, ...] = ()
    public: bool = False
    operator: bool = False
    """Whether it needs the operator's secret."""
    query: tuple[tuple[str, Any], ...] = ()
    """Names and types of parameters after the question mark; those in the path are numbers."""
    required: tuple[str, ...] = ()
    """Which of them must be there."""


def document(operations: tuple[Operation, ...], version: str) -> dict[str, Any]:
    """The OpenAPI document of ``operations``."""
    named = [
        kind
        for operation in operations
        for kind in (operation.answer, operation.body, *(kind for _, kind in operation.query))
        if kind is not None
    ]
    _, components = msgspec.json.schema_components([Problem, *named], ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "weightsync coordinator",
            "version": version,
            "description": "Who serves which version of the trainer's weights. Agents (trainer and engine ranks) connect to the "
            "WebSocket at /v1/agents; everything else is here.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _reference(kind: object) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema


def _operation(operation: Operation) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Success."}
    if operation.answer is not None:
        good["content"] = {operation.media: {"schema": _reference(operation.answer)}}
    responses = {"200": good}
    problem = {"application/problem+json": {"schema": _reference(Problem)}}
    for status in dict.fromkeys(
        (*(() if operation.public else (401, 503)), *((403,) if operation.operator else ()), *operation.errors)
    ):
        responses[str(status)] = {"description": "See kind and message.", "content": problem}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.operator:
        described["description"] = "For holders of the operator's secret."
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body is not RoundRequest,
            "content": {"application/json": {"schema": _reference(operation.body)}},
        }
    parameters = [("path", name, _NUMBER, True) for name in re.findall(r"{([a-z]+)}", operation.path)]
    parameters += [("query", name, _reference(kind), name in operation.required) for name, kind in operation.query]
    if parameters:
        described["parameters"] = [
            {"in": where, "name": name, "required": required, "schema": schema} for where, name, schema, required in parameters
        ]
    if operation.public:
        described["security"] = []
    return described
