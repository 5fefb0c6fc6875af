"""The one runtime of a ComfyUI process: settings, journal, cache, build queue, dispatcher. Made on first use."""

from __future__ import annotations

import functools
import itertools
import weakref
from pathlib import Path
from typing import Any

from ..cache.digests import DigestMemo
from ..cache.store import EngineStore
from ..config import CONFIG_NAME, Settings, SettingsFile, resolve_cache_folder, write_default
from ..errors import ConfigError
from ..journal import Journal
from ..scheduler.builds import BuildEvent, BuildQueue
from ..scheduler.dispatch import Dispatcher
from ..scheduler.figures import Records
from ..scheduler.shelf import EngineShelf, HostPorts
from . import progress
from .binding import accelerate, binding_of
from .model import ModelBinding, Source
from .weights import DigestWorker, Fingerprints

CACHE_FOLDER = "kitchen_engines"
"""Name of the engine folder under ComfyUI's models, and of its entry in ComfyUI's folder table."""

_DIGEST_THREADS = 2
"""sha256 lets go of Python's lock; more threads would take the cores a running prompt needs."""


class Runtime:
    """Everything the nodes need. Only `runtime()` makes one; nothing happens at import."""

    def __init__(self, user: Path, base: Path, models: Path) -> None:
        """user: ComfyUI's user folder. base: its base folder. models: its models folder."""
        self.config_path = user / CONFIG_NAME
        problem: OSError | None = None
        try:
            write_default(self.config_path)
        except OSError as error:
            problem = error
        self.settings = SettingsFile(self.config_path)
        settings = self.settings.current()
        journal = settings.journal
        self.journal = Journal.open([user, base / "kitchen_accel", base], journal.level, journal.max_mb, journal.keep)
        if problem is not None:
            self.journal.event(
                "config", f"{self.config_path} could not be written, the defaults apply: {problem}", level="warning"
            )
        self._told: ConfigError | None = None
        self._base, self._models = base, models
        self._numbers = itertools.count(1)
        self._generation = self.settings.generation
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.cache_problem: ConfigError | None = None
        root = self._cache_folder(settings)
        self.store = EngineStore(root, int(settings.cache.max_gb * 1e9))
        self._memo = DigestMemo(root / "digests.json")
        self.records = Records()
        self.queue = BuildQueue(self._on_build, markers=root / ".marks")
        host = HostPorts(self.check_settings, progress.poll, progress.interrupts(), progress.node, progress.show)
        self.shelf = EngineShelf(self.settings, self.store, self.queue, self.records, self.journal, host)
        self.dispatcher = Dispatcher(self.shelf, self.records)
        self._digests = DigestWorker(_DIGEST_THREADS)
        self._fingerprints = Fingerprints()
        self._sweep()
        self.check_settings()

    def source(self, label: str, file: Path, variant: str = "") -> Source:
        """A model's source, to be taken *before* the file is read, so that a change meanwhile is noticed."""
        return Source(label, file, variant, self._memo.stamp(file))

    def accelerate(self, patcher: Any, source: Source, wanted: str) -> Any:
        """A clone of `patcher` whose network goes through the dispatcher.

        patcher: a ComfyUI ModelPatcher of a diffusion model. wanted: a backend id or `"auto"`.
        """
        self.check_settings()

        def bind(any_patcher: Any) -> ModelBinding:
            return ModelBinding(any_patcher, source, self._digests, self._fingerprints, self._recall, self._remember)

        return accelerate(patcher, bind, self.dispatcher, wanted)

    def report(self, label: str | None = None) -> dict[str, Any]:
        """What ran where and why, of one model or of all, as JSON values."""
        records = self.records.select(label)
        latest = records[-1] if records else None
        problem = self.settings.problem or self.cache_problem
        return {
            "backend": latest.decision.backend if latest else None,
            "entries": [record.as_json() for record in records],
            "builds": [
                {
                    "digest": state.key_digest[:20],
                    "label": state.label,
                    "backend": state.backend,
                    "state": state.status,
                    "phase": state.phase,
                    "fraction": round(state.fraction, 3),
                    "text": state.text,
                }
                for state in self.queue.states()
            ],
            "offer": latest.offer if latest else "",
            "config": str(self.config_path),
            "config_problem": str(problem) if problem else None,
            "cache": str(self.store.root),
            "journal": str(self.journal.folder) if self.journal.folder else None,
        }

    def check_settings(self) -> None:
        """Read the YAML again if it changed; tell of a fault once, and of its mending."""
        settings = self.settings.current()
        problem = self.settings.problem
        if problem is not None and str(problem) != str(self._told):
            self.journal.event("config", f"{problem} The last good settings (or the defaults) apply.", level="warning")
        elif problem is None and self._told is not None:
            self.journal.event("config", f"{self.config_path} is fine again")
        self._told = problem
        if self.settings.generation == self._generation:
            return
        self._generation = self.settings.generation
        self.journal.configure(settings.journal.level, settings.journal.max_mb, settings.journal.keep)
        root = self._cache_folder(settings)
        if root == self.store.root:
            self.store.max_bytes = int(settings.cache.max_gb * 1e9)
            return
        self.journal.event("config", f"engines are kept in {root} from now on, no longer in {self.store.root}")
        self.store = self.shelf.store = EngineStore(root, int(settings.cache.max_gb * 1e9))
        self._memo = DigestMemo(root / "digests.json")
        self._sweep()

    def _cache_folder(self, settings: Settings) -> Path:
        """The engine folder of the settings; ComfyUI's own models folder where they name none that may be used."""
        auto = self._models / CACHE_FOLDER
        try:
            self.cache_problem = None
            return resolve_cache_folder(settings, self._base, auto, file=str(self.config_path))
        except ConfigError as error:
            self.cache_problem = error
            self.journal.event("config", f"{error} Until then engines are kept in {auto}.", level="warning")
            return auto

    def source_of(self, patcher: Any) -> Source:
        """Where a model from any loader came from: what our own loader noted, else a name that no other model has."""
        binding = binding_of(patcher)
        if binding is not None:
            return binding.model_of(patcher).source
        model = patcher.model
        if model not in self._names:
            kind = type(getattr(model, "model_config", model)).__name__
            self._names[model] = f"{kind} model {next(self._numbers)}"
        return Source(self._names[model])

    def _recall(self, source: Source, what: str) -> str | None:
        return None if source.file is None else self._memo.get(source.file, what)

    def _remember(self, source: Source, what: str, digest: str) -> None:
        if source.file is not None:
            self._memo.put(source.file, what, digest, before=source.stamp)

    def _on_build(self, event: BuildEvent) -> None:
        state = event.state
        self.shelf.show_build(state)
        if event.step:
            level: Any = "warning" if state.status == "failed" else "info"
            self.journal.event(
                "build", f"{state.label} for {state.backend}: {state.text}", level=level,
                status=state.status, engine=state.key_digest[:20], seconds=round(state.elapsed_s, 2),
                failure=state.failure,
            )  # fmt: skip

    def _sweep(self) -> None:
        """Remove what an earlier process left unfinished."""
        try:
            swept = self.store.sweep()
        except Exception as error:
            self.journal.event("cache", f"unfinished builds could not be removed: {error}", level="warning")
            return
        if swept:
            self.journal.event("cache", f"{swept} unfinished builds of an earlier run were removed")


@functools.cache
def runtime() -> Runtime:
    """The runtime of this process, made on the first call."""
    import folder_paths

    models = Path(folder_paths.models_dir)
    folder_paths.add_model_folder_path(CACHE_FOLDER, str(models / CACHE_FOLDER))
    base = Path(getattr(folder_paths, "base_path", models.parent))
    return Runtime(Path(folder_paths.get_user_directory()), base, models)
