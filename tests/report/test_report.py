"""Reports of runs on paper: everything is in the page, nothing leaves it, and broken or odd runs still get one."""

from __future__ import annotations

import importlib
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from deep_offload.cli import main
from deep_offload.plan.ops import Lane
from deep_offload.report import report_html, write_report
from deep_offload.report_run import read_run, thinned
from tests.report.run_files import HOSTILE, parts_drawn, start, step, whole_run, write_run

pytest.importorskip("matplotlib", reason="reports are drawn by matplotlib")
report_charts = importlib.import_module("deep_offload.report_charts")


class _Page(HTMLParser):
    """Collects addresses, ids and tags, and checks that tags are closed in order."""

    VOID = {"meta", "link", "br", "use", "path", "rect", "img", "i"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")


@pytest.fixture
def page(tmp_path) -> str:
    return report_html(read_run(write_run(tmp_path / "run", whole_run())))


def test_everything_is_there(page):
    """Curves, time split, lanes, predictions, memory, placement, warnings, checkpoints, command and environment."""
    for part in (
        "finished",
        "Loss",
        "Learning rate",
        "Gradient norm before clipping",
        "An iteration, in parts",
        "Busy share of each lane and of host memory (dram) during the update",
        "Lanes over time, measured and predicted",
        "-17 %",
        "until parameters are in place",
        "backward",
        "the loop waits",
        "Memory of the rank that logs",
        "optimizer state: 8 subgroups",
        "UserWarning",
        "checkpoint of iteration",
        "python pretrain_gpt.py",
        "NCCL_DEBUG",
        "num_layers",
        "80 %, dram",
    ):
        assert part in page, part
    assert page.count("<svg") == 8


def rows_of(page, title):
    """Cells of the table in the section of this title, by the first cell of a row."""
    section = re.search(rf"<section><h2>{title}</h2>(.*?)</section>", page, re.DOTALL)[1]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    return {unescape(cells[0]): cells[1:] for cells in rows if cells}


def test_predictions_stand_beside_what_was_measured(page):
    """Update, iteration and bytes of GPU and host: predicted, measured, and how far they are apart."""
    assert rows_of(page, "Predicted and measured") == {
        "update, until parameters are in place": ["1.5 ms", "1.8 ms", "-17 %"],
        "update, until the last flush": ["", "2.0 ms", ""],
        "lane that binds": ["dram", "dram", ""],
        "iteration": ["90.0 ms", "100.0 ms", "-10 %"],
        "GPU memory, peak": ["600.00 MiB", "512.00 MiB", "+17 %"],
        "optimizer state on the device": ["9.54 MiB", "9.54 MiB", "+0 %"],
        "optimizer state on the host": ["97.27 MiB", "95.37 MiB", "+2 %"],
        "host memory of the process, peak": ["", "1.00 GiB", ""],
    }


def test_bytes_without_offload_and_records_of_before(tmp_path):
    """Where nothing is offloaded bytes are predicted all the same; a record without them has a page without them."""
    whole = read_run(write_run(tmp_path / "whole", [start(predicted=None), step(1, update=None)], with_trace=False))
    page = report_html(whole)
    assert "no time was predicted" in page and "<td>iteration</td>" not in page
    assert rows_of(page, "Predicted and measured")["GPU memory, peak"] == ["600.00 MiB", "512.00 MiB", "+17 %"]
    old = start()
    del old["planned_bytes"], old["predicted"]["iteration_seconds"]
    page = report_html(read_run(write_run(tmp_path / "old", [old, step(1), step(2)], with_trace=False)))
    assert len(rows_of(page, "Predicted and measured")) == 3 and "planned" not in page


def lines_drawn(run, monkeypatch):
    """Curves of all charts of a page, by the chart's name."""
    drawn, draw = {}, report_charts.line_chart

    def watched(name, lines, *rest, **options):
        drawn[name] = {line.name: line for line in lines}
        return draw(name, lines, *rest, **options)

    monkeypatch.setattr(report_charts, "line_chart", watched)
    report_html(run)
    return drawn


@pytest.mark.parametrize(
    ("waits", "wait", "parts"),
    [
        (True, 0.05, [40.0, 5.0, 50.0, 5.0]),
        (True, 0.099, [0.0, 5.0, 90.0, 5.0]),
        (False, 0.004, [90.0, 5.0, 4.0, 1.0]),
        (None, 0.004, [90.0, 5.0, 4.0, 1.0]),
    ],
)
def test_parts_add_up_to_the_iteration(tmp_path, monkeypatch, waits, wait, parts):
    """What forward passes waited for is not counted twice; records of before do not say where they waited."""
    steps = [
        step(i, wait_seconds=wait, seconds=0.1, times={"forward-backward": 0.09, "optimizer": 0.005}) for i in (1, 2, 3)
    ]
    begin = start() if waits is None else start(waits_in_passes=waits)
    run = read_run(write_run(tmp_path / "run", [begin, *steps], with_trace=False))
    drawn, sums = parts_drawn(run, monkeypatch)
    assert list(drawn) == ["forward-backward", "optimizer", "waiting for the update", "everything else"]
    assert [values[0] for values in drawn.values()] == pytest.approx(parts)
    assert sums == pytest.approx([100.0, 100.0])


def test_each_start_says_where_it_waits(tmp_path, monkeypatch):
    """A run that was resumed on other ranks waits elsewhere from there on."""
    steps = [step(i, wait_seconds=0.02, times={"forward-backward": 0.07, "optimizer": 0.01}) for i in range(1, 5)]
    events = [start(waits_in_passes=False), *steps[:2], start(waits_in_passes=True), *steps[2:]]
    run = read_run(write_run(tmp_path / "run", events, with_trace=False))
    drawn, sums = parts_drawn(run, monkeypatch)
    assert drawn["forward-backward"] == pytest.approx([70.0, 50.0, 50.0])
    assert sums == pytest.approx([100.0] * 3)


def test_planned_memory_is_drawn(tmp_path, monkeypatch):
    """Dashed, beside what was measured, of the placement that held at each step: also over a change and a resume."""
    later = start(event="placement", iteration=4)
    later["planned_bytes"] = {"host": 2**30, "device": 0, "device_total": 2**31}
    steps = [step(i) for i in range(1, 6)]
    events = [start(), *steps[:3], later, *steps[3:], start(), step(5), step(6)]
    lines = lines_drawn(read_run(write_run(tmp_path / "run", events, with_trace=False)), monkeypatch)["memory"]
    assert {"host, planned state", "device, planned peak"} < set(lines) and len(lines) == 5
    planned, few = lines["device, planned peak"], 600 / 1024
    assert planned.is_predicted and not lines["device, peak"].is_predicted
    assert list(zip(planned.xs, planned.ys)) == [(1, few), (2, few), (3, few), (4, 2.0), (5, few), (6, few)]


def test_curves_have_one_point_an_iteration(tmp_path, monkeypatch):
    """The evaluation at the end makes no vertical line: of two at one iteration the last is drawn, both are listed."""
    run = read_run(write_run(tmp_path / "run", whole_run()))
    lines = lines_drawn(run, monkeypatch)
    for chart in lines.values():
        for line in chart.values():
            assert list(line.xs) == sorted(set(line.xs)), line.name
    assert lines["loss"]["validation"].ys[-1] == 3.5
    assert len(re.findall("<td>40</td><td>validation</td>", report_html(run))) == 2


def test_nothing_comes_from_a_network(page):
    """All addresses point into the page, there is no script, and the page forbids loading by itself."""
    found = _Page(page)
    assert all(address.startswith("#") or address == "data:," for address in found.addresses)
    assert "script" not in found.tags and "img" not in found.tags
    assert "default-src 'none'" in page and "@import" not in page
    urls = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert urls <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_text_of_a_run_is_text(page):
    """Markup in a command, a note or a setting is shown, never obeyed; ids are unique and references meet them."""
    assert HOSTILE not in page and "&lt;script&gt;" in page
    found = _Page(page)
    assert len(found.ids) == len(set(found.ids))
    references = {a[1:] for a in found.addresses if a.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert references and references <= set(found.ids)


def test_colors_are_variables(page):
    """Every color of a chart is a variable of the page, so that light and dark both work."""
    charts = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--ink)" in charts and "var(--s0)" in charts
    assert not re.findall(r"(?:stroke|fill): #[0-9a-f]{6}", charts)


def test_a_run_that_died(tmp_path):
    """Half a last line and no end: the page says so and shows what there is."""
    folder = write_run(tmp_path / "run", whole_run()[:20], with_trace=False, tail='{"event": "st')
    page = report_html(read_run(folder))
    assert "still running, or it died" in page and "1 lines of run.jsonl could not be read" in page
    assert "wrote no trace" in page


def test_a_run_without_steps_or_offload(tmp_path):
    """Nothing logged, nothing offloaded: sections say what is missing."""
    folder = write_run(tmp_path / "run", [start(predicted=None)], with_trace=False)
    page = report_html(read_run(folder))
    assert "no step was logged" in page and "nothing was predicted" in page and "<svg" not in page


def test_numbers_that_cannot_be_drawn(tmp_path):
    """NaN losses, infinite norms and skipped steps are left out of curves and named."""
    bad = [step(1), step(2, losses={"lm loss": float("nan")}, grad_norm=float("inf"), skipped=1), step(3, update=None)]
    page = report_html(read_run(write_run(tmp_path / "run", [start(), *bad], with_trace=False)))
    assert "iterations were skipped or not finite up to iteration 2" in page
    assert "skipped iterations" in page


def test_a_resumed_run(tmp_path):
    """The second start counts, steps done again replace the first ones, and a new placement is shown beside the old."""
    events = [start(), step(1), step(2, seconds=9.0), start(placement=["all resident"]), step(2), step(3)]
    run = read_run(write_run(tmp_path / "run", events, with_trace=False))
    assert [(s["iteration"], s["seconds"]) for s in run.steps] == [(1, 0.1), (2, 0.1), (3, 0.1)]
    page = report_html(run)
    assert "all resident" in page and "8 subgroups" in page


def test_long_runs_stay_small(tmp_path):
    """20000 steps make a page below 2 MB, and thinning keeps the highest and the lowest point."""
    steps = [step(i) for i in range(1, 20001)]
    page = report_html(read_run(write_run(tmp_path / "run", [start(), *steps], with_trace=False)))
    assert len(page) < 2e6
    xs, ys = list(range(5000)), [float(i == 3777) - float(i == 1234) for i in range(5000)]
    kept_x, kept_y = thinned(xs, ys)
    assert len(kept_x) <= 1200 and max(kept_y) == 1.0 and min(kept_y) == -1.0
    assert kept_x == sorted(kept_x)


def test_lanes_survive_the_file(tmp_path):
    """The trace reads back into measured and predicted lanes with all their operations."""
    run = read_run(write_run(tmp_path / "run", whole_run()))
    assert set(run.lanes) == {"measured", "predicted"}
    for timeline in run.lanes.values():
        assert all(timeline.lane(lane) for lane in Lane)
        assert len(timeline.spans) % 3 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "give the directory that training got as --run-dir"),
        ("", "has no start of a run in 0 lines"),
        ('{"event": "step"}\n', "it was not written by --run-dir"),
        ("[]\nnonsense\n", "has no start of a run in 2 lines"),
        ('{"event": "start"}\n', "has no start of a run in 1 lines: it was not written by --run-dir"),
        (json.dumps(start(time=None)) + "\n", "has no start of a run in 1 lines"),
    ],
)
def test_directories_that_hold_no_run(tmp_path, capsys, text, message):
    """One sentence and exit code 2."""
    if text is not None:
        (tmp_path / "run.jsonl").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def without(event, *names):
    """The event without a key, or without one of an inner object."""
    inner = event
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return event


def deep(levels):
    return json.loads("[" * levels + "]" * levels)


ODD_EVENTS = [
    {"event": ["start"]},
    {"event": "start"},
    without(start(), "time"),
    without(start(), "predicted", "binding_lane"),
    without(start(), "planned_bytes", "device_total"),
    start(time=float("inf")),
    start(time=1e300),
    start(placement="all on the CPU"),
    start(placement=[3]),
    start(config={"model": 3}),
    start(environment=deep(900)),
    start(environment={"host": deep(900)}),
    start(event="placement", state_bytes=None),
    {"event": "step"},
    without(step(3), "losses"),
    without(step(3), "update", "busy"),
    without(step(3), "memory", "host_peak"),
    step(3, losses={"lm loss": "low"}),
    step(3, seconds=float("nan")),
    step(3, wait_seconds=10**400),
    step(3) | {"iteration": "third"},
    step(3, update=[]),
    step(3, update={}),
    step(3, times={"optimizer": None}),
    {"event": "evaluation", "iteration": 3, "split": "validation"},
    {"event": "checkpoint", "iteration": 3},
    {"event": "note", "text": None},
    {"event": "end"},
]


@pytest.mark.parametrize("event", ODD_EVENTS, ids=range(len(ODD_EVENTS)))
def test_events_that_cannot_be_shown(tmp_path, event):
    """A line that lacks what a report needs, or holds something else there, is left out and counted."""
    folder = write_run(tmp_path / "run", [start(), step(1), event, step(2)], with_trace=False)
    run = read_run(folder)
    assert run.num_broken == 1 and [s["iteration"] for s in run.steps] == [1, 2]


def test_the_page_counts_what_it_leaves_out(tmp_path):
    """A run with all of them has a page, of the other events."""
    folder = write_run(tmp_path / "run", [start(), step(1), *ODD_EVENTS, step(2)], with_trace=False)
    page = report_html(read_run(folder))
    assert f"{len(ODD_EVENTS)} lines of run.jsonl could not be read" in page and "2 of 40" in page


def test_lines_that_are_no_text(tmp_path):
    """Binary, nested and endless lines are counted too; an event of a kind that nobody knows is not."""
    folder = write_run(tmp_path / "run", [start(), step(1), {"event": "of a later version"}], with_trace=False)
    with (folder / "run.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00\n" + b"[" * 100_000 + b"\n" + b'{"event": ' + b"9" * 5000 + b"}\n")
    assert read_run(folder).num_broken == 3


def trace_over(seconds):
    """A trace whose only operation has these for its start and end."""
    named = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "measured"}}
    args = {"op": "flush[0] @d2h slot 0", "seconds": seconds, "bytes": 1}
    return json.dumps({"traceEvents": [named, {"ph": "X", "cat": "flush", "pid": 0, "args": args}]}).encode()


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b"[]", trace_over(["a", None]), trace_over([1.0])],
    ids=["binary", "nested", "no object", "no numbers", "one number"],
)
def test_traces_that_cannot_be_read(tmp_path, capsys, content):
    """One sentence that names the file and says what to do."""
    folder = write_run(tmp_path / "run", whole_run(), with_trace=False)
    (folder / "trace.json").write_bytes(content)
    assert main(["report", str(folder)]) == 2
    err = capsys.readouterr().err
    assert f"{folder / 'trace.json'} cannot be read (" in err and err.count("\n") == 1
    assert "remove it to make a report without lanes" in err


def test_broken_trace_and_output(tmp_path):
    """A trace that is no JSON and a file that cannot be written get one sentence each."""
    folder = write_run(tmp_path / "run", whole_run())
    with pytest.raises(ValueError, match="cannot be written"):
        write_report(folder, tmp_path / "no" / "such" / "folder.html")
    (folder / "trace.json").write_text("{")
    with pytest.raises(ValueError, match="remove it to make a report without lanes"):
        read_run(folder)


def test_command_writes_the_page(tmp_path, capsys):
    """`report RUN_DIR` writes RUN_DIR/report.html and says where."""
    folder = write_run(tmp_path / "run", whole_run())
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
