"""One control request: a body of any content type, or none, on GET too; unknown keys are named in the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from rollspan.errors import RollspanError, wrong_value
from rollspan.frontend.answers import JsonAnswer, read_body
from rollspan.frontend.fan_out import Outcome, agreed, call_all, successes
from rollspan.frontend.state import FrontendState
from rollspan.frontend.strict_json import parse_object

BLANK = b" \t\n\f\r"
"""A body of these alone is none."""
BOOLEAN_WORDS = {"true": True, "1": True, "false": False, "0": False}


class Control:
    """A control request, while there is an engine for it.

    Attributes:
        state: what the routes share.
        query: parameters of the query; where one occurs twice, the last one counts.
    """

    def __init__(self, state: FrontendState, query: QueryParams, fields: dict[str, Any]) -> None:
        self.state = state
        self.query = query
        self._fields = fields

    @classmethod
    async def read(cls, state: FrontendState, request: Request) -> Control:
        """Reads the request; refuses before its body is read while there is no engine.

        Raises:
            RollspanError: no live engine, a body over the limit, or one that is no JSON object.
        """
        state.check_live()
        body = await read_body(request, state.options.max_body_bytes)
        return cls(state, request.query_params, parse_object(body) if body.strip(BLANK) else {})

    def field(self, name: str) -> Any:
        """A field of the body; an explicit null is as good as none."""
        return self._fields.get(name)

    def given(self, name: str) -> Any:
        """A parameter of the query, which wins, or a field of the body."""
        return self.query.get(name, self._fields.get(name))

    def required(self, name: str) -> Any:
        """A field of the body that must be there.

        Raises:
            RollspanError: it is not.
        """
        value = self._fields.get(name)
        if value is None:
            raise RollspanError(f"{name} is required", reason="invalid_request", param=name)
        return value

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        """A flag of the query, which wins, or of the body.

        Raises:
            RollspanError: it is neither true nor false.
        """
        value = self.query.get(name)
        if value is not None:
            known = BOOLEAN_WORDS.get(value.lower())
            if known is None:
                raise wrong_value(name, "true or false", value)
            return known
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_value(name, "true or false", value)
        return value

    async def call(self, method: str, *args: Any) -> list[Outcome]:
        """Calls all engines, and waits as long as it takes.

        Raises:
            RollspanError: what an engine says against it, in whatever number of them.
        """
        outcomes = await call_all(self.state.engines.callable(), method, *args)
        successes(outcomes)
        return outcomes

    async def ask(self, method: str, *args: Any) -> Any:
        """Asks the engines that take requests something that they must agree on.

        Raises:
            RollspanError: what an engine says against it; ``partial_failure`` when they differ.
        """
        engines = self.state.engines
        return agreed(await call_all(engines.serving or engines.callable(), method, *args))

    def answer(
        self, value: dict[str, Any], known: Collection[str] = (), outcomes: Sequence[Outcome] | None = None
    ) -> Response:
        """Answers with ``value``, and names the fields of the body that are not among ``known``.

        From a set of engines it tells the ``outcomes`` as well.
        """
        ignored = tuple(sorted(name for name in self._fields if name not in known))
        self.state.log_ignored(ignored)
        if outcomes is not None and len(self.state.engines) > 1:
            value = {**value, "engines": [outcome.to_json() for outcome in outcomes]}
        return JsonAnswer(value, ignored=ignored)


Handler = Callable[[Control], Awaitable[Response]]
"""A control route."""


def control_route(state: FrontendState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """``handler`` as Starlette calls it."""

    async def endpoint(request: Request) -> Response:
        return await handler(await Control.read(state, request))

    return endpoint
