"""Training prompts of an export, as the policy read them: rows, or a program for them.

Rows of a data set are copied only if its licence allows to pass them on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import expand_path, is_local_source, path_exists
from gdpo_tune.core.settings import DataSettings, HeldOutData
from gdpo_tune.core.task_info import PROBLEM_SEED
from gdpo_tune.exporters.library import PROMPTS_FILE, TrainingFiles
from gdpo_tune.exporters.reward_files import FIND_MODULES, format_docstring
from gdpo_tune.exporters.runtime_prompts import (
    ExportedPrompt,
    build_prompt,
    choose_problems,
    compute_digest,
    list_facts,
    write_rows,
)
from gdpo_tune.exporters.training_setup import TrainingSetup
from gdpo_tune.policies.prompt_choice import (
    choose_instructions,
    choose_prompt_format,
    load_local_tokenizer,
)
from gdpo_tune.policies.prompt_format import PromptFormat

REFERENCE_FILE = "make_prompts.py"
"""Program of an export that writes the prompts."""
ANSWER_SECONDS = 5.0
"""Seconds that the Hub has to answer."""
SHAREABLE = {
    *("apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "cc-by-3.0", "cc-by-4.0", "cc0-1.0"),
    *("cc-by-sa-3.0", "cc-by-sa-4.0", "cdla-permissive-2.0", "mit", "odc-by", "pddl", "unlicense"),
}
"""Licences, by the Hub's names, that allow to pass rows on."""
Place = TypeVar("Place", DataSettings, HeldOutData)


@dataclass(frozen=True)
class ExportedPrompts:
    """Training prompts in the order in which the trial read them first."""

    problems: Sequence[Any]
    instructions: str
    """Text before every prompt; may be empty."""
    reader: PromptFormat | None
    """How the policy reads them; None if its tokenizer is not on this machine: then no prompt is
    left out for its length."""


def collect_prompts(setup: TrainingSetup) -> ExportedPrompts:
    """Collect the training prompts of an export.

    Raises:
        DataError, UsageError: the data cannot be read, or holds too few prompts.
        PolicyError: the tokenizer loses tags that the rewards need.
    """
    task = setup.build_task()
    try:
        problems = task.problems("train", setup.spec.training.train_prompts, PROBLEM_SEED)
    except DataError as error:
        raise DataError(
            f"{error}; or --reference-data, which writes a program that makes the prompts where "
            "the data are"
        ) from error
    policy, model, own = setup.spec.policy, setup.spec.model, task.instructions
    tokenizer = load_local_tokenizer(policy, model.revision)
    instructions = choose_instructions(policy, tokenizer, own, model.instructions)
    reader = None if tokenizer is None else choose_prompt_format(policy, tokenizer, own, model)
    limit = setup.spec.data.max_prompt_length
    problems = choose_problems(problems, reader, limit, setup.request.seed)
    if not problems:
        raise DataError(
            f"every prompt has more than data.max_prompt_length = {limit} tokens: raise that, "
            "or give other data"
        )
    return ExportedPrompts(problems, instructions, reader)


def format_prompts(
    prompts: ExportedPrompts, setup: TrainingSetup, training: TrainingFiles
) -> bytes:
    """Return the prompts as Parquet, with the columns of the library.

    Raises:
        DataError: JSON would change one of them, so that the rewards would read another problem.
    """
    exported: list[ExportedPrompt] = []
    for problem in prompts.problems:
        try:
            prompt = build_prompt(problem, prompts.reader, prompts.instructions, setup.is_chat)
            prompt.text.encode()
            prompt.problem.encode()
            is_kept = is_same_json(list_facts(problem), json.loads(prompt.problem))
        except (TypeError, ValueError) as error:
            raise _build_prompt_error(problem, get_first_line(error)) from error
        if not is_kept:
            raise _build_prompt_error(problem, "a tuple, or a key that is no text")
        exported.append(prompt)
    stream = io.BytesIO()
    write_rows([training.build_row(prompt, n) for n, prompt in enumerate(exported)], stream)
    return stream.getvalue()


def is_same_json(value: Any, read: Any) -> bool:
    """Return whether JSON gives a value back as it was; NaN is the same as NaN."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return list(entries) == list(read) and all(is_same_json(entries[k], read[k]) for k in read)
    if isinstance(value, list):
        return all(map(is_same_json, cast("list[Any]", value), read))
    return bool(value == read or (value != value and read != read))


def _build_prompt_error(problem: Any, reason: str) -> DataError:
    return DataError(
        f"the row of the prompt {problem.prompt!r} cannot be written as JSON ({reason}): give "
        "each column of the task's rows texts, numbers, lists and mappings by texts"
    )


def build_reference_files(setup: TrainingSetup, training: TrainingFiles) -> dict[str, bytes]:
    """Return name -> content of the program that makes the prompts from their data set.

    Raises:
        DataError: the prompts come from no data set.
    """
    if not setup.spec.data.source:
        raise DataError(
            f"--reference-data: task {setup.spec.task} writes its own prompts, so there is no data "
            "set to refer to: leave it out"
        )
    source, build_row = setup.spec.data.source, training.build_row.__name__
    validation, test = map(_make_absolute, (setup.spec.data.validation, setup.spec.data.test))
    data = _make_absolute(setup.spec.data).replace(validation=validation, test=test)
    tokenizer = load_local_tokenizer(setup.spec.policy, setup.spec.model.revision)
    mode, own = setup.spec.model.instructions, setup.build_task().instructions
    is_here = path_exists(expand_path(source)) if setup.spec.data.is_local else _ask_hub(source)
    prompts = None if is_here in (False, None) else collect_prompts(setup)
    title = f"Makes {PROMPTS_FILE} of {source}: python {REFERENCE_FILE} [FILE]"
    program = f'''{format_docstring(title)}

{FIND_MODULES}
from gdpo_tune.core.settings import DataSettings, HeldOutData
from gdpo_tune.exporters.runtime_prompts import PromptSource, {build_row}, make_prompts

SOURCE = PromptSource(
    data={data!r},
    policy={setup.policy!r},
    instructions={choose_instructions(setup.spec.policy, tokenizer, own, mode)!r},
    reading={setup.prompt_format_arguments!r},
    is_chat={setup.is_chat},
    count={setup.spec.training.train_prompts},
    seed={setup.request.seed},
    digest={compute_digest(prompts.problems) if prompts and prompts.reader else ""!r},
)

if __name__ == "__main__":
    make_prompts(SOURCE, {build_row}, HERE / "{PROMPTS_FILE}")
'''
    return {REFERENCE_FILE: program.encode()}


def _make_absolute(place: Place) -> Place:
    if not place.source or not is_local_source(place.source):
        return place
    return place.replace(source=str(expand_path(place.source).absolute()))


def require_shareable(data: DataSettings) -> None:
    """Refuse to copy rows of a data set on the Hub unless its licence allows to pass them on.

    Raises:
        DataError: the licence is another one, or not known.
    """
    if not data.source or data.is_local:
        return
    licences = find_licences(data.source)
    if licences and SHAREABLE.issuperset(licences):
        return
    known = f"its licence is {' and '.join(licences)}" if licences else "its licence is not known"
    raise DataError(
        f"data.source = {data.source}: its rows would be copied into the directory, and {known}: "
        "--reference-data writes a program that fetches them instead; --copy-data copies them, if "
        "you may pass them on"
    )


def find_licences(source: str) -> list[str]:
    """Return the licences that the Hub names for a data set; empty if none is known."""
    stated = getattr(_ask_hub(source), "license", None) or []
    return [stated] if isinstance(stated, str) else list(stated)


def _ask_hub(source: str) -> Any:
    """Return the card of a data set, or an empty one; None if the Hub has or says nothing."""
    from httpx import HTTPError
    from huggingface_hub import DatasetCardData, HfApi

    try:
        info = HfApi().dataset_info(source, timeout=ANSWER_SECONDS)
    except (OSError, ValueError, HTTPError):  # no network, no such data set, no right to it
        return None
    return info.card_data or DatasetCardData()
