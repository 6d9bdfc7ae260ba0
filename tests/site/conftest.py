"""Fixtures of the tests of the built site: its folder, a server of it, and Chromium.

`make test-site` builds the site and runs them with `--site`. Without that option they are skipped.
"""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def site(pytestconfig):
    """The folder of the site."""
    if (folder := pytestconfig.getoption("site")) is None:
        pytest.skip("needs the built site, and Chromium: make test-site")
    return Path(folder).resolve()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def address(site):
    """Where a server on this machine has the site."""
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium(site, tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    assert program and driver, "Chromium or its driver is missing: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    started = webdriver.Chrome(options, Service(driver))
    yield started
    started.quit()


#: Browsers ask for an icon. Sphinx marks a query's words in the hidden titles of the theme's drawings, too, and fails.
HARMLESS = ("favicon.ico", "parent.getBBox is not a function")


@pytest.fixture
def browser(chromium):
    """Chromium with a wide, light window. A test fails if a page that it opens logs an error."""
    show(chromium)
    chromium.get_log("browser")
    yield chromium
    logged = [entry["message"] for entry in chromium.get_log("browser")]
    assert [text for text in logged if not any(word in text for word in HARMLESS)] == []


def script(name):
    """Return the text of a function's body that the browser runs: its `arguments` are those of `execute_script`."""
    return Path(__file__).with_name(f"{name}.js").read_text()


def show(browser, width=1400, scheme="light"):
    """Set the width of the window, and whether the reader prefers light or dark pages."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    preferred = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})
