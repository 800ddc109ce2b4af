"""What a sweep would do, as text: the resolved file, its space, its budget, and doubts."""

from __future__ import annotations

from gdpo_tune.spec.domains import Choice, Domain, Fixed
from gdpo_tune.spec.dump import shown_service, shown_yaml
from gdpo_tune.spec.lint import lint
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.notation import describe
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.sampler_choice import choose_sampler
from gdpo_tune.spec.sampling_budget import shares, total
from gdpo_tune.spec.schedulers import PbtSettings


def dry_run(spec: SweepSpec) -> str:
    """The text that `--dry-run` prints, without a line break at its end."""
    warnings = [f"  - {warning}" for warning in lint(spec)]
    parts = [
        "# Resolved",
        shown_yaml(spec).rstrip(),
        "",
        f"# Identity: {spec.identity()} (kept in {spec.place})",
        "",
        f"# Space: {len(spec.space.dimensions)} dimensions",
        *table([dimension(name, spec) for name in spec.space.dimensions]),
        "",
        "# Prompts a step",
        *table(prompts(spec)),
        "",
        "# Completions, at most",
        *table(completions(spec)),
        "",
        f"# A trial: {workers(spec)}",
        f"# Sampler: {choose_sampler(spec)}",
        *population(spec),
        f"# Ends early: {ends_early(spec)}",
        f"# Sandbox: {sandbox(spec)}",
        f"# Rollouts: {rollouts(spec)}",
        "",
        "# Doubtful combinations" + ("" if warnings else ": none"),
        *warnings,
    ]
    return "\n".join(parts).rstrip()


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def dimension(name: str, spec: SweepSpec) -> tuple[str, str, str, str]:
    """Name, kind, values and condition of one dimension."""
    domain = spec.space.domains[name]
    conditions = {parent: list(values) for parent, values in domain.when.items()}
    return name, kind(domain), describe(domain), f"when {show(conditions)}" if conditions else ""


def kind(domain: Domain) -> str:
    """What sort of dimension this is."""
    if isinstance(domain, Fixed | Choice):
        return "choice"
    return ("integer" if domain.integer else "float") + (" (log)" if domain.log else "")


def population(spec: SweepSpec) -> list[str]:
    """Where members of a population meet, if trials are one."""
    chosen = spec.search.scheduler
    if not isinstance(chosen, PbtSettings):
        return []
    steps = one_of(chosen.meetings(spec.training.steps))
    return [f"# Population: {spec.search.trials} members meet at steps {steps}"]


def ends_early(spec: SweepSpec) -> str:
    """What may end the sweep before all its trials, as far as it is asked for."""
    budget, patience = spec.search.budget, spec.search.patience
    words = {
        "trials": budget.trials,
        "completions": budget.completions,
        "GPU-hours": budget.gpu_hours,
        "hours": budget.hours,
    }
    limits = [f"after {limit:,g} {what}" for what, limit in words.items() if limit]
    if patience:
        limits.append(f"after {patience} trials in a row that do not move the hypervolume")
    return ", ".join(limits) or "never"


def workers(spec: SweepSpec) -> str:
    """Which processes train it, and on what."""
    asked, total = spec.resources, spec.training.completions_per_step
    each = f"{asked.cpus:g} CPUs and {asked.gpus:g} GPUs"
    if asked.workers == 1:
        return f"1 worker with {each}"
    share = total // asked.workers
    return f"{asked.workers} workers, each with {each} and {share} completions of a step"


def sandbox(spec: SweepSpec) -> str:
    """Where code runs, and what one candidate may use."""
    settings = spec.sandbox
    where = f"{settings.type} at {shown_service(settings.url)}" if settings.url else settings.type
    packages = f" with {one_of(settings.modules)}" if settings.modules else ""
    clocks = f"{settings.wall_seconds:g} s wall"
    if settings.type != "external":
        clocks = f"{settings.cpu_seconds:g} s CPU, {clocks}"
    return (
        f"{where}{packages}, up to {settings.workers} at a time: {clocks}, {settings.memory_mb} MiB"
    )


def rollouts(spec: SweepSpec) -> str:
    """What samples completions, and what it gets of a GPU."""
    settings, share = spec.rollout, min(1.0, spec.resources.gpus)
    if settings.engine != "transformers" and settings.vllm_mode == "server":
        return f"{settings.engine} at {settings.vllm_server}, one trial at a time"
    if settings.engine == "transformers" or not share:
        return settings.engine
    return f"{settings.engine}; vLLM gets {share * settings.vllm_memory_share:.3g} of a GPU"


def prompts(spec: SweepSpec) -> list[tuple[str, ...]]:
    """Every reachable group size with its prompts."""
    total = spec.training.completions_per_step
    sizes = spec.space.reachable("group_size") or ()
    return [(f"group_size {size}", f"{total // int(size)} prompts") for size in sizes]


def completions(spec: SweepSpec) -> list[tuple[str, ...]]:
    """Where the budget goes, in completions."""
    rows = [(share.what, share.completions, share.how) for share in shares(spec)]
    rows.append(("total", total(spec), ""))
    return [(what, f"{count:,}".rjust(12), how) for what, count, how in rows]
