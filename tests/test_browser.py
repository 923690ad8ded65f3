"""The report as a person sees it, in headless Chromium.

Needs Debian's `chromium` and `chromium-driver` (or their like); skipped where they are absent.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sample_result import HOSTILE, failed, measured_by, rederive, sample, save, unscored

from leakgauge.audit import schema
from leakgauge.audit.results import Measurement
from leakgauge.report import html

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    os.environ["SE_OFFLINE"] = "true"  # selenium must not look for drivers on the network
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    made = sample(folder, rounds=(0, 20))
    (folder / "report.html").write_text(html.render(made, folder, "show"), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    made = sample(folder, seeds=1, text=HOSTILE)
    metric = Measurement("x", HOSTILE, HOSTILE, "lower", 0.5)
    made = measured_by(made, metric, lambda psnr: 1 / psnr)
    attacks = (*made.plan.attack, {"name": HOSTILE, HOSTILE: HOSTILE * 5})
    made = replace(
        made,
        trials=(*made.trials, failed(made.trials[0], HOSTILE, HOSTILE)),
        plan=replace(made.plan, attack=attacks),
    )
    loaded = schema.load(save(folder, rederive(made)))
    (folder / "report.html").write_text(html.render(loaded, folder, "show"), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def unknown(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unknown")
    made = sample(folder, seeds=2, outcome="below the limit")
    trials = tuple(unscored(t) if t.kind == "trial" else t for t in made.trials)
    text = html.render(rederive(replace(made, trials=trials)), folder, "show")
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


def visit(browser, path: Path, width: int = 1280, dark: bool = False) -> list[str]:
    """Open a page afresh; the addresses it asked for besides itself, data in it excepted."""
    media = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [media]})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(path.as_uri())
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert path.as_uri() in asked  # the log works
    return [url for url in asked if url != path.as_uri() and not url.startswith("data:")]


def complaints(browser) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def visible(browser, selector: str) -> str:
    element = browser.find_element("css selector", selector)
    assert element.is_displayed()
    return element.text.replace("\xa0", " ")


def test_the_verdict_is_what_one_sees_first(browser, report):
    assert visit(browser, report) == []
    assert complaints(browser) == []
    assert "Leaks" in browser.title
    assert visible(browser, ".outcome") == "Leaks"
    assert "very high" in visible(browser, ".level")
    heading = browser.find_element("css selector", "h1")
    assert heading.text.startswith("This federation leaks")
    assert 0 < heading.rect["y"] < 844  # without scrolling
    assert len(browser.find_elements("css selector", ".figures .card")) == 5


def test_the_style_sheet_applies(browser, report):
    visit(browser, report)
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    visit(browser, report, dark=True)
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(250, 250, 248)", "rgb(18, 22, 27)")


def test_every_picture_is_loaded(browser, report):
    visit(browser, report)
    widths = browser.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert len(widths) == 2 * 120 + 2  # the worst picture stands on the first screen too
    assert set(widths) == {16}


@pytest.mark.parametrize("order", ["attack", "id", "worst"])
def test_sorting_puts_the_cards_in_order(browser, report, order):
    visit(browser, report)
    places = "return [...gallery.children].map(card => +card.dataset[arguments[0]])"
    browser.execute_script("gallery.append(...[...gallery.children].reverse())")
    assert browser.execute_script(places, order) != list(range(120))
    button = browser.find_element("css selector", f"#orders button[data-order={order}]")
    button.click()
    assert browser.execute_script(places, order) == list(range(120))
    pressed = browser.find_elements("css selector", "#orders button[aria-pressed=true]")
    assert [element.text for element in pressed] == [button.text]
    assert complaints(browser) == []


def test_the_first_card_is_the_worst_leak(browser, report):
    visit(browser, report)
    values = [
        float(element.text.split()[0])
        for element in browser.find_elements("css selector", "#gallery figcaption b")
    ]
    assert len(values) == 120
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("which", ["report", "hostile", "unknown"])
def test_nothing_sticks_out_at_the_side(browser, which, width, request):
    visit(browser, request.getfixturevalue(which), width)
    whole = browser.execute_script("return document.documentElement.scrollWidth")
    assert browser.execute_script("return innerWidth") == width
    assert whole <= width
    beyond = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert beyond == []


def test_what_nobody_can_score_is_shown_alone_and_never_green(browser, unknown):
    assert visit(browser, unknown) == []
    assert visible(browser, ".outcome") == "Inconclusive"
    assert "nobody knows the truth" in visible(browser, "h1")
    captions = browser.find_elements("css selector", "#gallery figcaption b")
    assert [caption.text for caption in captions] == ["not scored"] * 48
    widths = browser.execute_script(
        "return [...document.images].map(i => i.width / i.closest('figure').clientWidth)"
    )
    assert len(widths) == 48
    assert min(widths) > 0.7  # alone, it has the room of two
    green = browser.execute_script(
        "return [...document.querySelectorAll('.below-the-limit, .risk, .passed')]"
        ".filter(e => !e.closest('.reading, #control')).map(e => e.outerHTML)"
    )
    assert green == []
    assert complaints(browser) == []


def test_tables_are_read_line_by_line_on_a_phone(browser, report):
    visit(browser, report, 390)
    cells = browser.find_elements("css selector", "#findings tbody tr:first-child td")
    tops = [cell.rect["y"] for cell in cells]
    assert tops == sorted(set(tops))  # each below the other
    assert all(cell.rect["width"] > 300 for cell in cells)


def test_injected_text_does_nothing(browser, hostile):
    assert visit(browser, hostile) == []
    assert browser.execute_script("return window.__pwned") is None
    assert complaints(browser) == []
    assert browser.execute_script("return document.scripts.length") == 1
    assert HOSTILE in browser.find_element("css selector", "header").text
    for order in ("attack", "id", "worst"):
        browser.find_element("css selector", f"#orders button[data-order={order}]").click()
    assert browser.execute_script("return window.__pwned") is None


def test_the_policy_would_stop_what_slipped_through(browser, report, tmp_path):
    """The watchers of these tests do see: an unescaped text is blocked, and reported."""
    text = report.read_text(encoding="utf-8")
    slipped = tmp_path / "slipped.html"
    slipped.write_text(
        text.replace("<main>", f"<main>{HOSTILE}<img src='http://127.0.0.1:9/x.png'>"),
        encoding="utf-8",
    )
    visit(browser, slipped)
    assert browser.execute_script("return window.__pwned") is None
    assert len([text for text in complaints(browser) if "Content Security Policy" in text]) >= 3


def test_a_request_would_be_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'>", encoding="utf-8")
    assert visit(browser, page) == ["http://127.0.0.1:9/x.png"]
    assert complaints(browser) != []


def opened(browser) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll('section:has(details.fold[open])')].map(s => s.id)"
    )


def opens(browser, wanted: list[str]) -> bool:
    """Whether these are open within ten seconds: a busy browser follows a link a little later."""
    end = time.monotonic() + 10
    while opened(browser) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return opened(browser) == wanted


def test_a_link_opens_the_section_it_leads_to(browser, report):
    visit(browser, report)
    first = ["findings", "reconstructions", "defences"]
    assert opened(browser) == first
    link = browser.find_element("css selector", "nav a[href='#why']")
    assert not browser.find_element("css selector", "#why .plot").is_displayed()
    link.click()
    assert opens(browser, [*first, "why"])
    assert browser.find_element("css selector", "#why .plot").is_displayed()
    browser.find_element("css selector", "#why summary").click()
    assert opens(browser, first)
    browser.execute_script("arguments[0].click()", link)  # the address stays the same
    assert opens(browser, [*first, "why"])
    assert complaints(browser) == []


def test_printing_opens_every_section_and_closes_it_again(browser, report):
    visit(browser, report)
    before = opened(browser)
    browser.execute_script(
        "window.seen = []; addEventListener('beforeprint', () => { window.seen = "
        "[...document.querySelectorAll('details:not([open])')].map(d => d.className); "
        "window.sections = document.querySelectorAll('details[open]').length; });"
    )
    browser.execute_cdp_cmd("Page.printToPDF", {})
    assert browser.execute_script("return window.seen") == []
    assert browser.execute_script("return window.sections") > 14
    assert opened(browser) == before


def test_it_prints_with_the_verdict_on_a_page_of_its_own(browser, report):
    visit(browser, report)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    style = browser.execute_script(
        "const s = getComputedStyle(document.getElementById('verdict'));"
        "return [s.breakAfter, getComputedStyle(document.querySelector('nav')).display]"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert style == ["page", "none"]
