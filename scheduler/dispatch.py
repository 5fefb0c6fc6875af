"""The hot path: a cached Decision, then an engine or ComfyUI's own PyTorch path; guard, fallback, figures.

A Session lives for one sampling run of one model. Decisions are taken once per run and signature, so that a
build which ends in the middle of a run never changes the backend between two steps: the next run uses it.
Only a failing engine is left within a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import Call, Decision, Engine, Refusal
from ..errors import EngineError, NoBackendError
from .engines import Lease
from .figures import CudaClock, HostClock, Record, Records, Steps, clock_for
from .shelf import EngineShelf, ModelPort

PEAK_DB = 999.0
"""Stored for an infinite signal-to-noise ratio."""


def psnr_db(reference: Any, candidate: Any) -> float:
    """Peak signal-to-noise ratio of two tensors of one shape, in dB; the peak is the reference's range.

    PSNR = 20·log10(peak) - 10·log10(MSE). Returns -inf when either is not finite, `PEAK_DB` when they are equal.
    """
    a, b = reference.detach().double().cpu(), candidate.detach().double().cpu()
    if a.shape != b.shape:
        return -math.inf
    mse = float(((a - b) ** 2).mean())
    peak = float(a.max() - a.min())
    if not math.isfinite(mse) or not math.isfinite(peak):
        return -math.inf
    if mse == 0.0:
        return PEAK_DB
    if peak == 0.0:
        return -math.inf
    return min(PEAK_DB, 20 * math.log10(peak) - 10 * math.log10(mse))


def _ms(value: float | None) -> str:
    return "not timed" if value is None else f"{value:.1f} ms"


@dataclass(slots=True)
class Entry:
    """What a session does with one signature: cached so that the hot path is one dictionary look-up."""

    call: Call
    decision: Decision
    record: Record
    clock: HostClock | CudaClock
    torch: Steps
    steps: Steps
    lease: Lease | None = None
    engine: Engine | None = None
    probe: bool = False
    required: bool = False
    """`backend.fallback: none`: an engine failure is raised instead of handed to PyTorch."""


@dataclass(slots=True)
class Session:
    """One sampling run of one model."""

    dispatcher: Dispatcher
    model: ModelPort
    wanted: str
    number: int
    entries: dict[Any, Entry] = field(default_factory=dict)

    def call(
        self, signature: Any, inputs: Mapping[str, Any], eager: Callable[[], Any], describe: Callable[[], Call]
    ) -> Any:
        """One call of the network: the engine's output, or PyTorch's.

        signature: hashable, equal for calls that may share a decision within this run.
        inputs: live torch tensors by name. eager: ComfyUI's own path. describe: the Call as values.
        Raises NoBackendError only when `backend.fallback` is `none`, besides what ComfyUI's own path raises.
        """
        entry = self.entries.get(signature)
        if entry is None:
            entry = self.entries[signature] = self.dispatcher.resolve(self, describe(), inputs)
        engine = entry.engine
        if engine is None:
            started = entry.clock.begin()
            output = eager()
            entry.clock.end(started, entry.torch)
            return output
        if entry.probe or entry.lease is None:
            return self.dispatcher.probe(entry, inputs, eager)
        # never waits: two threads on one engine is a multi-GPU set-up, and the second one runs PyTorch
        busy = entry.lease.busy
        if not busy.acquire(blocking=False):
            entry.torch.count += 1
            return eager()
        failure: Exception | None = None
        try:
            started = entry.clock.begin()
            output = engine.run(inputs)
            # a sum is finite exactly when every element is, but for overflow, which no latent comes near
            if math.isfinite(float(output.sum())):
                entry.clock.end(started, entry.steps)
                return output
        except Exception as error:
            failure = error
        finally:
            busy.release()
        if failure is None:
            return self.dispatcher.condemned(entry, eager)
        return self.dispatcher.fail(entry, failure, eager)

    def finish(self) -> None:
        """The run is over: hand its figures on and let its engines go."""
        self.dispatcher.finish(self)


class Dispatcher:
    """Owns the records; asks the shelf for decisions and engines.

    All state is behind `shelf` and `records`; nothing here is shared with another dispatcher.
    """

    def __init__(self, shelf: EngineShelf, records: Records) -> None:
        self.shelf = shelf
        self.records = records
        self._runs = itertools.count(1)

    def session(self, model: ModelPort, wanted: str) -> Session:
        return Session(self, model, wanted, next(self._runs))

    def resolve(self, session: Session, call: Call, inputs: Mapping[str, Any]) -> Entry:
        """Decide for a signature this run has not met. Slow path, once per run and signature.

        Raises NoBackendError when the wanted backend is refused and `backend.fallback` is `none`.
        """
        shelf = self.shelf
        required = shelf.fallback_forbidden
        wanted_through: tuple[type[BaseException], ...] = (NoBackendError, *shelf.host.interrupts)
        try:
            decision, call = shelf.decide(session.model, call, inputs, session.wanted)
        except wanted_through:
            raise
        except Exception as error:
            # deciding must never lose the prompt, whatever a library or a disk does
            shelf.journal.event("error", f"the decision failed: {error}", level="warning", error=error)
            refusal = Refusal("error", "the decision", str(error), "no error", "see kitchen.jsonl")
            decision = Decision("cuda", "the decision failed", session.wanted, rejected=(("openvino", (refusal,)),))
        record = self.records.of(call, decision)
        record.begin(session.number)
        steps = record.steps(decision.backend, decision.precision)
        entry = Entry(call, decision, record, clock_for(call.device), record.torch, steps, required=required)
        if decision.backend != "cuda":
            try:
                entry.lease = shelf.lease(decision, call)
                entry.engine = entry.lease.engine
                record.device = entry.engine.device
                entry.probe = not shelf.proven(decision, call)
            except Exception as error:
                shelf.suspend(decision, str(error))
                self._retire(entry, error)
                if required:
                    raise NoBackendError(f"{decision.backend} failed: {error}") from error
        record.offer = shelf.offer(call, entry.decision)
        shelf.announce(session.model.label, call, entry.decision)
        return entry

    def probe(self, entry: Entry, inputs: Mapping[str, Any], eager: Callable[[], Any]) -> Any:
        """The first call of an engine for a shape: PyTorch runs too, and the engine is kept only if they agree."""
        engine, lease, decision = entry.engine, entry.lease, entry.decision
        if engine is None or lease is None or decision.precision is None:
            return eager()
        try:
            with lease.busy:
                output = engine.run(inputs)
        except Exception as error:
            return self.fail(entry, error, eager)
        started = entry.clock.begin()
        reference = eager()
        entry.clock.end(started, entry.torch)
        figure = psnr_db(reference, output)
        threshold = self.shelf.threshold_db(decision.precision)
        if figure >= threshold:
            entry.probe = False
            entry.record.proofs[decision.backend, decision.precision] = figure
            entry.steps.count += 1
            self.shelf.prove(decision, entry.call, figure)
            return output
        failure = EngineError(
            f"the engine's first output is {figure:.1f} dB from PyTorch's",
            allowed=f"at least {threshold:g} dB in {decision.precision} (parity.{decision.precision})",
            next_step="delete the engine from the cache to rebuild it, or report the model it happens with",
        )
        self.shelf.condemn(decision, str(failure))
        self._retire(entry, failure)
        if entry.required:
            raise NoBackendError(str(failure)) from failure
        return reference

    def fail(self, entry: Entry, error: Exception, eager: Callable[[], Any]) -> Any:
        """An engine raised in the middle of a run: this step and the rest of the run go to PyTorch."""
        self.shelf.suspend(entry.decision, str(error))
        return self._go_on(entry, error, eager)

    def condemned(self, entry: Entry, eager: Callable[[], Any]) -> Any:
        """An engine gave numbers that are not finite: PyTorch computes the step again and the engine is quarantined."""
        error = EngineError("the engine's output is not finite", next_step="delete the engine from the cache")
        self.shelf.condemn(entry.decision, str(error))
        return self._go_on(entry, error, eager)

    def _go_on(self, entry: Entry, error: Exception, eager: Callable[[], Any]) -> Any:
        backend = entry.decision.backend
        self._retire(entry, error)
        if entry.required:
            raise NoBackendError(
                f"{backend} failed: {error}", next_step="set backend.fallback to cuda to let PyTorch go on"
            ) from error
        error.__traceback__ = None  # its frames would keep the engine's tensors alive while PyTorch runs
        entry.torch.count += 1
        return eager()

    def finish(self, session: Session) -> None:
        """The run is over: read its clocks, let its engines go, and write its times to the journal."""
        for entry in session.entries.values():
            entry.engine = None
            try:
                entry.clock.settle()
                if entry.lease is not None:
                    self.shelf.release(entry.lease)
            except Exception as error:
                # the picture is made by now; what a driver says while it lets go must not cost it
                self.shelf.journal.event("error", f"the end of a run: {error}", level="warning", error=error)
        if session.entries:
            self._tell(session)
        session.entries.clear()

    def _tell(self, session: Session) -> None:
        records = {id(entry.record): entry.record for entry in session.entries.values()}
        figures = [record.as_json() for record in records.values()]
        lines = [
            f"[{f['shape']}] {f['backend']}: {f['run_engine_calls']} calls on an engine, {f['run_torch_calls']} on "
            f"PyTorch; a step: engine {_ms(f['engine_step_ms'])}, PyTorch {_ms(f['torch_step_ms'])}"
            for f in figures
        ]
        # one line on the console, the rest of a run with several shapes below it in kitchen.log
        self.shelf.journal.event(
            "run", f"{session.model.label} {lines[0]}", detail=lines[1:], run=session.number, figures=figures
        )

    def _retire(self, entry: Entry, error: Exception) -> None:
        backend = entry.decision.backend
        refusal = Refusal("engine-failed", f"the {backend} engine", str(error), "a run without an error")
        entry.engine = None
        entry.decision = Decision(
            "cuda",
            f"{backend} failed: {error}",
            entry.decision.wanted,
            rejected=((backend, (refusal,)), *entry.decision.rejected),
        )
        entry.record.fall_back(entry.decision, str(error))
        self.shelf.journal.event(
            "fallback", f"{entry.record.model}: {backend} failed, PyTorch goes on: {error}",
            level="warning", backend=backend, shape=entry.record.shape, error=error,
        )  # fmt: skip
