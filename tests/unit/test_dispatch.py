"""The hot path and its guard, with a fake shelf and fake engines (named so): what runs, falls back and counts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from kitchen_accel.backends.base import Call, Decision, ModelFacts, Precision, Refusal, TensorSpec
from kitchen_accel.errors import EngineError, NoBackendError
from kitchen_accel.scheduler.dispatch import PEAK_DB, Dispatcher, Session, psnr_db
from kitchen_accel.scheduler.engines import Lease, LoadedEngines
from kitchen_accel.scheduler.figures import Records

MODEL = ModelFacts("unet", "comfy.UNet", "c", "s", "float32", "float32", "w", "", 4, "tiny")
DIGESTED = replace(MODEL, weights_digest="known by now")
CALL = Call(MODEL, (TensorSpec("x", (2, 4, 8, 8), "float32", "cpu"),))
X = torch.arange(512, dtype=torch.float32).reshape(2, 4, 8, 8) / 512


class Interrupted(Exception):
    """Stands for ComfyUI's InterruptProcessingException."""


class FakeEngine:
    """Computes `x * 2` plus what `spoil` adds; raises what `error` holds."""

    device = "CPU"
    precision: Precision = "fp32"
    device_bytes = 8

    def __init__(self, spoil: float = 0.0, error: Exception | None = None) -> None:
        self.calls = 0
        self.spoil = spoil
        self.error = error
        self.closed = False
        self.prepared: list[Any] = []

    def prepare(self, tensors: Any) -> None:
        self.prepared.append(tensors)

    def run(self, inputs: Mapping[str, Any]) -> Any:
        if self.error is not None:
            raise self.error
        self.calls += 1
        return inputs["x"] * 2 + self.spoil

    def close(self) -> None:
        self.closed = True


class FakeJournal:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def event(self, kind: str, message: str, **fields: Any) -> None:
        self.events.append((kind, message, fields))

    def of(self, kind: str) -> list[tuple[str, str, dict[str, Any]]]:
        return [e for e in self.events if e[0] == kind]


class FakeHost:
    interrupts = (Interrupted,)


class FakeShelf:
    """Answers every call with one decision and one engine."""

    def __init__(self, engine: FakeEngine | None, *, required: bool = False, proven: bool = True) -> None:
        self.engine = engine
        self.precision: Precision = "fp32"
        self.fallback_forbidden = required
        self.is_proven = proven
        self.journal = FakeJournal()
        self.host = FakeHost()
        self.condemned: list[str] = []
        self.suspended: list[str] = []
        self.proofs: list[float] = []
        self.released = 0
        self.decide_error: Exception | None = None
        self.lease_error: Exception | None = None
        self.leases: list[Lease] = []

    def decide(self, model: Any, call: Call, inputs: Any, wanted: str) -> tuple[Decision, Call]:
        if self.decide_error is not None:
            raise self.decide_error
        if self.engine is None:
            reason = Refusal("a", "b", "c", "d")
            return Decision("cuda", "no engine", wanted, rejected=(("openvino", (reason,)),)), call
        # waiting for a digest makes another call of the one that was asked with
        return Decision("openvino", "asked for", wanted, "digest", self.precision), replace(call, model=DIGESTED)

    def lease(self, decision: Decision, call: Call) -> Lease:
        assert call.model == DIGESTED, "the engine of a call is found by what is known of it now"
        if self.lease_error is not None:
            raise self.lease_error
        assert self.engine is not None
        self.leases.append(Lease(("digest",), self.engine))
        return self.leases[-1]

    def proven(self, decision: Decision, call: Call) -> bool:
        return self.is_proven

    def prove(self, decision: Decision, call: Call, figure: float) -> None:
        assert call.model == DIGESTED
        self.proofs.append(figure)

    def threshold_db(self, precision: str) -> float:
        return 60.0

    def condemn(self, decision: Decision, reason: str) -> None:
        self.condemned.append(reason)

    def suspend(self, decision: Decision, reason: str) -> None:
        self.suspended.append(reason)

    def offer(self, call: Call, decision: Decision) -> str:
        return ""

    def announce(self, label: str, call: Call, decision: Decision) -> None:
        pass

    def release(self, lease: Lease) -> None:
        self.released += 1


class FakeModel:
    label = "tiny"


class Rig:
    """A session over a fake shelf, counting how often PyTorch ran."""

    def __init__(self, shelf: FakeShelf) -> None:
        self.shelf = shelf
        self.records = Records()
        self.session: Session = Dispatcher(shelf, self.records).session(FakeModel(), "auto")  # type: ignore[arg-type]
        self.eager_calls = 0

    def eager(self) -> torch.Tensor:
        self.eager_calls += 1
        return X * 2

    def step(self, eager: Callable[[], Any] | None = None) -> torch.Tensor:
        output: torch.Tensor = self.session.call("shape", {"x": X}, eager or self.eager, lambda: CALL)
        return output

    @property
    def entry(self) -> dict[str, Any]:
        return self.records.select(None)[-1].as_json()


def test_an_engine_that_is_proven_runs_alone() -> None:
    rig = Rig(FakeShelf(engine := FakeEngine()))
    outputs = [rig.step() for _ in range(5)]
    assert all(torch.equal(o, X * 2) for o in outputs)
    assert (engine.calls, rig.eager_calls) == (5, 0)
    assert (rig.entry["engine_calls"], rig.entry["torch_calls"]) == (5, 0)
    assert rig.entry["engine_step_ms"] > 0


def test_without_an_engine_pytorch_runs_and_the_reasons_are_kept() -> None:
    rig = Rig(FakeShelf(None))
    rig.step()
    assert rig.eager_calls == 1
    assert rig.entry["backend"] == "cuda"
    assert rig.entry["codes"] == {"openvino": ["a"]}


def test_a_new_engine_is_compared_with_pytorch_once() -> None:
    rig = Rig(FakeShelf(engine := FakeEngine(), proven=False))
    for _ in range(3):
        rig.step()
    assert (engine.calls, rig.eager_calls) == (3, 1)
    assert rig.shelf.proofs == [PEAK_DB]
    assert rig.entry["proof_db"] == PEAK_DB
    assert (rig.entry["engine_calls"], rig.entry["torch_calls"]) == (3, 1)


@pytest.mark.parametrize("spoil", [0.01, 1.0, math.nan, math.inf])
def test_a_wrong_new_engine_never_reaches_the_picture(spoil: float) -> None:
    rig = Rig(FakeShelf(engine := FakeEngine(spoil), proven=False))
    outputs = [rig.step() for _ in range(3)]
    assert all(torch.equal(o, X * 2) for o in outputs)
    assert engine.calls == 1
    assert len(rig.shelf.condemned) == 1
    assert "dB" in rig.shelf.condemned[0]
    assert rig.entry["backend"] == "cuda"
    assert len(rig.shelf.journal.of("fallback")) == 1


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_is_computed_again(spoil: float) -> None:
    rig = Rig(FakeShelf(engine := FakeEngine()))
    rig.step()
    engine.spoil = spoil
    outputs = [rig.step() for _ in range(3)]
    assert all(torch.equal(o, X * 2) for o in outputs)
    assert len(rig.shelf.condemned) == 1
    assert rig.eager_calls == 3
    assert len(rig.shelf.journal.of("fallback")) == 1


def test_an_engine_that_raises_is_left_for_the_rest_of_the_run_and_the_first_error_is_kept() -> None:
    rig = Rig(FakeShelf(engine := FakeEngine()))
    rig.step()
    engine.error = RuntimeError("first")
    rig.step()
    engine.error = RuntimeError("second")
    output = rig.step()
    assert torch.equal(output, X * 2)
    assert rig.shelf.suspended == ["first"]
    assert rig.entry["fallbacks"] == ["first"]
    assert isinstance(rig.shelf.journal.of("fallback")[0][2]["error"], RuntimeError)
    assert not rig.shelf.condemned, "an error is no proof of a wrong picture"


def test_an_engine_that_cannot_be_loaded_falls_back() -> None:
    shelf = FakeShelf(FakeEngine())
    shelf.lease_error = EngineError("truncated")
    rig = Rig(shelf)
    assert torch.equal(rig.step(), X * 2)
    assert rig.entry["backend"] == "cuda"
    assert "truncated" in rig.entry["why"]


def test_a_decision_that_fails_never_loses_the_prompt() -> None:
    shelf = FakeShelf(FakeEngine())
    shelf.decide_error = OSError("disk")
    rig = Rig(shelf)
    assert torch.equal(rig.step(), X * 2)
    assert shelf.journal.of("error")


@pytest.mark.parametrize("error", [Interrupted(), NoBackendError("refused")])
def test_an_interrupt_and_a_refused_named_backend_go_through(error: Exception) -> None:
    shelf = FakeShelf(FakeEngine())
    shelf.decide_error = error
    with pytest.raises(type(error)):
        Rig(shelf).step()


@pytest.mark.parametrize("fault", ["run", "load", "wrong", "nan"])
def test_without_a_fallback_every_failure_is_raised(fault: str) -> None:
    engine = FakeEngine(spoil={"wrong": 1.0, "nan": math.nan}.get(fault, 0.0))
    shelf = FakeShelf(engine, required=True, proven=fault != "wrong")
    if fault == "run":
        engine.error = RuntimeError("broken")
    if fault == "load":
        shelf.lease_error = EngineError("broken")
    rig = Rig(shelf)
    with pytest.raises(NoBackendError, match=r"openvino|dB"):
        rig.step()


@pytest.mark.parametrize("fault", ["run", "nan"])
def test_what_pytorch_raises_in_a_fallback_is_not_taken_for_the_engine(fault: str) -> None:
    """An out-of-memory or an interrupt of ComfyUI's own path must reach ComfyUI, and once."""
    engine = FakeEngine(spoil=math.nan if fault == "nan" else 0.0, error=ValueError() if fault == "run" else None)
    rig = Rig(FakeShelf(engine))
    calls = []

    def eager() -> Any:
        calls.append(1)
        raise Interrupted

    with pytest.raises(Interrupted):
        rig.step(eager)
    assert len(calls) == 1


def test_a_second_thread_on_the_same_engine_runs_pytorch() -> None:
    rig = Rig(FakeShelf(engine := FakeEngine()))
    rig.step()
    with rig.shelf.leases[0].busy:
        done: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: done.append(rig.step()))
        thread.start()
        thread.join(10)
    assert torch.equal(done[0], X * 2)
    assert (engine.calls, rig.eager_calls) == (1, 1)
    assert rig.entry["torch_calls"] == 1


def test_finish_gives_every_engine_back_and_the_next_run_decides_again() -> None:
    rig = Rig(FakeShelf(FakeEngine()))
    rig.step()
    rig.session.finish()
    assert rig.shelf.released == 1
    assert not rig.session.entries
    rig.session.finish()
    assert len(rig.shelf.journal.of("run")) == 1, "a run that is over is told once"
    _, message, fields = rig.shelf.journal.of("run")[0]
    assert "1 calls on an engine, 0 on PyTorch" in message
    assert fields["figures"][0]["run"] == fields["run"] == 1


def test_a_proof_belongs_to_its_precision_and_counters_to_their_run() -> None:
    """What a user reads must be of what ran, not of another precision or an earlier prompt."""
    shelf = FakeShelf(engine := FakeEngine(spoil=0.0), proven=False)
    rig = Rig(shelf)
    rig.step()
    rig.step()
    assert rig.entry["proof_db"] == PEAK_DB
    assert (rig.entry["run_engine_calls"], rig.entry["run_torch_calls"]) == (2, 1)
    rig.session.finish()
    engine.precision = shelf.precision = "bf16"
    shelf.is_proven = True
    rig.session = rig.session.dispatcher.session(FakeModel(), "auto")  # type: ignore[arg-type]
    rig.step()
    assert rig.entry["precision"] == "bf16"
    assert rig.entry["proof_db"] is None
    assert (rig.entry["run_engine_calls"], rig.entry["run_torch_calls"]) == (1, 0)
    assert (rig.entry["engine_calls"], rig.entry["torch_calls"]) == (3, 1)
    assert rig.entry["run"] == 2


def test_the_first_call_warms_up_and_is_not_timed() -> None:
    rig = Rig(FakeShelf(None))
    rig.step()
    assert (rig.entry["torch_calls"], rig.entry["torch_step_ms"]) == (1, None)
    rig.step()
    assert (rig.entry["torch_calls"], rig.entry["torch_step_ms"]) == (2, pytest.approx(0, abs=1000))


def test_an_engine_that_cannot_be_let_go_costs_no_picture() -> None:
    rig = Rig(FakeShelf(FakeEngine()))
    rig.step()

    def release(lease: Lease) -> None:
        raise OSError("driver")

    rig.shelf.release = release  # type: ignore[method-assign]
    rig.session.finish()
    assert "driver" in rig.shelf.journal.of("error")[0][1]


class TestPsnr:
    def test_equal(self) -> None:
        assert psnr_db(X, X.clone()) == PEAK_DB

    def test_formula(self) -> None:
        """Peak is the range of the reference; an offset of a hundredth of it is 40 dB."""
        reference = torch.linspace(0, 1, 101)
        assert psnr_db(reference, reference + 0.01) == pytest.approx(40.0, abs=1e-3)
        assert psnr_db(reference * 1000, reference * 1000 + 10) == pytest.approx(40.0, abs=1e-3)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_not_finite_never_passes(self, bad: float) -> None:
        spoiled = X.clone()
        spoiled[0, 0, 0, 0] = bad
        assert psnr_db(X, spoiled) == -math.inf
        assert psnr_db(spoiled, X) == -math.inf

    def test_another_shape_never_passes(self) -> None:
        assert psnr_db(X, X[:1]) == -math.inf

    def test_a_constant_reference_passes_only_when_equal(self) -> None:
        zeros = torch.zeros(4)
        assert psnr_db(zeros, zeros) == PEAK_DB
        assert psnr_db(zeros, zeros + 1e-9) == -math.inf


class TestLoadedEngines:
    def test_the_least_recently_used_is_closed_before_the_next_is_loaded(self) -> None:
        shelf = LoadedEngines(2)
        engines = [FakeEngine() for _ in range(3)]
        closed_at_load: list[int] = []

        def load(engine: FakeEngine) -> Callable[[], Any]:
            def inner() -> Any:
                closed_at_load.append(sum(e.closed for e in engines))
                return engine

            return inner

        for index, engine in enumerate(engines):
            shelf.give_back(shelf.take((str(index),), load(engine)))
        assert [e.closed for e in engines] == [True, False, False]
        assert closed_at_load == [0, 0, 1]
        assert shelf.digests() == {"1", "2"}
        assert shelf.total_bytes() == 16

    def test_one_in_use_is_never_closed(self) -> None:
        shelf = LoadedEngines(1)
        first, second = FakeEngine(), FakeEngine()
        held = shelf.take(("a",), lambda: first)
        shelf.take(("b",), lambda: second)
        assert not first.closed
        shelf.drop("a")
        assert not first.closed
        shelf.give_back(held)
        assert first.closed
        assert not second.closed

    def test_a_load_that_raises_leaves_nothing(self) -> None:
        shelf = LoadedEngines(1)

        def load() -> Any:
            raise EngineError("no")

        with pytest.raises(EngineError):
            shelf.take(("a",), load)
        assert not shelf.digests()
        assert shelf.take(("a",), lambda: FakeEngine()).users == 1

    def test_close_closes_all(self) -> None:
        shelf = LoadedEngines(3)
        engines = [FakeEngine() for _ in range(3)]
        for name, engine in zip("abc", engines, strict=True):
            shelf.take((name,), lambda engine=engine: engine)  # type: ignore[misc]
        shelf.close()
        assert all(e.closed for e in engines)
