"""The studio's web server: a page, a handful of requests, and one stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from mindspeed_dryrun.devices import hardware
from mindspeed_dryrun.errors import DryRunError, UsageError
from mindspeed_dryrun.language import speaking, t
from mindspeed_dryrun.megatron.flags import FLAGS, Handling
from mindspeed_dryrun.record.model import plain
from mindspeed_dryrun.studio import export, results
from mindspeed_dryrun.studio.choices import Choice, Subject, controls, read_choice
from mindspeed_dryrun.studio.gate import Gate
from mindspeed_dryrun.studio.session import DEFAULT_DEVICE, Busy, Session, Try
from mindspeed_dryrun.studio.words import LANGUAGES

_PAGE = Path(__file__).parent / "page"
_STATIC = {"studio.js": "text/javascript", "studio.css": "text/css"}
_MOST_LISTENERS = 16


class Studio:
    """The requests of the page."""

    def __init__(self, subject: Subject, folder: Path, trainer: str = "auto", jobs: int | None = None) -> None:
        self.subject = subject
        self.listeners: set[asyncio.Queue[tuple[str, dict[str, Any]]]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.session = Session(subject, folder, self._tell, trainer, jobs)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        """From the thread that runs: to every page that listens."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self.loop.call_soon_threadsafe(self._pass_on, kind, data)

    def _pass_on(self, kind: str, data: dict[str, Any]) -> None:
        for listener in self.listeners:
            if listener.qsize() < 1000:
                listener.put_nowait((kind, data))

    async def page(self, request: Request) -> Response:
        language = _language(request)
        names = sorted(flag.name for flag in FLAGS.values() if flag.handling is Handling.MODELLED)
        text = results.render(
            "studio.html",
            language,
            script=self.subject.script.name,
            devices=[(name, hardware.read_hardware(name).name) for name in hardware.names()],
            device=DEFAULT_DEVICE,
            flags=names,
            languages=LANGUAGES,
            token=request.query_params.get("token", ""),
        )
        return Response(text, media_type="text/html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC:
            return PlainTextResponse("There is no such file.", 404)
        text = results.render(name, _language(request)) if name.endswith(".css") else (_PAGE / name).read_text("utf-8")
        return Response(text, media_type=_STATIC[name])

    async def check(self, request: Request) -> Response:
        """What the page shows for a state: its controls, or why it is not possible."""
        choice = await self._choice(request)
        return JSONResponse(await run_in_threadpool(self._check, choice, _language(request)))

    def _check(self, choice: Choice, language: str) -> dict[str, Any]:
        problem = self.subject.refusal(choice)
        usable = choice if problem is None else Choice(sets=choice.sets) if not choice.flags else Choice()
        job = self.subject.job(usable)
        shown = [plain(control) for control in controls(self.subject, choice if problem is None else usable, job)]
        with speaking(language):
            for option in (option for control in shown for option in control["options"]):
                option["refused"] = t(option["refused"]) if option["refused"] else None
            problem = t(problem) if problem else None
        return {"controls": shown, "problem": problem, "world_size": job.world_size}

    async def ask(self, request: Request) -> Response:
        choice = await self._choice(request)
        one = await run_in_threadpool(self.session.ask, choice)
        return JSONResponse({"number": one.number, "state": one.state})

    async def show(self, request: Request) -> Response:
        """A try as HTML, and the state that belongs to it."""
        one = self._try(request)
        pinned = self.session.tries.get(_number(request.query_params.get("pinned")))
        html = await run_in_threadpool(results.result, one, _language(request), pinned)
        return JSONResponse(
            {
                "number": one.number,
                "state": one.state,
                "name": one.name,
                "choice": one.choice.to_json(),
                "verdict": results.verdict_key(one),
                "html": html,
            }
        )

    async def history(self, request: Request) -> Response:
        budget = self.session.budget_mb(Choice(device=self._device(request)))
        pinned = _number(request.query_params.get("pinned"))
        tries = dict(self.session.tries)
        html = await run_in_threadpool(results.history, tries, _language(request), budget, pinned)
        return JSONResponse({"html": html, "searching": self.session.searching})

    def _device(self, request: Request) -> str | None:
        name = request.query_params.get("device")
        return name if name in hardware.names() else None

    async def search(self, request: Request) -> Response:
        choice = await self._choice(request)
        await run_in_threadpool(self.session.search, choice)
        return JSONResponse({"state": "running"})

    async def stop(self, request: Request) -> Response:
        self.session.stop_search()
        return JSONResponse({"state": "stopping"})

    async def export(self, request: Request) -> Response:
        one, what = self._try(request), request.path_params["what"]
        if what == "script":
            name = self.subject.script.name
            text = await run_in_threadpool(export.as_script, self.subject, one)
            return _download(text, name)
        if what == "sweep":
            text = await run_in_threadpool(export.as_sweep, self.subject, list(self.session.tries.values()))
            return _download(text, "studio-sweep.yaml")
        page = await run_in_threadpool(export.as_report, one) if what == "report" else None
        if page is None:
            return PlainTextResponse("There is nothing to export.", 404)
        return FileResponse(page, media_type="text/html", filename="report.html")

    async def events(self, request: Request) -> Response:
        if len(self.listeners) >= _MOST_LISTENERS:
            return PlainTextResponse("Too many pages are open.", 429)
        self.loop = asyncio.get_running_loop()
        return StreamingResponse(self._stream(_language(request)), media_type="text/event-stream")

    async def _stream(self, language: str) -> AsyncIterator[str]:
        listener: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.listeners.add(listener)
        try:
            yield "event: hello\ndata: {}\n\n"
            while True:
                try:
                    kind, data = await asyncio.wait_for(listener.get(), 15)
                    yield f"event: {kind}\ndata: {json.dumps(_said(data, language))}\n\n"
                except asyncio.TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.listeners.discard(listener)

    async def _choice(self, request: Request) -> Choice:
        try:
            data = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise UsageError("The request is not JSON.") from None
        return read_choice(data, self.subject)

    def _try(self, request: Request) -> Try:
        one = self.session.tries.get(_number(request.path_params["number"]))
        if one is None:
            raise UsageError("There is no such try.")
        return one


def build(studio: Studio, token: str, hosts: frozenset[str]) -> ASGIApp:
    """The application, behind its gate."""
    routes = [
        Route("/", studio.page),
        Route("/static/{name}", studio.static),
        Route("/api/check", studio.check, methods=["POST"]),
        Route("/api/tries", studio.ask, methods=["POST"]),
        Route("/api/tries/{number:int}", studio.show),
        Route("/api/tries/{number:int}/export/{what}", studio.export),
        Route("/api/history", studio.history),
        Route("/api/search", studio.search, methods=["POST"]),
        Route("/api/stop", studio.stop, methods=["POST"]),
        Route("/api/events", studio.events),
    ]
    return Gate(Starlette(routes=routes, exception_handlers={DryRunError: _sentence}), token, hosts)


def _said(data: dict[str, Any], language: str) -> dict[str, Any]:
    """An event with its words in the reader's language."""
    with speaking(language):
        return data | {key: t(data[key]) for key in ("phase", "text") if isinstance(data.get(key), str)}


async def _sentence(request: Request, error: Exception) -> Response:
    with speaking(_language(request)):
        sentence = t(str(error))
    return JSONResponse({"error": sentence}, 429 if isinstance(error, Busy) else 422)


def _download(text: str, name: str) -> Response:
    content = text.encode("utf-8", "surrogateescape")
    safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in name)
    headers = {"Content-Disposition": f'attachment; filename="{safe}"'}
    return Response(content, media_type="text/plain; charset=utf-8", headers=headers)


def _language(request: Request) -> str:
    wanted = request.query_params.get("lang") or request.headers.get("accept-language", "")[:2]
    return wanted if wanted in LANGUAGES else "en"


def _number(text: Any) -> int:
    return int(text) if str(text).isdigit() and len(str(text)) < 9 else 0
