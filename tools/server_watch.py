"""Two observers of a running ComfyUI server, each a thread: its peak memory, and when its steps end."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise
from typing import Any

import psutil

SAMPLE_S = 0.05


class PeakMemory:
    """Samples a process's resident memory every 50 ms, as no platform but Windows and Linux keeps a peak for us."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()

    def peak(self) -> int:
        """Largest resident size seen, in bytes."""
        self._sample()
        return self._peak

    def reset(self) -> None:
        self._peak = 0

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        try:
            self._peak = max(self._peak, self._process.memory_info().rss)
        except psutil.Error:
            self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()


class StepClock:
    """Listens on ComfyUI's websocket and keeps the time of every sampling step's end.

    Returns from its constructor once connected, so that no step of a later prompt is missed.
    """

    def __init__(self, url: str) -> None:
        self._ends: dict[str, list[float]] = {}
        self._finished: set[str] = set()
        self._news = threading.Condition()
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._connected = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="step-clock", daemon=True)
        self._thread.start()
        self._connected.wait()
        self._raise_error()

    def intervals(self, prompt_id: str, timeout_s: float = 30.0) -> list[float]:
        """Seconds between the steps of one finished prompt, in order.

        The server's history may tell of the prompt's end before the last events arrive here: waits for them.
        Raises TimeoutError.
        """
        with self._news:
            if not self._news.wait_for(lambda: prompt_id in self._finished, timeout_s):
                raise TimeoutError(f"no word of the end of prompt {prompt_id} in {timeout_s:.0f} seconds")
            ends = self._ends.get(prompt_id, [])
        return [later - earlier for earlier, later in pairwise(ends)]

    def _raise_error(self) -> None:
        """Hand an error of the thread before it connected to the caller."""
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self) -> None:
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._task = self._loop.create_task(self._listen())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._connected.set()

    async def _listen(self) -> None:
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self._url, max_msg_size=0) as socket,
        ):
            async for message in socket:
                now = time.perf_counter()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(message.data)
                # the server greets a new listener with its status: from here on nothing is missed
                self._connected.set()
                self._note(str(event.get("type")), event.get("data") or {}, now)

    def _note(self, kind: str, data: dict[str, Any], now: float) -> None:
        """Keep what one event of the server tells."""
        prompt_id = str(data.get("prompt_id"))
        with self._news:
            if kind == "progress" and data.get("value", 0) >= 1:
                self._ends.setdefault(prompt_id, []).append(now)
            # sent after everything else of a prompt, however it ended
            elif kind == "executing" and data.get("node") is None:
                self._finished.add(prompt_id)
                self._news.notify_all()
