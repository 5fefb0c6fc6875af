"""A real ComfyUI server in its own process, with a private base folder, driven over HTTP.

Nothing of the ComfyUI tree is written to: models, custom nodes, input, output, user files and the database all lie
under the base folder. Works with any ComfyUI that knows `--base-directory`; options that came later are passed only
to trees whose `comfy/cli_args.py` names them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from .server_watch import PeakMemory, StepClock

PACK_NAME = "Kitchen Accel v1.0 ünïcode"
"""Default folder name of the pack under custom_nodes: everything a user's folder may hold."""

WANTED_OPTIONS = ("--disable-auto-launch", "--disable-api-nodes", "--cache-classic")
"""Passed where the tree knows them: no browser, no nodes that call out, and one cache behaviour in all versions."""

START_ATTEMPTS = 3
"""Another program may take the free port between our asking for it and the server's binding it."""

IGNORED_IN_COPY = (".*", "__pycache__", "*.egg-info", "build", "dist")


class ServerError(RuntimeError):
    """The server did not start, stopped, or did not answer in time. The message ends with its log's tail."""


class PromptError(RuntimeError):
    """The server refused a workflow, or a node failed. The message names the nodes and their errors.

    interrupted: whether the prompt was stopped on request.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        self.interrupted = interrupted
        super().__init__(message)


class ComfyServer:
    """A context manager around one server process.

    comfyui: ComfyUI's folder. base: the private base folder, made when missing and kept afterwards.
    pack: folder of a custom node pack to link under custom_nodes as `pack_name`, or None.
    extra_args: further options of main.py. env: variables set for the server beside this process's own.
    python: interpreter to run it with. start_timeout_s: seconds until ServerError.
    """

    def __init__(
        self,
        comfyui: Path,
        base: Path,
        pack: Path | None = None,
        *,
        pack_name: str = PACK_NAME,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.comfyui = comfyui.resolve()
        self.base = base.resolve()
        self.log_file = self.base / "server.log"
        self.port = 0
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})
        self._python = python
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: PeakMemory | None = None
        self._clock: StepClock | None = None
        self._client_id = uuid.uuid4().hex
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for name in ("custom_nodes", "models/checkpoints", "models/diffusion_models", "input", "output", "user"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        if pack is not None:
            link_folder(pack.resolve(), self.base / "custom_nodes" / pack_name)

    # --- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> ComfyServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id. Raises ServerError when it is not running."""
        return self._alive().pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_text(self) -> str:
        """Everything the server has written, over all its starts on this base folder."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def start(self) -> None:
        """Start and wait until it answers. Raises ServerError."""
        if self._process is not None:
            raise ServerError("the server already runs")
        for attempt in range(1, START_ATTEMPTS + 1):
            log_start = len(self.log_text)
            self._launch()
            try:
                self._wait_ready()
                break
            except ServerError:
                taken = any(text in self.log_text[log_start:] for text in ("address already in use", "Errno 10048"))
                self.kill9()
                if not taken or attempt == START_ATTEMPTS:
                    raise
            except BaseException:
                self.kill9()
                raise
        self._memory = PeakMemory(self.pid)
        self._clock = StepClock(f"ws://127.0.0.1:{self.port}/ws?clientId={self._client_id}")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the server to end, and end it by force after `timeout_s` seconds. Safe to call twice."""
        process = self._process
        if process is None:
            return
        try:
            self._close_watchers()
            if process.poll() is None:
                _ask_to_end(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
        finally:
            # also when an impatient second Ctrl-C ends the waiting
            self.kill9()

    def kill9(self) -> None:
        """End the server and all its children at once, as a crash would."""
        process, self._process = self._process, None
        self._close_watchers()
        if process is None:
            return
        victims = []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            victims = [root, *root.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()
        psutil.wait_procs(victims, timeout=10)

    def restart(self) -> None:
        """Stop and start again on the same base folder, on another port."""
        self.stop()
        self.start()

    # --- files --------------------------------------------------------------------------------------------------

    def add_model(self, file: Path, kind: str = "checkpoints") -> str:
        """Make a model file appear under models/`kind`; it is linked where possible and never changed.

        Returns the name to use in a workflow.
        """
        link_file(file.resolve(), self.base / "models" / kind / file.name)
        return file.name

    def add_input(self, name: str, data: bytes) -> str:
        """Write a file into the input folder. Returns its name."""
        (self.base / "input" / name).write_bytes(data)
        return name

    def add_node_file(self, file: Path) -> None:
        """Make a custom node of one Python file appear under custom_nodes, before the start."""
        shutil.copyfile(file, self.base / "custom_nodes" / file.name)

    # --- prompts ------------------------------------------------------------------------------------------------

    def queue(self, workflow: Mapping[str, Any]) -> str:
        """Queue an API-format workflow. Returns its prompt id. Raises PromptError when it is refused."""
        answer = self.request("/prompt", {"prompt": dict(workflow), "client_id": self._client_id})
        return str(answer["prompt_id"])

    def wait(self, prompt_id: str, timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait for a prompt. Returns its history. Raises PromptError when a node failed, ServerError on timeout."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            history: dict[str, Any] = self.request(f"/history/{prompt_id}")
            if prompt_id in history:
                entry: dict[str, Any] = history[prompt_id]
                _raise_failure(entry)
                return entry
            time.sleep(0.05)
        raise ServerError(f"prompt {prompt_id} did not finish in {timeout_s:.0f} seconds{self._tail()}")

    def run(self, workflow: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Queue and wait. Returns the history."""
        return self.wait(self.queue(workflow), timeout_s)

    def images(self, history: Mapping[str, Any]) -> list[bytes]:
        """The PNG files a prompt saved, in order."""
        found = []
        for output in history["outputs"].values():
            for image in output.get("images", []):
                query = urllib.parse.urlencode({key: image[key] for key in ("filename", "subfolder", "type")})
                found.append(self._fetch(f"/view?{query}"))
        return found

    def step_seconds(self, history: Mapping[str, Any]) -> list[float]:
        """Seconds between the sampler's steps of a finished prompt: one value fewer than there were steps.

        The first step is not among them: it has no beginning that a client sees, and holds the model's loading.
        """
        if self._clock is None:
            raise ServerError("the server is not running")
        return self._clock.intervals(str(history["prompt"][1]))

    def cached_nodes(self, history: Mapping[str, Any]) -> set[str]:
        """Ids of the nodes that did not run because ComfyUI still had their outputs."""
        messages = history["status"]["messages"]
        return {node for kind, data in messages if kind == "execution_cached" for node in data["nodes"]}

    def interrupt(self) -> None:
        """Stop the running prompt: its `wait` raises PromptError with `interrupted`."""
        self.request("/interrupt", {})

    def free(self) -> None:
        """Ask the server to unload its models and forget cached outputs, which it does once it is idle."""
        self.request("/free", {"unload_models": True, "free_memory": True})

    def report(self) -> dict[str, Any]:
        """What the pack tells at /kitchen_accel/report."""
        answer: dict[str, Any] = self.request("/kitchen_accel/report")
        return answer

    def peak_rss(self) -> int:
        """Largest resident memory of the server's process, in bytes, since the start or the last `reset_peak`.

        Its children (engine builds) are not counted.
        """
        if self._memory is None:
            raise ServerError("the server is not running")
        return self._memory.peak()

    def reset_peak(self) -> None:
        """Forget the peak seen so far."""
        if self._memory is None:
            raise ServerError("the server is not running")
        self._memory.reset()

    # --- inside -------------------------------------------------------------------------------------------------

    def request(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
        """GET `path`, or POST `body` as JSON. Returns the parsed answer, None for an empty one.

        Raises PromptError for a refused workflow, ServerError for everything else.
        """
        text = self._fetch(path, body, timeout_s)
        return json.loads(text) if text else None

    def _fetch(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            if path == "/prompt":
                raise PromptError(_refusal_text(text)) from error
            raise ServerError(f"{path} answered {error.code}: {text[:2000]}{self._tail()}") from error
        except OSError as error:
            code = self._process.poll() if self._process else None
            state = "is not running" if self._process is None or code is not None else "does not answer"
            raise ServerError(f"the server {state} (exit code {code}): {error}{self._tail()}") from error

    def _launch(self) -> None:
        self.port = _free_port()
        known = (self.comfyui / "comfy" / "cli_args.py").read_text(encoding="utf-8")
        command = [self._python, str(self.comfyui / "main.py"), "--cpu", "--base-directory", str(self.base)]
        command += ["--listen", "127.0.0.1", "--port", str(self.port)]
        command += ["--database-url", f"sqlite:///{(self.base / 'user' / 'comfyui.db').as_posix()}"]
        command += [option for option in WANTED_OPTIONS if f'"{option}"' in known and option not in self._extra_args]
        with self.log_file.open("ab") as log:
            log.write(b"--- start ---\n")
            log.flush()
            self._process = subprocess.Popen(
                [*command, *self._extra_args],
                cwd=self.comfyui,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # its own group: a Ctrl-C meant for the caller does not reach it, and its children die with it
                start_new_session=os.name != "nt",
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "DO_NOT_TRACK": "1", **self._env}
        env.pop("PYTHONWARNINGS", None)
        if importlib.util.find_spec("torchaudio") is None:
            # several trees import it while they start, for audio models; no workflow of ours uses them
            stand_in = self.base / "stand_in"
            (stand_in / "torchaudio").mkdir(parents=True, exist_ok=True)
            for module in ("__init__.py", "functional.py"):
                (stand_in / "torchaudio" / module).touch()
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stand_in), env.get("PYTHONPATH", "")]))
        return env

    def _wait_ready(self) -> None:
        end = time.monotonic() + self._start_timeout_s
        while time.monotonic() < end:
            code = self._alive().poll()
            if code is not None:
                raise ServerError(f"the server ended with exit code {code} while starting{self._tail()}")
            with contextlib.suppress(ServerError):
                self.request("/system_stats", timeout_s=5.0)
                return
            time.sleep(0.1)
        raise ServerError(f"the server did not answer in {self._start_timeout_s:.0f} seconds{self._tail()}")

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process

    def _close_watchers(self) -> None:
        for watcher in (self._clock, self._memory):
            if watcher is not None:
                watcher.close()
        self._clock = self._memory = None

    def _tail(self, lines: int = 30) -> str:
        return f"\n--- end of {self.log_file} ---\n" + "\n".join(self.log_text.splitlines()[-lines:])


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does, so that servers it started end too; a second one is ignored.

    A shell or `timeout` sends it to a whole group, whose members may send it on to each other.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def link_folder(source: Path, target: Path) -> None:
    """Make `source` appear at `target`: a symbolic link, else a junction, else a copy without build products."""
    if target.is_symlink():
        target.unlink()
    if target.exists():
        shutil.rmtree(target)
    try:
        target.symlink_to(source, target_is_directory=True)
    except OSError:
        # Windows without the right to make links
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*IGNORED_IN_COPY))


def link_file(source: Path, target: Path) -> None:
    """Make the file `source` appear at `target`: a symbolic link, else a hard link, else a copy."""
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    for link in (target.symlink_to, target.hardlink_to):
        with contextlib.suppress(OSError):
            link(source)
            return
    shutil.copyfile(source, target)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, which ComfyUI ends cleanly on; SIGTERM where a shell made this process, and so its child, ignore that."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            process.send_signal(signal.CTRL_BREAK_EVENT)
        else:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)


def _refusal_text(answer: str) -> str:
    """ComfyUI's answer to a workflow it refuses, as lines for people."""
    try:
        parsed = json.loads(answer)
        lines = [
            f"the workflow was refused: {parsed['error']['message']} {parsed['error'].get('details', '')}".rstrip()
        ]
        for node, found in (parsed.get("node_errors") or {}).items():
            lines += [f"{node} ({found['class_type']}): {e['message']} {e['details']}" for e in found["errors"]]
        return "\n".join(lines)
    except (ValueError, KeyError, TypeError):
        return f"the workflow was refused: {answer[:2000]}"


def _raise_failure(entry: Mapping[str, Any]) -> None:
    """Raise PromptError when a finished prompt's history tells of a failure."""
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_interrupted":
            raise PromptError(f"the prompt was interrupted at node {data['node_id']}", interrupted=True)
        if kind == "execution_error":
            trace = "".join(data["traceback"])
            raise PromptError(f"{data['node_id']} ({data['node_type']}): {data['exception_message']}\n{trace}")
    if entry["status"]["status_str"] != "success":
        raise PromptError(f"the prompt failed: {entry['status']}")
