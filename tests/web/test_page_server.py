"""The server of the live page: who gets an answer, and which."""

import getpass
import itertools
import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event
from unittest.mock import Mock

import httpx
import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.ledger.requests import list_pending
from gdpo_tune.web.guard import MAX_ADDRESSES, MAX_WRONG, WINDOW, is_loopback, list_own_names
from gdpo_tune.web.page_content import View
from gdpo_tune.web.page_server import DEFAULT_PORT, FILES, MAX_BYTES, open_socket
from tests.support.tuning import load_code_spec
from tests.support.web import TOKEN, build_guard, build_view, report_step, serve_page
from tests.support.web import start_sweep as start

OWN = {"X-Gdpo-Tune": "page"}
STOP = {"action": "stop", "arguments": {"trial": 2}}
PATHS = ["/", "/api/state", "/api/figure/front", "/api/space", "/files/page.js", "/nowhere"]


@pytest.fixture
def ledger(tmp_path):
    with start(load_code_spec(tmp_path)) as ledger:
        yield ledger


@contextmanager
def serve(spec, guard, root_path=""):
    """Serve the page of a sweep; yield a client that waits as long as a busy machine takes."""
    view, sweep = build_view(spec)
    with closing(sweep), serve_page(view, guard, root_path) as client:
        client.timeout = 60
        yield client


@pytest.fixture
def stranger(ledger):
    with serve(ledger.spec, build_guard()) as client:
        yield client


@pytest.fixture
def client(stranger):
    assert stranger.get(f"/?token={TOKEN}").status_code == 200
    return stranger


def list_waiting(ledger):
    return [file.request for file in list_pending(ledger.directory)]


def test_without_the_token_nothing_is_answered(ledger):
    clock = itertools.count(step=WINDOW)  # so that no address has to wait
    with serve(ledger.spec, build_guard(clock=lambda: next(clock))) as stranger:
        queries = ("", "?token=wrong", f"?token={TOKEN[:-1]}")
        for path in (f"{path}{query}" for path in PATHS for query in queries):
            answer = stranger.get(path)
            assert answer.status_code == 403, path
            assert TOKEN not in answer.text
        assert stranger.post("/api/requests", headers=OWN, json={}).status_code == 403
        # the token of an address counts for the page alone
        assert stranger.get(f"/api/state?token={TOKEN}").status_code == 403


def test_the_page_sets_a_cookie_that_scripts_cannot_read(stranger):
    answer = stranger.get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in answer.text
    assert [stranger.get(path).status_code for path in PATHS] == [200] * 5 + [404]


def test_after_ten_wrong_tokens_comes_429_but_never_for_the_owner(client):
    address = str(client.base_url)
    statuses = [httpx.get(f"{address}?token=x").status_code for _ in range(10)]
    # no header makes a guess come from another address
    others = [{"X-Forwarded-For": f"10.0.0.{number}"} for number in range(2)]
    statuses += [httpx.get(address, headers=headers).status_code for headers in others]
    assert statuses == [403] * 10 + [429] * 2
    refused = httpx.get(address)
    assert refused.headers["retry-after"] == "60"
    assert refused.text == "too many requests without the token; wait a minute\n"
    assert client.get("/api/state").status_code == 200


def test_a_foreign_name_of_the_machine_is_refused(client):
    for host, status in (("evil.example:8770", 403), ("localhost:9999", 200)):
        assert client.get("/api/state", headers={"Host": host}).status_code == status


def test_a_proxy_that_is_not_named_gets_one_line_with_the_way_out(client, ledger):
    answer = client.get("/", headers={"Host": "sweeps.example:8443"})
    assert (answer.status_code, answer.text.count("\n")) == (403, 1)
    assert "give watch --allow-host sweeps.example:8443" in answer.text
    headers = {**OWN, "Origin": "https://sweeps.example"}
    answer = client.post("/api/requests", headers=headers, json={})
    assert "give watch --allow-host sweeps.example\n" in answer.text
    odd = client.get("/", headers={"Host": "<b>sweeps.example"})
    assert "<b>" not in odd.text
    below = httpx.get(f"{str(client.base_url).rstrip('/')}/sweeps/?token={TOKEN}")
    assert "give watch the --root-path" in below.text
    assert list_waiting(ledger) == []


@pytest.mark.parametrize("path", ["/", "/user/an@n/proxy/"])
def test_a_proxy_may_pass_its_path_on_or_cut_it_off(ledger, path):
    """The cookie is for what the browser sees below the page, whatever the proxy cuts off.

    Source: RFC 6265, 5.1.4 (default path); ngx_http_proxy_module, proxy_pass with and without URI.
    """
    guard = build_guard(proxied=["sweeps.example"])
    headers = {"Host": "sweeps.example", "X-Forwarded-Proto": "https"}
    with serve(ledger.spec, guard, "/user/an@n/proxy") as client:
        answer = client.get(f"{path}?token={TOKEN}", headers=headers)
        assert answer.status_code == 200
        cookie = answer.headers["set-cookie"]
        assert "Path" not in cookie
        assert "Secure" in cookie
        headers["Cookie"] = cookie.partition(";")[0]
        for name in re.findall(r'(?:src|href)="([^":]+)"', answer.text):
            assert not name.startswith("/")
            assert client.get(path + name, headers=headers).status_code == 200
        assert client.get(f"{path}api/figure/front", headers=headers).status_code == 200
        headers |= {**OWN, "Origin": "https://sweeps.example"}
        answer = client.post(f"{path}api/requests", headers=headers, json=STOP)
    assert answer.status_code == 202
    assert len(list_waiting(ledger)) == 1


def test_every_answer_has_the_strict_headers(client):
    for answer in (client.get("/"), client.get("/nowhere"), httpx.get(str(client.base_url))):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_and_no_foreign_address(client):
    page = client.get("/").text
    assert "<script>" not in page
    assert " onclick" not in page
    assert "//" not in page.replace("<!doctype html>", "")
    for name in FILES:
        assert client.get(f"/files/{name}").status_code == 200
        assert f'"files/{name}"' in page
    assert b"Plotly" in client.get("/files/plotly.js").content
    assert client.get("/files/..%2Fserver.py").status_code == 404


def test_an_unchanged_state_is_not_sent_again(client, ledger):
    first = client.get("/api/state")
    tag = {"If-None-Match": first.headers["etag"]}
    weak = {"If-None-Match": f"W/{first.headers['etag']}"}  # after nginx has compressed it
    for headers in (tag, weak):
        again = client.get("/api/state", headers=headers)
        assert (again.status_code, again.content) == (304, b"")
    report_step(ledger, 2, 2)
    news = client.get("/api/state", headers=tag)
    assert news.status_code == 200
    assert news.headers["etag"] != first.headers["etag"]


def test_a_request_is_left_for_the_driver_with_its_author_or_refused_in_a_line(client, ledger):
    content = {"action": "stop", "arguments": {"trial": 99}}
    answer = client.post("/api/requests", headers=OWN, json=content)
    assert answer.status_code == 400
    assert answer.json() == {"problem": "there is no trial 99: the last one is 2"}
    answer = client.post("/api/requests", headers=OWN, json=STOP)
    assert answer.status_code == 202
    (request,) = list_waiting(ledger)
    assert answer.json() == {"id": request.id}
    assert (request.action, request.arguments) == ("stop", {"trial": 2})
    assert request.author.endswith(" (page)")


def test_a_request_from_another_page_is_refused(client, ledger):
    origins = ("http://127.0.0.1:8888", "https://evil.example")
    own = {"Origin": str(client.base_url).rstrip("/")}  # without the header
    for headers in ({}, own, *({**OWN, "Origin": origin} for origin in origins)):
        answer = client.post("/api/requests", headers=headers, json=STOP)
        assert answer.status_code == 403, headers
    assert list_waiting(ledger) == []


def test_a_user_without_a_name_may_ask(client, ledger, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=KeyError("uid not found")))
    assert client.post("/api/requests", headers=OWN, json=STOP).status_code == 202
    (request,) = list_waiting(ledger)
    assert request.author == f"user {os.getuid()} (page)"


def test_a_slow_request_keeps_no_page_waiting(client, monkeypatch):
    is_asked, may_end = Event(), Event()

    def request(*_):
        is_asked.set()
        assert may_end.wait(60)
        raise OSError("No space left on device")

    monkeypatch.setattr(View, "request", request)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.post, "/api/requests", headers=OWN, json=STOP)
        try:
            assert is_asked.wait(60)
            assert client.get("/api/state").status_code == 200
        finally:
            may_end.set()
    assert answer.result().json() == {"problem": "No space left on device"}


NO_JSON = "a request is JSON with action and arguments"
NO_WORD = "the action of a request is a word, and its arguments a mapping"


def test_malformed_requests_are_refused(client, ledger):
    broken = (b"", b"{", b"[]", b"3", b"[" * 5000, b"\xff\xfe", b'{"action": "stop"}')
    problems = dict.fromkeys(broken, NO_JSON)
    problems |= {b'{"action": 3, "arguments": {}}': NO_WORD}
    problems |= {b'{"action": "stop", "arguments": []}': NO_WORD}
    large = b'{"action": "' + b"x" * MAX_BYTES + b'", "arguments": {}}'
    problems[large] = f"a request has at most {MAX_BYTES:,} bytes"
    for body, problem in problems.items():
        answer = client.post("/api/requests", headers=OWN, content=body)
        assert (answer.status_code, answer.json()) == (400, {"problem": problem}), body[:50]
    assert list_waiting(ledger) == []


def test_the_space_is_served_as_fields_and_other_methods_and_schemas_are_not(client, ledger):
    fields = json.loads(client.get("/api/space").content)
    assert [field["name"] for field in fields] == list(ledger.spec.space.dimensions)
    assert client.put("/api/state", headers=OWN).status_code == 405
    assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


# Ports


def test_the_default_port_gives_way_to_the_next_free_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    with closing(open_socket("127.0.0.1", free)[0]) as listener:
        assert listener.getsockname() == ("127.0.0.1", free)
        with pytest.raises(UsageError, match=f"--port {free} is taken"):
            open_socket("127.0.0.1", free)
    first, _ = open_socket("127.0.0.1", None)
    second, note = open_socket("127.0.0.1", None)
    with closing(first), closing(second):
        assert second.getsockname()[1] > first.getsockname()[1] >= DEFAULT_PORT
        assert note == f"port {DEFAULT_PORT} is taken, so this is {second.getsockname()[1]}"


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1: this machine cannot listen"):
        open_socket("192.0.2.1", None)
    with pytest.raises(UsageError, match="--host no such host"):
        open_socket("no such host", None)


# Who may open it: the token, the limit on wrong ones, and names of this machine


def test_the_token_counts_in_the_address_and_in_the_cookie_of_this_server():
    guard = build_guard()
    assert guard.has_token(TOKEN, {})
    assert guard.has_token(None, {guard.cookie: TOKEN})
    assert not guard.has_token(None, {"another": TOKEN})
    for wrong in (None, "", TOKEN[:-1], TOKEN + "t", "é" * 43):
        assert not guard.has_token(wrong, {})
        assert not guard.has_token(wrong, {guard.cookie: "x"})


def test_after_ten_wrong_tokens_an_address_has_to_wait(caplog):
    clock = [0.0]
    guard = build_guard(clock=lambda: clock[0])
    assert [guard.note_wrong_token("10.0.0.1") for _ in range(MAX_WRONG)] == [403] * MAX_WRONG
    assert guard.note_wrong_token("10.0.0.1") == 429
    assert guard.note_wrong_token("10.0.0.2") == 403
    assert sum("10.0.0.1: it has no valid" in line for line in caplog.messages) == MAX_WRONG
    assert TOKEN not in caplog.text
    clock[0] = WINDOW + 1
    assert guard.note_wrong_token("10.0.0.1") == 403


def test_addresses_without_end_take_no_memory_without_end():
    guard = build_guard()
    for number in range(MAX_ADDRESSES + 50):
        guard.note_wrong_token(f"address {number}")
    assert len(guard._wrong) == MAX_ADDRESSES


PROXIED = ("sweeps.example", "box.example:8443")
KNOWN = "127.0.0.1:8770 [::1]:8770 192.168.0.7:8770 box.example:8770"
KNOWN += " localhost:9000"  # through an SSH tunnel
FOREIGN = "evil.example:8770 localhost.evil.example 127.0.0.1.evil.example ["
NEITHER = "evil.example sub.sweeps.example sweeps.example.evil.example xsweeps.example"


@pytest.mark.parametrize("host", ["", *KNOWN.split(), *FOREIGN.split()])
def test_only_names_of_this_machine_are_known(host):
    assert build_guard({"box.example"}).is_known_host(host) is (host in KNOWN.split())


@pytest.mark.parametrize("host", [*PROXIED, *NEITHER.split()])
def test_a_proxy_is_known_by_exactly_the_names_that_a_person_gave(host):
    """A name that another may point to this machine is refused.

    Source: Jackson et al. 2007, Protecting browsers from DNS rebinding attacks, 5.2.
    """
    assert build_guard(proxied=PROXIED).is_known_host(host) is (host in PROXIED)
    assert not build_guard().is_known_host(host)


@pytest.mark.parametrize(
    ("origin", "sent", "may"),
    [
        ("https://sweeps.example", {}, True),
        ("https://sweeps.example", {"x-forwarded-proto": "https"}, True),
        ("http://sweeps.example", {"x-forwarded-proto": "http"}, True),
        ("http://sweeps.example", {"x-forwarded-proto": "https"}, False),
        ("https://box.example:8443", {}, True),
        ("https://box.example", {}, False),
        ("https://sweeps.example:8443", {"host": "sweeps.example"}, False),
        ("https://evil.example", {}, False),
        ("https://sweeps.example.evil.example", {}, False),
        ("https://[", {}, False),
        ("null", {}, False),
        ("http://127.0.0.1:8770", {}, True),
        ("http://127.0.0.1:8888", {}, False),
        (None, {}, True),
    ],
)
def test_a_change_needs_the_header_and_the_origin_of_this_server_or_a_named_proxy(
    origin, sent, may
):
    """nginx sends its own address as `Host`; an origin is a scheme, a host and a port.

    Source: ngx_http_proxy_module, proxy_set_header; RFC 6454, 4.
    """
    headers = {"host": "127.0.0.1:8770", "x-gdpo-tune": "page", **sent}
    headers |= {} if origin is None else {"origin": origin}
    guard = build_guard(proxied=PROXIED)
    assert guard.may_change(headers) is may
    del headers["x-gdpo-tune"]
    assert not guard.may_change(headers)


def test_names_of_this_machine_count_only_beyond_localhost():
    assert list_own_names("127.0.0.1") == list_own_names("localhost") == frozenset()
    assert "box.example" in list_own_names("box.example")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("box.example")
