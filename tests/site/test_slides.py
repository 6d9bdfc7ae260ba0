"""Pages of slides (`docs/slides`): code is folded where a page fits the window without it, and ↓ scrolls the others."""

import shutil
from pathlib import Path

import pytest

SLIDES = Path(__file__).parents[2] / "docs" / "slides"
HEAD = '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="slides.css"><script src="slides.js"></script>'
CODE = f'<div class="cell_input"><pre>{"code<br>" * 10}</pre></div>'
STATE = """
const slide = document.querySelector(".slide.shown");
return [[...slide.querySelectorAll("details")].map(details => details.open), slide.classList.contains("more")];
"""


def box(pixels):
    return f'<div style="height: {pixels}px">a figure</div>'


@pytest.fixture
def lecture(browser, tmp_path):
    """A lecture of slides: the title, a short one, one that fits without its code, and one that does not."""
    for name in ("slides.js", "slides.css"):
        shutil.copy(SLIDES / name, tmp_path)
    shutil.copy(SLIDES.parent / "static" / "stix-two-math.woff2", tmp_path)
    bodies = (CODE + box(100), CODE + box(550), CODE + box(2000))
    pages = "".join(f'<section><h2>title</h2><div class="cell">{body}</div></section>' for body in bodies)
    path = tmp_path / "lecture.html"
    path.write_text(f'{HEAD}<div class="body"><section><h1>Lecture</h1>{pages}</section></div>')
    browser.get(path.as_uri())
    return browser


def test_code_is_folded_where_the_page_then_fits(lecture):
    from selenium.webdriver.common.keys import Keys

    body = lecture.find_element("tag name", "body")
    states = []
    for _ in range(3):
        body.send_keys(Keys.ARROW_RIGHT)
        states.append(lecture.execute_script(STATE))
    assert states == [[[True], False], [[False], False], [[True], True]]


def test_code_that_a_reader_opens_stays_open(lecture):
    from selenium.webdriver.common.keys import Keys

    body = lecture.find_element("tag name", "body")
    body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, "c", Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    assert lecture.execute_script(STATE) == [[True], True]


def test_turning_a_long_page_scrolls_it_first(lecture):
    from selenium.webdriver.common.keys import Keys

    body = lecture.find_element("tag name", "body")
    place = "const slide = document.querySelector('.slide.shown'); return [location.hash, slide.scrollTop]"
    body.send_keys(Keys.END)
    assert lecture.execute_script(place) == ["#4", 0]
    places = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT):
        body.send_keys(key)
        places.append(lecture.execute_script(place))
    assert places[0][0] == "#4" and places[0][1] > 500
    assert places[1:] == [["#4", 0], ["#3", 0]]


def test_the_down_key_scrolls_to_the_end_of_a_page(lecture):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    lecture.find_element("tag name", "body").send_keys(Keys.END)
    assert lecture.execute_script(STATE)[1]
    down = lambda: lecture.switch_to.active_element.send_keys(Keys.ARROW_DOWN)  # noqa: E731
    WebDriverWait(lecture, 60).until(lambda _: down() or not lecture.execute_script(STATE)[1])
