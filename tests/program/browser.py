# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, told what to do over its debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 120  # seconds for all that is asked of it

# How large all that it shows is, and where plots lie, in pixels of the whole page.
_LAYOUT = """(() => {
  const width = document.documentElement.scrollWidth;
  const area = box => [  // what is not scrolled away
    box.left + scrollX, box.top + scrollY, Math.min(box.width, width - box.left), box.height,
  ].map(Math.round);
  const plots = [...document.querySelectorAll('svg .axes, table.heat')];
  return {
    width,
    height: document.documentElement.scrollHeight,
    plots: plots.map(plot => area(plot.getBoundingClientRect())),
  };
})()"""

# Of a picture and areas in it: how much of each area has a colour.
_COLOURED = """(async (png, areas) => {
  const image = new Image();
  image.src = 'data:image/png;base64,' + png;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height).getContext('2d');
  canvas.drawImage(image, 0, 0);
  return areas.map(([x, y, w, h]) => {
    const bytes = canvas.getImageData(x, y, w, h).data;
    let coloured = 0;
    for (let i = 0; i < bytes.length; i += 4) {
      const [r, g, b] = bytes.subarray(i, i + 3);
      coloured += Math.max(r, g, b) - Math.min(r, g, b) > 24;
    }
    return coloured / (w * h);
  });
})"""


class Browser:
    """One page of it."""

    def __init__(self, send, receive):
        self._send, self._receive, self._number, self._session = send, receive, 0, None
        self._rest = b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self("Page.enable")

    def __call__(self, method, **params):
        """Makes a call of the browser's protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        answer = self._wait(lambda told: told.get("id") == self._number)
        assert "result" in answer, answer
        return answer["result"]

    def look(self, page, width, scheme="light", picture=None):
        """Shows the page as a phone or a screen of that width: its layout, and as `coloured` how
        much of each plot has a colour. The screenshot is kept as `picture`."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self("Emulation.setDeviceMetricsOverride", **size)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Page.navigate", url=Path(page).as_uri())
        self._wait(lambda told: told.get("method") == "Page.loadEventFired")
        layout = self._evaluate(_LAYOUT)
        clip = {"x": 0, "y": 0, "width": layout["width"], "height": layout["height"], "scale": 1}
        png = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        if picture:
            Path(picture).write_bytes(base64.b64decode(png))
        layout["coloured"] = self._evaluate(f"{_COLOURED}({json.dumps(png)}, {layout['plots']})")
        return layout

    def _evaluate(self, script):
        told = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"]["value"]

    def _wait(self, is_it):
        while True:
            while b"\0" not in self._rest:
                more = self._receive.read1()
                assert more, "the browser ended"
                self._rest += more
            message, self._rest = self._rest.split(b"\0", 1)
            told = json.loads(message)
            if is_it(told):
                return told


@contextlib.contextmanager
def browser():
    """Skips where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser (none of {', '.join(NAMES)})")
    from_us, to_it = os.pipe()
    from_it, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        # It reads 3 and writes 4.
        command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", program, *options.split()]
        process = subprocess.Popen(command, pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        try:
            with open(to_it, "wb") as send, open(from_it, "rb") as receive:
                yield Browser(send, receive)
        finally:
            process.wait()  # it ends with its pipe
            watch.cancel()
