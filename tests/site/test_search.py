"""Questions of new users, typed into the search box: the first hit answers."""

from urllib.parse import urlsplit

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")


def assign(weights):
    weights[0] = 1.0
    return np.sum(weights)


def clip(weights):
    return weights if weights > 0 else 0.0


ANSWERS = {
    "set an element": "docs/mistakes.html#i-cannot-assign-to-an-element",
    "gradient four times too large": "docs/mistakes.html#my-gradient-is-four-times-too-large",
    "jax.lax.psum": "docs/coming-from.html#jax",
    "which rank has which block": "docs/guide/ranks.html#which-rank-has-which-block",
    "resume a run": "docs/guide/training.html#resume-a-run-that-was-killed",
    "print the tape": "docs/guide/derivatives.html#print-a-tape",
    "float32": "docs/guide/derivatives.html#float32-and-python-s-numbers",
    "16 bits": "docs/guide/training.html#half-precision-16-bits-float16-and-bfloat16",
    "Slurm": "docs/guide/mpi.html#across-several-machines-with-slurm-or-a-host-file",
    "hangs": "docs/mistakes.html#my-program-hangs-ranks-wait-for-each-other",
    "add an operation": "CONTRIBUTING.html#add-an-operation",
}
#: What newcomers ask for, in a word or two -> pages that answer, one of which is among the first three hits.
NEWCOMERS = {
    "install": ["docs/guide/install"],
    "einsum": ["docs/guide/functions"],
    "gradient of all_gather": ["docs/guide/ranks", "docs/cheat-sheet"],
    "out of memory": ["docs/guide/memory"],
    "NaN": ["docs/guide/nan"],
    "seeds": ["docs/guide/random-streams"],
    "slow": ["docs/speed"],
    "deadlock": ["docs/mistakes"],
    "float32": ["docs/guide/derivatives"],
    "save": ["docs/guide/training", "docs/guide/mpi"],
    "glossary": ["docs/glossary"],
    "cheat sheet": ["docs/cheat-sheet"],
    "early stopping": ["docs/guide/leaving"],
}
#: Pages about the inside of the packages, which come after the guide.
INSIDE = ("docs/architecture", "docs/design", "CHANGELOG", "docs/changes/0.1.0")
#: Calls that fail, whose messages users paste into the search box.
ERRORS = {
    "an assignment": (lambda: md.grad(assign)(np.ones(3)), "docs/errors.html#writing-into-arrays"),
    "a condition": (lambda: md.jit(clip)(1.0), "docs/errors.html#conditions"),
    "a result": (
        lambda: spmd.shard_map(lambda v: v, MESH, P("i"), P())(np.ones(4)),
        "docs/errors.html#results",
    ),
}


TOP = "return Math.round(document.getElementById(arguments[0]).getBoundingClientRect().top)"


def hits_of(browser, address, question):
    """Return the addresses that the search box of the start page finds, the best first."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}/docs/index.html")
    box = browser.find_element(By.CSS_SELECTOR, '.start-search input[name="q"]')
    box.send_keys(question)
    box.submit()
    links = By.CSS_SELECTOR, "#search-results li > a"
    WebDriverWait(browser, 60).until(lambda b: b.find_elements(*links))
    return [link.get_attribute("href") for link in browser.find_elements(*links)]


def pages_of(browser, address, question):
    """Return the pages of the hits."""
    return [urlsplit(hit).path.strip("/").removesuffix(".html") for hit in hits_of(browser, address, question)]


def check_answer(browser, address, question, answer):
    """Type a question into the search box, follow the first hit, and see the answer there."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(hits_of(browser, address, question)[0])
    actual = urlsplit(browser.current_url)
    assert f"{actual.path}#{actual.fragment}" == f"/{answer}"
    WebDriverWait(browser, 60).until(lambda b: 0 <= b.execute_script(TOP, actual.fragment) < 450, "is not scrolled to")


@pytest.mark.parametrize("question", NEWCOMERS)
def test_a_newcomers_question(browser, address, question):
    hits = pages_of(browser, address, question)
    assert {*hits[:3]} & {*NEWCOMERS[question]}, hits[:5]


@pytest.mark.parametrize("question", ["collective", "gradient", "jit"])
def test_the_inside_comes_after_the_guide(browser, address, question):
    hits = pages_of(browser, address, question)
    assert hits[0].startswith("docs/") and not {*hits[:3]} & {*INSIDE}, hits[:5]


@pytest.mark.parametrize("question", ANSWERS)
def test_the_first_hit_answers(browser, address, question):
    check_answer(browser, address, question, ANSWERS[question])


@pytest.mark.parametrize("name", ERRORS)
def test_the_first_hit_explains_a_message(browser, address, name):
    call, answer = ERRORS[name]
    with pytest.raises(Exception) as error:
        call()
    check_answer(browser, address, str(error.value).splitlines()[0], answer)
