"""The report in a real browser: figures are drawn, the table sorts, no request is sent."""

import re
import shutil
import subprocess

import pytest

from gdpo_tune.figures import write_report
from tests.support.figures import make_records, make_spec, write_steps

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--enable-unsafe-swiftshader",
    "--virtual-time-budget=8000",
    "--window-size=1366,4000",
]
PHONE = 390
PROBE = """
<script>
addEventListener("load", () => {
  const heads = [...document.querySelectorAll("table.sortable th button")];
  const column = heads.findIndex((head) => head.textContent === "correctness");
  const order = () => [...document.querySelectorAll("table.sortable tbody tr")]
    .map((row) => row.cells[column].dataset.sort);
  heads[column].click();
  const rising = order();
  heads[column].click();
  document.body.dataset.rising = rising.join(" ");
  document.body.dataset.falling = order().join(" ");
  document.body.dataset.width = document.documentElement.scrollWidth;
  document.body.dataset.window = innerWidth;
  document.body.dataset.paper = getComputedStyle(document.body).backgroundColor;
  const drawing = document.querySelector("#figure-progress .main-svg");
  document.body.dataset.figure = drawing.style.background;
  document.body.dataset.requests = performance.getEntriesByType("resource").length;
});
</script>
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    directory = tmp_path_factory.mktemp("report")
    spec = make_spec(directory)
    records = make_records(spec, 48, replicates=4, failed=(4, 7))
    for record in records[1:]:
        write_steps(record)
    report = write_report(spec, records)
    report.write_text(report.read_text("utf-8").replace("</body>", PROBE + "</body>"), "utf-8")
    return report


def render_page(report, *flags):
    """Return the page as Chromium renders it, after its scripts."""
    profile = f"--user-data-dir={report.parent / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, *flags, "--dump-dom", f"file://{report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


@pytest.fixture(scope="module")
def page(report):
    return render_page(report)


def read_attribute(page, name):
    return page.rpartition(f'data-{name}="')[2].partition('"')[0]


def test_every_figure_is_drawn(page):
    drawn = ("pairs", "surfaces", "all", "importance", "slices", "progress", "shares", "training")
    for name in (*drawn, "timeline"):
        assert f'id="figure-{name}"' in page
    assert page.count('class="plot-container plotly"') == len(drawn) + 1
    assert "no-webgl" not in page


def test_a_click_sorts_numbers_and_keeps_missing_values_last(page):
    rising, falling = (read_attribute(page, name).split(" ") for name in ("rising", "falling"))
    values = [float(value) for value in rising if value]
    assert values == sorted(values)
    assert len(values) > 10
    assert rising[-2:] == falling[-2:] == ["", ""]
    assert [float(value) for value in falling if value] == values[::-1]


def test_the_page_requests_no_other_resource(page):
    assert read_attribute(page, "requests") == "0"


def test_the_page_is_light_by_default(page):
    assert read_attribute(page, "paper") == read_attribute(page, "figure") == "rgb(255, 255, 255)"


def test_page_and_figures_are_dark_if_the_browser_prefers_dark(report):
    page = render_page(report, "--blink-settings=preferredColorScheme=0")
    assert read_attribute(page, "paper") == read_attribute(page, "figure") == "rgb(20, 24, 30)"


def test_on_a_phone_figures_and_tables_scroll_and_the_page_does_not(report):
    page = render_page(report, f"--window-size={PHONE},2000")
    assert int(read_attribute(page, "width")) <= int(read_attribute(page, "window"))
