"""Every link of the site that stays in the site leads to a page, and to a place on it."""

import html
import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTRIBUTE = re.compile(r'\s(href|src|id)="([^"]*)"')


def attributes_of(page):
    """The values of each attribute of a page that makes links or places."""
    actual = defaultdict(list)
    for name, value in ATTRIBUTE.findall(page.read_text()):
        actual[name].append(html.unescape(value))
    return actual


def check_links(site):
    """Return the number of links within the site, and those that lead nowhere."""
    pages = {path: attributes_of(path) for path in sorted(site.rglob("*.html"))}
    places = {path: {"", "top", *actual["id"]} for path, actual in pages.items()}
    number, broken = 0, []
    for path, actual in pages.items():
        for link in (*actual["href"], *actual["src"]):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            number += 1
            target = Path(path.parent, unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or unquote(parts.fragment) not in places.get(target, {parts.fragment}):
                broken.append(f"{path.relative_to(site)}: {link}")
    return number, broken


def test_links_lead_somewhere(site):
    number, broken = check_links(site)
    assert broken == [] and number > 10_000


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">')
    links = ["b.html#here", "#top", "https://numpy.org", "c.html", "b.html#there", "#here", "pictures"]
    (tmp_path / "a.html").write_text("".join(f'<a href="{link}">' for link in links) + '<img src="b.png">')
    (tmp_path / "pictures").mkdir()
    actual = ["c.html", "b.html#there", "#here", "pictures", "b.png"]
    assert check_links(tmp_path) == (7, [f"a.html: {link}" for link in actual])
