"""Errors over HTTP, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.responses import JSONResponse

from ...core.sampling_params import ELSEWHERE
from ...utils.arguments import shown
from ...wire.failures import failure_of

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    501: "not_implemented_error", 503: "service_unavailable_error", 507: "insufficient_storage_error",
}  # fmt: skip
"""Status -> OpenAI's type."""


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status code.
        param: the field that was wrong.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON."""
        kind = TYPES.get(self.status, "api_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def api_error(error: BaseException, refused: bool) -> ApiError:
    """The HTTP error of an exception.

    Args:
        refused: the request was refused, and nothing ran: wrong values are the client's then.
    """
    if isinstance(error, ApiError):
        return error
    failure = failure_of(error)
    message = failure.message or failure.type
    if failure.is_a("EngineClosedError", "EngineDiedError", "EngineSleepingError"):
        return ApiError(503, message, code="engine_unavailable", headers={"Retry-After": "5"})
    if refused and failure.is_a("ValueError", "TypeError", "KeyError"):
        return ApiError(400, message, code="refused")
    if failure.is_a("NotImplementedError"):  # this engine does not serve it
        return ApiError(501, message, code="not_implemented")
    if failure.is_a("ConstraintError"):  # over HTTP, constraints are the client's
        return ApiError(400, message, code="constraint_failed")
    if failure.is_a("OSError") and not failure.is_a("TimeoutError"):
        return ApiError(507, message, code="store_failed")
    return ApiError(500, f"{failure.type}: {message}", code=failure.type)


def _weight(error: Any) -> tuple[int, bool]:
    """Sort key of validation errors: errors deep in the value are more specific than errors of other union members.
    Errors of a list itself are preferred.
    """
    return len(error["loc"]), error["type"] == "value_error" and isinstance(error.get("input"), list)


def validation_error(errors: Sequence[Any], fields: Sequence[str] = ()) -> ApiError:
    """The HTTP error of a request that does not fit the schema: the first wrong value, and its path.

    Args:
        fields: names of the request's fields, for those who misspell one.
    """
    chosen = max(errors, key=_weight, default=None)
    if chosen is None:
        return ApiError(400, "the request does not fit the schema")
    if chosen["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {chosen['ctx']['error']}", code="invalid_request")
    place = ".".join(
        str(part)[:80] for part in chosen["loc"] if part != "body" and not str(part).startswith("function-")
    )
    text = str(chosen["msg"]).removeprefix("Value error, ")
    if chosen["type"] == "extra_forbidden":
        text = f"unknown field; {_other_name(place, fields)}"
    given = chosen.get("input")
    if isinstance(given, str | int | float | bool | None) and chosen["type"] not in ("missing", "value_error"):
        text += f" (got {shown(given)[:100]})"
    return ApiError(400, f"{place}: {text}" if place else text, param=place or None, code="invalid_request")


def _other_name(name: str, fields: Sequence[str]) -> str:
    """Advice for an unknown field: the name of another library's field here, or a similar field."""
    if (name in ELSEWHERE or name == "lora") and "max_tokens" in fields:
        return ELSEWHERE.get(name, "an adapter's name is a model's: send it as model")
    near = get_close_matches(name, fields, n=1)
    return f"did you mean {near[0]}?" if near else "/docs lists the known ones"
