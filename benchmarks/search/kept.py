"""Jobs that can resume after a kill: each result is on disk before the next one is awaited."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def finish(
    jobs: Sequence[Job], work: Callable[[Job], Result], path: Path, processes: int
) -> list[Result]:
    """Run all jobs without a result in the file; return all results in the order of the jobs.

    Args:
        jobs: mappings of JSON values.
        work: function of a module, so that another process can import it.
        path: file of the results.
        processes: number of parallel processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_done(path)
    missing = [job for job in jobs if build_key(job) not in done]
    started = time.perf_counter()
    for count, (job, result) in enumerate(_run_jobs(missing, work, processes), 1):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job, "result": result}) + "\n")
        done[build_key(job)] = result
        values = ", ".join(map(str, job.values()))
        print(
            f"{count}/{len(missing)}  {time.perf_counter() - started:.0f} s  {values}", flush=True
        )
    return [done[build_key(job)] for job in jobs]


def build_key(job: Job) -> str:
    """Build the key of a job; equal jobs have equal keys."""
    return json.dumps(job, sort_keys=True)


def _run_jobs(
    jobs: Sequence[Job], work: Callable[[Job], Result], processes: int
) -> Iterator[tuple[Job, Result]]:
    if processes == 1:
        yield from ((job, work(job)) for job in jobs)
        return
    # Spawn, because a fork would copy the locks of torch's threads.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_Work(work), jobs)


class _Work:
    """Callable that returns a job with its result, because results arrive in any order."""

    def __init__(self, work: Callable[[Job], Result]) -> None:
        self._work = work

    def __call__(self, job: Job) -> tuple[Job, Result]:
        return job, self._work(job)
