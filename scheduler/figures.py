"""What ran: per model and set of shapes the decision, the counters and the step times the report shows."""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from ..backends.base import BackendId, Call, Decision, Precision, StepTimes

_KEPT_RECORDS = 256
_KEPT_SAMPLES = 64
_KEPT_FALLBACKS = 20


@dataclass(slots=True)
class Steps:
    """Durations of the latest calls of one path, in seconds, and how many calls there were in all.

    The very first call is counted but not timed: it warms caches up and would stand for all where there are few.
    """

    count: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SAMPLES))

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > 1:
            self.seconds.append(seconds)

    @property
    def median_s(self) -> float | None:
        values = tuple(self.seconds)
        return statistics.median(values) if values else None

    @property
    def median_ms(self) -> float | None:
        median = self.median_s
        return None if median is None else round(median * 1000, 3)


class HostClock:
    """Times calls whose result is there when they return, i.e. on the CPU."""

    def begin(self) -> Any:
        return time.perf_counter()

    def end(self, token: Any, steps: Steps) -> None:
        steps.add(time.perf_counter() - token)

    def settle(self) -> None:
        """Nothing is pending."""


class CudaClock:
    """Times calls that only queue work on a CUDA device, with a pair of events that are read when the run is over.

    Reading them earlier would make the host wait for the device in every step.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._pending: deque[tuple[Any, Any, Steps]] = deque(maxlen=_KEPT_SAMPLES)

    def _mark(self) -> Any:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> Any:
        return self._mark()

    def end(self, token: Any, steps: Steps) -> None:
        steps.count += 1
        if steps.count > 1:
            self._pending.append((token, self._mark(), steps))

    def settle(self) -> None:
        """Read the pending events; waits for the last of them."""
        while self._pending:
            begin, end, steps = self._pending.popleft()
            end.synchronize()
            steps.seconds.append(begin.elapsed_time(end) / 1000)


def clock_for(device: str) -> HostClock | CudaClock:
    """The clock for calls on `device`, torch's name of it."""
    return CudaClock(device) if device.partition(":")[0] == "cuda" else HostClock()


@dataclass(slots=True)
class Record:
    """One model and set of shapes.

    paths: per backend and precision the calls it served; `("cuda", None)` is ComfyUI's own path.
    device: where the engine executes, as its runtime said after compiling; empty without an engine.
    offer: what `precision: fast` would gain and cost, one sentence.
    proofs: PSNR in dB of an engine's first output against PyTorch's, by backend and precision, as far as it was taken
        in this process. run: number of the latest sampling run that used this record.
    patches: start of the weight patches' fingerprint; empty without patches.
    """

    model: str
    shape: str
    decision: Decision
    paths: dict[tuple[BackendId, Precision | None], Steps] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    proofs: dict[tuple[BackendId, Precision | None], float] = field(default_factory=dict)
    run: int = 0
    patches: str = ""
    before_run: tuple[int, int] = (0, 0)
    offer: str = ""
    device: str = ""

    def steps(self, backend: BackendId, precision: Precision | None) -> Steps:
        return self.paths.setdefault((backend, precision), Steps())

    @property
    def torch(self) -> Steps:
        return self.steps("cuda", None)

    @property
    def engine_calls(self) -> int:
        return sum(steps.count for (backend, _), steps in list(self.paths.items()) if backend != "cuda")

    def begin(self, run: int) -> None:
        """From now on calls belong to sampling run number `run`."""
        if run != self.run:
            self.run = run
            self.before_run = (self.engine_calls, self.torch.count)

    def fall_back(self, decision: Decision, reason: str) -> None:
        self.decision = decision
        if len(self.fallbacks) < _KEPT_FALLBACKS:
            self.fallbacks.append(reason)

    def as_json(self) -> dict[str, Any]:
        """For the report: plain values, times in milliseconds."""
        path = (self.decision.backend, self.decision.precision)
        current = self.paths.get(path) if path[0] != "cuda" else None
        return {
            "model": self.model,
            "shape": self.shape,
            "backend": self.decision.backend,
            "precision": self.decision.precision,
            "device": self.device if self.decision.backend != "cuda" else "",
            "wanted": self.decision.wanted,
            "why": self.decision.why,
            "engine": self.decision.engine_digest,
            "rejected": {backend: [r.text for r in reasons] for backend, reasons in self.decision.rejected},
            "codes": {backend: [r.code for r in reasons] for backend, reasons in self.decision.rejected},
            "run": self.run,
            "patches": self.patches,
            "run_engine_calls": self.engine_calls - self.before_run[0],
            "run_torch_calls": self.torch.count - self.before_run[1],
            "engine_calls": self.engine_calls,
            "torch_calls": self.torch.count,
            "engine_step_ms": current.median_ms if current else None,
            "torch_step_ms": self.torch.median_ms,
            "proof_db": self.proofs.get(path),
            "offer": self.offer,
            "fallbacks": list(self.fallbacks),
        }


class Records:
    """All records of this process, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._records: OrderedDict[tuple[str, ...], Record] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def _key(call: Call) -> tuple[str, ...]:
        model = call.model
        blocked = ",".join(r.code + r.subject for r in call.blockers)
        control = "control" if call.control else ""
        return (model.label, model.class_name, model.patch_fingerprint, call.shape_text, call.device, blocked, control)

    def of(self, call: Call, decision: Decision) -> Record:
        """The record of this call's model and shapes, with `decision` as its latest."""
        key = self._key(call)
        with self._lock:
            record = self._records.get(key)
            if record is None:
                record = self._records[key] = Record(call.model.label, call.shape_text, decision)
                record.patches = call.model.patch_fingerprint[:8]
                while len(self._records) > _KEPT_RECORDS:
                    self._records.popitem(last=False)
            self._records.move_to_end(key)
            record.decision = decision
            return record

    def times(self, call: Call) -> tuple[StepTimes, ...]:
        """Step times measured in this process for this call's model and shapes; `decide` knows how many it trusts."""
        with self._lock:
            record = self._records.get(self._key(call))
        if record is None:
            return ()
        return tuple(
            StepTimes(backend, precision, median, len(steps.seconds))
            for (backend, precision), steps in list(record.paths.items())
            if (median := steps.median_s) is not None
        )

    def select(self, label: str | None) -> list[Record]:
        """Records of one model, or of all, the latest last."""
        with self._lock:
            return [r for r in self._records.values() if label is None or r.model == label]
