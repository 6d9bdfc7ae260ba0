"""Every page of the site can be read: on narrow and wide screens, in light and dark, its pictures included."""

import re
from functools import partial

from tests.checks.samples import check_each

from .conftest import show

#: Text that stands out from its background by less than the given contrast (WCAG 2: from 1 to 21), and by how much.
FAINT = """
const channels = color => color.match(/[\\d.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const over = (below, [r, g, b, a = 1]) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
const grounds = new Map([[null, [255, 255, 255]]]);
function ground(node) {
  if (!grounds.has(node)) grounds.set(node, paint(node));
  return grounds.get(node);
}
function paint(node) {
  const style = getComputedStyle(node);
  if (style.backgroundImage != "none") return null;
  const color = channels(style.backgroundColor);
  const below = color[3] == null ? [0, 0, 0] : ground(node.parentElement);
  return below && over(below, color);
}
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode, node = text.parentElement, style = getComputedStyle(node);
  const shown = node.checkVisibility({visibilityProperty: true}) && style.color != "rgba(0, 0, 0, 0)";
  const below = text.data.trim() && shown && !node.closest("svg") && ground(node);
  if (!below) continue;
  const [dark, light] = [luminance(over(below, channels(style.color))), luminance(below)].sort((a, b) => a - b);
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < arguments[0]) faint.push(`${text.data.trim()}: ${contrast.toFixed(2)}`);
}
return faint;
"""
WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"
MISSING = "return [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
#: What is wider than its box or the window: it is cut off, or scrolls sideways, as tables may on narrow screens.
OVERFLOWING = """
const wide = [], right = box => box.getBoundingClientRect().right;
for (const node of document.querySelectorAll(arguments[0])) {
  if (!node.checkVisibility() || arguments[1] && node.closest(".table-wrapper, table")) continue;
  if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth || right(node) > innerWidth + 1)
    wide.push(`${node.tagName} ${node.textContent.trim().slice(0, 60)}`);
}
return wide;
"""
#: Window's width -> what fits there.
FITS = {400: "math, img, svg, .tables", 1400: "math, img, svg, pre, .table-wrapper, .tables"}
#: Formulas that were not set: text between dollars, outside code.
UNSET = """
const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode;
  if (text.data.includes("$") && !text.parentElement.closest("pre, code, script, style, svg, math"))
    found.push(text.data.trim());
}
return found;
"""


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
