"""Who may talk to the studio: a page of its own, in a browser on this machine, that knows the token.

A page of another site can make a browser send requests here; DNS rebinding can make them look like our own. So every
request needs a Host that is this server's own name, an Origin (where there is one) that is too, and the token, which no
other site can know. Bodies are short.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LONGEST_BODY = 64 << 10
HEADER = "x-studio-token"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gate:
    """ASGI middleware: what is not ours is answered with 403 and reaches nothing."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self.app, self.token, self.hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        reason = self.refusal(scope) if scope["type"] == "http" else "Only HTTP is served here."
        if reason:
            await _answer(send, scope, 403, reason)
            return
        await self.app(scope, _limited(receive), _guarded(send))

    def refusal(self, scope: Scope) -> str | None:
        """Why a request is not let in."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host", "") not in self.hosts:
            return "This is not the address that the studio was started with."
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
            return "A page of another site asked for this."
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "A page of another site asked for this."
        if int(headers.get("content-length") or 0) > LONGEST_BODY:
            return "That is too long."
        if scope["path"].startswith("/static/"):  # scripts and styles: the same for everybody
            return None
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        given = headers.get(HEADER) or (query.get("token") or [""])[0]
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return "The token is missing or wrong. Open the address that the studio printed."
        return None


def _limited(receive: Receive) -> Receive:
    """A body that claims to be short and is not is cut off."""
    seen = 0

    async def limited() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > LONGEST_BODY:
            return {"type": "http.disconnect"}
        return message

    return limited


def _guarded(send: Send) -> Send:
    async def guarded(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
        await send(message)

    return guarded


async def _answer(send: Callable[[Any], Awaitable[None]], scope: Scope, status: int, text: str) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
