"""Watch a sweep in a browser while it runs, and steer it.

    python -m gdpo_tune.watch runs/code
    python -m gdpo_tune.watch search_spaces/code.yaml
    python -m gdpo_tune.watch runs/code --host 0.0.0.0 --port 9000
    python -m gdpo_tune.watch runs/code --allow-host sweeps.example --root-path /code

The page shows the front, running trials with their curves, the log and the time left. It stops
trials, adds and clones configurations, changes the number of trials, and pauses the sweep. The
second waits for a sweep that has not started. The page is on this machine alone, unless `--host`
says otherwise; its address has a token, with which everyone can steer. The third is behind a proxy.
Ctrl-C ends the server; the sweep goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from gdpo_tune import cli
from gdpo_tune.core.files import is_file, write_atomically
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.web.guard import HOST_NAME, Guard, is_loopback, list_own_names

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

TOKEN = "watch.token"
"""File in the sweep's directory, for its owner alone: an open page goes on after a new start."""


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__)
    add = parser.add_argument
    parser.file("sweep", "its directory, name under runs/, address, or file", metavar="SWEEP")
    text = "address to listen on, such as 0.0.0.0 for all (default: this machine alone)"
    add("--host", default="127.0.0.1", help=text)
    text = "port to listen on (default: 8770, or the next free one)"
    add("--port", type=cli.integer(1, 65535), help=text)
    text = "name under which a proxy serves the page, with its port if the browser shows it"
    add("--allow-host", metavar="NAME", type=_parse_host_name, action="append", help=text)
    text = "path below which a proxy serves it, such as /sweeps"
    add("--root-path", type=_parse_root_path, default="", help=text)
    parser.flag("--open", "open the page in a browser")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Serve the page that `arguments` ask for until Ctrl-C, and return the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: trials want the cores
    options = build_parser().parse_args(arguments)
    with suppress(KeyboardInterrupt):  # the usual end
        serve_page(options)
    return 0


def serve_page(options: argparse.Namespace) -> None:
    """Print the address of the page, and serve it."""
    load, target = find_spec(options.sweep)

    from gdpo_tune.tuning.plan import estimate_outlook
    from gdpo_tune.web.live_sweep import LiveSweep
    from gdpo_tune.web.page_content import View
    from gdpo_tune.web.page_server import build_app, build_server, open_socket

    spec = load()
    listener, note = open_socket(options.host, options.port)
    with closing(listener), closing(LiveSweep(load)) as sweep:
        proxied = frozenset[str](options.allow_host or ())
        guard = Guard(read_token(spec.directory), list_own_names(options.host), proxied=proxied)
        host = socket.gethostname() if options.host in ("0.0.0.0", "::", "") else options.host
        host = f"[{host}]" if ":" in host else host
        address = f"http://{host}:{listener.getsockname()[1]}/?token={guard.token}"
        if not is_loopback(options.host):
            text = "everyone who has this address can steer the sweep, and it is sent unencrypted"
            print(f"warning: {text}", file=sys.stderr)
        print(f"{note}\n" * bool(note) + f"{spec.name}: {address}", flush=True)
        if options.open:
            import webbrowser

            webbrowser.open(address)
        logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        os.nice(10)  # trials come first
        app = build_app(View(sweep, estimate_outlook, target), guard, options.root_path)
        build_server(app).run(sockets=[listener])


def _parse_root_path(text: str) -> str:
    if set(text) & set(":?#"):
        fix = "write what stands between the name of the proxy and the page: /sweeps"
        raise argparse.ArgumentTypeError(f"{text!r} is not a path; {fix}")
    return f"/{unquote(text).strip('/')}".rstrip("/")


def _parse_host_name(text: str) -> str:
    with suppress(ValueError):  # of the encoding, of the port, or of an address
        name = text.encode("idna").decode().lower()
        if HOST_NAME.fullmatch(name) and urlsplit(f"//{name}").port != 0:
            return name
    fix = "write the name alone, or with its port: sweeps.example or localhost:8443"
    raise argparse.ArgumentTypeError(f"{text!r} is not the name of a host; {fix}")


def find_spec(named: str) -> tuple[Callable[[], SweepSpec], str]:
    """Return a function that reads the spec of a sweep, and the sweep's location."""
    from gdpo_tune.results import open_sweep

    if not open_sweep.is_space(named):
        location = open_sweep.resolve_location(named)
        file, storage = open_sweep.resolve_spec_file(location, named)

        from gdpo_tune.spec import load_spec

        return lambda: load_spec(file, [storage], file.parent.name, to_run=False), location

    from gdpo_tune.spec import load_spec

    asked = load_spec(named, to_run=False)

    def load() -> SweepSpec:
        file = asked.directory / SPEC
        if not is_file(file):
            return asked
        storage = open_sweep.override_storage(asked.storage)
        return load_spec(file, [storage], asked.name, to_run=False)

    return load, asked.location


def read_token(directory: Path) -> str:
    """Return the token of a sweep's page, a new one unless its directory keeps one."""
    path = directory / TOKEN
    with suppress(OSError, ValueError):
        if path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.getuid():
            token = path.read_text(encoding="ascii").strip()
            if len(token) >= 43:  # of 32 random bytes
                return token
    token = secrets.token_urlsafe(32)
    with suppress(OSError):  # of another user, or not there yet: it holds until this server ends
        write_atomically(path, token + "\n", mode=0o600)
    return token


if __name__ == "__main__":
    cli.run_command(main)
