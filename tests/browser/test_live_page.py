"""The live page in a real browser, beside a real driver whose trials train nothing."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from gdpo_tune.ledger import Ledger
from tests.support.browser import open_browser
from tests.support.free_ports import find_free_port
from tests.support.killed_sweeps import KilledSweep, kill_driver, wait_for_condition
from tests.support.paths import ROOT
from tests.support.web import unpack_finished_sweep

pytestmark = pytest.mark.browser

PATIENCE = 60.0
WITHIN = 5.0
"""Seconds within which the driver applies a request."""
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
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile"), "--window-size=1400,1800") as browser:
        yield browser


@pytest.fixture
def page(browser, address):
    browser.get(address)
    wait(browser, lambda: get_kind(browser) == "running")
    yield browser
    errors = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    # A refused request is one of the network.
    failed = [error for error in errors if error["source"] != "network"]
    assert failed == [], "a script failed, or the policy of the page forbade something"


def wait(browser, condition, seconds=PATIENCE):
    return WebDriverWait(browser, seconds, poll_frequency=0.1).until(lambda _: condition())


def get_kind(browser):
    return browser.execute_script("return document.getElementById('status').dataset.kind")


def click(browser, css):
    element = browser.find_element(By.CSS_SELECTOR, css)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def list_requests(sweep):
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return list(ledger.get_requests())


def wait_for_request(browser, sweep, count):
    """Wait until the ledger has so many requests; return the last, applied in time."""
    found = wait(browser, lambda: (r := list_requests(sweep)) and len(r) >= count and r)
    request = found[-1]
    assert request.outcome == "applied", request.reason
    assert request.applied - request.asked < WITHIN
    assert request.author.endswith(" (page)")
    wait(browser, lambda: f">{request.text}<" in read_requests(browser))
    wait(browser, lambda: "pending" not in read_requests(browser))
    return request


def read_requests(browser):
    return browser.execute_script("return document.getElementById('requests').innerHTML")


def test_the_page_shows_the_sweep_and_hides_the_token(page):
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#running tr"))
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#front .main-svg"))
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#curves .main-svg"))
    assert "token" not in page.current_url
    assert page.execute_script("return document.cookie") == ""
    row = page.find_element(By.CSS_SELECTOR, "#running tr")
    before = row.find_element(By.CSS_SELECTOR, ".progress small").text
    assert re.match(r"step \d+ of 40, \d+ s", before)
    page.execute_script("window.isTheSame = true")
    wait(page, lambda: page.find_element(By.CSS_SELECTOR, ".progress small").text != before)
    assert page.execute_script("return window.isTheSame")


@pytest.mark.parametrize("width", [800, 1400])
@pytest.mark.parametrize("theme", THEMES)
def test_nothing_is_cut_off_in_both_themes(page, theme, width):
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.set_window_size(width, 1800)
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#front .main-svg"))
    paper = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    drawn = "return document.querySelector('#front .main-svg').style.background"
    assert page.execute_script(paper, "body") == THEMES[theme]
    wait(page, lambda: page.execute_script(drawn) == THEMES[theme])
    fits = "return document.documentElement.scrollWidth <= innerWidth"
    wait(page, lambda: page.execute_script(fits))
    right = "return document.querySelector('#front .main-svg').getBoundingClientRect().right"
    assert page.execute_script(right) <= width
    for table in ("running-table", "ended-table"):
        box = f"const box = document.getElementById('{table}');"
        assert page.execute_script(f"{box} return box.scrollWidth <= box.clientWidth"), table


def test_a_trial_is_stopped(page, sweep):
    count = len(list_requests(sweep))
    latest = wait(page, lambda: page.find_elements(By.CSS_SELECTOR, "#running tr"))[-1]
    number = int(latest.get_attribute("data-number"))
    click(page, f"#running tr[data-number='{number}'] .stop")
    click(page, "#confirmation-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.arguments == {"trial": number}
    ended = f"#ended tr[data-number='{number}'] .state.pruned"
    wait(page, lambda: page.find_elements(By.CSS_SELECTOR, ended))


def test_a_trial_is_cloned_with_changes(page, sweep):
    count = len(list_requests(sweep))
    click(page, "#running tr .clone")
    wait(page, lambda: page.find_element(By.ID, "configuration").is_displayed())
    rate = page.find_element(By.ID, "field-learning_rate")
    old = float(rate.get_attribute("value"))
    rate.clear()
    rate.send_keys("0.000123")
    click(page, "#configuration-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.action == "clone"
    assert request.arguments["changes"] == {"learning_rate": 0.000123}
    assert old != 0.000123
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        original = ledger.get_record(request.arguments["trial"]).params
        assert request.effect.point.items() <= {**original, "learning_rate": 0.000123}.items()


def test_a_configuration_is_added_by_keyboard_alone(page, sweep):
    count = len(list_requests(sweep))
    page.find_element(By.ID, "add").send_keys(Keys.ENTER)
    wait(page, lambda: page.find_element(By.ID, "configuration").is_displayed())
    Select(page.find_element(By.ID, "field-normalization")).select_by_visible_text("grpo")
    page.find_element(By.ID, "field-group_size").send_keys(Keys.ARROW_DOWN)
    page.find_element(By.ID, "field-learning_rate").send_keys(Keys.ENTER)
    request = wait_for_request(page, sweep, count + 1)
    assert request.action == "add"
    assert request.effect.point["normalization"] == "grpo"


def test_a_value_outside_of_the_space_is_said_and_needs_a_tick(page, sweep):
    count = len(list_requests(sweep))
    click(page, "#add")
    wait(page, lambda: page.find_element(By.ID, "configuration").is_displayed())
    rate = page.find_element(By.ID, "field-learning_rate")
    rate.clear()
    rate.send_keys("0.01")
    assert "outside of the searched range" in page.find_element(By.ID, "fields").text
    click(page, "#configuration-send")
    problem = page.find_element(By.ID, "configuration-problem")
    wait(page, lambda: "outside of the space" in problem.text)
    assert len(list_requests(sweep)) == count
    click(page, "#force")
    click(page, "#configuration-send")
    request = wait_for_request(page, sweep, count + 1)
    assert request.effect.point["learning_rate"] == 0.01


def test_the_number_of_trials_changes(page, sweep):
    count = len(list_requests(sweep))
    field = page.find_element(By.ID, "trials")
    assert field.get_attribute("value") == "200"
    field.clear()
    field.send_keys("1", Keys.ENTER)
    answer = page.find_element(By.ID, "answer")
    wait(page, lambda: "have started already" in answer.text)
    field.clear()
    field.send_keys("204", Keys.ENTER)
    wait_for_request(page, sweep, count + 1)
    wait(page, lambda: field.get_attribute("data-shown") == "204")


def test_the_sweep_is_paused_and_resumed(page, sweep):
    count = len(list_requests(sweep))
    click(page, "#pause")
    assert wait_for_request(page, sweep, count + 1).action == "pause"
    wait(page, lambda: get_kind(page) == "paused")
    wait(page, lambda: page.find_element(By.ID, "pause").text == "Resume")
    click(page, "#pause")
    assert wait_for_request(page, sweep, count + 2).action == "resume"
    wait(page, lambda: get_kind(page) == "running")


def test_an_open_page_outlives_its_server_and_the_driver(browser, sweep, driver):
    port = find_free_port()
    with watch(sweep, port) as (address, _):
        browser.get(address)
        wait(browser, lambda: get_kind(browser) == "running")
    wait(browser, lambda: get_kind(browser) == "away")
    assert not browser.find_element(By.ID, "pause").is_enabled()
    kill_driver(driver, whole_machine=True)
    with watch(sweep, port) as (again, _):
        assert again == address
        wait(browser, lambda: get_kind(browser) == "ended")
        text = browser.find_element(By.ID, "status-text").text
        assert text == "The driver has ended; run the same command to resume."
        assert not any(b.is_enabled() for b in browser.find_elements(By.CSS_SELECTOR, ".stop"))
        assert browser.find_element(By.ID, "pause").is_enabled()  # a request waits for the driver
        with sweep.start() as process:
            wait(browser, lambda: get_kind(browser) == "running")
            kill_driver(process, whole_machine=True)


def test_a_finished_sweep_and_an_unchanged_one_is_not_drawn_again(browser, tmp_path):
    directory = unpack_finished_sweep(tmp_path)
    sweep = KilledSweep(tmp_path, (), fake=True)
    assert sweep.spec.directory == directory
    with watch(sweep, find_free_port()) as (address, _):
        browser.get(address)
        wait(browser, lambda: get_kind(browser) == "finished")
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#front .main-svg"))
        browser.execute_script(
            "window.changes = 0;"
            "new MutationObserver((found) => { window.changes += found.length; })"
            ".observe(document.body, {subtree: true, childList: true, characterData: true,"
            " attributes: true});"
        )
        time.sleep(3.5)
        assert browser.execute_script("return window.changes") == 0
        sizes = browser.execute_script(
            "return JSON.stringify(performance.getEntriesByType('resource')"
            ".filter((entry) => entry.name.endsWith('/api/state')).map((e) => e.decodedBodySize))"
        )
        assert [size for size in json.loads(sizes)[1:] if size] == []
