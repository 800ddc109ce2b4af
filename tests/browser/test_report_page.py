"""The report in a real browser: its figures, the choice of a policy, widths, themes and axe."""

import re
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.trial_files import shorten_completion, write_completions
from gdpo_tune.core.trials import Rung
from gdpo_tune.figures.front_plotly import draw_pairs
from gdpo_tune.figures.report_page import write_report
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.spec.model import Constraint
from tests.support.browser import open_browser
from tests.support.figures import add_candidates, make_records, make_spec, write_steps

pytestmark = pytest.mark.browser

WIDE, NARROW, PHONE = 1400, 800, 390
DARK_PAPER = "rgb(20, 24, 30)"


def write_made_up_report(directory, objectives=3, search=48, **options):
    spec = make_spec(directory, objectives)
    spec = spec.model_copy(update={"constraints": {"mean_length": Constraint(op="<=", bound=60)}})
    records = [
        replace(r, rungs=(Rung(60, r.validation, r.cost),)) if r.is_training else r
        for r in add_candidates(make_records(spec, search, **options))
    ]
    for record in records[1:]:
        write_steps(record)
    for record in records:
        sample = shorten_completion("Write f(x).", f"of {record.number}", {"correctness": 1.0})
        write_completions(record.directory, [sample])
    return spec, records, write_report(Sweep(spec, records))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    return write_made_up_report(directory, replicates=4, failed=(4, 7))


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser, sweep):
    """Return a function that opens a report; a script that fails fails the test."""
    contexts, errors = [], []

    def open_report(width=WIDE, scheme="light", file=sweep[2]):
        viewport = {"width": width, "height": 1000}
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(f"file://{file}")
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture
def page(open_page):
    return open_page()


def read_choice(page):
    """Return the selected candidate, the text for --pick, and how many members fit."""
    data = page.locator("#choose").evaluate("form => ({...form.dataset})")
    return data["selected"], data["pick"], int(data["fitting"])


def set_limit(page, label, value):
    page.get_by_label(f"{label}: exact value").fill(str(value))


# Figures and tables


def test_every_figure_is_drawn(page):
    drawn = ("pairs", "all", "effects", "slices", "progress", "training")
    for name in drawn:
        assert page.locator(f"#figure-{name} .main-svg").count() > 0
    assert page.locator(".plot-container.plotly").count() == len(drawn)


def test_a_click_sorts_numbers_and_keeps_missing_values_last(page):
    head = page.locator("table.sortable th").filter(has_text=re.compile("^correctness$"))
    column = head.evaluate("head => head.cellIndex")
    read = f"rows => rows.map(row => row.cells[{column}].dataset.sort)"
    orders = []
    for direction in ("ascending", "descending"):
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == direction
        orders.append(page.locator("table.sortable tbody tr").evaluate_all(read))
    rising, falling = orders
    values = [float(value) for value in rising if value]
    assert values == sorted(values)
    assert len(values) > 10
    assert rising[-2:] == falling[-2:] == ["", ""]
    assert [float(value) for value in falling if value] == values[::-1]


def test_the_page_requests_no_other_resource(page):
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", DARK_PAPER)]
)
def test_page_and_figures_have_the_colours_that_the_browser_prefers(open_page, scheme, paper):
    page = open_page(scheme=scheme)
    color = "getComputedStyle(document.body).backgroundColor"
    figure = "document.querySelector('#figure-progress .main-svg').style.background"
    assert page.evaluate(color) == page.evaluate(figure) == paper
    axis = page.locator("#figure-all .axis path.domain").first
    stroke = axis.evaluate("line => getComputedStyle(line).stroke")
    assert stroke not in (paper, "rgb(0, 0, 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window(open_page, scheme):
    page = open_page(WIDE, scheme)
    hidden = "box => box.scrollWidth - box.clientWidth"
    for kind in ("front", "sortable", "values"):  # all columns of the tables are in sight
        assert page.locator(f".scroll:has(table.{kind}):visible").first.evaluate(hidden) <= 1
    for width in (WIDE, NARROW, PHONE):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_timeout(500)  # figures are drawn again
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = page.locator("#figure-pairs .nsewdrag")
        ends = boxes.evaluate_all("all => all.map(box => box.getBoundingClientRect().right)")
        assert len(ends) == 3
        assert all(end <= width for end in ends)
        assert page.locator(".wide:has(#figure-pairs)").evaluate(hidden) <= 0


def test_the_legend_is_not_under_the_buttons(open_page):
    page = open_page(1366)
    page.locator("#figure-pairs").hover()
    buttons = page.locator("#figure-pairs .modebar").bounding_box()
    legend = page.locator("#figure-pairs .legend").bounding_box()
    assert legend["x"] + legend["width"] <= buttons["x"]


JENKINS = "sandbox allow-same-origin; default-src 'none'; img-src 'self'; style-src 'self';"


@pytest.mark.parametrize("policy", ["", "sandbox", "script-src 'none'", JENKINS])
def test_where_scripts_are_blocked_the_front_is_a_picture(browser, sweep, policy):
    """A policy blocks scripts without `noscript` being shown; it may forbid styles and images too.

    Source: Jenkins, Configuring Content Security Policy (its default); HTML, 4.12.2 (noscript).
    """
    context = browser.new_context(java_script_enabled=bool(policy))
    page = context.new_page()
    headers = {"Content-Security-Policy": policy} if policy else {}
    body = sweep[2].read_text(encoding="utf-8")
    answer = {"body": body, "headers": {**headers, "Content-Type": "text/html"}}
    page.route("**", lambda route: route.fulfill(**answer))
    page.goto("http://artifacts.example/report.html")
    picture = page.locator("#figure-pairs svg").bounding_box()
    assert picture["width"] > 600
    assert picture["height"] > 250
    # Controls that do nothing here are not shown.
    assert page.locator("#choose:visible, button.copy:visible").count() == 0
    front = build_front(sweep[1], sweep[0].list_objectives())
    marks = page.locator("#figure-pairs svg use").count()
    assert marks > 3 * len(front.configurations)
    fill = "all => [...new Set(all.map(one => getComputedStyle(one).fill))].length"
    assert page.locator("#figure-pairs svg use").evaluate_all(fill) > 3
    boxes = page.locator(".figure .still p")
    assert boxes.count() == page.locator(".figure").count() > 5
    page.wait_for_timeout(2500)  # the words wait for a script that draws the figure
    assert all(boxes.nth(index).is_visible() for index in range(boxes.count()))
    assert "which are blocked here" in boxes.first.inner_text()
    context.close()


def test_a_drawn_figure_replaces_its_picture(page):
    assert page.locator(".still").count() == 0


# Choice


def test_the_knee_is_chosen_first_and_always_in_sight(page, sweep):
    spec, records, _ = sweep
    front = build_front(records, spec.list_objectives())
    assert read_choice(page) == (front.knee.name, "knee", len(front.members))
    shown = page.locator("table.front tbody tr:visible").evaluate_all(
        "rows => rows.map(row => row.dataset.candidate)"
    )
    labelled = {m.name for m in front.members if front.list_labels(m)}
    assert set(shown) == labelled | {baseline.name for baseline in front.baselines}
    scroll = page.locator(".scroll:has(table.front)")
    assert scroll.evaluate("box => box.scrollHeight <= box.clientHeight + 1")
    page.get_by_role("button", name="Show all", exact=False).nth(0).click()
    assert page.locator("table.front tbody tr:visible").count() > len(shown)


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_the_page_chooses_as_the_command_does(open_page, tmp_path, objectives):
    spec, records, file = write_made_up_report(tmp_path, objectives, 60)
    front = build_front(records, spec.list_objectives())
    page = open_page(file=file)
    rules = page.locator("#prefer option").evaluate_all("all => all.map(one => one.value)")
    assert len(rules) == objectives + 1
    values = sorted(member.mean["correctness"].mean for member in front.members)
    lengths = sorted(member.mean["mean_length"].mean for member in front.members)
    for least in ("", 0.3, values[len(values) // 2], values[-1]):
        for most in ("", lengths[len(lengths) // 2]):
            set_limit(page, "correctness at least", least)
            set_limit(page, "mean length at most", most)
            for rule in rules:
                page.locator("#prefer").select_option(rule)
                selected, pick, fitting = read_choice(page)
                parsed = parse_pick(pick)
                assert len(parsed.conditions) == (least != "") + (most != "")
                if fitting:
                    assert pick_trial(Sweep(spec, records), parsed).name == selected
                    continue
                with pytest.raises(Exception, match="nothing on the front satisfies this") as found:
                    pick_trial(Sweep(spec, records), parsed)
                assert selected in str(found.value)


def test_a_slider_hides_what_is_beyond_it_and_writes_the_commands(page, sweep):
    spec, records, _ = sweep
    front = build_front(records, spec.list_objectives())
    slider = page.get_by_label("format at least", exact=True)
    slider.focus()
    for _ in range(25):
        slider.press("ArrowRight")
    limit = float(page.get_by_label("format at least: exact value").input_value())
    fitting = {m.name for m in front.members if m.mean["format"].mean >= limit}
    assert 0 < len(fitting) < len(front.members)
    selected, pick, count = read_choice(page)
    assert (pick, count) == (f"knee where format >= {limit:g}", len(fitting))
    assert selected in fitting
    assert f"{count} of {len(front.members)} policies" in page.get_by_role("status").inner_text()
    faded = page.locator("tr.misfit").evaluate_all("rows => rows.map(row => row.dataset.candidate)")
    assert set(faded) == {m.name for m in front.members} - fitting
    page.wait_for_timeout(200)  # the figure follows in the next frame
    points = page.evaluate(
        "document.getElementById('figure-pairs').data.filter(trace => trace.customdata)"
        ".flatMap(trace => trace.customdata.map((name, i) =>"
        " [name, trace.marker.opacity[i], trace.error_x ? trace.error_x.array[i] : 0]))"
    )
    assert {name for name, opacity, _ in points if opacity < 1} == set(faded)
    assert all(reach == 0 for name, _, reach in points if name in faded)
    assert any(reach > 0 for name, _, reach in points if name in fitting)
    with_bars = "document.getElementById('figure-pairs').data.filter(t => t.error_x).length"
    assert page.evaluate(with_bars) == sum(
        trace.error_x.array is not None for trace in draw_pairs(front, spec.constraints).data
    )
    card = page.locator("article.card:visible")
    assert card.get_attribute("data-candidate") == selected
    commands = page.locator(".command:visible code").all_inner_texts()
    assert any(f"gdpo_tune.report {spec.directory} --pick '{pick}'" in c for c in commands)
    assert any("gdpo_tune.export" in command and f"'{pick}'" in command for command in commands)
    assert any(f"gdpo_tune.merge {spec.directory} --toward" in command for command in commands)
    page.get_by_role("button", name="Reset", exact=True).click()
    page.wait_for_function("document.querySelectorAll('tr.misfit').length === 0")
    assert read_choice(page)[1] == "knee"


def test_what_is_no_number_is_no_missing_limit(page):
    """Issue 55: "1e" in a field dropped its limit without a word."""
    set_limit(page, "correctness at least", 0.5)
    before = read_choice(page)
    assert before[1] == "knee where correctness >= 0.5"
    field = page.get_by_label("correctness at least: exact value")
    field.press_sequentially("e")
    status = page.get_by_role("status").inner_text()
    assert status == "The limit of correctness is not a number, so nothing has changed."
    assert read_choice(page) == before
    field.press("Backspace")
    assert "policies on the front fit" in page.get_by_role("status").inner_text()


def test_what_is_shown_already_has_no_button(open_page, tmp_path):
    """Issue 55: one policy had a button "Show all 1 policies"."""
    page = open_page(file=write_made_up_report(tmp_path, 1, 2)[2])
    assert page.get_by_role("button", name="Show all", exact=False).count() == 0


@pytest.mark.parametrize("objectives", [2, 4])
def test_on_a_small_phone_nothing_overlaps_or_leaves_the_page(open_page, tmp_path, objectives):
    """Issue 55: at 320 pixels labels of points and of axes lay on each other."""
    page = open_page(320, file=write_made_up_report(tmp_path, objectives, 30)[2])
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    overlaps = page.locator(".figure").evaluate_all(
        "all => all.flatMap(figure => { const boxes = [...figure.querySelectorAll("
        "'.annotation-text, .xtick text, .axis-title')].map(text => [text.textContent,"
        " text.getBoundingClientRect()]).filter(([text, box]) => text && box.width > 0);"
        "return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>"
        " Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 &&"
        " Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 2)"
        ".map(([b]) => `${figure.id}: ${a} | ${b}`)); })"
    )
    assert overlaps == []


def test_a_large_screen_is_filled(open_page):
    """Issue 55: on a 4K screen 60 % of the page was empty."""
    page = open_page(3840)
    width = page.locator("body").bounding_box()["width"]
    assert width >= 0.7 * 3840
    panel = page.locator("#figure-pairs .nsewdrag").first.bounding_box()
    assert panel["height"] > 0.6 * panel["width"], "a figure keeps its shape"


def test_the_page_says_what_to_loosen_if_nothing_fits(page):
    set_limit(page, "correctness at least", 0.999)
    set_limit(page, "format at least", 0.1)
    status = page.get_by_role("status").inner_text()
    assert "No policy on the front fits" in status
    assert "loosen correctness >= 0.999." in status
    assert "format" not in status
    merge = page.locator("#choose-merge code").inner_text()
    assert "--toward 'correctness >= 0.999 and format >= 0.1'" in merge
    page.get_by_role("button", name="Loosen", exact=True).click()
    assert read_choice(page)[2] > 0
    assert page.get_by_label("format at least: exact value").input_value() == "0.1"


def test_a_name_and_a_point_select_a_policy_with_its_completions(page, sweep):
    spec, records, _ = sweep
    front = build_front(records, spec.list_objectives())
    other = next(m for m in front.members if not front.list_labels(m) and m.role == "search")
    page.get_by_role("button", name="Show all", exact=False).nth(0).click()
    page.locator(f"[data-select='{other.name}']").click()
    assert read_choice(page)[:2] == (other.name, other.name)
    column = page.locator(f"[data-column='{other.name}']:visible")
    place = column.evaluate("head => head.parentElement.cellIndex")
    cell = page.locator("table.completions tbody tr").first.locator(f":nth-child({place + 1})")
    assert cell.first.inner_text().startswith(f"of {other.numbers[0]}")
    heads, cells = (
        page.locator(f"table.completions {part}:visible").count()
        for part in ("thead th", "tbody tr:first-child > *")
    )
    assert heads == cells < page.locator("table.completions thead th").count()
    card = page.locator("article.card:visible")
    card.get_by_role("link", name="Sample completions").click()
    assert page.evaluate("location.hash") == "#sample-completions"
    card.get_by_role("link", name=str(other.first), exact=True).click()
    assert page.locator(f"tr#trial-{other.first}:target").is_visible()
    page.evaluate(
        "name => { const figure = document.getElementById('figure-pairs');"
        "figure.emit('plotly_click', { points: [{ customdata: name }] }); }",
        front.knee.name,
    )
    assert read_choice(page)[0] == front.knee.name
    assert column.count() == 0


def test_the_chosen_policy_is_selected(open_page, tmp_path):
    spec, records, _ = write_made_up_report(tmp_path, 3, 12)
    dominated = next(
        c
        for c in build_front(records, spec.list_objectives()).configurations
        if c.role == "search" and not c.is_on_front
    )
    chosen = pick_trial(Sweep(spec, records), parse_pick(dominated.name))
    page = open_page(file=write_report(Sweep(spec, records, chosen=chosen)))
    assert read_choice(page)[:2] == (dominated.name, dominated.name)
    assert (
        page.locator("article.card:visible h3").inner_text().startswith(f"trial {dominated.name}")
    )


def test_a_report_without_a_front_opens(open_page, tmp_path):
    spec = make_spec(tmp_path)
    page = open_page(file=write_report(Sweep(spec, [])))
    assert "No trial is complete yet." in page.inner_text("body")
    page = open_page(file=write_report(Sweep(spec, make_records(spec, 0)[:1])))
    assert page.locator("#choose").count() == 0


# Accessibility and print


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(open_page, scheme):
    page = open_page(WIDE, scheme)
    set_limit(page, "correctness at least", 0.5)
    for width in (WIDE, NARROW):
        page.set_viewport_size({"width": width, "height": 1000})
        found = Axe().run(page).response["violations"]
        assert {rule["id"]: [node["target"] for node in rule["nodes"]] for rule in found} == {}


def test_the_contents_lead_to_sections(page):
    links = page.locator("nav a")
    assert links.count() > 8
    for href in links.evaluate_all("all => all.map(link => link.getAttribute('href'))"):
        assert page.locator(f"section{href}").count() == 1
    top = page.locator("nav").bounding_box()["y"]
    page.mouse.wheel(0, 3000)
    page.wait_for_timeout(300)
    assert abs(page.locator("nav").bounding_box()["y"] - top) < 200


def test_on_paper_tables_are_whole_and_controls_are_gone(open_page):
    page = open_page(scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != DARK_PAPER
    assert not page.locator("#choose").is_visible()
    rows = page.locator("table.front tbody tr")
    assert page.locator("table.front tbody tr:visible").count() == rows.count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = page.locator(".figure .main-svg").evaluate_all("all => all.map(f => f.clientWidth)")
    assert max(widths) <= 700
    paper = "document.querySelector('#figure-progress .main-svg').style.background"
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    # pydynamicreporting#628: a heading and its caption stay with the figure below them.
    styles = "all => all.map(each => [getComputedStyle(each).breakAfter, each.tagName])"
    kept = page.locator("section > h2, section > p, .card h3").evaluate_all(styles)
    assert {value for value, _ in kept} == {"avoid"}
    whole = "all => all.map(each => getComputedStyle(each).breakInside)"
    parts = page.locator(".figure, .card, tr, section > p").evaluate_all(whole)
    assert set(parts) == {"avoid"}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
