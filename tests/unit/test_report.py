"""Every view of a report against its gold file, and the promises that hold for all of them.

`UPDATE_GOLD=1 pytest tests/unit/test_report.py` writes the gold files anew; look at the difference before committing.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from report_samples import HOSTILE, SAMPLES, fits, hostile, job_file, logs, rank
from tracker_file import Program

from mindspeed_dryrun.advise.levers import levers
from mindspeed_dryrun.advise.report_page import job_to_change
from mindspeed_dryrun.commands.schema import schemas
from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.files import json_text
from mindspeed_dryrun.record.model import Report, Status, Verdict
from mindspeed_dryrun.report import FORMATS, html, render, table, view
from mindspeed_dryrun.report.explain import explain_ranks

GOLD = Path(__file__).parents[1] / "gold"
SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
SCHEMA = json.loads((SCHEMAS / "report.json").read_text())
SUFFIX = {"table": "txt", "json": "json", "csv": "csv", "markdown": "md", "html": "html"}


def check_gold(name: str, text: str) -> None:
    path = GOLD / name
    if os.environ.get("UPDATE_GOLD"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; UPDATE_GOLD=1 writes it anew"


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("format", FORMATS)
def test_gold(sample, format, monkeypatch):
    monkeypatch.setattr(html, "__version__", "0")
    check_gold(f"report_{sample}.{SUFFIX[format]}", render(SAMPLES[sample](), format))


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_table_fits_80_columns_without_colour_or_control_characters(sample):
    text = render(SAMPLES[sample](), "table")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text and "\x07" not in text


def test_colour_only_adds_escape_sequences():
    import re

    for make in SAMPLES.values():
        assert re.sub(r"\x1b\[[\d;]*m", "", table.render(make(), colour=True)) == table.render(make())
    assert "\x1b[1;32mFITS\x1b[0m" in table.render(fits(), colour=True)


def test_the_worst_rank_is_the_first_row_whatever_its_number():
    report = fits()
    ranks = (dataclasses.replace(report.ranks[0], used_peak_mb=1, actual_peak_mb=2), report.ranks[1])
    report = dataclasses.replace(report, ranks=ranks, worst_rank=2)
    lines = table.render(report).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    assert lines[head + 1].lstrip().startswith("▶2")


def test_thousands_of_ranks_are_folded_and_none_is_lost():
    report = logs(4096)
    rows = view.rows(report)
    assert len(rows) == 1 and rows[0].folded
    assert sorted(rank for row in rows for rank in row.ranks) == list(range(4096))
    assert len(table.render(report).splitlines()) < 20
    broken = tuple(
        dataclasses.replace(rank, status=Status.FAILED, error=f"error {rank.rank}", stage=rank.rank % 3)
        if rank.rank % 100 == 0
        else dataclasses.replace(rank, used_peak_mb=50000 + rank.rank, stage=rank.rank % 3)
        for rank in report.ranks
    )
    rows = view.rows(dataclasses.replace(report, ranks=broken))
    assert len(rows) == 6
    assert sorted(rank for row in rows for rank in row.ranks) == list(range(4096))
    assert sum(len(row.ranks) for row in rows if row.status == "failed") == 41


@pytest.mark.parametrize("sample", SAMPLES)
def test_json_validates_against_the_schema_and_reads_back(sample):
    report = SAMPLES[sample]()
    data = json.loads(render(report, "json"))
    jsonschema.validate(data, SCHEMA, cls=jsonschema.Draft202012Validator)
    assert Report.from_json(data) == report


def test_the_schema_notices_a_wrong_report():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for change in ({"verdict": "yes"}, {"fits": "yes"}, {"budget_mb": "much"}, {"ranks": [{"rank": 0}]}):
        data = fits().to_json() | change
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, SCHEMA)


@pytest.mark.parametrize("name", schemas())
def test_the_schemas_in_the_docs_are_those_of_the_declarations(name):
    assert (SCHEMAS / f"{name}.json").read_text(encoding="utf-8") == json_text(schemas()[name]), (
        "mindspeed-dryrun schema --into docs/schema"
    )


def test_csv_has_a_line_for_each_simulated_rank():
    rows = list(csv.DictReader(io.StringIO(render(fits(), "csv"))))
    assert [(row["rank"], row["represents"], row["free_mb"]) for row in rows] == [
        ("0", "0-1", "825"),
        ("2", "2-3", "8114"),
    ]


def test_a_failed_ranks_figure_is_never_shown_as_one():
    report = hostile()
    for format in ("table", "markdown"):
        text = render(report, format)
        assert "950M" not in text and "900M" not in text
    assert view.headline(report).word == "FAILED"


@pytest.mark.parametrize(
    "change, word",
    [
        ({}, "FITS"),
        ({"verdict": Verdict.UNKNOWN}, "UNKNOWN"),
        ({"verdict": Verdict.BARELY}, "FITS BARELY"),
        ({"verdict": Verdict.DOES_NOT_FIT, "budget_mb": 57000, "margin_mb": -341}, "DOES NOT FIT"),
        ({"budget_mb": None}, "UNKNOWN"),
        ({"ranks": (), "worst_rank": None, "actual_peak_mb": None}, "UNKNOWN"),
        ({"ranks": (rank(0, (0,), 0, "oom", error="out of memory"),)}, "DOES NOT FIT"),
        ({"ranks": (rank(0, (0,), 0, "timeout"),)}, "FAILED"),
    ],
)
def test_verdict(change, word):
    assert view.headline(dataclasses.replace(fits(), **change)).word == word


@pytest.mark.parametrize(
    "ranks, text", [((0, 1, 2, 5), "0-2,5"), (range(0, 64, 2), "0-62:2"), ((3,), "3"), ((1, 9), "1,9"), ((), "")]
)
def test_ranges(ranks, text):
    assert view.ranges(ranks) == text


def test_an_unknown_format_is_wrong_use():
    with pytest.raises(UsageError, match="'pdf'"):
        render(fits(), "pdf")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_page_is_self_contained_and_what_comes_from_a_log_stays_text():
    page = render(hostile(), "html")
    tags = _Tags()
    tags.feed(page)
    assert not {"script", "img", "link", "iframe", "i", "object"} & set(tags.tags)
    names = {name for name, _ in tags.attributes}
    assert not any(name.startswith("on") for name in names) and "src" not in names
    assert all((value or "").startswith("#") for name, value in tags.attributes if name == "href")
    assert "&lt;script&gt;document.title=&#39;owned&#39;&lt;/script&gt;" in page
    assert "url(" not in page and "@import" not in page
    assert "\x1b" not in page and HOSTILE not in page


def test_the_page_of_a_record_shows_breakdown_curve_and_tensors(tmp_path):
    program = Program(layers=14, activation=100 << 20).run()
    program.write(tmp_path / "ranks" / "00000" / "rank_0" / "memory_block.csv")
    peak = program.peak()[0] >> 20
    report = fits()
    rank = dataclasses.replace(report.ranks[0], used_peak_mb=peak, actual_peak_mb=peak + 5)
    report = dataclasses.replace(report, ranks=(rank, report.ranks[1]), used_peak_mb=peak, actual_peak_mb=peak + 5)
    explained = explain_ranks(tmp_path, report.ranks)
    assert list(explained) == [0]
    job = job_file(job=report.job, patches=("one",), environment={"GLOG_v": "2"})
    page = html.page(report, job, explained, levers(report, job_to_change(job), explained[0]))
    for text in (
        "optimizer",
        f"peak {peak}M",
        "full recomputation",
        "GLOG_v",
        "Patches applied (1)",
        "adamw.py:139 step",
    ):
        assert text in page
    assert page.count('role="img"') == 3  # two bars and the curve
    assert len(page) < 200_000
