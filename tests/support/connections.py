"""Which hosts a command and all of its processes talk to."""

from __future__ import annotations

import ipaddress
import json
import os
from pathlib import Path

HOOK = """
import json, os, sys

def record(event, args):
    if event == "socket.connect":
        target = args[1]
        target = target[0] if isinstance(target, tuple) else ""
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        target = args[0]
    else:
        return
    if target:
        target = target.decode() if isinstance(target, bytes) else str(target)
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(json.dumps([sys.argv[0] if hasattr(sys, "argv") else "", target]) + "\\n")

sys.addaudithook(record)
"""
"""`sitecustomize` of every Python process of a sweep: Ray's, the trials' and the sandbox's.

Audit events of docs.python.org/3/library/audit_events.html; Unix sockets have no host.
"""


def record_connections(directory: Path) -> dict[str, str]:
    """Write the hook; return an environment without switches of our own in which it is loaded."""
    (directory / "sitecustomize.py").write_text(HOOK)
    own = ("RAY_", "HF_", "MLFLOW_", "DO_NOT_TRACK", "DISABLE_TELEMETRY")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return environment | {"CONNECTIONS": str(directory / "connections"), "PYTHONPATH": path}


def list_foreign_hosts(directory: Path) -> list[list[str]]:
    """List program and host of each connection that left this machine."""
    made = [json.loads(line) for line in (directory / "connections").read_text().splitlines()]
    assert made, "Ray's own processes talk through the loopback interface"
    return [each for each in made if not is_here(each[1])]


def is_here(target: str) -> bool:
    try:
        return ipaddress.ip_address(target).is_loopback
    except ValueError:
        return target == "localhost"
