"""Chromium without a window, through its DevTools protocol: what a page says, shows and asks for."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the files in `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Browser:
    """One tab. `open` returns what a page complained of; `evaluate` runs JavaScript in it."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        await self.socket.send_str(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads((await self.socket.receive(timeout=60)).data)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def open(self, address: str, width: int = 1280, height: int = 900) -> list[str]:
        """Load a page. Returns its errors, and requests that left its host."""
        self.events.clear()
        await self._measure(width, height)
        await self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads((await self.socket.receive(timeout=60)).data))
        return await self._complaints(address)

    async def resize(self, address: str, width: int, height: int = 900) -> list[str]:
        """Show the page that is open in another size. Returns what it complains of then."""
        self.events.clear()
        await self._measure(width, height)
        return await self._complaints(address)

    async def _measure(self, width: int, height: int) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **sizes)

    async def _complaints(self, address: str) -> list[str]:
        await self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return [*filter(None, map(partial(complaint, address), self.events))]

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


def complaint(address: str, event: dict[str, Any]) -> str | None:
    """What an event of a page is an error of, None if it is none."""
    method, what = event["method"], event["params"]
    if method == "Runtime.exceptionThrown":
        return str(what["exceptionDetails"].get("exception", what["exceptionDetails"]).get("description"))
    if method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
        return f"console: {what['args']}"
    if method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
        return f"{what['entry']['text']} {what['entry'].get('url', '')}"
    if method == "Network.requestWillBeSent":
        url = what["request"]["url"]
        host = "/".join(address.split("/")[:3])
        return None if url.startswith((host, "data:", "blob:", "about:")) else f"asks {url}"
    return None


def browse(work: Any, profile: Path) -> Any:
    """Run `await work(browser)` in a new browser and return its result."""
    import aiohttp

    async def with_browser() -> Any:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        environment = {**os.environ, "LANG": "C.UTF-8"}
        process = subprocess.Popen(
            [PROGRAM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        assert process.stderr is not None
        try:
            port = next(m[1] for line in process.stderr if (m := re.search(rb"ws://127.0.0.1:(\d+)/", line))).decode()
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    (tab,) = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    browser = Browser(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await browser.call(f"{domain}.enable")
                    return await work(browser)
        finally:
            process.terminate()
            process.wait(30)
            process.stderr.close()

    return asyncio.run(with_browser())
