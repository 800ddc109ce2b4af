"""What `rollout:` can get wrong: keys without effect, and a server without an address."""

from __future__ import annotations

from gdpo_tune.core.service_url import split_service_url
from gdpo_tune.core.settings import RolloutSettings
from gdpo_tune.spec.problems import Node, Problems
from gdpo_tune.spec.sandbox_checks import EXAMPLE


def check_rollout(settings: RolloutSettings | None, root: Node, problems: Problems) -> None:
    """The keys of the section fit together."""
    if settings is None or problems.about("rollout"):
        return
    _check_idle(settings, root, problems)
    _check_server(settings, root, problems)


def _check_idle(settings: RolloutSettings, root: Node, problems: Problems) -> None:
    """Refuse what would have no effect."""
    default = RolloutSettings()
    reasons = {
        "vllm_memory_share": "a server has a GPU of its own, which its command line divides"
        if settings.vllm_mode == "server"
        else "",
        "vllm_server": "only vllm_mode: server asks a server"
        if settings.vllm_mode == "colocate"
        else "",
    }
    if settings.engine == "transformers":
        reasons = dict.fromkeys(
            ("vllm_mode", "vllm_server", "vllm_memory_share"), "engine: transformers is not vLLM"
        )
    for name, reason in reasons.items():
        path = ("rollout", name)
        if reason and getattr(settings, name) != getattr(default, name):
            problems.at(root.find(path), path, reason, "remove the key")


def _check_server(settings: RolloutSettings, root: Node, problems: Problems) -> None:
    if settings.vllm_mode != "server" or settings.engine == "transformers":
        return
    if settings.engine == "auto":
        path = ("rollout", "vllm_mode")
        reason = "engine: auto may take another engine, which would ask no server"
        problems.at(root.find(path), path, reason, "write engine: vllm beside it")
    path = ("rollout", "vllm_server")
    node = root.find(path)
    if not settings.vllm_server:
        reason = "missing: vllm_mode: server asks a server that is already running"
        problems.add(node.mark, "rollout.vllm_server", None, reason, f"add vllm_server: {EXAMPLE}")
        return
    try:
        split_service_url(settings.vllm_server)
    except ValueError as error:
        fix = f"write {EXAMPLE}, where the server listens"
        problems.at(node, path, f"not the address of a web service: {error}", fix)
