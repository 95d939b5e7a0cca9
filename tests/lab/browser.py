"""Controls a headless Chromium over its debugging pipe: needs no driver, no socket, no network."""

import json
import os
import select
import shutil
import subprocess
import tempfile

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]

#: Timeout for a message from the browser, seconds; on a busy machine it may start slowly.
PATIENCE_S = 120


def path():
    """The path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. `errors` collects exceptions, logged errors and blocked requests of the page."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="fusewise-chromium-")
        self.log = open(os.path.join(self.profile, "log"), "w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        to_read, self.out = os.pipe()
        self.inn, to_write = os.pipe()

        def pipes():  # Chromium reads commands from descriptor 3 and answers on 4
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [path(), *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.number, self.session = b"", 0, None
        self.events, self.errors = [], []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.ask(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.inn)
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        number = self.number
        while True:
            reply = self._next()
            if reply.get("id") == number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def _next(self):
        while b"\0" not in self.buffer:
            if not select.select([self.inn], [], [], PATIENCE_S)[0]:
                self.log.seek(0)
                raise AssertionError(f"the browser does not answer; it last said: {self.log.read()[-2000:]}")
            chunk = os.read(self.inn, 2**20)
            assert chunk, "the browser is gone"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
            name, params = message["method"], message["params"]
            if name == "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"])
            if name == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            if name == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                self.errors.append(params["args"])
        return message

    def open(self, file, width=1200, height=900, dark=False):
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=theme)
        self.events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self._next()

    def run(self, script):
        """Evaluate a JavaScript expression and return its value."""
        reply = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = "\r" if key == "Enter" else None
            code = {"windowsVirtualKeyCode": {"Enter": 13, "Tab": 9, "ArrowDown": 40, " ": 32}.get(key, 0)}
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, **code, **extra)
