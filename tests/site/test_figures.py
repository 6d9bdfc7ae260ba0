"""Figures of the site are sharp on screens, and on slides, and have all of their labels."""

from functools import partial

from tests.checks.samples import check_each

from .conftest import script, show

BLURRED = script("blurred")
DISTORTED = script("distorted")
CUT_OFF = script("cut_off")


def check_figures(browser, path):
    for width in (400, 1400):
        show(browser, width)
        browser.get(path.as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        assert browser.execute_script(BLURRED) == []
        assert browser.execute_script(DISTORTED) == [], f"at {width}"


def test_figures_are_sharp(browser, site):
    pages = [path for path in sorted(site.rglob("*.html")) if "<img" in path.read_text()]
    assert len(pages) > 20
    check_each((str(path.relative_to(site)), partial(check_figures, browser, path)) for path in pages)


def check_labels(browser, path):
    browser.get(path.as_uri())
    assert browser.execute_script(CUT_OFF) == []


def test_no_label_is_cut_off(browser, site):
    drawings = [path for path in sorted(site.rglob("*.svg")) if "<text" in path.read_text()]
    assert len(drawings) > 20
    show(browser, 3000)
    check_each((path.name, partial(check_labels, browser, path)) for path in drawings)


#: A white square of 100 by 100 pixels.
SQUARE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAGQAAABkAQAAAABYmaj5AAAAHUlEQVR42mP8z4AAH5kYkMEob5Q3yhvljfKozwMAtFACuHzKyesAAAAASUVORK5CYII="
)


def test_what_is_blurred_or_cut_off_is_found(browser, tmp_path):
    def problems(script, name, text):
        (tmp_path / name).write_text(text)
        browser.get((tmp_path / name).as_uri())
        return browser.execute_script(script)

    page = f'<!doctype html><img src="{SQUARE}" style="width: {{}}px; height: {{}}px">'
    assert problems(BLURRED, "a.html", page.format(50, 50)) == []
    assert len(problems(BLURRED, "a.html", page.format(80, 50))) == 1
    assert problems(DISTORTED, "a.html", page.format(50, 50)) == []
    assert len(problems(DISTORTED, "a.html", page.format(50, 40))) == 1
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="50"><text x="{}" y="30">label</text></svg>'
    assert problems(CUT_OFF, "a.svg", drawing.format(10)) == []
    assert problems(CUT_OFF, "b.svg", drawing.format(80)) == ["label"]
