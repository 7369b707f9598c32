"""report.html, sweep.html and search.html in a real browser: quiet, offline, readable on a phone and on a desk, and open to everyone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategy_models
from report_samples import SAMPLES, fits, job_file
from strategy_models import MODELS
from strategy_oracle import Oracle
from tracker_file import Program

from mindspeed_dryrun.advise.levers import levers
from mindspeed_dryrun.advise.report_page import job_to_change
from mindspeed_dryrun.report import html
from mindspeed_dryrun.report.explain import explain_ranks
from mindspeed_dryrun.search import results
from mindspeed_dryrun.search.search import Search
from mindspeed_dryrun.search.space import Space, strategies
from mindspeed_dryrun.sweep.sweep import VariantResult, to_html
from mindspeed_dryrun.sweep.sweep_file import SweepPlan, Variant

pytestmark = pytest.mark.browser
SIZES = {"phone": (390, 844), "desk": (1440, 900)}


class Shown:
    """One page of the browser. `requests` and `problems` are what it has done since it was opened."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.problems: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))

    def open(self, file: Path, width: int, height: int, scheme: str = "light") -> None:
        """Loads a file at this size and colour scheme, and waits until it has."""
        self.requests.clear()
        self.problems.clear()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(file.as_uri())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is waited for)."""
        return self.page.evaluate(expression)


@pytest.fixture(scope="module")
def shown(browser: Any) -> Iterator[Shown]:
    context = browser.new_context(bypass_csp=True)  # axe is put into the page by the test
    yield Shown(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page for every sample, and one of a record with a tracked rank."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, make in SAMPLES.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(html.page(make()), encoding="utf-8")
    program = Program(layers=14, activation=100 << 20, weight=64 << 20).run()
    program.write(folder / "ranks" / "00000" / "memory_block.csv")
    peak = program.peak()[0] >> 20
    report = fits()
    rank = dataclasses.replace(report.ranks[0], used_peak_mb=peak, actual_peak_mb=peak + 900)
    long = "/a/long/folder/without/a/space/" * 6
    report = dataclasses.replace(
        report,
        ranks=(rank, report.ranks[1]),
        used_peak_mb=peak,
        actual_peak_mb=peak + 900,
        notes=(f"the checkpoint '{long}' is not here",),
        job=dataclasses.replace(fits().job, script=long + "train.sh"),
    )
    job = job_file(job=report.job, patches=("one",), environment={"GLOG_v": "2"})
    explained = explain_ranks(folder, report.ranks)
    found["explained"] = folder / "explained.html"
    found["explained"].write_text(
        html.page(report, job, explained, levers(report, job_to_change(job), explained[0])), encoding="utf-8"
    )
    for name, text in _strategy_pages().items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(text, encoding="utf-8")
    return found


def _strategy_pages() -> dict[str, str]:
    """Of a search that finds, of one that does not, and of a sweep with every kind of outcome."""
    shape, hardware = MODELS["llama2-13b"], strategy_models.hardware()
    listed = strategies(shape, 16, Space(vpp=(1, 2)))
    pages = {}
    for name, budget in (("search", 30), ("search in vain", 8)):
        result = Search(shape, listed, hardware, budget * 1024, Oracle(shape), per_stage=True).run()
        pages[name] = results.to_html(result, shape, hardware, "train.sh")
    variants = [
        Variant(name) for name in ("TP2", "TP4 with a name that is long enough to need a second line on a phone", "bad", "open")
    ]
    plan = SweepPlan(script=Path("train.sh"), variants=tuple(variants), budget_mb=60000, hardware=hardware)
    rows = [
        VariantResult(variant=variants[0], report=fits(), error=None, seconds=3.0),
        VariantResult(variant=variants[1], report=SAMPLES["does_not_fit"](), error=None, seconds=4.0),
    ]
    rows += [
        VariantResult(
            variant=variants[2], report=None, error="--num-layers 28 is not divisible by 3: <b>say</b> another.", seconds=0.1
        ),
        VariantResult(variant=variants[3]),
    ]
    return {**pages, "sweep": to_html(plan, rows)}


NAMES = [*SAMPLES, "explained"]
STRATEGY_NAMES = ["search", "search in vain", "sweep"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*NAMES, *STRATEGY_NAMES])
def test_no_console_message_and_no_request_but_the_page(shown, pages, name, size):
    shown.open(pages[name], *SIZES[size])
    shown.evaluate("new Promise(done => setTimeout(done, 200))")
    assert shown.problems == []
    assert shown.requests == [pages[name].as_uri()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*NAMES, *STRATEGY_NAMES])
def test_verdict_and_worst_rank_are_on_the_first_screen_and_nothing_overflows(shown, pages, name, size):
    width, height = SIZES[size]
    shown.open(pages[name], width, height)
    for element in ("verdict", "worst") if name in NAMES else ("verdict",):
        box = shown.evaluate(
            f"(() => {{const b = document.getElementById('{element}').getBoundingClientRect();"
            f" return {{left: b.left, right: b.right, top: b.top, bottom: b.bottom}}}})()"
        )
        assert 0 <= box["left"] < box["right"] <= width and 0 <= box["top"] < box["bottom"] <= height, (element, box)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    small = shown.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.childElementCount == 0 && e.textContent.trim()"
        " && e.checkVisibility() && parseFloat(getComputedStyle(e).fontSize) < 10).map(e => e.outerHTML)"
    )
    assert small == []


@pytest.mark.parametrize("size", SIZES)
def test_the_charts_are_drawn(shown, pages, size, tmp_path):
    shown.open(pages["explained"], *SIZES[size])
    area = shown.evaluate(
        "(() => {const b = document.querySelector('.area').getBoundingClientRect(); return [b.width, b.height]})()"
    )
    assert area[0] > 250 and area[1] > 100
    widths = shown.evaluate(
        "[...document.querySelectorAll('.bar')[0].querySelectorAll('rect')].map(r => r.getBoundingClientRect().width)"
    )
    assert len(widths) >= 5 and all(width > 0 for width in widths)
    fills = shown.evaluate(
        "[...document.querySelectorAll('.bar')[0].querySelectorAll('rect')].map(r => getComputedStyle(r).fill)"
    )
    assert len(set(fills)) == len(fills)
    peak = shown.evaluate(
        "(() => {const b = document.querySelector('.peak').getBoundingClientRect(); return b.left + b.width / 2})()"
    )
    text = shown.evaluate(
        "(() => {const b = document.querySelector('.peak-text').getBoundingClientRect(); return [b.left, b.right]})()"
    )
    assert text[0] - 2 <= peak <= text[1] + 2 and text[1] <= SIZES[size][0]
    assert len(shown.page.screenshot(path=tmp_path / "page.png", full_page=True)) > 20_000


@pytest.mark.parametrize("size", SIZES)
def test_the_charts_of_strategies_are_drawn(shown, pages, size):
    shown.open(pages["search"], *SIZES[size])
    kinds = shown.evaluate(
        "[...document.querySelectorAll('.plot circle')].map(c => [c.className.baseVal, getComputedStyle(c).fill])"
    )
    assert {"p-winner", "p-over", "p-predicted"} <= {kind for kind, _ in kinds} and len({fill for _, fill in kinds}) >= 3
    drawn = shown.evaluate(
        "(() => {const b = document.querySelector('.plot').getBoundingClientRect();"
        " const t = document.querySelector('.plot text').getBoundingClientRect(); return [b.width, b.height, t.height]})()"
    )
    assert drawn[0] > 600 and drawn[1] > 250 and drawn[2] > 9, "a phone scrolls the plot, it does not shrink it"
    shown.open(pages["sweep"], *SIZES[size])
    bars = shown.evaluate("[...document.querySelectorAll('.bar')].map(b => b.querySelectorAll('rect').length)")
    assert bars == [2, 2, 0, 0]
    assert shown.evaluate("document.querySelectorAll('b').length") == 0


def test_light_and_dark_differ_and_both_are_readable(shown, pages, tmp_path):
    colours = {}
    for scheme in ("light", "dark"):
        shown.open(pages["explained"], *SIZES["desk"], scheme=scheme)
        colours[scheme] = shown.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
    assert colours["light"] != colours["dark"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*NAMES, *STRATEGY_NAMES])
def test_axe_finds_no_serious_violation(shown, pages, axe, name, size, scheme):
    shown.open(pages[name], *SIZES[size], scheme=scheme)
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    shown.evaluate(axe + "; null")
    found = json.loads(shown.evaluate("axe.run().then(result => JSON.stringify(result.violations))"))
    serious = [
        (item["id"], item["impact"], [node["html"][:200] for node in item["nodes"]][:3])
        for item in found
        if item["impact"] in ("serious", "critical", "moderate")
    ]
    assert serious == []


def test_axe_would_notice(shown, pages, axe):
    """A check that finds nothing proves something only if it can find something."""
    shown.open(pages["fits"], *SIZES["desk"])
    shown.evaluate("document.querySelector('.verdict p').style.color = '#9fd8ad'; null")
    shown.evaluate("document.querySelectorAll('svg').forEach(s => s.removeAttribute('aria-label')); null")
    shown.evaluate(axe + "; null")
    found = shown.evaluate("axe.run().then(result => result.violations.map(v => v.id))")
    assert {"color-contrast", "svg-img-alt"} <= set(found)


def test_what_came_from_a_log_is_text_and_nothing_ran(shown, pages):
    shown.open(pages["hostile"], *SIZES["desk"])
    assert shown.evaluate("document.scripts.length") == 0
    assert shown.evaluate("document.title").startswith("FAILED: ")
    assert "<script>document.title='owned'</script>" in shown.evaluate("document.querySelector('pre').textContent")
    assert shown.evaluate("document.querySelectorAll('img, i').length") == 0


def test_the_keyboard_reaches_the_skip_link_and_every_scrolling_table(shown, pages):
    shown.open(pages["explained"], *SIZES["phone"])
    reached = []
    for _ in range(12):
        shown.page.keyboard.press("Tab")
        reached.append(shown.evaluate("document.activeElement.className || document.activeElement.tagName"))
    assert reached[0] == "skip"
    assert reached.count("scroll") >= 5 and "SUMMARY" in reached
