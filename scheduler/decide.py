"""Which backend serves a call, as a pure function of values: `decide(call, facts, policy, engines, times)`.

`cuda`, ComfyUI's own PyTorch path, never refuses. A named backend that is not refused is taken whatever its speed.
`auto` takes the fastest by measured time among PyTorch and the engines that are ready. Every backend that is not
taken is in `Decision.rejected` with all its reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..backends.base import (
    BACKEND_IDS,
    BackendId,
    Call,
    Decision,
    DeviceFacts,
    EngineState,
    Precision,
    Refusal,
    StepTimes,
)
from ..errors import NoBackendError
from .policy import Policy
from .precision import choose_precision, fast_offer, milliseconds, quickest
from .rules import device_precisions, refusals

__all__ = ["MIN_SAMPLES", "Policy", "Rejected", "buildable", "choose_precision", "decide", "fast_offer", "rejections"]

MIN_SAMPLES = 3
"""Calls a median is over before a decision trusts it (`StepTimes.samples`)."""

Rejected = tuple[tuple[BackendId, tuple[Refusal, ...]], ...]
"""Backends with their reasons, in the order of `BACKEND_IDS`."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """Seconds of one step of an engine and of PyTorch on the same inputs, and where the figures come from."""

    engine_s: float
    torch_s: float
    source: str

    @property
    def cost(self) -> float:
        """The engine's time as a multiple of PyTorch's: comparable between engines."""
        return self.engine_s / self.torch_s


@dataclass(frozen=True, slots=True)
class _Candidate:
    backend: BackendId
    reasons: tuple[Refusal, ...]
    digest: str = ""
    precision: Precision | None = None
    precision_why: str = ""
    pace: _Pace | None = None


def decide(
    call: Call,
    facts: DeviceFacts,
    policy: Policy,
    engines: Mapping[BackendId, EngineState],
    times: tuple[StepTimes, ...],
) -> Decision:
    """The backend that serves `call`, and why every other one does not.

    engines: per engine backend the state of the engine that would serve the call; a missing one counts as absent.
    times: measured in this process for this model and these shapes.

    Raises NoBackendError when a backend was named, is refused, and `policy.fallback` is `"none"`. Ask `rejections`
    and `buildable` first where a build should come before that error.
    """
    wanted = policy.default if policy.wanted == "auto" else policy.wanted
    candidates = _candidates(call, facts, policy, engines, times)
    if wanted == "auto":
        return _fastest(candidates)
    if wanted == "cuda":
        return _take(None, "cuda was asked for", wanted, candidates)
    named = next(c for c in candidates if c.backend == wanted)
    if not named.reasons:
        return _take(named, _named_why(named), wanted, candidates)
    if policy.fallback == "cuda":
        first = named.reasons[0].text
        more = f"; and {len(named.reasons) - 1} more" if len(named.reasons) > 1 else ""
        return _take(None, f"{wanted} was asked for but {first}{more}", wanted, candidates)
    raise _no_backend(named, candidates)


def rejections(call: Call, facts: DeviceFacts, policy: Policy, engines: Mapping[BackendId, EngineState]) -> Rejected:
    """Every engine backend with all its reasons against `call`, speed left aside; no reason means it could serve."""
    return tuple(
        (backend, refusals(backend, call, facts, policy, engines.get(backend)))
        for backend in BACKEND_IDS
        if backend != "cuda"
    )


def buildable(source: Decision | Rejected, wanted: str = "auto") -> tuple[BackendId, ...]:
    """The backends for which a build makes sense, in the order to build: those whose *only* reason is `no-engine`.

    wanted: with a bare `Rejected`, the named backend to restrict the answer to; a Decision brings its own.
    """
    rejected = source.rejected if isinstance(source, Decision) else source
    asked = source.wanted if isinstance(source, Decision) else wanted
    return tuple(
        backend
        for backend, reasons in rejected
        if asked in ("auto", backend) and reasons and all(reason.code == "no-engine" for reason in reasons)
    )


def _candidates(
    call: Call,
    facts: DeviceFacts,
    policy: Policy,
    engines: Mapping[BackendId, EngineState],
    times: tuple[StepTimes, ...],
) -> tuple[_Candidate, ...]:
    found = []
    for backend, reasons in rejections(call, facts, policy, engines):
        engine = engines.get(backend)
        if reasons or engine is None:
            found.append(_Candidate(backend, reasons))
            continue
        chosen = choose_precision(
            policy.precision,
            call.model.compute_dtype,
            device_precisions(backend, call, facts, policy),
            engine.measurements,
            policy.thresholds_db,
        )
        if isinstance(chosen, Refusal):
            found.append(_Candidate(backend, (chosen,)))
            continue
        precision, why = chosen
        found.append(_Candidate(backend, (), engine.digest, precision, why, _pace(engine, precision, times)))
    return tuple(found)


def _pace(engine: EngineState, precision: Precision, times: tuple[StepTimes, ...]) -> _Pace | None:
    """What is known of an engine's speed: measured in this process, else taken from its build; None without figures."""
    own = _median(engine.backend, precision, times)
    torch = _median("cuda", None, times)
    if own is not None and torch is not None:
        return _Pace(own, torch, "measured here")
    built = quickest(engine.measurements, precision)
    if built is None:
        return None
    ratio = built.step_s / built.torch_step_s
    if torch is not None:
        return _Pace(ratio * torch, torch, "expected from its build's measurement")
    if own is not None:
        return _Pace(own, own / ratio, "PyTorch expected from the build's measurement")
    return _Pace(built.step_s, built.torch_step_s, "measured at its build")


def _median(backend: BackendId, precision: Precision | None, times: tuple[StepTimes, ...]) -> float | None:
    """The median over most samples, in seconds. PyTorch's holds for every precision: it keeps the model's own."""
    trusted = [
        t
        for t in times
        if t.backend == backend
        and (precision is None or t.precision == precision)
        and t.samples >= MIN_SAMPLES
        and math.isfinite(t.median_s)
        and t.median_s > 0
    ]
    best = max(trusted, key=lambda t: t.samples, default=None)
    return None if best is None else best.median_s


def _fastest(candidates: tuple[_Candidate, ...]) -> Decision:
    able = [c for c in candidates if not c.reasons]
    # a single trial answers more than any guess, and the guard and the next decision limit what it can cost
    untried = next((c for c in able if c.pace is None), None)
    if untried is not None:
        return _take(untried, f"not measured yet, so it is tried; {untried.precision_why}", "auto", candidates)
    best = min(able, key=_cost, default=None)
    if best is None or best.pace is None:
        return _take(None, "no other backend can serve this call", "auto", candidates)
    figures = _figures(best.backend, best.pace)
    if best.pace.cost > 1:
        return _take(None, f"PyTorch is the fastest: {figures}", "auto", candidates)
    return _take(best, f"the fastest: {figures}; {best.precision_why}", "auto", candidates)


def _cost(candidate: _Candidate) -> float:
    return math.inf if candidate.pace is None else candidate.pace.cost


def _named_why(named: _Candidate) -> str:
    slower = ""
    if named.pace is not None and named.pace.cost > 1:
        slower = f", though it is slower here: {_figures(named.backend, named.pace)}"
    return f"{named.backend} was asked for{slower}; {named.precision_why}"


def _figures(backend: BackendId, pace: _Pace) -> str:
    return f"{backend} {milliseconds(pace.engine_s)} a step, PyTorch {milliseconds(pace.torch_s)} ({pace.source})"


def _take(chosen: _Candidate | None, why: str, wanted: str, candidates: tuple[_Candidate, ...]) -> Decision:
    """The Decision for `chosen`, None for PyTorch, with a reason against every other backend."""
    taken: BackendId = "cuda" if chosen is None else chosen.backend
    rejected: list[tuple[BackendId, tuple[Refusal, ...]]] = []
    if chosen is not None:
        rejected.append(("cuda", (_cuda_reason(chosen, wanted),)))
    rejected.extend((c.backend, c.reasons or (_outranked(c, chosen, wanted),)) for c in candidates if c is not chosen)
    return Decision(
        backend=taken,
        why=why,
        wanted=wanted,
        engine_digest="" if chosen is None else chosen.digest,
        precision=None if chosen is None else chosen.precision,
        rejected=tuple(rejected),
    )


def _cuda_reason(chosen: _Candidate, wanted: str) -> Refusal:
    if wanted != "auto":
        return _not_asked("cuda", wanted)
    if chosen.pace is None:
        return _not_measured(chosen)
    return Refusal(
        "slower",
        f"step of PyTorch ({chosen.pace.source})",
        milliseconds(chosen.pace.torch_s),
        f"less than {chosen.backend}'s {milliseconds(chosen.pace.engine_s)}",
    )


def _outranked(candidate: _Candidate, chosen: _Candidate | None, wanted: str) -> Refusal:
    """Why an engine backend that could serve the call does not."""
    if wanted != "auto":
        return _not_asked(candidate.backend, wanted)
    if chosen is not None and chosen.pace is None:
        return _not_measured(chosen)
    pace = candidate.pace
    # auto tries an engine without figures before anything else, so every other one has figures here
    subject = f"step of {candidate.backend}" + ("" if pace is None else f" ({pace.source})")
    actual = "not measured" if pace is None else f"{milliseconds(pace.engine_s)}, {pace.cost:.3f} of PyTorch's"
    if chosen is not None and chosen.pace is not None:
        limit = (
            f"less than {chosen.backend}'s {milliseconds(chosen.pace.engine_s)}, {chosen.pace.cost:.3f} of PyTorch's"
        )
    else:
        limit = "at most PyTorch's" + ("" if pace is None else f" {milliseconds(pace.torch_s)}")
    return Refusal("slower", subject, actual, limit)


def _not_asked(backend: BackendId, wanted: str) -> Refusal:
    return Refusal("not-asked", "backend asked for", wanted, f"{backend} or auto")


def _not_measured(chosen: _Candidate) -> Refusal:
    return Refusal(
        "not-measured",
        f"samples of {chosen.backend}",
        f"fewer than {MIN_SAMPLES} and no figure from its build",
        f"{MIN_SAMPLES}, so that the two can be compared",
    )


def _no_backend(named: _Candidate, candidates: tuple[_Candidate, ...]) -> NoBackendError:
    cuda = Refusal("fallback", "backend.fallback", "none", "cuda")
    lines = [f"  not cuda: {cuda.text}"]
    for candidate in candidates:
        reasons = candidate.reasons or (_not_asked(candidate.backend, named.backend),)
        lines.extend(f"  not {candidate.backend}: {reason.text}" for reason in reasons)
    hint = next((reason.hint for reason in named.reasons if reason.hint), "")
    general = "set backend.fallback to cuda, or pick auto in the node"
    return NoBackendError(
        "\n".join([f"{named.backend} was asked for and cannot serve this call", *lines]),
        next_step=f"{hint}; or {general}" if hint else general,
    )
