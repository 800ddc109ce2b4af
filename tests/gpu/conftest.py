"""The check of a GPU, `make gpu-check`: its options, its time, and its table with a line of JSON.

Each function has a process of its own, so that one that dies ends alone. A device on which nothing
can be trained skips the rest. docs/measurements.md says what is checked.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.spec import read_device_memory
from gdpo_tune.spec.machine import count_visible_gpus
from tests.gpu.plan import Plan, choose_vllm
from tests.gpu.processes import OVER, Processes, StepError

pytest.register_assert_rewrite("tests.gpu.limits")
SHAPE, TINY = "qwen3-0.6b", "tiny"
PRELOADED = ("gdpo_tune.training.trial", "tests.gpu.trials")
"""Imports of most tests on a CPU, which take longer than a small training itself."""
RESULTS = {"passed": "held", "failed": "did not hold", "skipped": "not run"}
UNUSABLE = "test_device_"
"""Start of the names of tests without which the others make no sense."""


OPTIONS: dict[str, dict[str, object]] = {
    "--small": {"action": "store_true", "default": False, "help": "do on a CPU what a CPU can do"},
    "--policy": {"default": "", "help": f"default: random weights in the shape of {SHAPE}"},
    "--engine": {"choices": ["auto", "transformers", "vllm"], "default": "auto"},
    "--minutes": {"type": float, "default": 20.0, "help": "what does not fit is not run"},
    "--logs": {"type": Path, "default": Path("runs") / "gpu_check"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("check of a GPU")
    for name, settings in OPTIONS.items():
        group.addoption(name, **settings)


def read_option(config: pytest.Config, name: str):
    """Return an option, or its default where pytest has begun without this file."""
    return config.getoption(name, OPTIONS[name]["default"])


def hide_other_gpus() -> tuple[str, ...]:
    """Hide all visible GPUs but the first from this process, and return all of their names."""
    count = count_visible_gpus(os.environ)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = tuple(name.strip() for name in listed.split(",")[:count])
    os.environ["CUDA_VISIBLE_DEVICES"] = names[0] if names else ""
    return names


@pytest.fixture(scope="session")
def plan(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Make the policies, and choose what is trained; without a GPU only `--small` goes on."""
    small = read_option(pytestconfig, "--small")
    devices = () if small else hide_other_gpus()
    if not small and not devices:
        problem = "this machine has 0 GPUs that may be used, and the check needs one"
        pytest.exit(f"{problem}\n    fix: --small on a CPU", returncode=2)
    if small:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # TRL would lower it to errors; the logs say how long an engine takes to start.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    logs = read_option(pytestconfig, "--logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    for log in logs.glob("*.log"):
        log.unlink()
    minutes = read_option(pytestconfig, "--minutes")
    processes = Processes(logs, minutes * 60, PRELOADED if small else ())
    directory = tmp_path_factory.mktemp("gpu")
    engine, policy = read_option(pytestconfig, "--engine"), read_option(pytestconfig, "--policy")
    shape = TINY if small else SHAPE
    made = str(directory / shape)
    try:
        vllm = choose_vllm(engine, gpu=not small)
        if small or not policy:
            processes.call("policy", "tests.gpu.trials:write_policy", made, shape, seconds=180)
    except (GdpoTuneError, StepError) as error:
        pytest.exit(f"error: {error}", returncode=2)
    return Plan(
        small=small,
        policy="embedded" if small else policy or made,
        tiny=made if small else "",
        directory=directory,
        processes=processes,
        engine=engine,
        vllm=vllm,
        device_bytes=0 if small else read_device_memory() or 0,
        devices=devices,
    )


FAILED: list[str] = []
"""Names of tests that did not hold."""
ROWS: list[dict[str, object]] = []


@pytest.fixture
def note(request: pytest.FixtureRequest, plan: Plan):
    """Return a function that adds figures to the row of a test; skip what cannot be run."""
    if broken := [name for name in FAILED if name.startswith(UNUSABLE)]:
        pytest.skip(f"{broken[0]} did not hold")
    if plan.processes.read_remaining() <= 0:
        pytest.skip(OVER)
    return lambda **figures: request.node.user_properties.extend(figures.items())


@pytest.fixture
def gpu(plan: Plan) -> None:
    """Skip a test that needs a GPU where there is none."""
    if plan.small:
        pytest.skip("no GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Keep a row for each test of the check."""
    report = yield
    if item.get_closest_marker("gpu") and (report.when == "call" or report.outcome != "passed"):
        if report.failed:
            FAILED.append(item.name)
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        row = {"check": item.name.removeprefix("test_"), "result": RESULTS[report.outcome]}
        figures = dict(report.user_properties)
        ROWS.append(row | ({"reason": reason} if reason else {}) | figures)
    return report


STARTED = time.monotonic()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the table, a row a test, and one line of JSON, which a file keeps, too."""
    if not ROWS:
        return
    terminalreporter.section("what held")
    for row in ROWS:
        others = (f"{k} {v}" for k, v in row.items() if k not in ("check", "result"))
        terminalreporter.write_line(f"{row['check']:62} {row['result']:13} {', '.join(others)}")
    results = [row["result"] for row in ROWS]
    counts = {result.replace(" ", "_"): results.count(result) for result in RESULTS.values()}
    seconds = round(time.monotonic() - STARTED, 1)
    about = {"benchmark": "gpu_check", "small": read_option(config, "--small"), "seconds": seconds}
    line = json.dumps({**about, **counts, "rows": ROWS}, default=str)
    (read_option(config, "--logs") / "figures.json").write_text(f"{line}\n")
    terminalreporter.write_line(line)
