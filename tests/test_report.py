"""launch.report: the page about a run is whole, needs nothing else, hides nothing, and has the numbers that the run has."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ejdist.sections import flat
from launch import report
from launch.errors import DONE, WRONG
from launch.reporting import chart
from launch.reporting.chart import MOST, Scale, Series, running_mean, text_of
from launch.reporting.folder import open_folder
from launch.reporting.html import tag
from recipes.schema import Recipe, compose

HOSTILE = '</td><script>alert("x")</script><img src=http://evil.example/x onerror=y>\x00'
SECTIONS = ["What is missing", "Summary", "Loss", "Throughput", "Balance of attention", "Goodput",
            "Balance of experts", "Recipe", "Plan, checks and evaluation", "Checkpoints", "Pictures"]  # fmt: skip
HUGE = 400 * "1"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20) + b"IEND\xaeB`\x82"
LEDGER = [
    {"at": 100.0, "phase": "restart", "start": True},
    {"at": 110.0, "phase": "compile"},
    {"at": 130.0, "phase": "productive", "step": 0},
    {"at": 190.0, "phase": "productive", "step": 30, "data_wait": 2.0},
    {"at": 191.0, "hosts": {"0": {"host": 0.5, "data_wait": 0.1}}, "step": 30, "steps": 30, "slow": [0]},
    {"at": 200.0, "phase": "end", "step": 30},
]
EMPTY = {"meta", "img", "br"}


class Page(HTMLParser):
    """A page, read strictly: every element is closed, in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.words, self.cells, self.texts = [], [], [], {}, {}
        self._cell = None
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, name, attributes):
        found = dict(attributes)
        assert len(found) == len(attributes), f"an attribute twice: {name} {attributes}"
        self.elements.append((name, found))
        if name not in EMPTY:
            self.open.append(name)
        self._cell = found.get("data-key", self._cell if name != "tr" else None)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        assert self.open and self.open.pop() == name, f"</{name}> closes nothing, at line {self.getpos()[0]}"
        if name == "td":
            self._cell = None

    def handle_data(self, data):
        self.words.append(data)
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if self._cell is not None:
            self.cells.setdefault(self._cell, []).append(data)

    @property
    def text(self):
        return " ".join(self.words)


def write(folder, rows=60, **files):
    """Makes the folder of a run; files of the name None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        {"step": n, "loss": 5 / math.sqrt(n), "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 4096.0, "step_time": 0.5,
         "tokens_per_second": 8192.0, "flops_causal": 1e9, "flops_full": 2e9}
        for n in range(1, rows + 1)
    ]  # fmt: skip
    summary = {"loss_first": made[0]["loss"], "loss_last": 0.6512345678901234, "steps": rows, "tokens_per_second": 8192.25,
               "mfu_causal": 0.4125, "peak_tflops_per_device": 0.01, "devices": 2, "mesh": {"sp": 2}}  # fmt: skip
    recipe = flat(compose(["recipe=long_context", f"run.steps={rows}"]))
    has = {
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in made), "summary.json": json.dumps(summary),
        "recipe.json": json.dumps(recipe), "goodput.jsonl": "".join(json.dumps(row) + "\n" for row in LEDGER),
        "loss.png": PNG,
    } | {name.replace("__", "."): content for name, content in files.items()}  # fmt: skip
    for name, content in has.items():
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    kept = folder / "checkpoints" / str(rows) / "run"
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "metadata").write_text(json.dumps({"recipe": {"run.steps": rows, "z_loss": 0.5}}))
    return folder, made, summary


def page_of(*folders, capsys=None):
    to = folders[0] / "page.html"
    names = [str(folder) for folder in folders]
    assert report.main([f"run.dir={','.join(names)}", f"to={to}"]) == DONE
    return Page(to.read_text())


@pytest.fixture
def whole(tmp_path):
    return write(tmp_path / "run")


def test_a_page_is_whole_and_needs_nothing_else(whole, capsys):
    folder, *_ = whole
    assert report.main([f"run.dir={folder}"]) == DONE
    assert f"{folder}: finished: 60 of 60 steps; 0 things missing or damaged" in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.texts["h2"] == SECTIONS and "Nothing: every file was there and could be read." in page.text
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "iframe", "object", "base"} and "svg" in names
    for name, attributes in page.elements:
        for key in ("src", "href", "srcset", "xlink:href", "action", "data"):
            assert attributes.get(key, "data:image/png;base64,").startswith("data:image/png;base64,"), (
                name,
                attributes,
            )
        assert not any(key.startswith("on") for key in attributes)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text and 'name="viewport"' in text


def test_how_even_attention_was_is_drawn_where_rows_say_so(tmp_path):
    even = {"imbalance_sp": 1.25, "imbalance_dp": 1.5, "padding_share": 0.125}
    folder, made, _ = write(tmp_path / "run", rows=3)
    assert "does not say how even attention is" in page_of(folder).text
    rows = "".join(json.dumps(row | even) + "\n" for row in made)
    page = page_of(write(tmp_path / "even", rows=3, metrics__jsonl=rows)[0])
    assert "attention of the busiest rank over the mean" in page.text and "share of tokens" in page.text


def test_numbers_are_those_of_the_summary_and_of_the_ledger(whole):
    folder, _, summary = whole
    page = page_of(folder)
    for key, value in summary.items():
        assert json.loads(page.cells[key][0]) == value, key
    assert "41.2%" in page.text and "8,192" in page.text
    assert "68.0% of 100.0 s were productive, in 1 start." in page.text
    found = {key: page.cells[key][0] for key in ("productive", "compile", "data_wait", "restart")}
    assert found == {"productive": "68.0 s", "compile": "20.0 s", "data_wait": "2.0 s", "restart": "10.0 s"}
    assert "1 of 1" in page.text, "the host that was slow"


def test_what_differs_from_the_defaults_is_marked(whole):
    folder, *_ = whole
    page = page_of(folder)
    names = [a for n, a in page.elements if n in ("tr", "td") and ("data-key" in a or n == "tr")]
    marked = {b["data-key"] for a, b in pairwise(names) if a.get("class") == "changed"}
    recipe, usual = (
        json.loads(json.dumps(flat(r))) for r in (compose(["recipe=long_context", "run.steps=60"]), Recipe())
    )
    assert marked == {key for key in recipe if recipe[key] != usual[key]}
    assert {"run.steps", "mesh.sp"} <= marked and "run.seed" not in marked
    assert json.loads(page.cells["optimizer.learning_rate"][0]) == 0.003


def test_what_is_hostile_is_text(tmp_path):
    recipe = {"run.dir": HOSTILE, HOSTILE: 1, "data.mixture": [{"source": HOSTILE}]}
    documents = {"plan__json": json.dumps({HOSTILE: [HOSTILE, {"a": HOSTILE}]}),
                 "doctor__json": json.dumps([{HOSTILE: HOSTILE}]),
                 "rehearsal__json": json.dumps([{"told": HOSTILE}])}  # fmt: skip
    row = {"step": 1, "loss": HOSTILE, "step_time": 1.0, "tokens_per_second": [], "experts/max_violation": ["x"],
           "experts/counts": [[1, HOSTILE], "x", [], [2, 0]]}  # fmt: skip
    ledger = [{"at": 1.0, "hosts": {HOSTILE: HOSTILE, "1": {"host": "x"}}, "step": HOSTILE, "slow": HOSTILE}, *LEDGER]
    folder, *_ = write(
        tmp_path / "<b>&'\"run", metrics__jsonl=json.dumps(row) + "\n", recipe__json=json.dumps(recipe),
        summary__json=json.dumps({"steps": HOSTILE, HOSTILE: HOSTILE, "loss_last": math.nan}),
        goodput__jsonl="".join(json.dumps(row) + "\n" for row in ledger), **documents,
    )  # fmt: skip
    (folder / "checkpoints" / "<script>").mkdir()
    page = page_of(folder)
    names = {name for name, _ in page.elements}
    assert not names & {"script", "b>"} and {a.get("src") for n, a in page.elements if n == "img"} <= {
        a["src"] for n, a in page.elements if n == "img" and a["src"].startswith("data:")
    }
    assert page.text.count('<script>alert("x")</script>') >= 8, "it is there to read"
    assert "loss is no number at step 1" in page.text and "\x00" not in page.text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"summary__json": None}, "summary.json is not there: the run has not come to an end"),
        ({"summary__json": "{"}, "summary.json cannot be read: Expecting property name"),
        ({"summary__json": "[1]"}, "summary.json cannot be read: it is no table of keys"),
        ({"summary__json": '{"steps": 40}'}, "summary.json is of step 40, and metrics.jsonl goes to step 60"),
        ({"metrics__jsonl": None}, "metrics.jsonl is not there: no step has been made"),
        ({"metrics__jsonl": '{"step": 1, "loss": 2.0, "step_time": 1, "tokens_per_second": 1}\ngarb\n{"step": 3, "loss'},
         "metrics.jsonl: line 2 cannot be read and is left out, nor can 1 after it"),
        ({"metrics__jsonl": '{"step": 2, "loss": 1}\n{"step": 5, "loss": null}\n{"step": 5, "loss": null}\n'},
         "of the steps 2 to 5, 2 without a row"),
        ({"metrics__jsonl": '{"step": 2, "loss": 1}\n'}, "the rows before step 2 are not there"),
        ({"metrics__jsonl": '{"step": 1, "loss": 1}\n{"step": 1, "loss": 2}\n'}, "has 1 rows of steps that another row is of"),
        ({"metrics__jsonl": '{"step": 1, "loss": null}\n'}, "metrics.jsonl: loss is no number at step 1"),
        ({"metrics__jsonl": '{"step": 1}\n{"step": 2}\n'}, "metrics.jsonl: loss is missing at step 1 and 1 more"),
        ({"recipe__json": None}, "recipe.json is not there: of the recipe only what a checkpoint keeps is shown"),
        ({"goodput__jsonl": None}, "goodput.jsonl is not there: where the time went is not known"),
        ({"goodput__jsonl": '{"at": 1.0, "phase": "restart", "start": true}\n{"at": 2'},
         "goodput.jsonl: lines that cannot be read and are left out: 1"),
        ({"goodput__jsonl": '{"at": 1, "phase": "productive", "step": "x"}\n{"at": 2, "phase": "end", "resumed": 1}\n'},
         "goodput.jsonl: lines that cannot be read and are left out: 1"),
        ({"goodput__jsonl": '{"at": 1, "phase": "restart"}\n{"at": NaN, "phase": "end"}\n'},
         "goodput.jsonl: lines that cannot be read and are left out: 1"),
        ({"metrics__jsonl": None, "rehearsal__json": "[]"}, "this is a rehearsal, whose runs are in calm/run"),
        ({"metrics__jsonl": f'{{"step": {HUGE}}}\n{{"step": 1, "loss": {HUGE}}}\n{{"step": {HUGE * 20}}}'},
         "metrics.jsonl: loss is no number at step 1"),
        ({"metrics__jsonl": '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": 2.0}\n'}, "step_time is missing at step 1"),
        ({"plan__json": "x"}, "plan.json cannot be read: Expecting value"),
        ({"loss__png": PNG[:-6]}, "loss.png is no whole picture and is left out"),
    ],
)  # fmt: skip
def test_what_is_missing_or_damaged_is_named(tmp_path, files, said):
    folder, *_ = write(tmp_path / "run", **files)
    page = page_of(folder)
    assert said in page.text and page.texts["h2"] == SECTIONS


def test_checkpoints_that_are_kept_elsewhere_are_not_missing(tmp_path):
    folder, *_ = write(tmp_path / "run", recipe__json=json.dumps({"checkpoint.dir": "gs://runs/<first>"}))
    shutil.rmtree(folder / "checkpoints")
    page = page_of(folder)
    assert "Kept in gs://runs/<first> (checkpoint.dir)." in page.text and "Nothing: every file was there" in page.text
    (folder / "recipe.json").write_text("{}")
    assert "checkpoints is not there: nothing was saved" in page_of(folder).text


def test_a_run_that_is_going_on(tmp_path):
    folder, *_ = write(tmp_path / "run", summary__json=None, recipe__json=json.dumps({"run.steps": 100}))
    assert (
        open_folder(folder, "run")
        .status()
        .startswith("going on, or cut off: 60 of 100 steps, the last one written at 20")
    )
    # It removes its older checkpoints, also between the listing of the folder and the look at each.
    (folder / "checkpoints" / "59").symlink_to("removed")
    assert 59 not in open_folder(folder, "run").checkpoints
    folder, *_ = write(tmp_path / "other", recipe__json=json.dumps({"run.steps": 100}))
    assert open_folder(folder, "run").status() == "stopped after 60 of 100 steps"


def test_many_steps_make_a_small_page_and_no_peak_is_lost():
    x = np.arange(1, 100_001.0)
    values = np.sin(x / 1000)
    values[54_320], values[70_000] = 15.0, math.nan
    s = Series.of("run", x.tolist(), [v if math.isfinite(v) else None for v in values.tolist()])
    small, most = s.reduced(1, 100_000)
    assert len(small.x) == MOST and most in (250, 251) and np.nanmax(small.high) == 15.0
    assert np.nanmin(small.low) == np.nanmin(values) and np.isfinite(small.middle).all()
    assert (small.low <= small.middle).all() and (small.middle <= small.high).all()
    assert small.middle[:10] == pytest.approx([values[n * 250 : (n + 1) * 250].mean() for n in range(10)], abs=1e-2)
    drawn = chart.chart("Loss", "nats", [s])
    assert len(drawn) < 60_000 and drawn.count('class="hole"') == 1 and "mean and range of up to 25" in drawn
    page = Page(drawn)
    assert "run, steps 53,751 to 55,000: " in page.text and "to 15)" in page.text
    zoomed = chart.chart("Loss", "", [s], closer=True)
    assert (
        "overflow:hidden" in zoomed
        and max(float(t) for t in Page(zoomed).texts["span"] if t[0] in "-0123456789" and "," not in t) <= 1
    )
    assert chart.chart("Loss", "", [Series.of("run", [1, 2, 3], [1.0, 2.0, 3.0])], closer=True) == "", (
        "nothing is hidden"
    )


def test_curves_are_where_their_numbers_are():
    drawn = chart.chart("x", "", [Series.of("a", [1, 2, 3, 5], [0.0, 10.0, None, 5.0])], zero=True)
    ((d,),) = [re.findall(r'<path d="([^"]*)" class="curve"', drawn)]
    assert d == "M0.0 1000.0h0L250.0 47.6M1000.0 523.8h0", "from 0 to 10.5, with a gap"
    layers = Series.of("a", [1, 2], [[1.0, 3.0], [2.0, 2.0, None]])
    assert layers.low[0] == 1 and layers.high[0] == 3 and layers.middle[0] == 2 and math.isnan(layers.middle[1])
    assert chart.chart("nothing", "", [Series.of("a", [1], [None])]).count("has no number") == 1


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10), [0, 2, 4, 6, 8, 10]),
        (Scale(-1e-4, 1e-4), [-1e-4, -5e-5, 0, 5e-5, 1e-4]),
        (Scale(0.9, 1100, log=True), [1, 3, 10, 30, 100, 300, 1000]),
        (Scale(1, 100_000), [20_000, 40_000, 60_000, 80_000, 100_000]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.ticks(5) == pytest.approx(ticks, abs=1e-12)
    assert [0 <= scale(t) <= 1 for t in ticks] == [True] * len(ticks)


def test_numbers_as_people_write_them():
    assert [text_of(v) for v in (0, 1234.0, 12345.0, 8.03e9, 3e-5, -2.5e6, math.nan)] == [
        "0", "1234", "12.35k", "8.03G", "3e-05", "-2.5M", "nan",
    ]  # fmt: skip
    assert running_mean(np.array([1.0, 3, math.nan, 5]), 2).tolist()[:2] == [1, 2]
    assert tag("td", ["<", tag("b", "&")], data_key='"') == '<td data-key="&quot;">&lt;<b>&amp;</b></td>'


def test_several_runs_beside_each_other(tmp_path, monkeypatch, capsys):
    one, *_ = write(tmp_path / "run.seed=1,data.packing=cut")
    two, *_ = write(tmp_path / "two", rows=40, goodput__jsonl=None)
    monkeypatch.chdir(tmp_path)
    assert report.main(["run.dir=*"]) == DONE
    page = Page((tmp_path / "report.html").read_text())
    assert page.texts["h2"] == SECTIONS and page.cells["steps"] == ["60", "40"]
    marked = [a for n, a in page.elements if n == "tr" and a.get("class") == "changed"]
    assert len(marked) == 1 and page.cells["run.steps"] == ["60", "40"], "only what differs between them"
    assert sum(n == "svg" for n, _ in page.elements) == 5, "both in one chart"
    assert "goodput.jsonl is not there" in page.text and "68.0% of" in page.text
    assert report.main([f"run.dir={one}"]) == DONE, "a comma in a folder's name is one of the name"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.dir=nowhere"], "run.dir = 'nowhere': there is no such folder; name that of a run"),
        (["run.dir=."], "run.dir = '.' has nothing of a run in it: no metrics.jsonl"),
        (["run.dir=x*"], "run.dir = 'x*' fits no folder with a metrics.jsonl"),
        (["run.dir=1,2,3,4,5,6,7,8,9"], "names 9 runs, and a page compares at most 8"),
        (["run.dir=a", "run.dir=b"], "run.dir is given twice; give it once, with commas"),
        (["dir=a"], "cannot read 'dir=a': write run.dir=DIR or to=FILE"),
        (["to=a"], "run.dir=DIR is missing"),
        (["run.dir=gs://b/a"], "run.dir = 'gs://b/a' is a URL, and this key takes a path of this machine"),
    ],
)
def test_called_wrongly(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == WRONG
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_every_file_of_the_page_is_installed():
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    assert 'launch = ["**/*.css"]' in text
