"""`comfy_kitchen.yaml` as frozen settings, and every fault in it as one clear error.

Nothing here decides anything: a backend that is the default but not enabled is the decision's business, because
turning the whole file down for it would enable the backend again.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from .backends.base import BACKEND_IDS, BackendId, Precision
from .errors import ConfigError
from .strict_yaml import Section, load_yaml

CONFIG_NAME = "comfy_kitchen.yaml"
"""File name of the configuration, in the package (the default) and at the user's."""

BackendChoice: TypeAlias = Literal["auto", "cuda", "tensorrt", "openvino", "directml"]
"""`auto` and every `BackendId`: what `backend.default` and the nodes' `backend` input take."""

PrecisionChoice: TypeAlias = Literal["auto", "fp32", "bf16", "fp16", "fast"]


class BackendSettings(Section):
    """`backend`: which backends may serve a model, and what happens when one cannot."""

    default: BackendChoice = "auto"
    """What a node's `auto` means. `auto` here: the fastest backend that is proven right."""
    fallback: Literal["cuda", "none"] = "cuda"
    """Where a call goes whose named backend refuses it. `none`: the prompt fails with all reasons."""
    enabled: tuple[BackendId, ...] = Field(
        default=BACKEND_IDS, description=f"a list of {', '.join(BACKEND_IDS)}, each at most once"
    )
    """Backends that may be used, in the order of `BACKEND_IDS`. Always holds `cuda`, the reference."""

    @field_validator("enabled")
    @classmethod
    def _once_each(cls, value: tuple[BackendId, ...]) -> tuple[BackendId, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise PydanticCustomError(
                    "duplicate", "is listed twice", {"index": index, "next_step": "remove one of the two"}
                )
        return tuple(name for name in BACKEND_IDS if name == "cuda" or name in value)


class BuildSettings(Section):
    """`builds`: limits of the child processes that build engines."""

    timeout_min: float = Field(default=60.0, gt=0, description="a number of minutes above 0")
    """Minutes after which a build is ended and counted as failed."""
    patched_after_runs: int = Field(default=2, ge=0, description="a whole number, 0 or more (0 = never)")
    """Prompts the same weight patches (LoRA) must have served before an engine with them is built; 0 = never."""
    memory_ceiling_gb: float = Field(default=0.0, ge=0, description="a number of GB, 0 or more (0 = no limit)")
    """Memory in GB (1e9 bytes) a build process may take; 0 = no limit."""


class CacheSettings(Section):
    """`cache`: the folder of built engines."""

    max_gb: float = Field(default=40.0, gt=0, description="a number of GB above 0")
    """Size in GB (1e9 bytes) above which the engines unused for longest are removed."""


class ParitySettings(Section):
    """`parity`: minimum PSNR in dB, of the final picture and of the network's first outputs, by precision."""

    fp32: float = Field(default=60.0, gt=0, description="a number of dB above 0")
    fp16: float = Field(default=40.0, gt=0, description="a number of dB above 0")
    bf16: float = Field(default=30.0, gt=0, description="a number of dB above 0")

    def threshold(self, precision: Precision) -> float:
        """Minimum PSNR in dB for an engine that computes in `precision`."""
        return {"fp32": self.fp32, "fp16": self.fp16, "bf16": self.bf16}[precision]


class OpenVinoSettings(Section):
    """`openvino`: how the OpenVINO backend runs its engines."""

    device: str = Field(default="CPU", description="CPU, GPU, GPU.0, GPU.1, ..., NPU")
    """OpenVINO's own device name."""
    shapes: Literal["auto", "static", "dynamic"] = "auto"
    """`static`: one compiled network per shape; `dynamic`: one for all; `auto`: static where it pays."""
    max_compiled: int = Field(default=3, ge=1, le=16, description="a whole number from 1 to 16")
    """Compiled static networks kept alive at a time."""
    threads: int = Field(default=0, ge=0, description="a whole number, 0 or more (0 = OpenVINO's choice)")
    """CPU threads of an inference; 0 = OpenVINO's choice."""

    @field_validator("device")
    @classmethod
    def _one_known_device(cls, value: str) -> str:
        if re.fullmatch(r"CPU|GPU(\.\d{1,3})?|NPU", value):
            return value
        word = re.split(r"[:.,]", value.strip().upper())[0]
        if word in ("AUTO", "HETERO", "MULTI", "BATCH"):
            raise PydanticCustomError(
                "virtual_device",
                "names a virtual device, but the device that runs must be known, for the engine's key and the report",
                {"next_step": "name the device itself"},
            )
        plain = re.fullmatch(r"CPU|GPU(\.\d{1,3})?|NPU", value.strip().upper())
        hint = f"write {plain[0]}" if plain else "write one of the allowed names, in capitals"
        raise PydanticCustomError("device", "is not a device of OpenVINO", {"next_step": hint})


class JournalSettings(Section):
    """`journal`: kitchen.log and kitchen.jsonl."""

    level: Literal["debug", "info", "warning"] = "info"
    """Least severe events that are written."""
    max_mb: float = Field(default=5.0, gt=0, description="a number of MB above 0")
    """Size in MB (1e6 bytes) at which each of the two files starts anew."""
    keep: int = Field(default=3, ge=0, le=100, description="a whole number from 0 to 100")
    """Older files kept of each."""


class Settings(Section):
    """The whole file. `Settings()` is what the packaged default file says."""

    backend: BackendSettings = BackendSettings()
    precision: PrecisionChoice = "auto"
    """What engines compute in. `auto`: what stock ComfyUI would; `fast`: the quickest that passes `parity`."""
    runtime_cache: str = Field(default="auto", min_length=1, description="auto, or the path of a folder")
    """Folder of built engines; see `resolve_cache_folder`."""
    build: Literal["background", "blocking", "never"] = "background"
    """Whether a prompt waits for an engine that is not built yet."""
    builds: BuildSettings = BuildSettings()
    cache: CacheSettings = CacheSettings()
    parity: ParitySettings = ParitySettings()
    openvino: OpenVinoSettings = OpenVinoSettings()
    journal: JournalSettings = JournalSettings()

    @field_validator("runtime_cache")
    @classmethod
    def _a_path(cls, value: str) -> str:
        if value != "auto" and value.strip().lower() == "auto":
            raise PydanticCustomError("path", "is neither auto nor a path", {"next_step": "write auto"})
        if not value.strip():
            raise PydanticCustomError("path", "is empty", {"next_step": "write auto"})
        if not value.isprintable():
            raise PydanticCustomError(
                "path",
                "holds a control character",
                {"next_step": "write Windows paths in 'single quotes' or with / (\"\\t\" in double quotes is a tab)"},
            )
        return value


def load_settings(path: Path) -> Settings:
    """Settings of the YAML file `path`; an empty file, and an empty section, mean the defaults.

    Raises ConfigError, see `strict_yaml.load_yaml`.
    """
    return load_yaml(path, Settings)


def write_default(path: Path) -> bool:
    """Write the commented default configuration to `path` unless something is there already.

    Atomic: another process sees no file or the whole one, and a file that appears meanwhile is kept.
    Returns whether it was written. Raises OSError when the folder cannot be made or written.
    """
    if os.path.lexists(path):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    text = Path(__file__).with_name(CONFIG_NAME).read_bytes()
    handle, name = tempfile.mkstemp(prefix=".kitchen-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would hide the file from an editor run by another user
        try:
            os.link(temporary, path)  # fails when the name is taken, which os.replace would not
        except FileExistsError:
            return False
        except OSError:  # no hard links here, e.g. exFAT
            if os.path.lexists(path):
                return False
            temporary.replace(path)
        return True
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _State:
    """What was read last, swapped as a whole so that readers need no lock."""

    stamp: object
    settings: Settings
    problem: ConfigError | None
    generation: int


class SettingsFile:
    """The configuration at `path`, read again whenever the file changed. Thread safe.

    A missing file means the defaults. A faulty one leaves the last good settings (at first: the defaults) in force.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._state = _State(_UNREAD, Settings(), None, 0)

    @property
    def problem(self) -> ConfigError | None:
        """What is wrong with the file as of the last `current()`; None when it is fine or missing."""
        return self._state.problem

    @property
    def generation(self) -> int:
        """How often the settings in force changed since this object was made; starts at 0 with the defaults."""
        return self._state.generation

    def current(self) -> Settings:
        """The settings in force. One `os.stat` and no lock when the file is unchanged. Never raises."""
        state = self._state
        if state.stamp == self._stamp():
            return state.settings
        with self._lock:
            state, stamp = self._state, self._stamp()
            if state.stamp != stamp:
                state = self._state = self._reload(state, stamp)
        return state.settings

    def _stamp(self) -> object:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            return object()  # equal to no other: reading tells what is wrong
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _reload(self, state: _State, stamp: object) -> _State:
        settings, problem = state.settings, None
        if stamp is None:
            settings = Settings()
        else:
            try:
                settings = load_settings(self.path)
            except ConfigError as error:
                problem = error
                if isinstance(error.__cause__, OSError):
                    stamp = object()  # locked or forbidden: that can end without a change of the file, so look again
        return _State(stamp, settings, problem, state.generation + (settings != state.settings))


_UNREAD = object()
"""A stamp no file has."""


def resolve_cache_folder(settings: Settings, base: Path, auto: Path, *, file: str = CONFIG_NAME) -> Path:
    """The absolute folder that `runtime_cache` names; it may not exist.

    `auto` -> `auto`, wherever it lies: it is ComfyUI's own models folder; a relative path -> below `base`; `~` is the
    home folder. Nothing is created.
    file: path of the configuration, for the message. Raises ConfigError when the folder lies inside this package,
    where an update or a reinstallation would delete it, or when there is no such home folder.
    """
    value = settings.runtime_cache
    next_step = "set runtime_cache to auto or to a folder elsewhere"
    if value == "auto":
        return Path(os.path.abspath(auto))  # noqa: PTH100 (resolve would replace a link the user chose)
    try:
        folder = base / Path(value).expanduser()
    except RuntimeError as error:  # ~name without such a user, or no home at all
        raise ConfigError("'runtime_cache' has no home folder", file=file, got=value, next_step=next_step) from error
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 (resolve would replace a link the user chose)
    root = Path(__file__).resolve().parent
    real = folder.resolve()
    for candidate in (folder, *folder.parents, real, *real.parents):
        # samefile sees through links and through file systems that ignore case
        with contextlib.suppress(OSError):
            if candidate.samefile(root):
                raise ConfigError(
                    "'runtime_cache' lies inside the accelerator's own folder",
                    file=file,
                    got=str(folder),
                    allowed=f"auto, or a folder outside {root}",
                    next_step=next_step,
                )
    return folder
