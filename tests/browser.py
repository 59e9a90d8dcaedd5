"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no package and no port
is needed."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from lagrpo.types import JsonObject

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless --remote-debugging-pipe --disable-gpu --disable-quic --no-first-run "
    "--disable-sync --hide-scrollbars --disable-background-networking "
    "--disable-component-update --disable-extensions --force-device-scale-factor=1"
)
DEADLINE = 60.0  # seconds for one answer, or for something to become true, on a busy machine
KEYS = {
    "Escape": 27,
    "Enter": 13,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowLeft": 37,
}


def find_chromium() -> str:
    """The program $LAGRPO_BROWSER names, or the first on the PATH. Raises FileNotFoundError where
    there is none."""
    names = [name for name in (os.environ.get("LAGRPO_BROWSER"), *NAMES) if name]
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise FileNotFoundError(
            "these tests need Chromium: apt-get install chromium, or set LAGRPO_BROWSER"
        )
    return program


class Browser:
    """One process with one page at a time."""

    def __init__(self, profile: Path) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [
            find_chromium(),
            *OPTIONS.split(),
            *sandbox,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out):
            os.close(end)
        self._out, self._in, self._rest = ours_out, ours_in, b""
        self._numbers = itertools.count(1)
        self._events: list[JsonObject] = []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        for end in (self._out, self._in):
            os.close(end)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> JsonObject:
        """Returns the result of a command. Raises RuntimeError, or TimeoutError after DEADLINE."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != number:
                self._events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def take_events(self) -> list[JsonObject]:
        """Returns the events that the browser has sent since the last call."""
        events, self._events = self._events, []
        return events

    def _read(self) -> JsonObject:
        end = time.monotonic() + DEADLINE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready or not (piece := os.read(self._in, 1 << 16)):
                raise TimeoutError(f"the browser did not answer (exit code {self._process.poll()})")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1280, height: int = 860) -> Page:
        """A new page, once its script has drawn the head."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        page.call("Page.navigate", url=url)
        page.wait("document.querySelector('header')")
        return page


class Page:
    """A page, and what it complained of and asked for."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> JsonObject:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page. Raises RuntimeError for what it throws."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return once the expression is true. Raises TimeoutError after DEADLINE."""
        end = time.monotonic() + DEADLINE
        while not self.js(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{expression} is not true; the page shows: "
                    f"{self.js('document.body.innerText')[:500]}"
                )
            time.sleep(0.02)

    def settle(self) -> None:
        """Return after two frames, when what was asked for is on the screen."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str = "main") -> str:
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector: str) -> list[str]:
        return self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)"
        )

    def place(self, selector: str, number: int = 0) -> tuple[float, float]:
        """The middle of an element, scrolled into sight."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        box = self.js(
            f"(() => {{ const node = {element}; if (!node) return null;"
            " node.scrollIntoView({block: 'nearest'});"
            "const box = node.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        assert box, f"there is no {selector} number {number}"
        return box[0], box[1]

    def click(self, selector: str, number: int = 0) -> None:
        x, y = self.place(selector, number)
        self.click_at(x, y)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def hover(self, selector: str, number: int = 0) -> None:
        x, y = self.place(selector, number)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def tap(self, selector: str, number: int = 0) -> None:
        """Tap an element with a finger, and wait until the page has taken the tap as a click."""
        x, y = self.place(selector, number)
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.js(
            "window.tapped = new Promise((done) =>"
            " addEventListener('click', done, { capture: true, once: true })); 0"
        )
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.js("window.tapped.then(() => 0)")
        self.settle()

    def key(self, name: str) -> None:
        code = {"windowsVirtualKeyCode": KEYS[name]} if name in KEYS else {"text": name}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Put text into a field in place of what is there, and wait until the page has drawn what
        follows."""
        self.js(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            " field.focus();"
            f"field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')); }})()"
        )
        time.sleep(0.2)
        self.settle()

    def choose(self, label: str, value: str) -> None:
        """Take an option of the select with this label."""
        self.js(
            "(() => { const select = "
            f"document.querySelector('select[aria-label={json.dumps(label)}]');"
            f"select.value = {json.dumps(value)}; select.dispatchEvent(new Event('change')); }})()"
        )
        self.settle()

    def check(self, *allowed: str) -> None:
        """Assert that nothing was complained of, and that nothing was asked for but URLs that begin
        so."""
        self.call("Page.bringToFront")  # pages behind others draw no frames
        self.settle()
        for event in self._browser.take_events():
            if event.get("sessionId") == self._session:
                self._note(event["method"], event["params"])
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(allowed)] == []

    def _note(self, method: str, facts: JsonObject) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(facts["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and facts["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(json.dumps(facts["args"])[:500])
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
