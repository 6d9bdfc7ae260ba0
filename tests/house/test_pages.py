"""The cheat sheet, the glossary and the pages about other systems agree with the code and with the guide."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

import collectives
import minidiff as md
import spmd
from collectives import cost, ops
from tests.benchmarks import jax_pages, jax_states

DOCS = Path(__file__).parents[2] / "docs"

_spec = importlib.util.spec_from_file_location("cheat_sheet", DOCS / "cheat_sheet.py")
cheat_sheet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cheat_sheet)

# ---------------------------------------------------------------- the cheat sheet


def test_the_tables_of_the_cheat_sheet_are_those_of_the_declarations():
    text = cheat_sheet.PAGE.read_text()
    assert cheat_sheet.with_tables(text) == text, "run python docs/cheat_sheet.py"


def test_another_declaration_changes_the_cheat_sheet(monkeypatch):
    monkeypatch.setitem(cost.BY_NAME, "psum", ops.untyped_psum_p)
    monkeypatch.setitem(cost.ALGORITHMS, "ring_all_gather", cost.ALGORITHMS["ring_all_reduce"])
    text = cheat_sheet.PAGE.read_text()
    actual = cheat_sheet.with_tables(text)
    row = "| `psum(x, 'i')` | `[a] [b] → [a+b] [a+b]` | varying → varying | `psum` |"
    assert row in actual and row not in text
    assert actual.count("2(N − 1)K/N") == text.count("2(N − 1)K/N") + 4


def test_every_collective_is_on_the_cheat_sheet():
    text = cheat_sheet.PAGE.read_text()
    public = {name for name in collectives.__all__ if name != "InFlight"}
    assert {name for name in public if f"`{name}" not in text} == set()
    names = (cheat_sheet.COLLECTIVES + " " + cheat_sheet.CASTS).split()
    operations = {cheat_sheet.OPERATION.get(name, name) for name in names}
    internal = {"ppermute_wait", "ragged_all_to_all"}  # written .wait() and all_to_all(splits=)
    assert {*cost.BY_NAME} - operations == internal


def test_formulas_of_the_cheat_sheet_are_those_that_price_collectives():
    text = cheat_sheet.PAGE.read_text()
    shown = {cheat_sheet.formula(f.bytes.text): f.bytes for f in (cost.ALGORITHMS[x] for x in cost.PRICED_AS.values())}
    assert {*re.findall(r"\| ([^|`]*K[^|`]*) \|\n", text)} == {*shown}
    by_hand = {"2(N − 1)K/N": 2 * 3 * 1000 / 4, "(N − 1)K/N": 750, "K ⌈log₂ N⌉": 2000, "K": 1000}
    assert {text: formula(4, 1000) for text, formula in shown.items()} == by_hand


# ---------------------------------------------------------------- the glossary

GLOSSARY = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (DOCS / "glossary.md").read_text())
GLOSSARY = [row for row in GLOSSARY if row[0] != "term"]
TERMS = {term for row in GLOSSARY for term in row[0].split(", ")}

#: Words in italics that are stressed, or name a parameter or a label, and introduce no term.
STRESSED = {
    "first", "wrong", "widths", "axes", "mode", "a study", "forward", "backward", "sum", "same", "different",
    "their part", "with a warning",
    "a decision that changes which collectives are called must be the same on all ranks.",
}  # fmt: skip
#: Terms that the guide introduces by another form of the word.
FORMS = {"static": "static memory", "dynamic": "dynamic memory"}


def words_in_italics(text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    words = re.findall(r"(?<![*\w])\*(?![\s*])([^*]+?)(?<![\s*])\*(?![*\w])", text)
    return {" ".join(word.split()).lower() for word in words}


def test_every_term_that_the_guide_introduces_is_in_the_glossary():
    introduced = set()
    for page in (DOCS / "guide").glob("*.md"):
        introduced |= words_in_italics(page.read_text())
    assert {"linearize", "halo", "sharded array", "master weights"} <= introduced
    assert {FORMS.get(word, word) for word in introduced - STRESSED} - {term.lower() for term in TERMS} == set()


def test_words_in_italics_are_found():
    text = "a *tape* and **bold**, `*code*`, *two\nwords*; 2 * 3 * 4\n```\n*no*\n```\n"
    assert words_in_italics(text) == {"tape", "two words"}


def test_the_glossary_has_what_a_newcomer_looks_up():
    needed = """primal tangent cotangent tape residual variance invariant varying unreduced reduced collective
        all-reduce rank linearize transpose gradient Jacobian Hessian JVP VJP tracer interpreter
        body carry donated tree leaf mesh block global replicated sharding spec SPMD MPI launcher
        backend cast state broadcast deadlock halo ring root microbatch bucket pipeline stage bubble
        ZeRO latency bandwidth overlap exposed checkpointing eager watchdog"""
    assert {*needed.split()} - TERMS == set()
    assert {"mesh axis", "partition spec", "partial sum", "data parallelism", "sharded array", "backward pass"} <= TERMS


def test_the_glossary_is_sorted_and_names_each_term_once():
    sections = re.split(r"(?m)^## ", (DOCS / "glossary.md").read_text())[1:]
    for section in sections:
        terms = re.findall(r"(?m)^\| ([^|]+) \| [^|]+ \| \[", section)
        assert terms == sorted(terms, key=str.lower)
    every = [term.lower() for row in GLOSSARY for term in row[0].split(", ")]
    assert len(every) == len(set(every)) > 100


# ---------------------------------------------------------------- the sidebar


def test_the_sidebar_is_one_screen_of_short_titles():
    sidebar = runpy.run_path(str(DOCS / "sidebar.py"))
    groups = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    rows = [row for group in groups for row in group.split("\n") if row and not row.startswith(":")]
    assert len(rows) + 2 * len(groups) <= 45
    below = sidebar["below"]()
    assert all(below.values())
    shown = [entry(row) for row in [*rows, *(row for pages in below.values() for row in pages)]]
    assert all(len(title) <= 42 for title, _ in shown), max(shown, key=lambda pair: len(pair[0]))
    pages = [Path(target).name for _, target in shown]
    assert {p.stem for p in (DOCS / "guide").glob("*.md")} | {*pages} == {*pages}
    assert len(shown) == len({target.replace("../", "").replace("docs/", "") for _, target in shown})


def entry(row):
    """Return the title that a row of a table of contents shows, and the page."""
    title, _, page = row.rstrip(">").rpartition(" <")
    path = DOCS.parent / f"{page}.md"
    path = path if path.exists() else DOCS / f"{page}.md"
    return title or re.search(r"^# (.*)", path.read_text(), re.M)[1], page


# ---------------------------------------------------------------- other systems


def test_programs_of_other_systems_send_what_the_table_says():
    text = jax_pages.TYPES.read_text()
    actual = {title: jax_pages.shown(jax_pages.our_counts(names)) for title, names in jax_pages.run_ours(text).items()}
    assert actual == {title: ours for title, (ours, _) in jax_pages.table_of_counts(text).items()}
    assert len(actual) == 4


def test_every_program_is_there_for_jax_too():
    for title, body in jax_pages.programs(jax_pages.TYPES.read_text()).items():
        assert jax_pages.our_code(body) and jax_pages.their_code(body).startswith("# JAX"), title


@pytest.mark.parametrize("title", jax_pages.REFUSED)
def test_what_is_refused_is_on_the_page(title):
    run, here, _ = jax_pages.REFUSED[title]
    assert jax_pages.accepts(run, jax_states.our_names()) == here
    assert f"| {title} | {'' if here else 'an error'}" in jax_pages.TYPES.read_text()


def test_the_names_beside_those_of_jax_exist():
    rows = list(jax_pages.rows_of_names(jax_pages.COMING.read_text()))
    names = {name.partition("(")[0] for _, ours in rows for name in ours}
    packages = {"md": md, "spmd": spmd, "collectives": collectives}
    for name in (name for name in names if re.fullmatch(r"(md|spmd)\.[\w.]+", name)):
        package, *rest = name.split(".")
        x = packages[package]
        for part in rest:
            x = getattr(x, part, None) if part != "states" else x  # an attribute of a type
        assert x is not None, name
    assert len(rows) > 25
    assert next(theirs[1] for theirs, _ in rows if theirs[0] == "jax.lax.psum") == "jax.lax.pmean"


def test_defaults_that_differ_are_read():
    listed = jax_pages.listed_defaults(jax_pages.COMING.read_text())
    assert {"jax.shard_map(in_specs)", "jax.nn.one_hot(dtype)", "jax.random.normal(dtype)"} < listed
