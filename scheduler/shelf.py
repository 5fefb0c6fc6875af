"""Everything behind a decision: settings, facts, the cache's state, and asking for a build where one is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ..backends import create
from ..backends.base import (
    PRECISIONS,
    BackendId,
    BuildOptions,
    Call,
    Decision,
    DeviceFacts,
    EngineState,
    LibraryFacts,
    Precision,
)
from ..cache.key import EngineKey, ModelIdentity
from ..cache.manifest import Quarantine
from ..cache.store import EngineStore, StoredEngine
from ..capture.families import requested_profile
from ..config import Settings, SettingsFile
from ..errors import CacheError, CacheMiss, CaptureError, EngineError
from ..journal import Journal
from ..version import VERSION
from . import facts as machine
from .builds import BuildJob, BuildQueue, BuildState, BuildTicket
from .child import JobSpec, result_from_json
from .decide import Policy, buildable, decide, fast_offer
from .engines import Lease, LoadedEngines
from .figures import Records
from .precision import PRECISION_OF_DTYPE

_ENGINE_BACKENDS: tuple[BackendId, ...] = ("tensorrt", "openvino", "directml")
_GB = 1e9
_KEPT_ANNOUNCED = 512
_STOCK = dict(PRECISION_OF_DTYPE)
MAX_LOADED = 2
"""Engines kept loaded: base and refiner, or two checkpoints compared side by side."""


class ModelPort(Protocol):
    """What the host hands in of one model; everything ComfyUI-specific stays behind it."""

    label: str

    def digest(self) -> Future[str] | None:
        """The digest of the weights, perhaps still being computed; None when no engine could use it."""

    def refreshed(self, call: Call) -> Call:
        """`call` with the model's facts as they are now."""

    def network_spec(self) -> dict[str, Any]:
        """What the build process needs to make the network again, as JSON values."""

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[Path, Callable[[], bool]], None]:
        """A function that writes weights and the example `inputs` into a job folder, for the build's own thread."""

    def command(self) -> tuple[str, ...]:
        """argv of the build process, without the job folder."""


@dataclass(frozen=True, slots=True)
class HostPorts:
    """What the host lends the shelf.

    refresh: takes over changed settings; called before every decision.
    poll: raises one of `interrupts` when the user interrupted the prompt.
    node: id of the node that is being executed on the calling thread, or None.
    show: shows a line of text on a node, from any thread; never raises.
    """

    refresh: Callable[[], None]
    poll: Callable[[], None]
    interrupts: tuple[type[BaseException], ...]
    node: Callable[[], str | None]
    show: Callable[[str, str | None], None]


class EngineShelf:
    """Decides, finds, builds, loads and condemns engines. One per server process."""

    def __init__(
        self, settings: SettingsFile, store: EngineStore, queue: BuildQueue, records: Records, journal: Journal,
        host: HostPorts,
    ) -> None:  # fmt: skip
        self.journal = journal
        self.queue = queue
        self.store = store
        self._settings = settings
        self._records = records
        self.host = host
        self._loaded = LoadedEngines(MAX_LOADED)
        self._lock = threading.Lock()
        self._facts: tuple[tuple[BackendId, ...], DeviceFacts] | None = None
        self._failed: dict[str, str] = {}
        self._proven: set[tuple[str, str, str]] = set()
        self._announced: dict[tuple[str, str], object] = {}
        self._uses: dict[str, int] = {}
        self._nodes: dict[str, str | None] = {}
        self._waiting: set[str] = set()

    # -- settings and facts ---------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self._settings.current()

    @property
    def fallback_forbidden(self) -> bool:
        return self.settings.backend.fallback == "none"

    def threshold_db(self, precision: Precision) -> float:
        return self.settings.parity.threshold(precision)

    def facts(self) -> DeviceFacts:
        """This machine, probed once per set of enabled backends."""
        enabled = self.settings.backend.enabled
        with self._lock:
            if self._facts is None or self._facts[0] != enabled:
                self._facts = (enabled, machine.probe(enabled))
            return self._facts[1]

    def _policy(self, wanted: str, settings: Settings) -> Policy:
        known: BackendId | Literal["auto"] = wanted if wanted in ("cuda", *_ENGINE_BACKENDS) else "auto"
        parity = settings.parity
        return Policy(
            wanted=known,
            default=settings.backend.default,
            enabled=settings.backend.enabled,
            fallback=settings.backend.fallback,
            precision=settings.precision,
            thresholds_db=(("bf16", parity.bf16), ("fp16", parity.fp16), ("fp32", parity.fp32)),
            openvino_device=settings.openvino.device,
        )

    # -- decisions --------------------------------------------------------------------------------------------

    def decide(self, model: ModelPort, call: Call, inputs: Mapping[str, Any], wanted: str) -> tuple[Decision, Call]:
        """The decision for one call, after asking for builds it lacks, and the call it holds for.

        The call that comes back may know more of the model: its weights' digest, which was waited for.

        Raises NoBackendError when `backend.fallback` is `none`, and what `HostPorts.poll` raises while it waits.
        """
        self.host.refresh()
        settings = self.settings
        policy = self._policy(wanted, settings)
        asked = policy.default if policy.wanted == "auto" else policy.wanted
        if asked == "cuda":
            return decide(call, self.facts(), policy, {}, ()), call
        # without a fallback there is nothing to run meanwhile, so the prompt waits whatever `build` says
        blocking = settings.build == "blocking" or (settings.backend.fallback == "none" and settings.build != "never")
        lenient = replace(policy, fallback="cuda")
        decision = self._decide(call, lenient, settings)
        if blocking and _pending(decision):
            self._wait_digest(model)
            call = model.refreshed(call)
            decision = self._decide(call, lenient, settings)
        if settings.build != "never":
            if _pending(decision):
                self._build_after_digest(model, call, inputs, lenient, settings)
            for backend in (*buildable(decision), *(_under_way(decision) if blocking else ())):
                ticket = self._request(backend, model, call, inputs, settings, blocking=blocking)
                if ticket is not None and blocking:
                    self.queue.wait(ticket, self.host.poll)
            decision = self._decide(call, lenient, settings)
        if policy.fallback == "none":
            decision = self._decide(call, policy, settings)
        return decision, call

    def _decide(self, call: Call, policy: Policy, settings: Settings) -> Decision:
        states = {b: self._state(b, call, settings) for b in _ENGINE_BACKENDS if b in policy.enabled}
        return decide(call, self.facts(), policy, states, self._records.times(call))

    def offer(self, call: Call, decision: Decision) -> str:
        """One sentence on what `precision: fast` would gain and cost for this call; empty without an engine."""
        settings = self.settings
        if decision.backend == "cuda" or decision.precision is None:
            return ""
        state = self._state(decision.backend, call, settings)
        offer = fast_offer(state.measurements, decision.precision, self._policy("auto", settings).thresholds_db)
        return f"{offer} Measured while the engine was built."

    def announce(self, label: str, call: Call, decision: Decision) -> None:
        """Write the decision to the journal when it differs from the last one for this model and shape."""
        slot = (label, call.shape_text)
        codes = tuple((backend, tuple(r.code for r in reasons)) for backend, reasons in decision.rejected)
        # figures in the texts move with every run, so a change is one of backend, precision or kind of reason
        state = (decision.backend, decision.precision, decision.wanted, codes)
        if self._announced.get(slot) == state:
            return
        if len(self._announced) >= _KEPT_ANNOUNCED:
            self._announced.clear()
        self._announced[slot] = state
        path = f" in {decision.precision}" if decision.precision else f" (PyTorch, {call.device})"
        self.journal.event(
            "decision", f"{label} [{call.shape_text}] runs on {decision.backend}{path}: {decision.why}",
            backend=decision.backend, precision=decision.precision, wanted=decision.wanted, model=label,
            shape=call.shape_text, engine=decision.engine_digest,
            rejected={backend: [r.text for r in reasons] for backend, reasons in decision.rejected},
            detail=[f"not {backend}: {r.text}" for backend, reasons in decision.rejected for r in reasons],
        )  # fmt: skip

    # -- keys and states ----------------------------------------------------------------------------------------

    def _options(self, backend: BackendId, settings: Settings) -> BuildOptions:
        """The settings that change an engine's bytes."""
        return BuildOptions(settings.openvino.device if backend == "openvino" else "")

    def _run_options(self, backend: BackendId, settings: Settings) -> BuildOptions:
        """The settings that change how an engine runs, not what it is."""
        if backend != "openvino":
            return self._options(backend, settings)
        ov = settings.openvino
        pairs = (("max_compiled", str(ov.max_compiled)), ("shapes", ov.shapes), ("threads", str(ov.threads)))
        return BuildOptions(ov.device, pairs)

    def key(self, backend: BackendId, call: Call, settings: Settings) -> EngineKey | None:
        """The key of the engine that would serve `call`; None when there can be none (yet)."""
        facts = self.facts()
        library = facts.library(backend)
        if not isinstance(library, LibraryFacts) or not call.model.weights_digest or call.blockers:
            return None
        try:
            profile = requested_profile(call.model.family, call.tensors)
        except CaptureError:
            return None
        gpu = ", ".join(g.name for g in facts.gpus) if settings.openvino.device != "CPU" else ""
        return EngineKey(
            backend=backend,
            model=ModelIdentity.of(call.model),
            profile=profile,
            options=self._options(backend, settings),
            versions=(("kitchen_accel", VERSION), (library.name, library.version), ("torch", facts.torch_version)),
            platform=facts.platform,
            hardware=gpu or facts.cpu_name,
        )

    def _state(self, backend: BackendId, call: Call, settings: Settings) -> EngineState:
        """What the cache and the queue know; absent, without a digest, when there is no key to ask with."""
        key = self.key(backend, call, settings)
        if key is None:
            return EngineState(backend, "absent")
        digest = key.folder_name
        building = self.queue.state(key.digest)
        if building is not None and not building.ended:
            return EngineState(backend, "building", digest, building.text)
        try:
            found = self.store.find(key)
        except CacheMiss as miss:
            if building is not None and building.status == "failed":
                return EngineState(backend, "failed", digest, building.text)
            return EngineState(backend, "absent", digest, self._too_early(key.digest, call, settings) or str(miss))
        except CacheError as error:
            return EngineState(backend, "failed", digest, str(error))
        if digest in self._failed:
            return EngineState(backend, "failed", digest, self._failed[digest])
        held: dict[str, Quarantine] = {**self.store.state(digest).quarantine}
        wanted = settings.precision if settings.precision in PRECISIONS else _STOCK.get(call.model.compute_dtype, "")
        for name in ("*", wanted):
            if name in held:
                return EngineState(backend, "quarantined", digest, held[name].reason)
        usable = tuple(m for m in found.measurements if m.precision not in held)
        return EngineState(backend, "ready", digest, "", usable, found.profile)

    def _too_early(self, digest: str, call: Call, settings: Settings) -> str:
        """Why an engine for patched weights is not built yet; empty when it may be. Strengths are often only tried."""
        needed, uses = settings.builds.patched_after_runs, self._uses.get(digest, 0)
        if not call.model.patch_fingerprint or 0 < needed <= uses:
            return ""
        if needed == 0:
            return "the weights are patched (LoRA), and builds.patched_after_runs is 0"
        return (
            f"the weights are patched (LoRA): {uses} prompts used these patches, builds.patched_after_runs is {needed}"
        )

    # -- builds ---------------------------------------------------------------------------------------------------

    def _request(
        self, backend: BackendId, model: ModelPort, call: Call, inputs: Mapping[str, Any], settings: Settings,
        *, blocking: bool,
    ) -> BuildTicket | None:  # fmt: skip
        """Queue the build of the engine `call` lacks; None when it is not wanted (yet) or cannot be queued."""
        key = self.key(backend, call, settings)
        if key is None:
            return None
        if call.model.patch_fingerprint:
            self._uses[key.digest] = self._uses.get(key.digest, 0) + 1
            if self._too_early(key.digest, call, settings) and not (blocking and settings.builds.patched_after_runs):
                return None
        options = self._options(backend, settings)
        store = self.store  # `runtime_cache` may change while the build runs
        spec = JobSpec(
            backend=backend, profile=key.profile, options=options, network=model.network_spec(),
        )  # fmt: skip
        job = BuildJob(
            key_digest=key.digest,
            backend=backend,
            label=model.label,
            spec=spec.to_json(),
            prepare=model.prepare(inputs),
            command=model.command(),
            env={},
            stage=store.stage,
            commit=lambda folder, result, seconds: self._commit(store, key, model.label, folder, result, seconds),
            timeout_s=settings.builds.timeout_min * 60,
            memory_ceiling_bytes=int(settings.builds.memory_ceiling_gb * _GB),
            low_priority=not blocking,
        )
        self._nodes[key.digest] = self.host.node() or self._nodes.get(key.digest)
        return self.queue.submit(job)

    def _commit(
        self, store: EngineStore, key: EngineKey, label: str, folder: Path, result: dict[str, Any], seconds: float
    ) -> None:
        built = result_from_json(result)
        staged = store.stage()
        try:
            for item in folder.iterdir():
                item.replace(staged / item.name)
            store.put(
                key, staged, build_seconds=seconds, label=label, profile=built.profile,
                measurements=built.measurements, notes=built.notes,
            )  # fmt: skip
        except BaseException:
            store.discard(staged)
            raise
        self._failed.pop(key.folder_name, None)
        store.evict(in_use=self._loaded.digests() | {key.folder_name})

    def _build_after_digest(
        self, model: ModelPort, call: Call, inputs: Mapping[str, Any], policy: Policy, settings: Settings
    ) -> None:
        """The key is not known before the weights are digested: ask for the build when they are."""
        future = model.digest()
        mark = f"{model.label}|{call.model.patch_fingerprint}|{call.model.class_name}"
        with self._lock:
            if future is None or mark in self._waiting:
                return
            self._waiting.add(mark)
        kept = {name: tensor.detach().clone() for name, tensor in inputs.items()}

        def ready(done: Future[str]) -> None:
            with self._lock:
                self._waiting.discard(mark)
            if done.cancelled() or done.exception() is not None:
                self.journal.event(
                    "digest", f"the weights of {model.label} could not be read: {done.exception()}", level="warning"
                )
                return
            try:
                fresh = model.refreshed(call)
                for backend in buildable(self._decide(fresh, policy, settings)):
                    self._request(backend, model, fresh, kept, settings, blocking=False)
            except Exception as error:
                # runs on the digest's thread: nobody above could show it
                self.journal.event("build", f"no build of {model.label}: {error}", level="warning", error=error)

        future.add_done_callback(ready)

    def _wait_digest(self, model: ModelPort) -> None:
        future = model.digest()
        if future is None:
            return
        self.host.show(f"{model.label}: reading the weights", self.host.node())
        while not future.done():
            self.host.poll()
            # a future has no wait with a poll; a tenth of a second is what an interrupt may take
            threading.Event().wait(0.1)

    def show_build(self, state: BuildState) -> None:
        """Show a build's progress on the node that asked for it."""
        asked = self._nodes.get(state.key_digest)
        text = f"{state.label}: engine {state.text}"
        if state.status == "done":
            text = f"{state.label}: engine ready, the next prompt uses it"
        self.host.show(text, asked)

    # -- engines ----------------------------------------------------------------------------------------------------

    def lease(self, decision: Decision, call: Call) -> Lease:
        """The decision's engine, loaded and ready for the call's shapes. Raises EngineError or CacheError."""
        settings = self.settings
        key = self.key(decision.backend, call, settings)
        if key is None or decision.precision is None or key.folder_name != decision.engine_digest:
            raise EngineError("the engine's key changed between the decision and the load")
        stored = self.store.find(key)
        precision = decision.precision
        options = self._run_options(decision.backend, settings)
        lease_key = (key.folder_name, precision, options.device, *(f"{k}={v}" for k, v in options.options))
        lease = self._loaded.take(lease_key, lambda: self._load(stored, decision.backend, precision, options))
        try:
            with lease.busy:
                lease.engine.prepare(call.tensors)
        except Exception:
            self._loaded.give_back(lease)
            raise
        return lease

    def _load(self, stored: StoredEngine, backend: BackendId, precision: Precision, options: BuildOptions) -> Any:
        engine = create(backend).load(stored.folder, stored.profile, precision, options)
        self.journal.event(
            "loaded", f"{stored.label}: {backend} engine loaded for {options.device}",
            backend=backend, engine=stored.folder.name, precision=precision,
        )  # fmt: skip
        return engine

    def release(self, lease: Lease) -> None:
        self._loaded.give_back(lease)

    def proven(self, decision: Decision, call: Call) -> bool:
        """Whether this process compared the engine's output for these shapes with PyTorch's.

        Not taken over from an earlier process: the driver, the library or the machine may be another one by now.
        """
        return (decision.engine_digest, str(decision.precision), call.shape_text) in self._proven

    def prove(self, decision: Decision, call: Call, figure_db: float) -> None:
        """The engine's output for these shapes agrees with PyTorch's."""
        self._proven.add((decision.engine_digest, str(decision.precision), call.shape_text))
        self.journal.event(
            "proof", f"{call.model.label} [{call.shape_text}]: {decision.backend} agrees with PyTorch, "
            f"{figure_db:.1f} dB", backend=decision.backend, engine=decision.engine_digest, psnr_db=figure_db,
        )  # fmt: skip
        precision = decision.precision
        if precision is not None:
            self._quietly(lambda: self.store.add_proof(decision.engine_digest, precision, figure_db))

    def condemn(self, decision: Decision, reason: str) -> None:
        """The engine gave a wrong result: not used again until it is rebuilt, in this or any other process."""
        precision = decision.precision
        if precision is not None:
            self._quietly(lambda: self.store.quarantine(decision.engine_digest, precision, reason))
        self.suspend(decision, reason)

    def suspend(self, decision: Decision, reason: str) -> None:
        """The engine failed to load or run: do not try it again in this process."""
        self._failed[decision.engine_digest] = reason
        self._loaded.drop(decision.engine_digest)

    def forgive(self) -> None:
        """Try failed engines and builds again, e.g. after the user mended the cause."""
        self._failed.clear()
        for state in self.queue.states():
            if state.status == "failed":
                self.queue.forget(state.key_digest)

    def _quietly(self, write: Callable[[], object]) -> None:
        """A read-only or full cache loses a remark, never a prompt."""
        try:
            write()
        except (CacheError, OSError) as error:
            self.journal.once(str(error), "cache", f"the cache could not be written: {error}", level="warning")

    def close(self) -> None:
        self.queue.close()
        self._loaded.close()


def _pending(decision: Decision) -> bool:
    """Whether some backend only waits for the weights' digest (and for the engine that needs it)."""
    return any(
        any(r.code == "digest-pending" for r in reasons)
        and all(r.code in ("digest-pending", "no-engine") for r in reasons)
        for backend, reasons in decision.rejected
        if decision.wanted in ("auto", backend)
    )


def _under_way(decision: Decision) -> tuple[BackendId, ...]:
    """The backends that only wait for a build which an earlier prompt asked for."""
    return tuple(
        backend
        for backend, reasons in decision.rejected
        if decision.wanted in ("auto", backend) and reasons and all(r.code == "building" for r in reasons)
    )
