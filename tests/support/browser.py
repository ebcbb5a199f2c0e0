"""A real Chromium for tests of the gateway's page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from support.harness import wait_for

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")

#: It must do nothing by itself, and needs no rights that a container lacks.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)

DESK = (1280, 800)
PHONE = (360, 740)


class Browser(webdriver.Chrome):
    """Chromium with a fresh profile, and short words for what tests do."""

    def __init__(self, profile: str) -> None:
        options = Options()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(options, Service(str(DRIVER)))

    def looks(self, size: tuple[int, int] = DESK, *, dark: bool = False) -> None:
        """Sets the size of the window's inside, and the colours that the reader prefers."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    @contextmanager
    def visits(self, url: str) -> Iterator[None]:
        """Opens the gateway's page, and waits for its worker; at the end nothing was complained."""
        self.get(url)
        wait_for(lambda: self.text("state") == "1 worker", "the page shows the worker")
        yield
        assert self.complaints() == []

    def text(self, name: str) -> str:
        """What the reader sees of an element, by its id."""
        return str(self.find_element(By.ID, name).text)

    def number(self, name: str) -> float:
        """The number that an element shows; 0 if it shows none."""
        text = self.text(name).replace(",", "")
        return float(text) if text.replace(".", "").isdigit() else 0.0

    def points(self, name: str) -> int:
        """How many points a line of a chart has."""
        return len((self.find_element(By.ID, name).get_attribute("points") or "").split())

    def rows(self, name: str) -> list[str]:
        """The rows of a table's body, each on one line."""
        # At once, because the page makes new ones each second.
        script = "return [...document.getElementById(arguments[0]).rows].map(r => r.innerText)"
        return [" ".join(row.split()) for row in self.execute_script(script, name)]

    def click(self, name: str) -> None:
        """Clicks an element."""
        self.find_element(By.ID, name).click()

    def type(self, name: str, text: str) -> None:
        """Writes a text into a field, in the place of what is there."""
        field = self.find_element(By.ID, name)
        field.clear()
        field.send_keys(text)

    def complaints(self) -> list[str]:
        """What the browser has complained of: errors of the script, and refusals by the policy."""
        log = self.get_log("browser")  # type: ignore[no-untyped-call]
        # 401 and 503 are answers that the page shows.
        return [each["message"] for each in log if "status of" not in each["message"]]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts it; skips the test where it is not installed."""
    for program in (CHROMIUM, DRIVER):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            yield browser
        finally:
            browser.quit()
