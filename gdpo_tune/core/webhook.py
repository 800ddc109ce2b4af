"""Webhooks: one POST of a JSON object to an address that is a secret."""

from __future__ import annotations

from typing import Any

from gdpo_tune.core.addresses import find_address_problem
from gdpo_tune.core.timed_call import call_within

SECONDS = 5.0
"""Longest time for an answer of the webhook."""


def post_message(address: str, message: dict[str, Any]) -> str:
    """POST a message as JSON; return why that failed, without the address, which is a secret."""
    import httpx

    problem = find_webhook_problem(address)
    if problem:
        return problem

    def post() -> int:
        # a redirect is not followed: the message would be lost; and the body is not read, which
        # may have no end
        with httpx.stream("POST", address, json=message, timeout=SECONDS) as answer:
            return answer.status_code

    try:
        status = call_within(SECONDS, post)
    except (TimeoutError, httpx.TimeoutException):
        return f"the webhook does not answer within {SECONDS:g} s"
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
