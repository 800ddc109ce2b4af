"""Facts of a library, the result of an export, and the checks that all exporters share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from gdpo_tune.core.errors import ExportError, SpecProblem
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import join_names, show
from gdpo_tune.core.trl_fields import TRL_FIELDS, is_default
from gdpo_tune.exporters.differences import Difference
from gdpo_tune.exporters.runtime_prompts import ExportedPrompt
from gdpo_tune.exporters.training_setup import TrainingSetup
from gdpo_tune.spec.document import dump_flow

Settings = Mapping[str, object]
REWARDS_FILE = "rewards.py"
"""Module of an export with the reward functions."""
MODULES = "modules"
"""Directory of an export with a copy of what `rewards.py` needs of this package."""
PROMPTS_FILE = "prompts.parquet"
"""Training prompts of an export."""
POLICY_COPY = "policy"
"""Directory of an export with a policy that ships with this package."""
CONVERTED = "converted"
"""Directory of an export with the policy that a conversion made."""
START = "bash run.sh"
"""Command that starts the library in the directory of an export."""


@dataclass(frozen=True)
class TrainingFiles:
    """Files of a training besides the configuration: how its library gets rewards and prompts."""

    imports: Sequence[str]
    """Names of `runtime` that `ending` needs."""
    ending: str
    """Source at the end of `rewards.py`, below `SCORER`."""
    build_row: Callable[[ExportedPrompt, int], Mapping[str, object]]
    """Columns of a prompt, which has that number, in `prompts.parquet`; of `runtime_prompts`."""
    reads_as_trained: bool = False
    """True if prompts are read by the chat template of the training, not by the policy's own."""
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of another file -> its text."""


@dataclass(frozen=True)
class Exported:
    """Files that run a training or a merge in another library."""

    library: str
    """With the version whose source the exporter was written from."""
    file: str
    """Name of its configuration."""
    text: str
    install: str
    """Command that installs the library."""
    run: str
    """Lines of a shell that start it in that directory, with the arguments "$@"."""
    result: str
    """Directory in that of the export where the policy will be."""
    required_inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Key -> what the user has to put there."""
    training: TrainingFiles | None = None
    """None for a merge, which trains nothing."""
    conversion: str = ""
    """Command that makes that policy of what the library saves; empty if it saves it so."""
    environment: str = ""
    """Assignment before the command that starts it, such as `NAME=/a/path`."""
    differences: Sequence[Difference] = ()

    @property
    def start(self) -> str:
        """Command that starts the library in the directory of the export."""
        return f"{self.environment} {START}".lstrip()


@dataclass(frozen=True)
class Library:
    """A version of a library, and the settings of a training that it can express."""

    name: str
    modes: Collection[str]
    losses: Collection[str]
    schedules: Collection[str] = ("constant", "linear", "cosine")
    leave_one_out: Collection[str] = ()
    """Modes under which it has that baseline."""
    loads_revisions: bool = True
    """True if it can load a revision of a model other than the newest."""
    accepts_fractional_alpha: bool = True
    """True if it accepts a `lora_alpha` that is not an integer."""
    takes_trl_fields: bool = False
    """True if the exporter writes fields of `space: {trl: ...}`."""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Mode -> why the library lacks it although it seems to have it."""

    def check(self, setup: TrainingSetup, *others: SpecProblem) -> None:
        """Refuse a training that the library cannot reproduce exactly.

        Raises:
            ExportError: with every reason, `others` among them.
        """
        if problems := (*self._find_problems(setup), *others):
            raise ExportError(self.name, problems)

    def _find_problems(self, setup: TrainingSetup) -> Iterator[SpecProblem]:
        def build(key: str, value: object, reason: str, fix: str) -> SpecProblem:
            return SpecProblem(setup.note, key, show(value), reason, fix)

        name, mode, shape = self.name, setup.mode, setup.spec.training.lr_schedule
        if mode not in self.modes:
            note = self.notes.get(mode, "has no such normalization")
            reason = f"{name} {note}; it knows {join_names(self.modes)}"
            yield build("normalization", mode, reason, "pick a trial with one of those")
        elif setup.leaves_one_out and mode not in self.leave_one_out:
            reason = f"{name} compares with the mean of the whole group under {mode}"
            fix = "pick a trial with baseline: group_mean"
            yield build("baseline", "leave_one_out", reason, fix)
        if setup.loss not in self.losses:
            known = join_names(self.losses)
            reason = f"{name} cannot average the loss in this way; it knows {known}"
            yield build("loss_type", setup.loss, reason, "pick a trial with one of those")
        if shape not in self.schedules:
            reason = f"{name} has no such schedule; it knows {join_names(self.schedules)}"
            fix = "--set training.lr_schedule=constant"
            yield build("training.lr_schedule", shape, reason, fix)
        if setup.gamma > 0:
            reason = "no library makes the weights depend on how saturated a reward is"
            yield build("gamma", setup.gamma, reason, "pick a trial with gamma: 0")
        for trl_name in () if self.takes_trl_fields else TRL_FIELDS:
            if not is_default(setup.params, trl_name):
                reason = f"fields of TRL are written to TRL alone, and this is {name}"
                yield build(trl_name, setup.params[trl_name], reason, "export to trl")
        if load_task_info(setup.spec.task, setup.params).calls_tools:
            reason = "the turns of tools are not exported"
            yield build("task", setup.spec.task, reason, "train with python -m gdpo_tune.train")
        if setup.spec.model.revision and not self.loads_revisions:
            fix = "download that revision, and set its directory with --set policy="
            reason = f"{name} loads the newest revision"
            yield build("model.revision", setup.spec.model.revision, reason, fix)
        if (
            setup.spec.model.lora_rank
            and not self.accepts_fractional_alpha
            and not isinstance(setup.lora_alpha, int)
        ):
            fix = "pick a whole number, or export to trl or verl"
            reason = f"{name} takes whole numbers alone"
            yield build("model.lora_alpha", setup.lora_alpha, reason, fix)
        if setup.spec.sandbox.type == "unsafe_no_isolation":
            reason = "code of the policy would run without isolation, wherever it is started"
            yield build("sandbox.type", setup.spec.sandbox.type, reason, "--set sandbox.type=local")


def format_install(package: str, extras: Sequence[str]) -> str:
    """Return the command that installs a package such as `trl==1.16.0` with extras."""
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
