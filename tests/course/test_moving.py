"""Pages that move (notebooks/moving.py): what they say is what programs do; `spmd.explore` has a page of its steps.

A browser steps them in `tests/site/test_moving_pages.py`.
"""

import html.parser
import itertools
import json
import re
import sys
from pathlib import Path

import numpy
import pytest

import minidiff as md
import spmd
from collectives import cost
from spmd import P
from spmd.report.explore import Control, Page, PageRow

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2] / "notebooks"))
import moving


class Cells(html.parser.HTMLParser):
    """The tables of a page: for each key, rows of texts; arrows that lead to a row; and whatever leads elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.shown, self.links, self.rows, self.moves = {}, [], [], [], {}
        self.feed(page.html)

    def handle_starttag(self, tag, attrs):
        actual = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag == "table":
            self.key = tuple(json.loads(actual["data-key"]))
            self.rows, self.moves[self.key] = self.tables.setdefault(self.key, []), []
            if "hidden" not in actual:
                self.shown.append(self.rows)
        elif tag == "tr" and actual.get("class") == "moves":
            self.moves[self.key].append(None)
        elif tag == "div" and "data-moves" in actual:
            self.moves[self.key][-1] = len(self.rows), json.loads(actual["data-moves"])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and None not in self.moves[self.key]:
            self.rows[-1].append("")
        elif tag == "br" and self.rows[-1]:
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows = []

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def pages():
    return {name: make() for name, make in moving.PAGES.items()}


def test_pages_need_nothing_from_elsewhere_and_show_a_table_without_a_script(pages):
    for page in pages.values():
        actual = Cells(page)
        assert actual.links == [] and len(actual.shown) == 1 and len(actual.shown[0]) > 1
        assert "http" not in page.html


def test_every_choice_of_the_sliders_has_its_table(pages):
    for page in pages.values():
        choices = itertools.product(*(control.options for control in page.controls if control.role == "table"))
        assert set(page.tables) == set(choices)


# ---------------------------------------------------------------- the gallery


def test_the_ring_ends_with_the_sum_on_every_rank(pages):
    *_, last = Cells(pages["ring"]).shown[0]
    total = "".join(f"{x:g}" for x in moving.NUMBERS.reshape(4, 4).sum(0))
    assert last[1:] == [total] * 4


def test_the_collectives_are_those_that_run(pages):
    tables = Cells(pages["collectives"]).tables
    assert {name for (name,) in tables} == {*moving.COLLECTIVES}
    for (name,), rows in tables.items():
        f, spec = moving.COLLECTIVES[name]
        x = moving.NUMBERS if spec == P("i") else moving.NUMBERS[:4]
        every = spmd.shard_map(
            lambda x, f=f: f(x)[None], mesh=moving.MESH, in_specs=spec, out_specs=P("i"), check_rep=False
        )
        expected = ["".join(f"{v:g}" for v in block.ravel()) for block in numpy.asarray(every(x))]
        assert rows[2][1:] == expected, name


AROUND = {(0, 1), (1, 2), (2, 3), (3, 0)}
EVERY_PAIR = {*itertools.permutations(range(4), 2)}
FROM_ROOT = {(0, 1), (0, 2), (0, 3)}


def reversed_arrows(pairs):
    return {(b, a) for a, b in pairs}


def arrows(page):
    """For each table and each row that arrows lead to, where they start and end."""
    return {key: {row: {(a, b) for a, b, _ in moves} for row, moves in each} for key, each in Cells(page).moves.items()}


def test_arrows_lead_where_numbers_go(pages):
    assert arrows(pages["ring"]) == {(): dict.fromkeys(range(2, 8), AROUND)}
    nothing = ("pbroadcast", "pscatter")  # all ranks have the operand
    forward = dict.fromkeys(moving.COLLECTIVES, EVERY_PAIR) | {name: set() for name in nothing}
    forward |= {"ppermute": AROUND, "broadcast": FROM_ROOT, "scatter": FROM_ROOT}
    forward |= dict.fromkeys(("reduce", "gather"), reversed_arrows(FROM_ROOT))
    for (name,), rows in arrows(pages["collectives"]).items():
        assert rows.get(2, set()) == forward[name], name
        # backward the other way, unless all ranks have the cotangent
        assert rows.get(4) in (None, reversed_arrows(forward[name]), *[EVERY_PAIR] * (name in nothing)), name
        assert (4 in rows) == (name not in ("psum", "all_gather_invariant", "broadcast")), name


def test_arrows_lead_to_each_sum_of_a_gradient(pages):
    sums = [row for row, (text, *_) in enumerate(Cells(pages["tape"]).shown[0]) if " = psum(" in text]
    assert arrows(pages["tape"]) == {(): dict.fromkeys(sums, EVERY_PAIR)} and len(sums) == 2
    assert len(sums) == sum(step.bytes is not None for step in pages["tape"].steps)


def test_a_pipeline_sends_each_microbatch_from_stage_to_stage_and_back(pages):
    for (_, stages, microbatches), rows in arrows(pages["pipeline"]).items():
        sent = [pair for pairs in rows.values() for pair in pairs]
        there = [(i, i + 1) for i in range(stages - 1)] * microbatches
        assert sorted(sent) == sorted([*there, *((b, a) for a, b in there)])


def test_the_schedules_are_the_librarys(pages):
    for (name, stages, microbatches), rows in Cells(pages["pipeline"]).tables.items():
        schedule = moving.SCHEDULES[name](stages, microbatches)
        assert len(rows) == schedule.ticks + 2  # the header, and the last line
        shown = [cell for row in rows[1:-1] for cell in row[1:] if cell]
        assert len(shown) == 2 * stages * microbatches and f"idle {schedule.bubble:.0%}" in rows[-1][1]


def numbers_of(page, key):
    """The steps and bytes from which the script computes seconds, row by row."""
    (table,) = re.findall(
        rf'<table data-key="{re.escape(html.escape(json.dumps(list(key))))}".*?</table>', page.html, re.S
    )
    return [tuple(map(float, pair)) for pair in re.findall(r'data-steps="([\d.]+)" data-bytes="([\d.e+]+)"', table)]


def test_prices_are_those_of_the_formulas(pages):
    names = [name for name in cost.ALGORITHMS if name.endswith("all_reduce")]
    for key in ((64, 1000), (4096, 10**9)):
        costs = [cost.ALGORITHMS[name](*key) for name in names]
        assert numbers_of(pages["cost"], key) == [(c.steps, c.bytes) for c in costs]
    report = spmd.communication(
        md.grad(moving.parallel.data_parallel(spmd.make_mesh((4,), ("i",), backend="simulated")))
    )
    types = [
        (md.ShapedArray((n, m), float), md.ShapedArray((m,), float)) for n, m in zip(moving.SIZES, moving.SIZES[1:])
    ]
    rows = report(
        types, tuple(md.ShapedArray((moving.EXAMPLES, n), float) for n in (moving.SIZES[0], moving.SIZES[-1]))
    ).rows
    total = sum((r.count * cost.price(r.collective, r.ranks, r.bytes / r.count) for r in rows), cost.Cost())
    assert numbers_of(pages["network"], (4, 8))[0] == (total.steps, total.bytes)


# ---------------------------------------------------------------- other pages


def test_a_page_of_ones_own(tmp_path):
    tables = {(n,): (["n"], [PageRow([str(k)]) for k in range(n)]) for n in (1, 2)}
    page = Page("Counting <up>", "", tables, [Control("how far", [1, 2])])
    actual = Cells(page)
    assert actual.tables == {(1,): [["n"], ["0"]], (2,): [["n"], ["0"], ["1"]]}
    assert "Counting &lt;up&gt;" in page.html and page.write(tmp_path / "page.html").read_text() == page.html
    assert 'srcdoc="&lt;!DOCTYPE html&gt;' in page._repr_html_()
    assert 'title="Counting &lt;up&gt;"' in page._repr_html_()
