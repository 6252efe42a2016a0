"""Refusals of the HTTP interface, in OpenAI's error shape.

ApiError                      one HTTP status, one JSON body
├── BadRequestError       400 the request is wrong; `param` names the field
├── UnauthorizedError     401 no key, or an unknown one
├── NotFoundError         404 no such path or model
├── MethodNotAllowedError 405
├── SlowClientError       408 the body did not come in time
├── BodyTooLargeError     413
├── OverloadedError       503 too many requests, draining, or no core; carries Retry-After
├── TimeoutApiError       504 the request took longer than it may
└── CoreFailedError       500 the core failed this request
"""

from __future__ import annotations

from typing import Any

from preload.engine.errors import CoreError


class ApiError(Exception):
    """A refusal that a client sees. `headers` are added to the response."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequestError(ApiError):
    """Raised when a request cannot be served as it is; the client should correct the named field."""

    status = 400
    type = "invalid_request_error"


class UnauthorizedError(ApiError):
    """Raised when a request has no valid API key; the client should send one."""

    status = 401
    type = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class NotFoundError(ApiError):
    """Raised when a path or a model does not exist; the client should use one that does."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowedError(ApiError):
    """Raised when a path does not answer to a method; the client should use the one in `Allow`."""

    status = 405
    type = "invalid_request_error"


class SlowClientError(ApiError):
    """Raised when a body did not come in time; the client should send it faster. The connection is closed."""

    status = 408
    type = "invalid_request_error"

    def __init__(self, timeout_s: float) -> None:
        message = f"the request body did not come within {timeout_s:g} s"
        super().__init__(message, code="request_timeout", headers={"Connection": "close"})


class BodyTooLargeError(ApiError):
    """Raised when a body is over the limit; the client should send less. The connection is closed."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        message = f"the request body is larger than {limit_bytes} bytes"
        super().__init__(message, code="request_too_large", headers={"Connection": "close"})


class OverloadedError(ApiError):
    """Raised when a request cannot be taken now; the client should come back after Retry-After seconds."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, code: str, retry_after_s: int = 1) -> None:
        super().__init__(message, code=code, headers={"Retry-After": str(retry_after_s)})


class TimeoutApiError(ApiError):
    """Raised when a request took longer than it may; the client should ask for less or come back later."""

    status = 504
    type = "server_error"


class CoreFailedError(ApiError):
    """Raised when the core failed a request; the operator should read the core's last words."""


class StartError(CoreError):
    """Raised when the frontend, or a core for it, cannot start; the message says what to change."""
