"""Jobs that resume after a kill: each result is on disk before the next one is awaited."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

Job = Mapping[str, Any]
Result = Mapping[str, Any]


def read_done(path: Path) -> dict[str, Result]:
    """Return key of a job -> its result from a file; remove an incomplete last line."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))  # a kill while the file is rewritten would lose all of it
    entries = map(json.loads, whole.splitlines())
    return {build_key(entry["job"]): entry["result"] for entry in entries}


def build_key(job: Job) -> str:
    """Build the key of a job; equal jobs have equal keys."""
    return json.dumps(job, sort_keys=True)


def finish(
    jobs: Sequence[Job], work: Callable[[Job], Result], path: Path, processes: int
) -> list[Result]:
    """Run all jobs without a result in the file; return all results in the order of the jobs.

    Jobs are mappings of JSON values; `work` is a function of a module, for parallel processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_done(path)
    missing = [job for job in jobs if build_key(job) not in done]
    started = time.perf_counter()
    # Spawn, because a fork would copy the locks of torch's threads.
    spawned, answer = multiprocessing.get_context("spawn"), partial(_answer, work)
    with spawned.Pool(processes) if processes > 1 else nullcontext() as pool:
        answers = pool.imap_unordered(answer, missing) if pool else map(answer, missing)
        for count, (job, result) in enumerate(answers, 1):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"job": job, "result": result}) + "\n")
            done[build_key(job)] = result
            seconds, values = time.perf_counter() - started, ", ".join(map(str, job.values()))
            print(f"{count}/{len(missing)}  {seconds:.0f} s  {values}", flush=True)
    return [done[build_key(job)] for job in jobs]


def _answer(work: Callable[[Job], Result], job: Job) -> tuple[Job, Result]:
    """Return a job with its result, because results arrive in any order."""
    return job, work(job)
