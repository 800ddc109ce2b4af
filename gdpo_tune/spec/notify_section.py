"""`notify:` of a sweep file: the webhook that is notified how the sweep goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import MinLen
from pydantic import Field

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.http import find_webhook_problem
from gdpo_tune.spec.sections import Section, require_pattern

if TYPE_CHECKING:
    from gdpo_tune.spec.model import SweepSpec

EnvironmentName = Annotated[
    str,
    require_pattern(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "not the name of an environment variable",
        "write the name alone, such as GDPO_WEBHOOK, and keep the value out of the file",
    ),
]
SweepOccasion = Literal["finished", "failed", "interrupted", "trial_failed"]
EVERY_SWEEP_OCCASION: tuple[SweepOccasion, ...] = (
    "finished",
    "failed",
    "interrupted",
    "trial_failed",
)


class WebhookSettings(Section):
    """Webhook that gets a JSON object by POST."""

    webhook_env: EnvironmentName
    """Environment variable with the address that gets a JSON object by POST."""


class SweepNotify(WebhookSettings):
    """Webhook that is notified when the sweep ends, and when its first trial fails."""

    on: Annotated[tuple[SweepOccasion, ...], Field(strict=False), MinLen(1)] = EVERY_SWEEP_OCCASION
    """Occasions for a notification: `finished`; `failed`, by an error or because nothing is on the
    front; `interrupted`, which the same command resumes; `trial_failed`, the first since a start.
    """


def find_unset_webhook(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ
) -> list[UsageError]:
    """Return the error of a webhook that the sweep could not notify from this machine, if any."""
    name = spec.notify.webhook_env if spec.notify else ""
    problem = find_webhook_problem(environment.get(name, "")) if name else ""
    if not problem:
        return []
    return [
        UsageError(
            f"notify.webhook_env = {name}: the environment variable is {problem}\n"
            f"    fix: export {name}=https://..., or remove notify:"
        )
    ]
