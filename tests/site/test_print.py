"""The cheat sheet on paper: two pages of A4, with nothing cut off."""

import base64
import re

from .conftest import show

#: The width in pixels of A4 landscape between its margins: 297 mm - 2 * 8 mm, at 96 pixels an inch.
WIDTH = int((297 - 16) / 25.4 * 96)

TOO_WIDE = """return [...document.querySelectorAll('#cheat-sheet table, #cheat-sheet pre')]
    .filter(x => x.scrollWidth > arguments[0]).map(x => x.innerText.slice(0, 60))"""


def pages_of(pdf):
    """Return the sizes of the pages of a PDF in points: width, height."""
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    return [(round(float(width)), round(float(height))) for width, height in boxes]


def test_the_cheat_sheet_is_two_pages(browser, address):
    browser.get(f"{address}/docs/cheat-sheet.html")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    sizes = pages_of(base64.b64decode(printed["data"]))
    assert 1 <= len(sizes) <= 2 and {*sizes} == {(842, 595)}
    show(browser, WIDTH)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.execute_script(TOO_WIDE, WIDTH) == []
        assert browser.execute_script(TOO_WIDE, 100) != []
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
