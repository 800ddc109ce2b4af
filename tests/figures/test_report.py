import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from gdpo_tune.analysis.front import build_front, find_parents, summarize_origins
from gdpo_tune.core.events import Incident
from gdpo_tune.core.text import format_number, format_percent, get_mode
from gdpo_tune.figures import style
from gdpo_tune.figures.front_png import DPI, draw_front, draw_front_svg, write_front_png
from gdpo_tune.figures.report_page import build_report, write_report
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import list_result_warnings
from tests.support.figures import NASTY, add_candidates, make_records, make_spec, write_steps

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Collects tags and texts, and refuses tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            name == tag and all(found.get(k) == v for k, v in attributes.items())
            for name, found in self.tags
        )


def page_of(spec, records) -> Page:
    return Page(build_report(Sweep(spec, records)).replace(get_plotlyjs(), ""))


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


SIZES = pytest.mark.parametrize(("objectives", "search"), [(1, 0), (2, 1), (3, 16), (4, 1)])


@SIZES
def test_the_report_is_well_formed_for_any_size(tmp_path, objectives, search):
    spec = make_spec(tmp_path, objectives)
    page = page_of(spec, make_records(spec, search))
    assert page.count("tr", **{"data-state": "complete"}) == search + 2
    assert "identity" in page.text


def test_an_empty_sweep_says_so_with_its_scoring_and_ending(spec):
    page = page_of(spec, [])
    for text in ("No trial is complete yet.", "No trial has started yet."):
        assert text in page.text
    for text in ("Warnings", "scoringstrict", "Node losses and retries"):
        assert text not in page.text
    spec = spec.model_copy(update={"scoring": "released"})
    ended = Page(build_report(Sweep(spec, [], [{"ending": "the budget of 2 hours is spent"}]))).text
    assert "scoringreleased" in ended
    assert "the budget of 2 hours is spent" in ended


def test_the_picture_without_scripts_needs_no_style_and_is_the_same_each_time(spec):
    """`style` is blocked where scripts are; an attribute of the same name is not (SVG 2, 6.6)."""
    front = build_front(make_records(spec, 6), spec.list_objectives())
    picture = draw_front_svg(front, spec.name)
    assert picture == draw_front_svg(front, spec.name)
    assert 'fill="#' in picture
    for forbidden in ("style", "script", "http", "<!--", "$x$"):
        assert forbidden not in picture
    ids = re.findall(r' id="([^"]+)"', picture)
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', picture)) <= set(ids)


def test_nothing_is_fetched_from_anywhere(spec):
    html = build_report(Sweep(spec, make_records(spec, 6)))
    assert html.count(get_plotlyjs()) == 1
    page = Page(html.replace(get_plotlyjs(), ""))
    assert not any("src" in attributes for _, attributes in page.tags)
    links = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert len(links) > 5
    assert {link[:1] for link in links} == {"#"}
    assert {link[1:] for link in links} <= ids
    assert "http" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "sendChartToCloud" in html.replace(get_plotlyjs(), "")


def test_a_full_report_counts_and_shows_reasons_that_cannot_run(spec):
    records = make_records(spec, 6, failed=(3, 4))
    lost = Incident(0.0, "is tried again: <b>", (3,))
    left_out = [{"prompts_left_out.test": "1 of 9"}, {"prompts_left_out.train": "3 of 12"}] * 4
    records = [
        replace(record, environment={"sandbox": "full", **environment})
        for record, environment in zip(records, left_out, strict=True)
    ]
    session = {"started": 0.0, "finished": 9.0, "slots": 2, "incidents": [lost]}
    page = Page(build_report(Sweep(spec, records, [session])).replace(get_plotlyjs(), ""))
    assert NASTY in page.text
    assert page.count("tr", **{"data-state": "failed"}) == 2
    assert not any(tag == "script" and "alert" in str(attrs) for tag, attrs in page.tags)
    volume = build_front(records, spec.list_objectives()).hypervolume
    for text in (
        *("2 failed", format_number(volume), str(spec.directory.absolute())),
        "prompts too long, left outtest 1 of 9, train 3 of 12",
        *("Node losses and retries", "trial 3 is tried again: <b>"),
        "The last trial started or ended at",
    ):
        assert text in page.text


def test_a_report_with_checkpoints_and_merges(spec):
    records = add_candidates(make_records(spec, 12, replicates=3, failed=(4,)))
    for record in records[1:]:
        write_steps(record)
    page = page_of(spec, records)
    ids = {attributes.get("id") for tag, attributes in page.tags if tag == "div"}
    figures = ("pairs", "all", "progress", "training")
    assert {f"figure-{name}" for name in figures} <= ids
    for text in ("merge-18", "0.25 x 2@60 + 0.75 x 3@60", "18, 19", "checkpoint 2@40"):
        assert text in page.text
    front = build_front(records, spec.list_objectives())
    ends, checkpoints, merges = summarize_origins(front)
    assert min(checkpoints.share, merges.share) > 0
    for origin in (ends, checkpoints, merges):
        assert format_number(origin.hypervolume) in page.text
        assert format_percent(origin.share) in page.text
    assert "61,440" in page.text  # completions of 16 trainings
    assert "1,024" in page.text  # completions of 2 evaluations of merges
    assert "Origins of the front" in page.text
    assert "Origins of the front" not in page_of(spec, records[:-3]).text


def test_equal_records_give_equal_files_that_appear_whole_and_alone(spec, tmp_path):
    sweep = Sweep(spec, make_records(spec, 6))
    for write, name in ((write_report, "report.html"), (write_front_png, "front.png")):
        first = write(sweep)
        assert first == spec.directory / name
        content = first.read_bytes()
        assert write(sweep).read_bytes() == content
        assert write(sweep, tmp_path / "new" / name).read_bytes() == content
    assert sorted(path.name for path in spec.directory.iterdir()) == ["front.png", "report.html"]


@SIZES
def test_the_png_is_a_png_of_the_expected_size(tmp_path, objectives, search):
    spec = make_spec(tmp_path, objectives)
    path = write_front_png(Sweep(spec, make_records(spec, search)))
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[i : i + 4]) for i in (16, 20))
    panels = {1: 1, 2: 1, 3: 3, 4: 3}[objectives]
    assert width >= panels * 3.5 * DPI
    assert height >= 3.5 * DPI * (2 if objectives == 4 else 1)
    assert [entry.name for entry in spec.directory.iterdir()] == ["front.png"]


def test_the_png_uses_the_reports_colours_and_hollow_marks(tmp_path):
    spec = make_spec(tmp_path, 2)
    front = build_front(make_records(spec, 14, replicates=2), spec.list_objectives())
    axis = draw_front(front, "x").axes[0]
    marks = {
        (line.get_xdata()[0], line.get_ydata()[0]): line
        for line in axis.lines
        if line.get_linestyle() == "None" and len(line.get_xdata()) == 1
    }
    searched = [member for member in front.members if member.role == "search"]
    assert searched
    for member in searched:
        line = marks[member.get_values(front.objectives)]
        mark = style.get_mark(get_mode(member.params))
        assert line.get_markeredgecolor() == mark.color
        assert line.get_marker() == mark.matplotlib
        assert (line.get_markerfacecolor() == style.PAPER) == member.is_provisional


def test_the_png_has_symbols_of_candidates_and_lines_to_parents(tmp_path):
    spec = make_spec(tmp_path, 2)
    front = build_front(add_candidates(make_records(spec, 8)), spec.list_objectives())
    figure = draw_front(front, "x")
    lines = figure.axes[0].lines
    for role, (name, mark) in style.CANDIDATES.items():
        (candidate,) = [c for c in front.members if c.role == role]
        point = candidate.get_values(front.objectives)
        (line,) = [m for m in lines if (*m.get_xdata(), *m.get_ydata()) == point]
        assert (line.get_marker(), line.get_markeredgecolor()) == (mark.matplotlib, mark.color)
        assert name in {text.get_text() for text in figure.legends[0].get_texts()}
    (merge,) = [c for c in front.members if c.role == "merge"]
    start = merge.get_values(front.objectives)
    drawn = {tuple(zip(m.get_xdata(), m.get_ydata(), strict=True)) for m in lines}
    for parent in find_parents(front, merge):
        assert (start, parent.get_values(front.objectives)) in drawn


def test_no_text_of_the_png_leaves_the_picture(spec):
    front = build_front(make_records(spec, 16, replicates=3), spec.list_objectives())
    figure = draw_front(front, "name")
    figure.draw_without_rendering()
    whole = figure.bbox.padded(1)
    for axis in figure.axes:
        for text in [*axis.texts, axis.xaxis.label, axis.yaxis.label]:
            box = text.get_window_extent()
            assert whole.contains(box.x0, box.y0)
            assert whole.contains(box.x1, box.y1)


def test_the_empty_png_says_so(spec):
    figure = draw_front(build_front([], spec.list_objectives()), "x")
    texts = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert texts == {"no trial is complete yet"}


HALFWAY = """
import sys, threading, time
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

halfway, go_on = threading.Event(), threading.Event()


class Pause(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "pandas.core.api":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def pause_and_execute(module):
            halfway.set()
            go_on.wait()
            execute(module)

        spec.loader.exec_module = pause_and_execute
        return spec


def waits_for_pandas(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        lock = frame.f_locals.get("self")
        if frame.f_code.co_name == "acquire" and getattr(lock, "name", "") == "pandas":
            return True
        frame = frame.f_back
    return False


def finish_once_somebody_waits():
    main = threading.main_thread()
    while main.is_alive() and not waits_for_pandas(main):
        time.sleep(0.01)
    go_on.set()


sys.meta_path.insert(0, Pause())
threading.Thread(target=__import__, args=("pandas",)).start()
halfway.wait()
threading.Thread(target=finish_once_somebody_waits).start()

from gdpo_tune.figures.report_page import write_report
import plotly.graph_objects as go

go.Figure(go.Scatter(x=[1, 2], y=[3, 4]))
assert go_on.is_set()
print(hasattr(sys.modules["pandas"], "DataFrame"))
"""


def test_pandas_is_whole_before_plotly_looks_for_it():
    """Another thread imports it while the report is drawn, and is in the middle of that."""
    done = subprocess.run(
        [sys.executable, "-c", HALFWAY], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "True\n", done.stderr


def test_a_full_disk_is_named_and_left_as_it_was(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*report\.html"):
        write_report(Sweep(make_spec(tmp_path), []), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_warnings_stand_in_the_report_and_that_of_the_knee_comes_first(spec):
    records = make_records(spec, 20)
    front = build_front(records, spec.list_objectives())
    warnings = [str(warning) for warning in list_result_warnings(spec, front)]
    assert front.knee_shortfall
    page = page_of(spec, records)
    assert all(warning[1:] in page.text for warning in warnings)
    assert page.text.count(warnings[0][1:]) == 2
    assert page.count("p", **{"class": "warning"}) == 1


def test_a_supervised_start_is_named_beside_the_other_baselines(tmp_path):
    spec = make_spec(tmp_path, objectives=2)
    records = make_records(spec, 4)
    start = replace(records[0], number=len(records), role="start")
    page = Page(build_report(Sweep(spec, [*records, start])))
    assert page.text.count("supervised start") >= 3  # legend, front and trials
    assert "trained on demonstrations" in build_report(Sweep(spec, [*records, start]))
    assert write_front_png(Sweep(spec, [*records, start])).is_file()
