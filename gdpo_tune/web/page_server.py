"""The server of the live page: its addresses, and the socket that it listens on."""

from __future__ import annotations

import errno
import hashlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from plotly.offline import get_plotlyjs

from gdpo_tune.core.errors import GdpoTuneError, UsageError
from gdpo_tune.ledger.requests import find_user
from gdpo_tune.web.guard import HEADERS, HOST_NAME, Guard
from gdpo_tune.web.page_content import View

DEFAULT_PORT = 8770
MAX_PORTS = 20
"""Ports that are tried from the default one on."""
MAX_BYTES = 64 * 1024
"""Bytes of a request's body, at most."""
FILES = {
    "page.js": ("gdpo_tune.web", "page/page.js"),
    "figures.js": ("gdpo_tune.web", "page/figures.js"),
    "dialogs.js": ("gdpo_tune.web", "page/dialogs.js"),
    "page.css": ("gdpo_tune.web", "page/page.css"),
    "drawing.js": ("gdpo_tune.figures", "assets/drawing.js"),
    "report.css": ("gdpo_tune.figures", "assets/report.css"),
}
"""Name in an address -> package and path of a file."""
KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


def build_app(view: View, guard: Guard, root_path: str = "") -> FastAPI:
    """Return the application: the page, its files, the state and requests to the sweep.

    A proxy may pass `root_path` on, or cut it off: all addresses in the page are relative.
    """
    app = FastAPI(openapi_url=None)  # nothing but the page is served
    assets = {name: _read_file(*place) for name, place in FILES.items()}
    assets["plotly.js"] = get_plotlyjs().encode()
    figures = {f"figure/{name}": partial(view.get_figure, name) for name in ("front", "running")}
    contents = {"state": view.get_state, "space": view.get_space, **figures}
    lock = threading.Lock()  # a view belongs to one thread at a time

    @app.middleware("http")
    async def check(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:  # pyright: ignore[reportUnusedFunction]
        if request.scope["path"].startswith(f"{root_path}/"):
            request.scope["path"] = request.scope["path"][len(root_path) :]
        response = _refuse(request, guard) or await answer(request)
        response.headers.update(HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    @app.get("/")
    def show_page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        response = Response(_read_file("gdpo_tune.web", "page/index.html"), media_type="text/html")
        # Without a path it is for what is below this page (RFC 6265, 5.1.4), behind any proxy.
        is_secure = request.headers.get("x-forwarded-proto") == "https"
        flags: Any = {"httponly": True, "samesite": "strict", "path": None, "secure": is_secure}
        response.set_cookie(guard.cookie, guard.token, **flags)
        return response

    @app.get("/files/{name}")
    def send_file(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        if name not in assets:
            return Response(status_code=404)
        return _answer(request, assets[name], KINDS[name.rpartition(".")[2]])

    @app.get("/api/{name:path}")
    def send_content(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        with lock:
            content = contents[name]() if name in contents else None
        if content is None:
            return Response(status_code=404)
        return _answer(request, content, "application/json")

    @app.post("/api/requests")
    async def take_request(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        try:
            action, arguments = await _read_request(request)
            author = f"{find_user()} (page)"
            # in a thread, because it reads the ledger, and other pages ask meanwhile
            made = await run_in_threadpool(view.request, action, arguments, author)
        except (GdpoTuneError, OSError) as error:
            return JSONResponse({"problem": str(error)}, 400)
        return JSONResponse({"id": made.id}, 202)

    return app


def open_socket(host: str, port: int | None) -> tuple[socket.socket, str]:
    """Return a socket that listens, and a note for a person if it is not on the default port.

    A UsageError says that the address is not one of this machine, or that the port is taken.
    """
    ports = range(DEFAULT_PORT, DEFAULT_PORT + MAX_PORTS) if port is None else (port,)
    for candidate in ports:
        try:
            listener = _listen(host, candidate)
        except PermissionError as error:
            fix = "choose one from 1024 on"
            raise UsageError(f"--port {candidate}: not allowed to listen there; {fix}") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(
                f"--host {host}: this machine cannot listen there ({error.strerror or error}); "
                "give one of its own addresses, or 0.0.0.0 for all of them"
            ) from error
        taken = candidate != DEFAULT_PORT and port is None
        return listener, f"port {DEFAULT_PORT} is taken, so this is {candidate}" if taken else ""
    if port is None:
        last = DEFAULT_PORT + MAX_PORTS - 1
        raise UsageError(f"ports {DEFAULT_PORT} to {last} are taken; choose another with --port")
    raise UsageError(f"--port {port} is taken; choose another, or leave --port out")


def build_server(app: FastAPI) -> uvicorn.Server:
    """Return a server, whose `run(sockets=[...])` serves until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        app,
        access_log=False,
        lifespan="off",
        log_level="error",
        proxy_headers=False,  # else a client could evade the rate limit by a made-up address
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    return uvicorn.Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _refuse(request: Request, guard: Guard) -> Response | None:
    host = request.headers.get("host", "")
    if not guard.is_known_host(host):
        text = "this name is not one of this machine; open the printed address"
        return _say(403, f"{text}{_suggest_proxy(host)}")
    is_page = request.scope["path"] == "/"
    query = request.query_params.get("token") if is_page else None
    if not guard.has_token(query, request.cookies):
        address = request.client.host if request.client else "unknown"
        status = guard.note_wrong_token(address)
        if status == 429:
            return _say(status, "too many requests without the token; wait a minute")
        text = "no valid token; open the address that the command watch prints"
        way = "" if is_page else ", or give watch the --root-path under which a proxy serves it"
        return _say(status, f"{text}{way}")
    if request.method not in ("GET", "HEAD") and not guard.may_change(request.headers):
        origin = request.headers.get("origin", "").partition("://")[2]
        return _say(403, f"a change is accepted from this page alone{_suggest_proxy(origin)}")
    return None


def _suggest_proxy(host: str) -> str:
    way = f", or if a proxy serves it as {host}, give watch --allow-host {host}"
    return way if HOST_NAME.fullmatch(host) else ""


def _say(status: int, text: str) -> Response:
    headers = {"Retry-After": "60"} if status == 429 else {}
    return Response(text + "\n", status, headers, media_type="text/plain")


def _answer(request: Request, content: bytes, kind: str) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    # A proxy that compresses marks the version as weak. Source: RFC 9110, 13.1.2.
    if request.headers.get("if-none-match", "").removeprefix("W/") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)


async def _read_request(request: Request) -> tuple[str, dict[str, Any]]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise UsageError(f"a request has at most {MAX_BYTES:,} bytes")
    try:
        content = json.loads(body)
        action, arguments = content["action"], content["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError("a request is JSON with action and arguments") from error
    if not isinstance(action, str) or not isinstance(arguments, dict):
        raise UsageError("the action of a request is a word, and its arguments a mapping")
    return action, arguments


def _read_file(package: str, path: str) -> bytes:
    return files(package).joinpath(*path.split("/")).read_bytes()
