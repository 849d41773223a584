"""Pictures, tables and the report: they show what the simulator says, and need nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from pipeplan.cluster import Cluster
from pipeplan.emit.comparison import ComparedPlan, Comparison, compare_with_baselines
from pipeplan.emit.figure import COLOUR_BY_KIND, draw_timelines, shade, timeline_svg
from pipeplan.emit.report import render_report
from pipeplan.emit.tables import bubble_table, comparison_table, format_ms, memory_table
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.simulate import Timeline, simulate
from pipeplan.units import format_gb


@pytest.fixture
def timeline(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """The plan's timeline."""
    return simulate(plan, profile, cluster)


def compared(name: str, makespan_ns: int, *, fits: bool = True) -> ComparedPlan:
    """Return a row of which only name, time and fit matter."""
    return ComparedPlan(name=name, makespan_ns=makespan_ns, bubble_fraction=0.1, peak_memory_bytes=1, fits=fits)


def test_figure_has_a_box_for_every_op(timeline: Timeline) -> None:
    """The boxes of each rank start and end when its ops do."""
    axes = draw_timelines((None, timeline)).axes[0]
    boxes = set()
    for collection in axes.collections:
        for path in collection.get_paths():
            extent = path.get_extents()
            boxes.add((round((extent.y0 + extent.y1) / 2), round(extent.x0, 6), round(extent.x1, 6)))
    expected = {
        (rank, round(timed.start_ns / 1e6, 6), round(timed.end_ns / 1e6, 6))
        for rank, ops in enumerate(timeline.ops_by_rank)
        for timed in ops
    }
    assert boxes == expected


@pytest.mark.parametrize(("slower", "label"), [(1.0, "time (ms)"), (1e-4, "time (µs)"), (1e6, "time (ms)")])
def test_axis_of_short_and_of_long_batches(slower: float, label: str, timeline: Timeline) -> None:
    """Ticks are plain numbers in a unit that suits the batch, whatever its length."""
    scaled = replace(
        timeline,
        makespan_ns=max(1, round(timeline.makespan_ns * slower)),
        ops_by_rank=tuple(
            tuple(
                replace(timed, start_ns=round(timed.start_ns * slower), end_ns=round(timed.end_ns * slower))
                for timed in ops
            )
            for ops in timeline.ops_by_rank
        ),
    )
    svg = timeline_svg((None, scaled))
    assert label in svg
    assert "1e" not in "".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))


def test_svg_is_valid_and_repeatable(timeline: Timeline) -> None:
    """The SVG is well-formed XML, refers to nothing outside, and is the same every time."""
    svg = timeline_svg(("predicted", timeline), ("measured", timeline))
    ElementTree.fromstring(svg)
    assert svg == timeline_svg(("predicted", timeline), ("measured", timeline))
    assert not [link for link in re.findall(r'href="([^"]+)"', svg) if not link.startswith("#")]


def test_colours_differ_in_brightness() -> None:
    """Kinds that meet in one plan differ in luminance too, so that a grey print still tells them apart."""

    def luminance(colour: str) -> float:
        channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    by_name = {kind.name: luminance(colour) for kind, colour in COLOUR_BY_KIND.items()}
    assert abs(by_name["F"] - by_name["I"]) > 0.15
    assert abs(by_name["F"] - by_name["W"]) > 0.1


def test_shade_keeps_the_first_stage_and_pales_the_last() -> None:
    """Shading runs from the colour itself towards white, never to white."""
    assert shade("#56B4E9", 0, 3) == "#56B4E9"
    assert shade("#000000", 2, 3) > shade("#000000", 1, 3) > "#000000"
    assert shade("#000000", 2, 3) < "#FFFFFF"


def test_tables_say_what_the_timeline_says(plan: Plan, cluster: Cluster, timeline: Timeline) -> None:
    """Every rank's busy time, ramp-up, inner and ramp-down idle time, and peak stand in the tables."""
    bubbles = bubble_table(plan, timeline).rows
    memory = memory_table(timeline, cluster)
    for rank in range(2):
        bubble, peak = timeline.bubble_by_rank[rank], timeline.memory_by_rank[rank]
        times = (timeline.busy_ns_by_rank[rank], bubble.ramp_up_ns, bubble.inner_ns, bubble.ramp_down_ns)
        assert bubbles[rank][3:7] == tuple(format_ms(value) for value in times)
        assert memory.rows[rank][6] == format_gb(peak.total)
    totals = [peak.total for peak in timeline.memory_by_rank]
    assert memory.highlighted == totals.index(max(totals))


@pytest.mark.parametrize(
    ("baselines", "words"),
    [
        ([compared("1F1B", 1000)], "10.0% less time"),
        ([compared("1F1B", 910)], "under 2%, so 1F1B serves as well"),
        ([compared("ZB-V", 500, fits=False), compared("1F1B", 1000)], "10.0% less time"),
        ([compared("ZB-V", 500, fits=False)], "No baseline fits"),
    ],
)
def test_verdict_is_honest(baselines: list[ComparedPlan], words: str) -> None:
    """A gain under 2 % is called small, and only baselines that fit count."""
    comparison = Comparison(plan=compared("this plan", 900), baselines=tuple(baselines), lower_bound_ns=800)
    assert words in comparison.verdict
    assert "12.5% above" in (comparison_table(comparison).footnote or "")


@pytest.mark.parametrize(
    ("makespan_ns", "fits", "best_fits", "words"),
    [
        (1100, True, True, "10.0% more time than 1F1B"),
        (900, False, True, "does not fit into the memory; 1F1B does"),
        (900, False, False, "No baseline fits into the memory; the plan does not either"),
    ],
)
def test_a_plan_that_loses_or_does_not_fit(makespan_ns: int, fits: bool, best_fits: bool, words: str) -> None:
    """A plan by hand may be slower than a baseline, or too large; neither is called a gain."""
    plan, best = compared("this plan", makespan_ns, fits=fits), compared("1F1B", 1000, fits=best_fits)
    assert words in Comparison(plan=plan, baselines=(best,)).verdict


@pytest.mark.parametrize("is_optimal", [False, True])
def test_a_bound_of_one_layout_is_said_to_be(is_optimal: bool) -> None:
    """Where the bound was proved for the given layout only, the sentence on it says so."""
    comparison = Comparison(
        plan=compared("this plan", 900),
        baselines=(),
        lower_bound_ns=900,
        is_optimal=is_optimal,
        is_bound_of_layout=True,
    )
    assert "of this partition and placement" in (comparison_table(comparison).footnote or "")
    general = replace(comparison, is_bound_of_layout=False)
    assert "partition" not in (comparison_table(general).footnote or "")


def test_a_plan_that_takes_no_time() -> None:
    """A profile of zeros, such as a draft, has no ratios and no gain; the table stands all the same."""
    comparison = Comparison(plan=compared("this plan", 0), baselines=(compared("1F1B", 0),), lower_bound_ns=0)
    assert comparison.gain == 0.0
    assert [row[5] for row in comparison_table(comparison).rows] == ["", "", ""]


def test_each_order_stands_once_with_its_best_fitting_split() -> None:
    """Of one order's splits the table shows the fastest that fits, even where a faster one does not."""
    rows = [
        replace(compared("1F1B", 900, fits=False), split="parameters"),
        replace(compared("1F1B", 1000), split="uniform"),
        replace(compared("1F1B", 950), split="time-balanced"),
    ]
    comparison = Comparison(plan=compared("this plan", 900), baselines=tuple(rows))
    assert [(row.split, row.makespan_ns) for row in comparison.best_by_order] == [("time-balanced", 950)]


def test_comparison_of_a_given_plan(plan: Plan, profile: Profile, cluster: Cluster, timeline: Timeline) -> None:
    """A plan shown later is compared with every named order, and no baseline is below the bound."""
    comparison = compare_with_baselines(plan, timeline, profile, cluster)
    assert {"1F1B", "GPipe", "ZB-H1"} <= {row.name for row in comparison.baselines}
    assert comparison.lower_bound_ns is not None
    assert all(row.makespan_ns >= comparison.lower_bound_ns for row in comparison.baselines)


class _Links(HTMLParser):
    """Collects tags and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links.extend(value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset"))


def test_report_is_self_contained(plan: Plan, profile: Profile, cluster: Cluster, timeline: Timeline) -> None:
    """The report holds timeline and tables, fetches nothing, runs nothing, and fits a phone's width."""
    comparison = compare_with_baselines(plan, timeline, profile, cluster)
    html = render_report(plan, profile, cluster, timeline, comparison, "deepspeed …")
    page = _Links()
    page.feed(html)
    assert page.tags.count("table") == 3
    assert "svg" in page.tags
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in html
    assert re.search(r"url\((?!#)", html) is None
    assert 'name="viewport" content="width=device-width' in html
    assert format_ms(timeline.makespan_ns) in html
    assert comparison.verdict in html
