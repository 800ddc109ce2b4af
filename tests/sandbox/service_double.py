"""A small double of SandboxFusion: same fields, same execution and same reading of output."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gdpo_tune.sandbox import Call, Job

FIELDS = {
    "code", "language", "stdin", "compile_timeout", "run_timeout", "memory_limit_MB", "files",
    "fetch_files",
}  # fmt: skip


class ServiceDouble(ThreadingHTTPServer):
    """A server that runs the programs it receives; `faults` holds other answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.faults = deque()
        self.bodies = []
        self.paths = []
        self.headers = []
        self.connections = set()
        self.closed = 0
        self.released = threading.Event()

    def shutdown_request(self, request):
        super().shutdown_request(request)
        self.closed += 1

    def handle_error(self, request, client_address):
        """Ignore clients that hang up, which are part of the tests."""


@contextmanager
def serve_double(tls=None):
    """Run a double, with TLS if a context is given."""
    server = ServiceDouble()
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.url = f"https://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(self.body)
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        self.server.connections.add(self.client_address)
        if self.server.faults:
            fault = self.server.faults.popleft()
            if fault is not None:
                fault(self)
                return
        self.run_code()

    def run_code(self):
        if not self.path.partition("?")[0].endswith("/run_code"):
            self.answer({"detail": "Not Found"}, 404)
            return
        request = json.loads(self.body)
        assert set(request) == FIELDS
        assert request["language"] == "python"
        run = asyncio.run(_run_program(request))
        good = run["status"] == "Finished" and run["return_code"] == 0
        self.answer(build_response("Success" if good else "Failed", run))

    def answer(self, content, status=200, headers=(), kind="application/json"):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        """Print nothing."""


def build_response(status, run, message=""):
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


async def _run_program(request):
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(request["code"])
        file.flush()
        kilobytes = request["memory_limit_MB"] * 1024
        command = f"ulimit -S -s {kilobytes} -v {kilobytes}; exec {sys.executable} {file.name}"
        process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if request["stdin"] is not None:
            process.stdin.write(request["stdin"].encode())
        process.stdin.close()
        started = time.monotonic()
        status = "Finished"
        try:
            # Its output is not read while it runs, except for what the streams buffer.
            await asyncio.wait_for(process.wait(), request["run_timeout"])
        except TimeoutError:
            status = "TimeLimitExceeded"
            process.kill()
        run = {
            "status": status,
            "execution_time": time.monotonic() - started,
            "return_code": process.returncode if status == "Finished" else None,
            "stdout": await _read_stream(process.stdout),
            "stderr": await _read_stream(process.stderr),
        }
        await process.wait()
        process._transport.close()
        return run


async def _read_stream(stream):
    try:
        data = await asyncio.wait_for(stream.read(1 << 20), 0.2)
    except TimeoutError:
        data = b""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return f"[DecodeError] {error}"


GOOD = Job("def f(x): return x + 1", (Call("f", (1,), 2),))


def wait_until(condition):
    while not condition():
        time.sleep(0.005)


def run_one_job(sandbox, job):
    [result] = sandbox.run_batch([job])
    return result


def hang(handler):
    handler.server.released.wait()


def hang_up(handler):
    handler.close_connection = True


def run_and_hang_up(handler):
    handler.run_code()
    handler.close_connection = True


def build_answer(content, status=200, headers=(), kind="application/json"):
    return lambda handler: handler.answer(content, status, headers, kind)


def build_run_answer(stdout="", status="Finished", code=0, stderr=""):
    run = {"status": status, "execution_time": 0.1, "return_code": code}
    return build_response("Success", run | {"stdout": stdout, "stderr": stderr})
