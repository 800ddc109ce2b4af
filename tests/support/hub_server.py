"""A server on this machine that speaks the part of the Hub's API that `publish` uses.

It keeps repositories in memory. After `fail_after` requests that match `fail_at`, it answers no
more of them, as if it had died.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from ruamel.yaml import YAML

from tests.support.clock import replace_pauses

TOKEN = "hf_" + "a" * 34
USER = {"name": "me", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}
LFS_SUFFIXES = (".safetensors", ".png")
NOW = "2026-01-01T00:00:00.000Z"


@dataclass
class StoredRepository:
    """Files of a repository by path, and its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commits: list[list[str]] = field(default_factory=list)
    """Paths that each commit changed."""

    @property
    def sha(self) -> str:
        content = json.dumps([len(self.commits), sorted(self.files)])
        return hashlib.sha1(content.encode()).hexdigest()


class HubServer(ThreadingHTTPServer):
    """The server's state; `repositories` are by `model:USER/NAME`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.user = USER
        self.repositories: dict[str, StoredRepository] = {}
        self.objects: dict[str, bytes] = {}
        """Contents of large files by their SHA-256."""
        self.collections: dict[str, dict] = {}
        self.uploads: list[str] = []
        """Objects that were sent, in order."""
        self.requests: list[str] = []
        self.fail_at: str = ""
        """Pattern of requests that get no answer, as if the server had died."""
        self.fail_after = 0
        """Requests of that pattern that are answered before."""

    def add(self, repository: str, files: dict[str, bytes], *, private: bool = False) -> None:
        """Add a repository, such as `model:me/other`."""
        self.repositories[repository] = StoredRepository(private, {".gitattributes": b""} | files)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


def get_oid(path: str, content: bytes) -> str:
    """Return the digest by which the Hub knows a file."""
    return hashlib.sha256(content).hexdigest() if is_large(path) else git_oid(content)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: HubServer
    # With connections that stay open, a server that was shut down would still answer.
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def handle_request(self) -> None:
        size = self.headers.get("Content-Length")
        self.body = self.rfile.read(int(size)) if size else self.read_chunks()
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.server.requests.append(line)
        if self.server.fail_at and re.search(self.server.fail_at, line):
            self.server.fail_after -= 1
            if self.server.fail_after < 0:
                return
        for pattern, function in ROUTES:
            if match := re.fullmatch(pattern, line):
                function(self, *match.groups())
                return
        self.answer(404, {"error": f"no route for {line}"}, code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def read_chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        content = b""
        while length := int(self.rfile.readline(), 16):
            content += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, status: int, content: object = None, code: str = "", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if code:
            headers["X-Error-Code"] = code
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def is_logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def find(self, kind: str, name: str) -> StoredRepository | None:
        repository = self.server.repositories.get(f"{kind.rstrip('s')}:{name}")
        if repository is None or (repository.private and not self.is_logged_in):
            self.answer(404, {"error": "Repository not found"}, code="RepoNotFound")
            return None
        return repository

    def whoami(self) -> None:
        if self.is_logged_in:
            self.answer(200, self.server.user)
        else:
            self.answer(401, {"error": "Invalid username or password."})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization'] or self.server.user['name']}/{asked['name']}"
        key = f"{asked.get('type', 'model')}:{name}"
        if not self.is_logged_in:
            self.answer(401, {"error": "Unauthorized"})
        elif key in self.server.repositories:
            self.answer(409, {"error": "You already created this repo"})
        else:
            self.server.repositories[key] = StoredRepository(asked.get("visibility") == "private")
            prefix = "datasets/" if asked.get("type") == "dataset" else ""
            self.answer(200, {"url": f"{self.server.url}/{prefix}{name}", "name": name})

    def info(self, kind: str, name: str) -> None:
        if repository := self.find(kind, name):
            files = [{"rfilename": path} for path in sorted(repository.files)]
            about = {"id": name, "_id": "1", "sha": repository.sha, "private": repository.private}
            card = repository.files.get("README.md", b"").decode()
            if match := re.match(r"---\n(.*?)\n?---\n", card, re.DOTALL):
                about["cardData"] = YAML(typ="safe").load(match[1])
            self.answer(200, about | {"siblings": files, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, kind: str, name: str) -> None:
        if repository := self.find(kind, name):
            rows = []
            for path, content in sorted(repository.files.items()):
                row = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
                if is_large(path):
                    sha = hashlib.sha256(content).hexdigest()
                    row["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 130}
                rows.append(row)
            self.answer(200, rows)

    def resolve(self, prefix: str, name: str, path: str) -> None:
        repository = self.find(prefix.rstrip("/") or "model", name)
        if repository is None:
            return
        content = repository.files.get(path)
        if content is None:
            self.answer(404, {"error": "Entry not found"}, code="EntryNotFound")
            return
        etag = f'"{get_oid(path, content)}"'
        self.answer(200, content, ETag=etag, X_Repo_Commit=repository.sha)

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        is_valid = content.startswith("---\n") and "license: no-such-licence" not in content
        errors = [] if is_valid else [{"message": '"license" must be one of the licences'}]
        self.answer(200 if is_valid else 400, {"errors": errors, "warnings": []})

    def preupload(self, kind: str, name: str) -> None:
        if repository := self.find(kind, name):
            rows = []
            for file in json.loads(self.body)["files"]:
                path, held = file["path"], repository.files.get(file["path"])
                row = {"path": path, "shouldIgnore": False}
                row["uploadMode"] = "lfs" if is_large(path) else "regular"
                if held is not None:
                    row["oid"] = get_oid(path, held)
                rows.append(row)
            self.answer(200, {"files": rows})

    def batch(self, *_: str) -> None:
        rows = []
        for asked in json.loads(self.body)["objects"]:
            href = f"{self.server.url}/objects/{asked['oid']}"
            known = asked["oid"] in self.server.objects
            rows.append(asked | ({} if known else {"actions": {"upload": {"href": href}}}))
        self.answer(200, {"transfer": "basic", "objects": rows})

    def put_object(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.objects[oid] = self.body
        self.server.uploads.append(oid)
        self.answer(200, {})

    def commit(self, kind: str, name: str) -> None:
        repository = self.find(kind, name)
        if repository is None:
            return
        changed = []
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del repository.files[value["path"]]
            if "path" in value:
                changed.append(value["path"])
        repository.commits.append(changed)
        url = f"{self.server.url}/{name}/commit/{repository.sha}"
        self.answer(200, {"commitUrl": url, "commitOid": repository.sha})

    def create_collection(self) -> None:
        asked = json.loads(self.body)
        slug = f"{asked['namespace']}/{asked['title'].lower().replace(' ', '-')}-1"
        if slug in self.server.collections:
            self.answer(409, {"slug": slug})
            return
        rest = {"lastUpdated": NOW, "position": 0, "theme": "blue", "upvotes": 0, "items": []}
        private = asked.get("private", False)
        about = {"slug": slug, "title": asked["title"], "owner": {"name": asked["namespace"]}}
        self.server.collections[slug] = {**about, **rest, "private": private}
        self.answer(200, self.server.collections[slug])

    def get_collection(self, slug: str) -> None:
        self.answer(200, self.server.collections[slug])

    def add_item(self, slug: str) -> None:
        item, items = json.loads(self.body)["item"], self.server.collections[slug]["items"]
        if any((i["id"], i["type"]) == (item["id"], item["type"]) for i in items):
            self.answer(409, {"error": "already there"})
            return
        items.append(item | {"_id": f"{len(items)}", "position": len(items)})
        self.answer(200, self.server.collections[slug])

    def delete_item(self, slug: str, number: str) -> None:
        items = self.server.collections[slug]["items"]
        items[:] = [item for item in items if item["_id"] != number]
        self.answer(200, {})


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (r"GET /api/whoami-v2", Handler.whoami),
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate),
    (rf"GET /api/(models|datasets)/{NAME}(?:/revision/[^/]+)?", Handler.info),
    (rf"GET /api/(models|datasets)/{NAME}/tree/[^/]+", Handler.tree),
    (rf"POST /api/(models|datasets)/{NAME}/preupload/main", Handler.preupload),
    (rf"POST /api/(models|datasets)/{NAME}/commit/main", Handler.commit),
    (rf"POST /(datasets/)?{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /objects/(\w+)", Handler.put_object),
    (rf"(?:GET|HEAD) /(datasets/|){NAME}/resolve/[^/]+/(.+)", Handler.resolve),
    (r"POST /api/collections", Handler.create_collection),
    (r"GET /api/collections/([^/]+/[^/]+)", Handler.get_collection),
    (r"POST /api/collections/([^/]+/[^/]+)/items?", Handler.add_item),
    (r"DELETE /api/collections/([^/]+/[^/]+)/items/(\w+)", Handler.delete_item),
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[HubServer]:
    """Start a Hub on which this process is logged in as `me`, with caches of their own."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        replace_pauses(monkeypatch, lambda _: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("GDPO_TUNE_CACHE", str(tmp_path / "cache"))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
