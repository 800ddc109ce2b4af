"""Work that goes on where it was: a job's result is on disk before the next one is awaited."""

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


def read_done(kept: Path) -> dict[str, Result]:
    """Key of a job -> its result, as a file has them; a last line that was cut off is removed."""
    if not kept.exists():
        return {}
    content = kept.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(kept, len(whole))  # written anew, all of it would be lost to a kill meanwhile
    entries = map(json.loads, whole.splitlines())
    return {build_key(entry["job"]): entry["result"] for entry in entries}


def finish(
    jobs: Sequence[Job], work: Callable[[Job], Result], kept: Path, processes: int
) -> list[Result]:
    """Results of all jobs in their order; those that the file holds are not done again.

    Args:
        jobs: mappings that JSON can hold.
        work: a function of a module, so that another process finds it.
        kept: the file.
        processes: how many work side by side.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = read_done(kept)
    missing = [job for job in jobs if build_key(job) not in done]
    started = time.perf_counter()
    for count, (job, result) in enumerate(_run_jobs(missing, work, processes), 1):
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job, "result": result}) + "\n")
        done[build_key(job)] = result
        said = ", ".join(map(str, job.values()))
        print(f"{count}/{len(missing)}  {time.perf_counter() - started:.0f} s  {said}", flush=True)
    return [done[build_key(job)] for job in jobs]


def build_key(job: Job) -> str:
    """Equal for jobs that ask for the same."""
    return json.dumps(job, sort_keys=True)


def _run_jobs(
    jobs: Sequence[Job], work: Callable[[Job], Result], processes: int
) -> Iterator[tuple[Job, Result]]:
    if processes == 1:
        yield from ((job, work(job)) for job in jobs)
        return
    # Spawned: a fork would copy the locks of torch's threads.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_Work(work), jobs)


class _Work:
    """Keeps a job beside its result, which arrives in any order."""

    def __init__(self, work: Callable[[Job], Result]) -> None:
        self._work = work

    def __call__(self, job: Job) -> tuple[Job, Result]:
        return job, self._work(job)
