"""The live page in a real browser, beside a real driver whose trials train nothing."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe

from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import list_pending
from tests.support.browser import open_browser, wait
from tests.support.free_ports import find_free_port
from tests.support.killed_sweeps import KilledSweep, kill_driver, wait_for_condition
from tests.support.paths import ROOT
from tests.support.tuning import load_code_spec
from tests.support.web import build_guard, build_view, serve_page, unpack_finished_sweep

pytestmark = pytest.mark.browser

PATIENCE = 60.0
OVERRIDES = (
    "search.trials=200",
    "search.sampler=random",
    "search.scheduler={type: fifo}",
    "search.merges.budget=0",
    "search.checkpoints.budget=0",
    "training.steps=40",
    "resources={cpus: 1}",
    "constraints={}",
)
THEMES = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 30)"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    sweep = KilledSweep(tmp_path_factory.mktemp("sweep"), OVERRIDES, fake=True)
    sweep.set_faults({"all": "slow"})
    return sweep


@pytest.fixture(scope="module")
def driver(sweep):
    """Start the driver of the sweep; yield once trials of the search run."""
    with sweep.start() as process:
        wait_for_condition(process, lambda: len(sweep.list_starts()) > 3, sweep.read_errors)
        yield process
        if process.poll() is None:
            kill_driver(process, whole_machine=True)


@contextmanager
def watch(sweep, port):
    """Run the command; yield the address that it prints, and its process."""
    command = [sys.executable, "-m", "gdpo_tune.watch", str(sweep.spec.directory)]
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            yield re.search(r"http://\S+", line)[0], process
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def address(sweep, driver):
    with watch(sweep, find_free_port()) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Return a function that opens the page; a script that fails fails the test."""
    contexts, errors = [], []

    def open_address(address, **options):
        contexts.append(browser.new_context(viewport={"width": 1400, "height": 1800}, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(error))
        page.on("console", lambda m: errors.append(m.text) if is_problem(m) else None)
        page.goto(address)
        return page

    yield open_address
    for context in contexts:
        context.close()
    assert errors == [], "a script failed, or the policy of the page forbade something"


def is_problem(message):
    # A refused request, or one to a server that has ended, is one of the network.
    return message.type == "error" and "Failed to load resource" not in message.text


@pytest.fixture
def page(open_page, address):
    page = open_page(address)
    wait(lambda: get_kind(page) == "running")
    return page


def get_kind(page):
    return page.evaluate("document.getElementById('status').dataset.kind")


def list_requests(sweep):
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return list(ledger.get_requests())


def wait_for_request(page, sweep, count):
    """Wait until the ledger has so many requests; return the last, which was applied."""
    found = wait(lambda: (r := list_requests(sweep)) and len(r) >= count and r)
    request = found[-1]
    assert request.outcome == "applied", request.reason
    assert request.author.endswith(" (page)")
    wait(lambda: f">{request.text}<" in read_requests(page))
    wait(lambda: "pending" not in read_requests(page))
    return request


def read_requests(page):
    return page.inner_html("#requests")


def test_the_page_shows_the_sweep_and_hides_the_token(page):
    wait(lambda: page.query_selector_all("#running tr"))
    wait(lambda: page.query_selector_all("#front .main-svg"))
    wait(lambda: page.query_selector_all("#curves .main-svg"))
    assert "token" not in page.url
    assert page.evaluate("document.cookie") == ""
    row = page.locator("#running tr").first
    before = row.locator(".progress small").inner_text()
    assert re.match(r"step \d+ of 40, \d+ s", before)
    page.evaluate("window.isTheSame = true")
    wait(lambda: page.locator(".progress small").first.inner_text() != before)
    assert page.evaluate("window.isTheSame")


@pytest.mark.parametrize("theme", THEMES)
def test_nothing_is_cut_off_and_axe_finds_nothing_in_both_themes(open_page, address, theme):
    page = open_page(address, color_scheme=theme)
    drawn = "document.querySelector('#front .main-svg').style.background"
    right = "document.querySelector('#front .main-svg').getBoundingClientRect().right"
    for width in (800, 1400):
        page.set_viewport_size({"width": width, "height": 1800})
        wait(lambda: page.query_selector_all("#front .main-svg"))
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == THEMES[theme]
        wait(lambda: page.evaluate(drawn) == THEMES[theme])
        wait(lambda: page.evaluate("document.documentElement.scrollWidth <= innerWidth"))
        wait(lambda width=width: page.evaluate(right) <= width)
        for table in ("running-table", "ended-table"):
            fits = "(box) => box.scrollWidth <= box.clientWidth"
            assert page.locator(f"#{table}").evaluate(fits), table
    wait(lambda: page.query_selector_all("#running tr"))
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_a_trial_is_stopped(page, sweep):
    count = len(list_requests(sweep))
    latest = wait(lambda: page.query_selector_all("#running tr"))[-1]
    number = int(latest.get_attribute("data-number"))
    page.click(f"#running tr[data-number='{number}'] .stop")
    page.click("#confirmation-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.arguments == {"trial": number}
    ended = f"#ended tr[data-number='{number}'] .state.pruned"
    wait(lambda: page.query_selector_all(ended))


def test_a_trial_is_cloned_with_changes(page, sweep):
    count = len(list_requests(sweep))
    page.click("#running tr .clone")
    page.wait_for_selector("#configuration", state="visible")
    rate = page.locator("#field-learning_rate")
    old = float(rate.input_value())
    rate.fill("0.000123")
    page.click("#configuration-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.action == "clone"
    assert request.arguments["changes"] == {"learning_rate": 0.000123}
    assert old != 0.000123
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        original = ledger.get_record(request.arguments["trial"]).params
        assert request.effect.point.items() <= {**original, "learning_rate": 0.000123}.items()


def test_a_clone_has_the_values_that_a_change_brings_into_effect(open_page, tmp_path):
    rate = "{log: [3.0e-5, 3.0e-4], when: {normalization: [gdpo]}}"
    spec = load_code_spec(tmp_path, [f"space.learning_rate={rate}"])
    view, sweep = build_view(spec)
    guard = build_guard()
    with Ledger.open(spec) as ledger, closing(sweep), serve_page(view, guard) as client:
        ledger.begin_session(time.time(), 2, {}, "random")
        params = spec.space.complete_baseline({"normalization": "grpo"})
        ledger.start(params, "search", "model", seed=0)
        page = open_page(f"{client.base_url}/?token={guard.token}")
        page.click("#running tr .clone")
        page.wait_for_selector("#configuration", state="visible")
        assert page.is_disabled("#field-learning_rate")
        page.select_option("#field-normalization", '"gdpo"')
        shown = float(page.input_value("#field-learning_rate"))
        page.click("#configuration-send")
        (file,) = wait(lambda: list_pending(spec.directory))
    changes = file.request.arguments["changes"]
    assert changes == {"normalization": "gdpo", "learning_rate": pytest.approx(shown, rel=1e-3)}


def test_a_configuration_is_added_by_keyboard_alone(page, sweep):
    count = len(list_requests(sweep))
    page.press("#add", "Enter")
    page.wait_for_selector("#configuration", state="visible")
    page.press("#field-normalization", "Home")
    page.press("#field-normalization", "ArrowDown")
    page.press("#field-group_size", "ArrowDown")
    page.press("#field-learning_rate", "Enter")
    request = wait_for_request(page, sweep, count + 1)
    assert request.action == "add"
    assert request.effect.point["normalization"] == "grpo"


def test_a_value_outside_of_the_space_is_said_and_needs_a_tick(page, sweep):
    count = len(list_requests(sweep))
    page.click("#add")
    page.wait_for_selector("#configuration", state="visible")
    rate = page.locator("#field-learning_rate")
    rate.fill("0.01")
    assert "outside of the searched range" in page.inner_text("#fields")
    page.click("#configuration-send")
    problem = page.locator("#configuration-problem")
    wait(lambda: "outside of the space" in problem.inner_text())
    assert len(list_requests(sweep)) == count
    page.click("#force")
    page.click("#configuration-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.effect.point["learning_rate"] == 0.01


def test_the_number_of_trials_changes(page, sweep):
    count = len(list_requests(sweep))
    field = page.locator("#trials")
    assert field.input_value() == "200"
    field.fill("1")
    field.press("Enter")
    answer = page.locator("#answer")
    wait(lambda: "have started already" in answer.inner_text())
    field.fill("204")
    field.press("Enter")
    wait_for_request(page, sweep, count + 1)
    wait(lambda: field.get_attribute("data-shown") == "204")


def test_the_sweep_is_paused_and_resumed(page, sweep):
    count = len(list_requests(sweep))
    page.click("#pause")
    assert wait_for_request(page, sweep, count + 1).action == "pause"
    wait(lambda: get_kind(page) == "paused")
    wait(lambda: page.inner_text("#pause") == "Resume")
    page.click("#pause")
    assert wait_for_request(page, sweep, count + 2).action == "resume"
    wait(lambda: get_kind(page) == "running")


@pytest.mark.parametrize("hours", [-1, 1])
def test_times_are_those_of_the_server_whatever_the_clock_of_the_browser(browser, address, hours):
    """gearpump#1479: RFC 9110, 6.6.1: `Date` is when the answer was made."""
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.add_init_script(
            f"const now = Date.now.bind(Date); Date.now = () => now() + {hours * 3_600_000}"
        )
        page.goto(address)
        wait(lambda: get_kind(page) == "running")
        wait(lambda: page.inner_text(".progress small"))
        assert " h " not in page.inner_text(".progress small")
        assert " h " not in page.inner_text("#time-left")


def test_a_server_that_is_silent_takes_no_requests(open_page, address):
    """node-red-dashboard#618: a dead tunnel neither answers nor ends the connection."""
    page = open_page(address)
    wait(lambda: get_kind(page) == "running")
    page.route("**/api/state", lambda route: None)
    wait(lambda: get_kind(page) == "away")
    assert "No answer since" in page.inner_text("#status-text")
    assert not page.locator("#pause").is_enabled()
    page.unroute("**/api/state")
    wait(lambda: get_kind(page) == "running")
    assert page.locator("#pause").is_enabled()


def test_an_open_page_outlives_its_server_and_the_driver(open_page, sweep, driver):
    port = find_free_port()
    with watch(sweep, port) as (address, _):
        page = open_page(address)
        wait(lambda: get_kind(page) == "running")
    wait(lambda: get_kind(page) == "away")
    assert not page.locator("#pause").is_enabled()
    kill_driver(driver, whole_machine=True)
    with watch(sweep, port) as (again, _):
        assert again == address
        wait(lambda: get_kind(page) == "ended")
        text = page.inner_text("#status-text")
        assert text == "The driver has ended; run the same command to resume."
        assert not any(b.is_enabled() for b in page.query_selector_all(".stop"))
        assert page.locator("#pause").is_enabled()  # a request waits for the driver
        with sweep.start() as process:
            wait(lambda: get_kind(page) == "running")
            kill_driver(process, whole_machine=True)


def test_a_finished_sweep_and_an_unchanged_one_is_not_drawn_again(open_page, tmp_path):
    directory = unpack_finished_sweep(tmp_path)
    sweep = KilledSweep(tmp_path, (), fake=True)
    assert sweep.spec.directory == directory
    with watch(sweep, find_free_port()) as (address, _):
        page = open_page(address)
        wait(lambda: get_kind(page) == "finished")
        wait(lambda: page.query_selector_all("#front .main-svg"))
        page.evaluate(
            "window.changes = 0;"
            "new MutationObserver((found) => { window.changes += found.length; })"
            ".observe(document.body, {subtree: true, childList: true, characterData: true,"
            " attributes: true});"
        )
        time.sleep(3.5)
        assert page.evaluate("window.changes") == 0
        sizes = page.evaluate(
            "JSON.stringify(performance.getEntriesByType('resource')"
            ".filter((entry) => entry.name.endsWith('/api/state')).map((e) => e.decodedBodySize))"
        )
        assert [size for size in json.loads(sizes)[1:] if size] == []
