"""The pages: complete without a network, readable in every case, labels that do not overlap."""

import itertools
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_results import failed, repeats, stale

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.report import page as page_of, plots
from paramserver.tools.report.cases import cases_of
from paramserver.tools.report.findings import findings
from paramserver.tools.report.page import NO_PLOTS, write_report
from paramserver.tools.report.results import Results
from paramserver.tools.report.tables import Table, resources_table, rounds_table, throughput_table

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # look_at_report is a module of the checkout

from tests.measure import look_at_report

BROWSER = look_at_report.find_chromium()
HOSTILE = "a|b <script>alert(1)</script> & `x` -- $y$ --> \"q\" 'z'"
LATE = {"slow": {"trainer": 1, "factor": 5.0, "probability": 1.0}}
LONG = "server.consistency=async, server.transport=shared_memory, training.batch_size=32"


def near(speed, seed, count=3):
    draws = random.Random(seed)
    return [speed * (1 + draws.gauss(0, 0.02)) for _ in range(count)]


def two():
    return repeats("rpc, 2 trainers", near(5200, 1)) + repeats("ddp, 2 trainers", near(4600, 2), mode="ddp", servers=0)


def many():
    """Every kind of case, of 1, 2 and 4 trainers, with long names."""
    records = repeats("local", near(3000, 0), mode="local", trainers=1, servers=0, baseline="local")
    for t in (1, 2, 4):
        alone = {"mode": "local", "servers": 0, "baseline": "no communication"}
        records += repeats(f"no communication {t} trainers", near(2900 * t, t), trainers=t, **alone)
        records += repeats(f"ddp {t} trainers, {LONG}", near(2700 * t**0.8, t + 10), mode="ddp", servers=0, trainers=t)
        for c in ("sync", "async"):
            old = stale({0: 30, t: 100, 2 * t: 20}, {1: 5}) if c == "async" else stale({0: 100})
            keys = {"server.consistency": c}
            predicted = {"communication_ms": 4.0, "built": "one server", "bandwidth_bytes_s": 1e9, "latency_s": 1e-5}
            fields = {"trainers": t, "overrides": keys, "staleness": old, "predicted": predicted}
            target = {"target": {"accuracy": 0.95}, "time_to_target_s": 3.0, "samples_to_target": 9000.0}
            records += repeats(f"rpc {t} trainers, {c}, {LONG}", near(2800 * t**0.85, t + 20), **fields, **target)
    old = stale({i: 200 // (i + 1) for i in range(60)})
    records += repeats(f"late, {LONG}", near(900, 7), trainers=4, scenario=LATE, staleness=old)
    return [*records, failed(f"broken, {LONG}", error="PeerLost: rank 2 is gone\nmore")]


def results(records, *notes):
    return Results("results.jsonl", tuple(records), notes)


class Reader(HTMLParser):
    """Text, elements and ids; an element that is not closed where it should be fails."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
        assert not any(name.startswith("on") for name, _ in attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def plain(text):
    return re.sub(r"\s+", " ", text.replace("`", ""))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "out" / "deep"
    written = write_report(results(many(), "A note."), folder)
    assert [path.name for path in written] == ["report.html", "report.md"]
    return folder


def test_one_file_shows_everything_without_a_network(page):
    html = (page / "report.html").read_text()
    reader = read(html)
    assert all(link.startswith("#") for link in reader.links)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.seen)
    assert len(reader.ids) == len(set(reader.ids))
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(reader.ids)
    assert "default-src 'none'" in html
    assert 'name="viewport"' in html
    assert not re.findall(r"@import|url\((?!#)", html)


def test_every_picture_is_there_in_both_pages(page):
    names = {"throughput", "scaling", "steps", "phases", "loss-seconds", "loss-samples", "staleness"}
    names |= {"validation-0-seconds", "validation-0-samples"}
    assert {path.stem for path in (page / "plots").iterdir()} == names
    html, text = ((page / f"report.{kind}").read_text() for kind in ("html", "md"))
    assert read(html).seen.count("svg") == len(names) == html.count('role="img"')
    assert set(re.findall(r"\]\(plots/(.*)\.svg\)", text)) == names
    for name in names:
        root = ElementTree.parse(page / "plots" / f"{name}.svg").getroot()
        marks = [one for one in root.iter() if one.tag.endswith(("path", "use"))]
        assert len(marks) > 20
        assert root.attrib["aria-label"]


def test_rounds_have_a_table_and_a_curve(tmp_path):
    plain = repeats("rpc", near(5200, 1), wire_bytes_per_sample=7268.0)
    assert not rounds_table(cases_of(plain)).rows
    curve = {"local_steps": ((100.0, 1.0, 32.0), (200.0, 2.0, 16.0)), "drift": ((100.0, 1.0, 0.2), (200.0, 2.0, 0.1))}
    records = plain + repeats("rounds", near(6000, 2), wire_bytes_per_sample=142.0, quantities=curve)
    write_report(results(records), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| `rounds` | 24 (24 to 24) | 0.150 (0.150 to 0.150) | 142 (142 to 142) |" in text
    assert "| `rpc` | - | - | 7268 (7268 to 7268) |" in text
    assert "plots/drift.svg" in text
    assert "With rounds of local steps a step is a round." in text


def test_every_finding_figure_and_condition_is_in_both_pages(page):
    cases = cases_of(many())
    html = plain("".join(read((page / "report.html").read_text()).text))
    text = plain((page / "report.md").read_text().replace("\\|", "|"))
    wanted = [*findings(cases), "A note.", *(case.name for case in cases)]
    wanted += ["0123456789abcdef", "green with 8 cores", "paramserver.benchmark --config 'a & b.yaml'", "2.13.0"]
    wanted += ["task: digits.py:Digits training: batch_size: 32", "PeerLost: rank 2 is gone", "samples/s", "p99 (ms)"]
    wanted += ["server.consistency=async", "trainer 1 slowed 5 times", "wire per step (KiB)", "95 %", "results.jsonl"]
    for sentence in wanted:
        assert plain(sentence) in html
        assert plain(sentence) in text


def test_the_first_lines_are_the_findings(page):
    lines = [line for line in (page / "report.md").read_text().split("\n") if line]
    assert lines[0].startswith("# ")
    assert lines[1].startswith("15 cases, 3 repeats of 5 s each, on green with 8 cores")
    assert lines[2].startswith("- With 1 trainer: ")


def test_tables_are_sorted_by_speed():
    table = throughput_table(cases_of(many()))
    assert table.titles[1] == "samples/s"
    speeds = [float(row[1]) for row in table.rows]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == len([case for case in cases_of(many()) if case.speed])
    assert all(len(row) == len(table.titles) for row in table.rows)


def test_bytes_that_were_not_counted_name_their_source():
    computed = {"wire_bytes_source": "computed, ring all-reduce"}
    rows = resources_table(cases_of([*repeats("ddp", near(100, 1), **computed), *repeats("rpc", near(90, 2))])).rows
    assert [row[1].partition(" (")[2] for row in rows] == [
        "4688 to 4688) (computed, ring all-reduce)",
        "4688 to 4688)",
    ]


def test_names_and_errors_are_text_whatever_they_hold(tmp_path):
    records = repeats(HOSTILE, near(100, 1), target={HOSTILE: 1.0}, staleness=stale({0: 1, 1: 1}))
    records = [*records, failed(f"other {HOSTILE}", error=f"Error: {HOSTILE}")]
    write_report(results(records, HOSTILE), tmp_path)
    reader = read((tmp_path / "report.html").read_text())
    assert "script" not in reader.seen
    assert "alert(1)" in "".join(reader.text)
    text = (tmp_path / "report.md").read_text()
    for block in text.split("\n\n"):
        if block.startswith("|"):
            bars = {line.replace("\\|", "").count("|") for line in block.split("\n")}
            assert len(bars) == 1
    assert "\n<script" not in text
    for file in (tmp_path / "plots").glob("*.svg"):
        ElementTree.parse(file)


def test_without_matplotlib_all_but_the_plots_and_one_sentence(tmp_path, monkeypatch, page):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(results(many()), tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "svg" not in read(html).seen
    assert (tmp_path / "report.md").read_text().count(NO_PLOTS.replace("`", "")) == 1
    assert "".join(read(html).text).count("matplotlib") == 1
    with_plots = (page / "report.html").read_text()
    assert html.count("<tr>") == with_plots.count("<tr>")
    assert not (tmp_path / "plots").exists()


def test_nothing_completed_makes_a_page_too(tmp_path):
    write_report(results([failed("rpc", environment={}), failed("ddp", error=None)]), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "No case was completed" in text
    assert "TaskError: no data" in text
    assert "no reason is known" in text


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedConfiguration, match="--out"):
        write_report(results(two()), tmp_path / "file" / "out")


# In a browser.


if BROWSER is not None:  # conftest.py reports in one sentence where it is missing

    @pytest.mark.parametrize("screen", look_at_report.SCREENS)
    def test_a_browser_shows_every_picture_and_no_label_over_another(page, screen):
        size = look_at_report.SCREENS[screen]
        assert look_at_report.browser_messages(BROWSER, page / "report.html", size, "--dump-dom") == []
        account = look_at_report.page_layout(BROWSER, page / "report.html", size)
        assert len(account["pictures"]) == 9
        assert sum(len(picture["labels"]) for picture in account["pictures"]) > 100
        assert look_at_report.faults(account) == []

    def test_a_browser_reports_errors_and_labels_that_overlap(tmp_path):
        """The test above can fail."""
        label = '<g id="a-text_{}"><!-- {} --><path d="M{} 5h9v9z"/></g>'
        inner = label.format(1, "one", 10) + label.format(2, "two", 15) + label.format(3, "far", 195)
        (tmp_path / "bad.html").write_text(
            "<html><body><script>throw new Error('mine')</script><div style='width:3000px'>wide</div>"
            f"<figure><svg width='200' height='50'>{inner}</svg><svg width='0' height='0'></svg></figure></body></html>"
        )
        size = look_at_report.SCREENS["desk"]
        assert "mine" in "".join(look_at_report.browser_messages(BROWSER, tmp_path / "bad.html", size, "--dump-dom"))
        found = look_at_report.faults(look_at_report.page_layout(BROWSER, tmp_path / "bad.html", size))
        for complaint in ("wider than the screen", "'one' and 'two' overlap", "'far' leaves", "0 by 0 pixels"):
            assert sum(complaint in one for one in found) == 1


# Markdown and HTML.


def test_a_block_has_the_same_content_in_both_forms():
    blocks = [
        page_of.heading("T", 1),
        page_of.paragraph("a `b` <c>"),
        page_of.bullets(["one `x`", "two"]),
        page_of.code("``` fenced\n\n<d>"),
        page_of.table(Table(("n", "v"), [("`p|q`", "1"), ("r\\|s", "")])),
        page_of.picture(plots.Picture("p", "<svg></svg>", "the `caption`")),
        page_of.paragraph("lone ` here <e>"),
    ]
    text = "\n\n".join(block.markdown for block in blocks)
    html = page_of.to_html("T", blocks)
    assert "a `b` &lt;c>" in text
    assert "````\n``` fenced\n\n<d>\n````" in text
    assert "| `p\\|q` | 1 |" in text
    assert "| --- | ---: |" in text
    assert "<h1>T</h1>" in html
    assert "a <code>b</code> &lt;c&gt;" in html
    assert "<ul>\n<li>one <code>x</code></li>\n<li>two</li>\n</ul>" in html
    assert "<pre>``` fenced\n\n&lt;d&gt;</pre>" in html
    assert '<td><code>p|q</code></td><td data-title="v">1</td>' in html
    assert '<td>r\\|s</td><td data-title="v"></td>' in html
    caption = "<figcaption>the <code>caption</code></figcaption>"
    assert f'<figure>\n<div class="picture" tabindex="0"><svg></svg></div>\n{caption}\n</figure>' in html
    assert "<p>lone ` here &lt;e&gt;</p>" in html


# Plots.


def draw(records):
    """Draws the plots of records; the figures by name."""
    figures = {}

    def keep(figure, name, caption):
        figures[name] = figure
        return f"<svg>{caption}</svg>"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", keep)
        plots.draw(cases_of(records))
    return figures


@pytest.fixture(scope="module")
def of_two():
    return draw(two())


@pytest.fixture(scope="module")
def of_many():
    return draw(many())


def texts_of(figure):
    """Every visible text with its box."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in shown]
    area = figure.bbox
    ticks = {id(t) for axes in figure.axes for t in _ticks_outside(axes)}
    return [(text, box) for t, (text, box) in zip(shown, boxes, strict=True) if id(t) not in ticks], area


def _ticks_outside(axes):
    """Labels of ticks beyond the limits, which are not drawn."""
    for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                yield from (tick.label1, tick.label2)


@pytest.mark.parametrize("which", ["of_two", "of_many"])
def test_no_label_overlaps_another_or_leaves_the_picture(request, which):
    figures = request.getfixturevalue(which)
    assert len(figures) >= 7
    for name, figure in figures.items():
        texts, area = texts_of(figure)
        assert len(texts) >= 4
        for text, box in texts:
            assert box.x0 >= area.x0 - 1, (name, text)
            assert box.x1 <= area.x1 + 1, (name, text)
            assert box.y0 >= area.y0 - 1, (name, text)
            assert box.y1 <= area.y1 + 1, (name, text)
        for (one, a), (other, b) in itertools.combinations(texts, 2):
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert wide <= 1 or high <= 1, (name, one, other)


def test_every_case_is_in_every_plot_of_all(of_many):
    names = {case.name for case in cases_of(many()) if case.speed is not None}
    for name in ("throughput", "steps", "phases", "loss-seconds", "validation-0-samples"):
        shown = {re.sub(r"\s+", " ", text) for text, _ in texts_of(of_many[name])[0]}
        assert names <= shown


def test_lines_differ_without_colour():
    looks = [plots._line_style(i) for i in range(40)]
    assert len({(str(look["linestyle"]), look["marker"]) for look in looks}) == 40
    assert len({plots.HATCHES[i] for i in range(7)}) == 7


def test_lengths_are_what_was_measured(of_two):
    rpc = cases_of(two())[0]
    (axes,) = of_two["throughput"].axes
    assert max(bar.get_width() for bar in axes.patches) == pytest.approx(rpc.speed.value)
    (axes,) = of_two["phases"].axes
    ends = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    ddp = cases_of(two())[1]
    assert ends == pytest.approx(sum(value for name, value in ddp.phases_ms.items() if name != "hidden"))


def test_the_ideal_line_is_as_many_times_one_process(of_two, of_many):
    (axes,) = of_many["scaling"].axes
    line = next(line for line in axes.lines if str(line.get_label()).startswith("ideal"))
    local = next(case for case in cases_of(many()) if case.name == "local")
    assert list(line.get_ydata()) == pytest.approx([local.speed.value * t for t in (1, 2, 4)])
    assert "scaling" not in of_two


def test_a_very_wide_interval_leaves_the_bars_visible():
    wide = repeats("rpc, 2 trainers", [10.0, 100.0, 300.0])
    wide += repeats("ddp, 2 trainers", [200.0, 210.0, 205.0], mode="ddp")
    assert cases_of(wide)[0].speed.high > 4e3
    (axes,) = draw(wide)["throughput"].axes
    assert axes.get_xlim()[1] < 600
    figure = draw([*wide, *repeats("rpc, 4 trainers", [40.0, 400.0, 900.0], trainers=4)])["scaling"]
    assert figure.axes[0].get_ylim()[1] < 2000


def test_the_share_of_each_staleness():
    (axes,) = draw(repeats("rpc", [1.0], staleness=stale({0: 1, 2: 2, 90: 1})))["staleness"].axes
    shares = [bar.get_height() for bar in axes.patches]
    assert (shares[0], shares[2], shares[40]) == (25, 50, 25)
    assert "or older" in axes.get_xlabel()


def test_settings_of_the_user_change_nothing():
    import matplotlib

    with matplotlib.rc_context({"font.size": 40, "axes.grid": True, "text.usetex": False}):
        texts, _ = texts_of(draw(two())["throughput"])
        assert matplotlib.rcParams["font.size"] == 40
    assert all(box.height < 30 for _, box in texts)


# Curves.


def test_a_band_is_the_mean_and_range_of_what_all_repeats_cover():
    found = plots.band([[(0.0, 0.0), (10.0, 10.0)], [(2.0, 4.0), (12.0, 14.0)]])
    assert (found.x[0], found.x[-1]) == (2.0, 10.0)
    for x, mean, low, high in zip(found.x, found.mean, found.low, found.high, strict=True):
        assert (mean, low, high) == pytest.approx((x + 1, x, x + 2))


def test_long_curves_are_smoothed_and_short_ones_kept():
    noisy = [(float(i), 5.0 + (-1) ** i) for i in range(1200)]
    found = plots.band([noisy])
    assert len(found.x) == 60
    assert max(found.mean) - min(found.mean) < 0.2
    short = [(1.0, 3.0), (2.0, 1.0)]
    assert list(zip(plots.band([short]).x, plots.band([short]).mean, strict=True)) == short
    assert plots.band([[], []]) is None


def test_curves_that_do_not_meet_or_are_points():
    apart = plots.band([[(0.0, 1.0), (1.0, 1.0)], [(5.0, 9.0), (6.0, 9.0)]])
    assert apart.x == [0.0, 1.0]
    point = plots.band([[(3.0, 1.0)], [(3.0, 2.0)]])
    assert (point.x, point.mean) == ([3.0], [1.5])
    assert all(math.isfinite(value) for value in (*point.low, *point.high))
