"""Every page of the site can be read: on narrow and wide screens, in light and dark, its pictures included."""

import re
from functools import partial

from tests.checks.samples import check_each

from .conftest import script, show

FAINT = script("faint")
WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"
MISSING = "return [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
OVERFLOWING = script("overflowing")
#: Window's width -> what fits there.
FITS = {400: "math, img, svg, .tables", 1400: "math, img, svg, pre, .table-wrapper, .tables"}
UNSET = script("unset")


def check_page(browser, path):
    browser.get(path.as_uri())
    assert browser.execute_script(MISSING) == []
    assert browser.execute_script(UNSET) == [], "formulas"
    for width, selector in FITS.items():
        show(browser, width)
        needed, there = browser.execute_script(WIDTHS)
        assert needed <= there, f"{needed} pixels wide in a window of {there}"
        assert browser.execute_script(OVERFLOWING, selector, width < 1000) == [], f"wider than their boxes at {width}"
    for scheme in ("light", "dark"):
        show(browser, scheme=scheme)
        assert browser.execute_script(FAINT, 3) == [], scheme


def test_every_page_can_be_read(browser, site):
    pages = [path for path in sorted(site.rglob("*.html")) if "_modules" not in path.parts]
    check_each((str(path.relative_to(site)), partial(check_page, browser, path)) for path in pages)


def test_lectures_are_called_by_their_numbers(site):
    text = (site / "docs" / "index.html").read_text()
    links = re.findall(r'href="../notebooks/([^"#]*).html">([^<]*)</a></li>', text)
    assert len(links) > 30
    for name, title in links:
        assert title.startswith(f"{name[:2]} ") == name[:2].isdigit(), title


def test_what_cannot_be_read_is_found(browser, tmp_path):
    style = ":root { color-scheme: light dark; color: CanvasText; background: Canvas }"

    def problem(body):
        page = tmp_path / "page.html"
        page.write_text(f"<!doctype html><style>{style}</style>{body}")
        try:
            check_page(browser, page)
        except AssertionError as error:
            return str(error)

    assert problem("<p>text") is None
    assert "pixels wide" in problem("<div style='width: 500px'>wide</div>")
    formula = "<math display='block' style='overflow: auto'><mi>" + "x" * 300 + "</mi></math>"
    assert "boxes at 400" in problem(f"<div style='overflow: auto'>{formula}</div>")
    assert "boxes at 1400" in problem(f"<pre style='overflow: auto'>{'long ' * 100}</pre>")
    assert problem(f"<pre style='overflow: auto'>{'x' * 88}</pre>") is None
    assert "dark" in problem("<p style='color: #333'>text")
    assert "formulas" in problem("<p>the share is $p$") and problem("<pre>$ make test</pre>") is None
    assert "light" in problem("<p style='background: #444; color: black'>text")
    assert problem("<p style='background: #ccc; color: #333'>text") is None
    assert "missing.png" in problem("<img src='missing.png'>")
    browser.get_log("browser")  # of the picture
