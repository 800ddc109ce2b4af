"""Who may open the live page: the token, the limit on wrong ones, and names of this machine."""

import pytest

from gdpo_tune.web.guard import MAX_ADDRESSES, MAX_WRONG, WINDOW, is_loopback, list_own_names
from tests.support.web import TOKEN, build_guard


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


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8770", True),
        ("localhost:9000", True),  # through an SSH tunnel
        ("[::1]:8770", True),
        ("192.168.0.7:8770", True),
        ("box.example:8770", True),
        ("evil.example:8770", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_only_names_of_this_machine_are_known(host, known):
    assert build_guard({"box.example"}).is_known_host(host) is known


def test_a_change_needs_the_header_and_no_foreign_origin():
    may_change = build_guard().may_change
    own = {"host": "127.0.0.1:8770", "x-gdpo-tune": "page"}
    assert may_change(own)
    assert may_change({**own, "origin": "http://127.0.0.1:8770"})
    assert not may_change({"host": own["host"], "origin": "http://127.0.0.1:8770"})
    assert not may_change({**own, "origin": "http://127.0.0.1:8888"})
    assert not may_change({**own, "origin": "https://evil.example"})
    assert not may_change({**own, "origin": "null"})


PROXIED = ("sweeps.example", "box.example:8443")


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("sweeps.example", True),
        ("box.example:8443", True),
        ("evil.example", False),
        ("sub.sweeps.example", False),
        ("sweeps.example.evil.example", False),
        ("xsweeps.example", False),
    ],
)
def test_a_proxy_is_known_by_exactly_the_names_that_a_person_gave(host, known):
    """A name that another may point to this machine is refused.

    Source: Jackson et al. 2007, Protecting browsers from DNS rebinding attacks, 5.2.
    """
    assert build_guard(proxied=PROXIED).is_known_host(host) is known
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
    ],
)
def test_a_change_comes_from_the_origin_of_a_named_proxy(origin, sent, may):
    """nginx sends its own address as `Host`; an origin is a scheme, a host and a port.

    Source: ngx_http_proxy_module, proxy_set_header; RFC 6454, 4.
    """
    headers = {"host": "127.0.0.1:8770", "origin": origin, "x-gdpo-tune": "page", **sent}
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
