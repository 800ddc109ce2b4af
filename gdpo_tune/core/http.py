"""Calls of other machines: ended in time, repeated while nothing answers, and those of webhooks.

A webhook gets one POST of a JSON object at an address that is a secret.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from gdpo_tune.core.addresses import find_address_problem

if TYPE_CHECKING:
    from tenacity import Retrying


T = TypeVar("T")


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise `TimeoutError` and let it end in its own thread.

    The time-out of a socket is not enough: a server may send single bytes for ever.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


OUTAGE_SECONDS = 600.0
"""Seconds for which something that stopped answering is asked again."""


def build_retry(
    patience: float, *, first: float = 1.0, longest: float | None = None, **options: Any
) -> Retrying:
    """Return a retry loop: the first attempt at once, others after pauses that double.

    The last attempt begins within `patience` seconds. Pauses grow from `first` to `longest`;
    by default all are as long as the first. `options` are others of `tenacity.Retrying`.
    """
    from tenacity import Retrying, stop_before_delay, wait_exponential  # 30 ms, for asyncio

    pauses = wait_exponential(multiplier=first, max=longest or first)
    return Retrying(stop=stop_before_delay(patience), wait=pauses, **options)


WEBHOOK_SECONDS = 5.0
"""Longest time for an answer of the webhook."""


def post_message(address: str, message: dict[str, Any]) -> str:
    """POST a message as JSON; return why that failed, without the address, which is a secret."""
    import httpx

    if problem := find_webhook_problem(address):
        return problem

    def post() -> int:
        # a redirect is not followed: the message would be lost; and the body is not read, which
        # may have no end
        with httpx.stream("POST", address, json=message, timeout=WEBHOOK_SECONDS) as answer:
            return answer.status_code

    try:
        status = run_with_timeout(WEBHOOK_SECONDS, post)
    except (TimeoutError, httpx.TimeoutException):
        return f"the webhook does not answer within {WEBHOOK_SECONDS:g} s"
    except (OSError, httpx.HTTPError) as error:
        reason = str(error) if isinstance(error, httpx.ConnectError) else type(error).__name__
        return f"the webhook does not answer ({reason})"
    except (ValueError, httpx.InvalidURL, ImportError) as error:  # an address or a proxy of no use
        return f"nothing can be sent to the webhook ({type(error).__name__})"
    return "" if 200 <= status < 300 else f"the webhook answered {status}"


def find_webhook_problem(address: str) -> str:
    """Return why nothing can be sent to an address, without showing it; empty if it can."""
    problem = find_address_problem(address, query=True) if address else ""
    return f"not the address of a webhook: {problem}" if problem else "" if address else "not set"


def bypass_proxies_on_loopback() -> None:
    """Exclude this machine from proxies, in this process and in its children."""
    # Not every client reads networks, and Debian gives 127.0.1.1 to the host's own name.
    here = "localhost,127.0.0.1,127.0.1.1,127.0.0.0/8,::1"
    present = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    has_proxy = any(os.environ[name] for name in os.environ if name.lower().endswith("_proxy"))
    if has_proxy and present != "*" and here not in present:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{here},{present}".rstrip(",")
