"""A real S3 server on this machine, which can be stopped and restarted with its content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import FakeBucket, s3_backends
from moto.server import ThreadedMotoServer

from tests.support.free_ports import find_free_port

BUCKET = "sweeps"


class S3Server:
    """Moto's server; its buckets survive a stop because they are in this process."""

    def __init__(self) -> None:
        self.port = find_free_port()
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process reaches the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @contextmanager
    def keep_stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
            self.start()

    def list_names(self) -> list[str]:
        """List the names of all objects in the bucket, without a request."""
        return sorted(self._bucket().keys.keys())

    def read(self, name: str) -> bytes:
        """Read an object without a request; empty if the object does not exist."""
        stored = self._bucket().keys.get(name)
        return stored.value if stored is not None else b""

    def _bucket(self) -> FakeBucket:
        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]


@contextmanager
def start_s3_server() -> Iterator[S3Server]:
    """Start a server with an empty bucket; the environment of this process points to it."""
    server = S3Server()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    server.start()
    try:
        fsspec.get_filesystem_class(
            "s3"
        ).clear_instance_cache()  # the cached instance has the port of the last server
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
        yield server
    finally:
        server.stop()
        s3_backends.reset()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
