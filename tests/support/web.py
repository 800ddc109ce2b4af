"""A sweep for the live page, in its own ledger, and a server of its page."""

import gzip
import shutil
import threading
import time
from contextlib import contextmanager

import httpx

from gdpo_tune.core.events import Outlook
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.lifecycle import RequestInbox
from gdpo_tune.web.guard import Guard
from gdpo_tune.web.live_sweep import LiveSweep
from gdpo_tune.web.page_content import View
from gdpo_tune.web.page_server import build_app, build_server, open_socket
from tests.support.free_ports import find_free_port
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome

TOKEN = "t" * 43
STORED = ROOT / "tests" / "data" / "code_sweep"


def apply_requests(ledger):
    """Apply what waits for the driver, as the driver does."""
    return list(RequestInbox(ledger).take())


def start_sweep(spec, *, ended=2, running=1, slots=2):
    """Begin a ledger with trials that ended and that run; return it, open for writing."""
    ledger = Ledger.open(spec)
    ledger.begin_session(time.time() - 60, slots, {}, "random")
    for number in range(ended + running):
        weight = {"reward_weights.format": 0.1 * (number + 1)}
        ledger.start(spec.space.complete_baseline(weight), "search", "model", seed=70 + number)
        if number < ended:
            ledger.complete(number, build_outcome(0.9 - 0.2 * number, 0.2 + 0.2 * number, 0.5))
        else:
            report_step(ledger, number, 1)
    return ledger


def report_step(ledger, number, step, *, rung=True):
    cost = Cost(step * ledger.spec.training.completions_per_step, 2.0 * step, 1.0 * step)
    values = {name: Estimate(0.1 * step, 0.01) for name in ledger.spec.required_metrics}
    metrics = {f"train/rewards/{name}/mean": 0.05 * step for name in ledger.spec.objectives}
    append_step(ledger.get_trial_directory(number), Measurement(step, metrics, cost))
    if rung:
        ledger.record_rung(number, Measurement(step, metrics, cost, values))


def plan_trials(spec, records, hours, waiting):
    """Return an outlook on ten trials and those that requests have added."""
    return Outlook(10 + len(waiting), 10_000.0)


def build_view(spec):
    """Return a view of a sweep that reads at every call, and the sweep, which has to be closed."""
    sweep = LiveSweep(lambda: spec, clock=lambda: 0.0)
    return View(sweep, plan_trials, str(spec.directory)), sweep


def build_guard(names=frozenset(), clock=time.monotonic, proxied=()):
    """Return a guard whose token is known."""
    return Guard(TOKEN, frozenset(names), clock, frozenset(proxied))


@contextmanager
def serve_page(view, guard, root_path=""):
    """Serve a page in a thread; yield a client of it without the token.

    `{}` in `root_path` stands for its port.
    """
    listener, _ = open_socket("127.0.0.1", find_free_port())
    root_path = root_path.format(listener.getsockname()[1])
    server = build_server(build_app(view, guard, root_path))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def unpack_finished_sweep(directory):
    target = directory / "runs" / "code"
    target.mkdir(parents=True)
    shutil.copy(STORED / "spec.yaml", target)
    with gzip.open(STORED / "ledger.journal.gz") as source:
        (target / "ledger.journal").write_bytes(source.read())
    return target
