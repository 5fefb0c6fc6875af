"""Behind a decision: the real cache and settings, with a fake backend, build queue and model, named so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kitchen_accel.backends.base import (
    BuildOptions,
    BuildResult,
    Call,
    Decision,
    DeviceFacts,
    LibraryFacts,
    Measurement,
    ModelFacts,
    Precision,
    Refusal,
    TensorSpec,
)
from kitchen_accel.cache.store import EngineStore
from kitchen_accel.capture.families import requested_profile
from kitchen_accel.config import SettingsFile
from kitchen_accel.errors import EngineError, NoBackendError
from kitchen_accel.journal import Journal, read
from kitchen_accel.scheduler import facts as facts_module
from kitchen_accel.scheduler import shelf as shelf_module
from kitchen_accel.scheduler.builds import BuildJob, BuildState
from kitchen_accel.scheduler.child import result_to_json
from kitchen_accel.scheduler.figures import Records
from kitchen_accel.scheduler.shelf import EngineShelf, HostPorts

TENSORS = (
    TensorSpec("x", (2, 4, 16, 16), "float32", "cpu"),
    TensorSpec("timesteps", (2,), "float32", "cpu"),
    TensorSpec("context", (2, 77, 768), "float32", "cpu"),
)
MODEL = ModelFacts("unet", "comfy.UNet", "config", "code", "float32", "float32", "", "", 4, "tiny")
KNOWN = replace(MODEL, weights_digest="weights")
FACTS = DeviceFacts(
    "linux", "3.11", "2.14.1", "a CPU", 8, 2,
    libraries=(("openvino", LibraryFacts("openvino", "2026.4", ("CPU",), (("CPU", ("fp32", "bf16")),))),),
)  # fmt: skip


class Interrupted(Exception):
    """Stands for ComfyUI's InterruptProcessingException."""


class FakeEngine:
    device = "CPU"
    precision: Precision = "fp32"
    calls = 0
    device_bytes = 8

    def __init__(self) -> None:
        self.closed = False
        self.prepared: list[Any] = []

    def prepare(self, tensors: Any) -> None:
        self.prepared.append(tensors)

    def run(self, inputs: Mapping[str, Any]) -> Any:
        return inputs["x"]

    def close(self) -> None:
        self.closed = True


class FakeBackend:
    id = "openvino"

    def __init__(self) -> None:
        self.loads: list[tuple[Path, Precision, BuildOptions]] = []
        self.engines: list[FakeEngine] = []
        self.error: Exception | None = None

    def load(self, folder: Path, profile: Any, precision: Precision, options: BuildOptions) -> FakeEngine:
        if self.error is not None:
            raise self.error
        self.loads.append((folder, precision, options))
        self.engines.append(FakeEngine())
        return self.engines[-1]


class FakeQueue:
    """Keeps jobs until `finish` builds them."""

    def __init__(self) -> None:
        self.jobs: dict[str, BuildJob] = {}
        self.submitted: list[BuildJob] = []
        self.failed: set[str] = set()
        self.waited = 0
        self.on_wait: Callable[[], None] = self.finish

    def state(self, digest: str) -> BuildState | None:
        if digest in self.failed:
            return BuildState(digest, "openvino", "tiny", "failed")
        return BuildState(digest, "openvino", "tiny", "building", fraction=0.4) if digest in self.jobs else None

    def states(self) -> tuple[BuildState, ...]:
        return tuple(BuildState(d, "openvino", "tiny", "failed") for d in self.failed)

    def forget(self, digest: str) -> None:
        self.failed.discard(digest)

    def submit(self, job: BuildJob) -> Any:
        if job.key_digest not in self.jobs:
            self.submitted.append(job)
        self.jobs[job.key_digest] = job
        return job.key_digest

    def wait(self, ticket: Any, poll: Callable[[], None]) -> None:
        self.waited += 1
        self.on_wait()

    def finish(self) -> None:
        """Every job leaves an engine of one file, measured faster than PyTorch in both precisions."""
        for job in self.jobs.values():
            out = job.stage()
            (out / "engine.bin").write_bytes(b"engine")
            measured = (Measurement("fp32", "static", 130.0, 0.5, 1.0), Measurement("bf16", "static", 45.0, 0.3, 1.0))
            profile = requested_profile("unet", TENSORS)
            job.commit(out, result_to_json(BuildResult(profile, measured)), 1.0)
        self.jobs.clear()

    def close(self) -> None:
        pass


class FakeModel:
    """A model whose digest is known when `digest_now` says so."""

    label = "tiny"

    def __init__(self, *, known: bool = True) -> None:
        self.future: Future[str] = Future()
        if known:
            self.future.set_result("weights")

    def digest(self) -> Future[str]:
        return self.future

    def refreshed(self, call: Call) -> Call:
        return replace(call, model=KNOWN) if self.future.done() else call

    def network_spec(self) -> dict[str, Any]:
        return {}

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[Path, Callable[[], bool]], None]:
        return lambda folder, cancelled: None

    def command(self) -> tuple[str, ...]:
        return ("python",)


class Rig:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.yaml = tmp_path / "comfy_kitchen.yaml"
        self.backend = FakeBackend()
        self.queue = FakeQueue()
        self.interrupt = False
        self.shown: list[tuple[str, str | None]] = []
        self.store = EngineStore(tmp_path / "cache", 10**9)
        self.folder = tmp_path
        self.journal = Journal(tmp_path)
        monkeypatch.setattr(shelf_module, "create", lambda backend: self.backend)
        monkeypatch.setattr(facts_module, "probe", lambda enabled: FACTS)
        self.shelf = self.fresh()

    def fresh(self) -> EngineShelf:
        """What another process on the same cache would have."""
        host = HostPorts(
            lambda: None, self.poll, (Interrupted,), lambda: "7", lambda text, node: self.shown.append((text, node))
        )
        return EngineShelf(
            SettingsFile(self.yaml), self.store, self.queue, Records(), self.journal, host,  # type: ignore[arg-type]
        )  # fmt: skip

    def poll(self) -> None:
        if self.interrupt:
            raise Interrupted

    def configure(self, text: str) -> None:
        self.yaml.write_text(text, encoding="utf-8")

    def decide(
        self, *, model: Any = None, facts: ModelFacts = KNOWN, wanted: str = "openvino", **call: Any
    ) -> Decision:
        found = Call(facts, call.pop("tensors", TENSORS), **call)
        decision, self.call = self.shelf.decide(model or FakeModel(), found, {}, wanted)
        return decision

    def codes(self, decision: Decision) -> list[str]:
        return [r.code for r in dict(decision.rejected).get("openvino", ())]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def test_in_the_background_the_first_prompt_asks_and_a_later_one_uses(rig: Rig) -> None:
    first = rig.decide()
    assert first.backend == "cuda"
    assert rig.codes(first) == ["building"]
    assert "40%" in first.rejected[1][1][0].text
    assert rig.decide().backend == "cuda"
    assert len(rig.queue.submitted) == 1
    assert rig.queue.submitted[0].low_priority
    rig.queue.finish()
    second = rig.decide()
    assert (second.backend, second.precision) == ("openvino", "fp32")
    assert len(rig.queue.submitted) == 1


def test_one_engine_serves_every_shape(rig: Rig) -> None:
    rig.decide()
    rig.queue.finish()
    other = tuple(replace(t, shape=(6, *t.shape[1:])) for t in TENSORS)
    other = (replace(other[0], shape=(6, 4, 21, 13)), *other[1:])
    assert rig.decide(tensors=other).engine_digest == rig.decide().engine_digest
    assert len(rig.queue.submitted) == 1


def test_blocking_waits_and_is_not_slowed_down(rig: Rig) -> None:
    rig.configure("build: blocking\n")
    assert rig.decide().backend == "openvino"
    assert (rig.queue.waited, rig.queue.submitted[0].low_priority) == (1, False)


def test_blocking_waits_for_a_build_that_an_earlier_prompt_asked_for(rig: Rig) -> None:
    rig.decide()
    rig.configure("build: blocking\n")
    assert rig.decide().backend == "openvino"
    assert len(rig.queue.submitted) == 1


def test_never_builds_nothing(rig: Rig) -> None:
    rig.configure("build: never\n")
    decision = rig.decide()
    assert (decision.backend, rig.codes(decision)) == ("cuda", ["no-engine"])
    assert not rig.queue.submitted


def test_the_build_is_asked_for_when_the_digest_is_known(rig: Rig) -> None:
    model = FakeModel(known=False)
    decision = rig.decide(model=model, facts=MODEL)
    assert (decision.backend, rig.codes(decision)) == ("cuda", ["digest-pending"])
    rig.decide(model=model, facts=MODEL)
    assert not rig.queue.submitted
    model.future.set_result("weights")
    assert len(rig.queue.submitted) == 1


def test_a_digest_that_fails_is_told(rig: Rig) -> None:
    model = FakeModel(known=False)
    rig.decide(model=model, facts=MODEL)
    model.future.set_exception(OSError("unreadable"))
    assert not rig.queue.submitted
    assert "unreadable" in read(rig.folder, 1)[0]["message"]


def test_blocking_waits_for_the_digest_too_and_says_what_is_known_then(rig: Rig) -> None:
    rig.configure("build: blocking\n")
    model = FakeModel(known=False)
    rig.interrupt = True
    with pytest.raises(Interrupted):
        rig.decide(model=model, facts=MODEL)
    assert rig.shown[0][1] == "7"
    model.future.set_result("weights")
    rig.interrupt = False
    assert rig.decide(model=model, facts=MODEL).backend == "openvino"
    assert rig.call.model == KNOWN


@pytest.mark.parametrize(("setting", "builds_at"), [(None, 2), (1, 1), (3, 3), (0, None)])
def test_patched_weights_get_an_engine_after_some_prompts(rig: Rig, setting: int | None, builds_at: int | None) -> None:
    if setting is not None:
        rig.configure(f"builds:\n  patched_after_runs: {setting}\n")
    patched = replace(KNOWN, patch_fingerprint="lora")
    for prompt in range(1, 5):
        decision = rig.decide(facts=patched)
        assert decision.backend == "cuda"
        assert len(rig.queue.submitted) == (1 if builds_at is not None and prompt >= builds_at else 0)
    if builds_at is None:
        assert "patched_after_runs is 0" in dict(decision.rejected)["openvino"][0].text


def test_an_engine_of_the_plain_model_never_serves_a_patched_one(rig: Rig) -> None:
    rig.decide()
    rig.queue.finish()
    decision = rig.decide(facts=replace(KNOWN, patch_fingerprint="lora"))
    assert decision.backend == "cuda"
    assert "LoRA" in dict(decision.rejected)["openvino"][0].text


@pytest.mark.parametrize(
    "change",
    [
        {"facts": replace(KNOWN, weights_digest="other")},
        {"facts": replace(KNOWN, config_digest="other")},
        {"facts": replace(KNOWN, code_digest="other")},
        {"facts": replace(KNOWN, compute_dtype="bfloat16")},
    ],
    ids=lambda c: next(iter(c)),
)
def test_another_model_is_another_engine(rig: Rig, change: dict[str, Any]) -> None:
    rig.decide()
    rig.queue.finish()
    assert rig.decide(**change).backend == "cuda"
    assert len(rig.queue.submitted) == 2


def test_what_acts_inside_the_network_neither_runs_nor_builds(rig: Rig) -> None:
    blocked = (Refusal("block-patch", "patches", "attn2_patch", "none"),)
    control = (TensorSpec("output.0", (2, 320, 16, 16), "float32", "cpu"),)
    assert rig.codes(rig.decide(blockers=blocked))[0] == "block-patch"
    assert "control" in rig.codes(rig.decide(control=control))
    assert not rig.queue.submitted
    rig.decide()
    rig.queue.finish()
    assert rig.decide(blockers=blocked).backend == "cuda"
    assert rig.decide(control=control).backend == "cuda"


def test_a_failed_build_is_not_asked_for_again_until_forgiven(rig: Rig) -> None:
    rig.decide()
    (digest,) = rig.queue.jobs
    rig.queue.jobs.clear()
    rig.queue.failed.add(digest)
    decision = rig.decide()
    assert rig.codes(decision) == ["build-failed"]
    assert len(rig.queue.submitted) == 1
    rig.shelf.forgive()
    rig.decide()
    assert len(rig.queue.submitted) == 2


def test_without_a_fallback_it_waits_for_the_engine_or_raises_all_reasons(rig: Rig) -> None:
    rig.configure("backend:\n  fallback: none\n")
    assert rig.decide().backend == "openvino"
    with pytest.raises(NoBackendError, match=r"(?s)block-patch|patches.*not tensorrt"):
        rig.decide(blockers=(Refusal("block-patch", "patches", "x", "none"),))


class TestEngines:
    @pytest.fixture(autouse=True)
    def built(self, rig: Rig) -> None:
        rig.decide()
        rig.queue.finish()

    def test_a_lease_loads_once_and_prepares_every_shape(self, rig: Rig) -> None:
        decision = rig.decide()
        one = rig.shelf.lease(decision, rig.call)
        two = rig.shelf.lease(decision, rig.call)
        assert one is two
        (load,) = rig.backend.loads
        assert load[1] == "fp32"
        assert dict(load[2].options) == {"max_compiled": "3", "shapes": "auto", "threads": "0"}
        assert rig.backend.engines[0].prepared == [TENSORS, TENSORS]

    def test_settings_of_the_run_load_it_anew_without_a_build(self, rig: Rig) -> None:
        rig.shelf.release(rig.shelf.lease(rig.decide(), rig.call))
        rig.configure("openvino:\n  threads: 1\n")
        rig.shelf.release(rig.shelf.lease(rig.decide(), rig.call))
        assert [dict(load[2].options)["threads"] for load in rig.backend.loads] == ["0", "1"]
        assert len(rig.queue.submitted) == 1

    def test_fast_takes_the_quicker_precision_that_passes(self, rig: Rig) -> None:
        rig.configure("precision: fast\n")
        assert rig.decide().precision == "bf16"
        rig.configure("precision: fast\nparity:\n  bf16: 50\n")
        assert rig.decide().precision == "fp32"

    def test_the_offer_names_gain_and_cost(self, rig: Rig) -> None:
        decision = rig.decide()
        assert "bf16" in rig.shelf.offer(rig.call, decision)
        assert "45.0 dB" in rig.shelf.offer(rig.call, decision)

    def test_a_condemned_engine_is_never_used_again_by_any_process(self, rig: Rig) -> None:
        decision = rig.decide()
        lease = rig.shelf.lease(decision, rig.call)
        rig.shelf.condemn(decision, "12 dB from PyTorch")
        rig.shelf.release(lease)
        assert rig.backend.engines[0].closed or rig.shelf._loaded.digests()
        for shelf in (rig.shelf, rig.fresh()):
            rig.shelf = shelf
            again = rig.decide()
            assert again.backend == "cuda"
            assert "12 dB" in dict(again.rejected)["openvino"][0].text
        assert len(rig.queue.submitted) == 1, "a rebuild would give the same engine"
        # rebuilt on request: the entry is deleted
        rig.store.remove(decision.engine_digest)
        rig.decide()
        assert len(rig.queue.submitted) == 2

    def test_one_precision_condemned_leaves_the_other(self, rig: Rig) -> None:
        rig.configure("precision: fast\n")
        rig.shelf.condemn(rig.decide(), "bf16 is wrong here")
        rig.shelf = rig.fresh()
        decision = rig.decide()
        assert (decision.backend, decision.precision) == ("openvino", "fp32")

    def test_an_engine_that_failed_is_tried_again_by_the_next_process(self, rig: Rig) -> None:
        decision = rig.decide()
        rig.backend.error = EngineError("no memory")
        with pytest.raises(EngineError):
            rig.shelf.lease(decision, rig.call)
        rig.shelf.suspend(decision, "no memory")
        assert rig.codes(rig.decide()) == ["build-failed"]
        rig.backend.error = None
        rig.shelf = rig.fresh()
        assert rig.decide().backend == "openvino"

    def test_a_damaged_entry_is_built_again(self, rig: Rig) -> None:
        entry = rig.store.entries()[0].folder / "engine.bin"
        entry.write_bytes(b"ENGINE")
        rig.shelf = rig.fresh()
        rig.store = rig.shelf.store = EngineStore(rig.store.root, 10**9)
        assert rig.decide().backend == "cuda"
        assert len(rig.queue.submitted) == 2

    def test_proofs_hold_for_one_process_precision_and_shape(self, rig: Rig) -> None:
        decision = rig.decide()
        assert not rig.shelf.proven(decision, rig.call)
        rig.shelf.prove(decision, rig.call, 129.0)
        assert rig.shelf.proven(decision, rig.call)
        other = replace(rig.call, tensors=tuple(replace(t, shape=(4, *t.shape[1:])) for t in TENSORS))
        assert not rig.shelf.proven(decision, other)
        assert not rig.shelf.proven(replace(decision, precision="bf16"), rig.call)
        assert not rig.fresh().proven(decision, rig.call)
        assert rig.store.state(decision.engine_digest).proofs["fp32"].psnr_db == 129.0


def test_a_decision_is_told_once_per_change(rig: Rig) -> None:
    def told() -> list[str]:
        return [r["message"] for r in read(rig.folder, 100) if r["kind"] == "decision"]

    for _ in range(3):
        rig.shelf.announce("tiny", rig.call if hasattr(rig, "call") else Call(KNOWN, TENSORS), rig.decide())
    assert len(told()) == 1
    rig.queue.finish()
    for _ in range(3):
        rig.shelf.announce("tiny", rig.call, rig.decide())
    assert len(told()) == 2
    assert "openvino in fp32" in told()[-1]


def test_a_cache_that_cannot_be_written_loses_a_remark_only(rig: Rig) -> None:
    decision = Decision("openvino", "x", "openvino", "0" * 20, "fp32")
    rig.shelf.prove(decision, Call(KNOWN, TENSORS), 100.0)
    rig.shelf.condemn(decision, "wrong")
    assert [r for r in read(rig.folder, 100) if r["kind"] == "cache"]


def test_build_progress_is_shown_on_the_node_that_asked(rig: Rig) -> None:
    rig.decide()
    (digest,) = rig.queue.jobs
    rig.shelf.show_build(BuildState(digest, "openvino", "tiny", "building", "capture", 0.4))
    rig.shelf.show_build(BuildState(digest, "openvino", "tiny", "done"))
    assert [node for _, node in rig.shown] == ["7", "7"]
    assert "40%" in rig.shown[0][0]
    assert "next prompt" in rig.shown[1][0]
