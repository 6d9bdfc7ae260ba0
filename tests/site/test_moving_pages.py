"""Pages that move (`docs/moving.md`): keys, buttons and sliders do what they say."""

import numpy

from collectives import cost

from .conftest import script, show


def test_keys_buttons_and_sliders(browser, site):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    def text_of():
        return [x.text for x in browser.find_elements(By.CSS_SELECTOR, "output")]

    show(browser, width=500)
    browser.get((site / "docs/moving/pipeline.html").as_uri())
    body = browser.find_element(By.TAG_NAME, "body")
    assert text_of() == ["step 1 of 15", "4", "4"]
    body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert text_of()[0] == "step 2 of 15"
    body.send_keys(Keys.END)
    assert text_of()[0] == "step 15 of 15"
    body.send_keys(Keys.HOME)
    browser.find_element(By.ID, "forth").click()
    assert text_of()[0] == "step 2 of 15"
    Select(browser.find_element(By.CSS_SELECTOR, 'select[aria-label="schedule"]')).select_by_visible_text("1F1B")
    browser.find_element(By.CSS_SELECTOR, 'input[aria-label="stages"]').send_keys(Keys.ARROW_LEFT)
    assert text_of()[1:] == ["3", "4"]
    assert len(browser.find_elements(By.CSS_SELECTOR, "table:not([hidden]) th")) == 4
    (table,) = browser.find_elements(By.CSS_SELECTOR, "table:not([hidden])")
    assert table.get_attribute("data-key") == '["1F1B", 3, 4]'


def test_a_page_plays_to_its_end_and_leads_back(browser, site):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "docs/moving/ring.html").as_uri())
    play = browser.find_element(By.ID, "play")
    play.click()
    assert play.text == "pause"
    shown = browser.find_element(By.CSS_SELECTOR, 'output[for="step"]')
    WebDriverWait(browser, 60).until(lambda _: shown.text == "step 7 of 7")
    WebDriverWait(browser, 60).until(lambda _: play.text == "play")
    browser.find_element(By.TAG_NAME, "a").click()
    assert browser.current_url.endswith("/docs/moving.html")


ARROWS = script("arrows")


def test_arrows_lead_from_rank_to_rank(browser, site):
    from selenium.webdriver.common.by import By

    browser.get((site / "docs/moving/ring.html").as_uri())
    for steps in (1, 2):
        browser.find_element(By.ID, "forth").click()
        arrows, shown = browser.execute_script(ARROWS)
        assert sorted(arrows) == [[0, 1], [1, 2], [2, 3], [3, 0]]
        assert shown == steps


def test_the_script_computes_the_models_seconds(browser, site):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get((site / "docs/moving/cost.html").as_uri())
    names = [name for name in cost.ALGORITHMS if name.endswith("all_reduce")]
    for alpha, key in ((1e-5, Keys.ARROW_LEFT), (1e-6, Keys.ARROW_LEFT)):
        cells = [x.text for x in browser.find_elements(By.CSS_SELECTOR, "table:not([hidden]) [data-steps]")]
        expected = [cost.ALGORITHMS[name](64, 10**6).seconds(alpha, 1e-10) for name in names]
        numpy.testing.assert_allclose([float(x.removesuffix(" s")) for x in cells], expected, rtol=1e-3)
        browser.find_element(By.CSS_SELECTOR, 'input[data-role="alpha"]').send_keys(key)


def test_a_page_inside_another_is_whole(browser, site):
    """All of its rows are there, with nothing to scroll, on narrow and wide screens."""
    from selenium.webdriver.support.ui import WebDriverWait

    for width in (400, 700, 900, 1400):
        show(browser, width)
        browser.get((site / "docs/moving.html").as_uri())
        (frame,) = browser.find_elements("tag name", "iframe")
        browser.execute_script("arguments[0].scrollIntoView()", frame)
        browser.switch_to.frame(frame)
        WebDriverWait(browser, 60).until(lambda _: browser.find_elements("css selector", "td"))
        size = "[root.scrollHeight - innerHeight, root.scrollWidth - root.clientWidth]"
        assert browser.execute_script(f"const root = document.documentElement; return {size}") == [0, 0], width
        browser.switch_to.default_content()
