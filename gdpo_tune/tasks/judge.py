"""Rewards that a language model gives, and files of the answers that were paid for.

`judge/` in a trial's directory has a line for each: `{"key": ..., "score": 7.0, "calls": 1,
"prompt_tokens": 210, "completion_tokens": 8}`; null is no score, the key a digest of all that
decides it. Processes append to files of their own, without a lock, and read those of all trials.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import re
import string
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import create_model

from gdpo_tune.core.addresses import find_address_problem
from gdpo_tune.core.errors import TrialFailure, UsageError, get_first_line
from gdpo_tune.core.files import explain_full_disk, list_causes
from gdpo_tune.core.redaction import HIDDEN
from gdpo_tune.core.task_files import LONGEST_REASON
from gdpo_tune.core.text import join_turns
from gdpo_tune.tasks.base import TIME_LIMIT


@dataclass(eq=False, kw_only=True)
class Judge:
    """A reward function that asks a model behind a server with the API of OpenAI for a score."""

    url: str
    model: str
    prompt: str
    """Text for the model; it contains `{completion}`, and may contain `{prompt}` and columns."""
    scale: tuple[float, float]
    """The lowest and the highest score."""
    key: str = ""
    """Name of the environment variable with the server's key."""
    concurrency: int = 64  # calls that are open at once
    request: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Other fields of each request."""

    def __post_init__(self) -> None:
        caller = inspect.stack(0)[2]  # of `__init__`
        self.place = f"{Path(caller.filename).name}, line {caller.lineno}"
        self.low, self.high = map(float, self.scale)
        parts = string.Formatter().parse(self.prompt)
        self._columns = {name for _, name, _, _ in parts if name is not None}
        is_scale, is_name = -math.inf < self.low < self.high < math.inf, self.key.isidentifier()
        for name, problem in {
            "url": find_address_problem(self.url),
            "prompt": "" if "completion" in self._columns else "it has no {completion}",
            "scale": "" if is_scale else "write (LOWEST, HIGHEST)",
            "key": "" if is_name or not self.key else "write the name of an environment variable",
            "concurrency": "" if self.concurrency >= 1 else "write a number of at least 1",
        }.items():
            if problem:
                raise UsageError(f"{name} of a Judge: {problem}")
        number: Any = Annotated[float, Ge(self.low), Le(self.high)]
        self._mark: Any = create_model("verdict", __config__={"extra": "forbid"}, score=number)
        self._client: Any = None
        self._scores: dict[str, float] = {}
        self._offsets: dict[Path, int] = {}
        self._writer, self.__name__ = uuid.uuid4().hex, "judge"

    def open(self, name: str, directory: Path | None, seconds: float) -> None:
        """Prepare for calls of `seconds` each, as the reward `name` of a trial; see `Task`.

        Raises UsageError without the package openai or the variable of the key.
        """
        self.__name__, self._directory, self._seconds = name, directory, seconds
        if self._client is None:
            head = f"reward {name} ({self.place}) "
            if find_spec("openai") is None:
                raise UsageError(f"{head}needs openai\n    fix: pip install 'gdpo-tune[judge]'")
            # With a line break it is no header, and in the message that says so not what is hidden.
            if self.key and not re.fullmatch("[!-~]+", os.environ.get(self.key, "")):
                raise UsageError(
                    f"{head}needs the variable {self.key}, a key without blanks and line breaks\n"
                    f"    fix: export {self.key}=..."
                )
            self._openai: Any = importlib.import_module("openai")  # late: 1 s
            # Always one, or a key of OpenAI in the environment would be sent to this server.
            self._secret = os.environ.get(self.key, "no-key")
            self._client = self._openai.AsyncOpenAI(base_url=self.url, api_key=self._secret)

    async def __call__(self, log_metric: Any, **columns: Any) -> list[float | None]:
        """Return the scores of N completions; None for one that the judge did not score."""
        if self._client is None:  # TRL itself calls it
            self.open(self.__name__, None, TIME_LIMIT)
        replies = columns["completions"]
        columns["prompt"] = list(map(join_turns, columns["prompts"]))
        answers = (c if isinstance(c, str) or len(c) > 1 else c[0]["content"] for c in replies)
        columns["completion"] = list(map(join_turns, answers))  # all turns, with calls of tools
        if unknown := self._columns - columns.keys():
            reason = f"{{{min(unknown)}}}, and there are {', '.join(sorted(columns))}"
            raise TrialFailure(f"the prompt of reward {self.__name__} ({self.place}) has {reason}")
        rows = [{n: columns[n][row] for n in self._columns} for row in range(len(replies))]
        texts = [self.prompt.format(**row) for row in rows]
        decisive = [self.url, self.model, self.scale, self.request]
        keys = [uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([*decisive, t])).hex for t in texts]
        scores = self._read_scores()
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in scores}
        failed, paid = await self._ask(missing)
        for name, count in {**paid, "cached": len(keys) - len(missing)}.items():
            log_metric(f"judge/{self.__name__}/{name}", count)
        for row, key in enumerate(keys):
            if key in failed and "log_failure" in columns:
                columns["log_failure"](row, failed[key])
        return [scores.get(key) for key in keys]

    def _read_scores(self) -> dict[str, float]:
        files = f"*/judge/{self.__name__}.*.jsonl"
        for file in self._directory.parent.glob(files) if self._directory else ():
            with file.open("rb") as stream:
                stream.seek(self._offsets.get(file, 0))
                *lines, rest = stream.read().split(b"\n")  # of which more may follow
                self._offsets[file] = stream.tell() - len(rest)
            for line in lines:
                with suppress(ValueError):  # a full disk has cut it
                    row = json.loads(line)
                    self._scores |= {} if row["score"] is None else {row["key"]: row["score"]}
        return self._scores

    async def _ask(self, texts: Mapping[str, str]) -> tuple[dict[str, str], Counter[str]]:
        """Ask for each text by its key and keep the scores; return key -> failure, and the cost."""
        # The client's pauses, of 0.5, 1, 2, 4 and then 8 s, last about a quarter of the time.
        limit, retries = 0.9 * self._seconds, 4 + int(self._seconds / 32)
        client = self._client.with_options(timeout=self._seconds / 2, max_retries=retries)
        schema = {"name": "verdict", "strict": True, "schema": self._mark.model_json_schema()}
        form = {"response_format": {"type": "json_schema", "json_schema": schema}}
        scale = f"from {self.low:g} to {self.high:g}"
        end = f'\n\nAnswer with JSON alone: {{"score": NUMBER}}, a number {scale}.'
        failed: dict[str, str] = {}
        paid = Counter(calls=0, prompt_tokens=0, completion_tokens=0)
        slots = asyncio.Semaphore(self.concurrency)

        async def ask(key: str) -> None:
            messages = [{"role": "user", "content": texts[key] + end}]
            body = {"model": self.model, "messages": messages, **form, **self.request}
            try:
                async with slots:
                    # Unlike `chat.completions.create`, it sends the fields of every server.
                    answer = await client.post("/chat/completions", cast_to=object, body=body)
            except (self._openai.OpenAIError, ValueError) as error:  # no JSON, or no UTF-8
                reason = ": ".join(dict.fromkeys(map(get_first_line, list_causes(error))))
                failed[key] = reason.replace(self._secret, HIDDEN)[:LONGEST_REASON]  # may be in it
                return
            said, score, usage = answer, None, {}
            with suppress(AttributeError, LookupError, TypeError, ValueError):  # of another form
                usage = answer.get("usage") or {}  # not every server counts
                said = answer["choices"][0]["message"]["content"]
                self._scores[key] = score = self._mark.model_validate_json(said, strict=True).score
            paid.update(cost := {name: usage.get(name) or 0 for name in paid} | {"calls": 1})
            failed[key] = f"no score {scale}: {said!r}"[:LONGEST_REASON]
            if self._directory is not None:
                file = self._directory / "judge" / f"{self.__name__}.{self._writer}.jsonl"
                with explain_full_disk(self._directory, "a verdict"):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("a") as stream:
                        stream.write(json.dumps({"key": key, "score": score, **cost}) + "\n")

        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await asyncio.gather(*map(ask, texts))
        late = f"no answer within {limit:g} s"
        return {k: failed.get(k, late) for k in texts if k not in self._scores}, paid
