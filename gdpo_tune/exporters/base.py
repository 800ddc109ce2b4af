"""Result of an exporter, the checks that all share, and the notation of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gdpo_tune.core.errors import ExportError, SpecProblem
from gdpo_tune.exporters.glue.prompt_rows import ExportedPrompt
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.spec.document import dump_flow
from gdpo_tune.spec.text import join_names, show

Settings = Mapping[str, object]
REWARDS_FILE = "rewards.py"
"""Module of an export with the reward functions."""
PROMPTS_FILE = "prompts.parquet"
"""Training prompts of an export."""
POLICY_COPY = "policy"
"""Directory of an export with a policy that ships with this package."""
CONVERTED = "converted"
"""Directory of an export with the policy that a conversion made."""
START = "bash run.sh"
"""Command that starts the library in the directory of an export."""


@dataclass(frozen=True)
class Difference:
    """Something that the library does differently than the training that was measured."""

    topic: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class TrainingFiles:
    """Files of a training besides the configuration: how its library gets rewards and prompts."""

    glue: Mapping[str, Sequence[str]]
    """Module of `exporters.glue` -> its definitions that the library looks for in `rewards.py`, or
    that `ending` needs."""
    ending: str
    """Source at the end of `rewards.py`."""
    build_row: Callable[[ExportedPrompt, int], Mapping[str, object]]
    """Columns of a prompt, which has that number, in `prompts.parquet`; a function of `glue`."""
    reads_as_trained: bool = False
    """True if prompts are read by the chat template of the training, not by the policy's own."""
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of another file -> its text."""


@dataclass(frozen=True)
class Exported:
    """A training, or a merge, as the files of a library."""

    library: str
    """With the version whose source the exporter was written from."""
    file: str
    """Name of its configuration."""
    text: str
    install: str
    """Command that installs the library."""
    run: str
    """Lines of a shell that start it in that directory, with the arguments "$@"."""
    differences: Sequence[Difference]
    to_supply: Mapping[str, str]
    """Key -> what the user has to put there."""
    result: str
    """Directory in that of the export where the policy will be."""
    training: TrainingFiles | None = None
    """None for a merge, which trains nothing."""
    conversion: str = ""
    """Command that makes that policy of what the library saves; empty if it saves it so."""
    environment: str = ""
    """Assignment before the command that starts it, such as `NAME=/a/path`."""

    @property
    def start(self) -> str:
        """Command that starts the library in the directory of the export."""
        return f"{self.environment} {START}".lstrip()


def check_support(
    recipe: Recipe,
    library: str,
    *,
    modes: Collection[str],
    losses: Collection[str],
    schedules: Collection[str] = ("constant", "linear", "cosine"),
    leave_one_out: Collection[str] = (),
    revisions: bool = True,
    fractions: bool = True,
    notes: Mapping[str, str] | None = None,
    others: Sequence[SpecProblem] = (),
) -> None:
    """Refuse a recipe that the library would change or ignore in part.

    `modes`, `losses` and `schedules` are those that the library has; `leave_one_out` are the modes
    under which it has that baseline. `revisions` tells whether it can load another revision of a
    model than the newest, `fractions` whether it takes those of a `lora_alpha`.
    `notes` map a mode to why the library lacks it although it seems to have it; `others` are
    problems that only this library has.

    Raises:
        ExportError: with every reason.
    """
    problems: list[SpecProblem] = []

    def add(key: str, value: object, reason: str, fix: str) -> None:
        problems.append(SpecProblem(recipe.note, key, show(value), reason, fix))

    if recipe.mode not in modes:
        note = (notes or {}).get(recipe.mode, "has no such normalization")
        reason = f"{library} {note}; it knows {join_names(modes)}"
        add("normalization", recipe.mode, reason, "pick a trial with one of those")
    elif recipe.leaves_one_out and recipe.mode not in leave_one_out:
        reason = f"{library} compares with the mean of the whole group under {recipe.mode}"
        add("baseline", "leave_one_out", reason, "pick a trial with baseline: group_mean")
    if recipe.loss not in losses:
        reason = f"{library} cannot average the loss in this way; it knows {join_names(losses)}"
        add("loss_type", recipe.loss, reason, "pick a trial with one of those")
    shape = recipe.training.lr_schedule
    if shape not in schedules:
        reason = f"{library} has no such schedule; it knows {join_names(schedules)}"
        add("training.lr_schedule", shape, reason, "--set training.lr_schedule=constant")
    if recipe.gamma > 0:
        reason = "no library makes the weights depend on how saturated a reward is"
        add("gamma", recipe.gamma, reason, "pick a trial with gamma: 0")
    if recipe.model.revision and not revisions:
        reason = f"{library} loads the newest revision"
        fix = "download that revision, and set its directory with --set policy="
        add("model.revision", recipe.model.revision, reason, fix)
    if recipe.model.lora_rank and not fractions and not isinstance(recipe.lora_alpha, int):
        fix = "pick a whole number, or export to trl or verl"
        add("model.lora_alpha", recipe.lora_alpha, f"{library} takes whole numbers alone", fix)
    if recipe.schedule:
        reason = (
            "no library changes weights or the learning rate during training, as this member of a "
            "population did"
        )
        fix = "train it here: gdpo_tune.train --from"
        add("schedule", f"{len(recipe.schedule)} changes", reason, fix)
    if recipe.sandbox.type == "unsafe_no_isolation":
        reason = "the export would run code of the policy without isolation, wherever it is started"
        add("sandbox.type", recipe.sandbox.type, reason, "--set sandbox.type=local")
    if problems or others:
        raise ExportError(library, (*problems, *others))


def format_install(package: str, extras: Sequence[str] = ()) -> str:
    """Return the command that installs a package such as `trl==1.16.0` with extras.

    An extra limits the versions of what it installs to those that the package works with.
    """
    name, _, version = package.partition("==")
    return (
        f"pip install '{name}[{','.join(extras)}]=={version}'"
        if extras
        else f"pip install {package}"
    )


def format_yaml(settings: Settings, *comments: str) -> str:
    """Return YAML that readers of version 1.1 and 1.2 read alike, below `comments`."""
    lines = [*(f"# {comment}" for comment in comments), *_format_entries(settings, "")]
    return "\n".join(lines) + "\n"


def _format_entries(settings: Settings, indent: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _format_entries(cast("Settings", value), f"{indent}  ")
        else:
            yield f"{indent}{key}: {dump_flow(value)}"
