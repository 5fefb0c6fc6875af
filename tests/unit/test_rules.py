"""What a call, a missing library, a precision or an engine's state gives as reasons, with value and limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kitchen_accel.backends.base import (
    BackendId,
    Call,
    DeviceFacts,
    DimRange,
    EngineState,
    GpuFacts,
    InputProfile,
    LibraryFacts,
    Measurement,
    ModelFacts,
    Refusal,
    ShapeProfile,
    TensorSpec,
)
from kitchen_accel.capture.families import family
from kitchen_accel.scheduler.capability import CAPABILITIES
from kitchen_accel.scheduler.policy import Policy
from kitchen_accel.scheduler.rules import REFUSAL_CODES, refusals

OPENVINO = LibraryFacts("openvino", "2026.4.1", ("CPU",), (("CPU", ("fp32", "bf16")),))
POLICY = Policy(
    wanted="auto",
    default="auto",
    enabled=("tensorrt", "openvino", "directml"),
    fallback="cuda",
    precision="auto",
    thresholds_db=(("bf16", 30.0), ("fp16", 40.0), ("fp32", 60.0)),
)
READY = EngineState("openvino", "ready", "d1", measurements=(Measurement("fp32", "dynamic", 110.0, 0.02, 0.04),))


def machine(*gpus: GpuFacts, system: str = "linux", **libraries: LibraryFacts | Refusal) -> DeviceFacts:
    return DeviceFacts(
        system,
        "3.11.7",
        "2.14.1",
        "a CPU",
        32 << 30,
        8,
        gpus,
        tuple(libraries.items()),  # type: ignore[arg-type]
    )


def call(
    *, x: tuple[int, ...] = (2, 4, 64, 64), device: str = "cpu", dtype: str = "float32", family: str = "unet",
    compute: str = "float32", tokens: int = 77, **changes: Any,
) -> Call:  # fmt: skip
    model = ModelFacts(family, "UNetModel", "c", "k", compute, compute, "w", "", 1 << 30)
    tensors = (
        TensorSpec("x", x, dtype, device),
        TensorSpec("timesteps", (x[0],), "float32", device),
        TensorSpec("context", (x[0], tokens, 768), dtype, device),
    )
    return replace(Call(model, tensors), **changes)


def reasons(
    backend: BackendId, asked: Call, facts: DeviceFacts, policy: Policy = POLICY, engine: EngineState | None = READY
) -> dict[str, Refusal]:
    """By code, after checking that no code is unknown and that two reasons are never the same."""
    found = refusals(backend, asked, facts, policy, engine)
    assert len(set(found)) == len(found)
    assert {r.code for r in found} <= {code for code, _ in REFUSAL_CODES} | {b.code for b in asked.blockers}
    return {r.code: r for r in found}


CPU_BOX = machine(openvino=OPENVINO)


def test_disabled() -> None:
    found = reasons("openvino", call(), machine(), replace(POLICY, enabled=("tensorrt",)))

    assert found["disabled"].actual == "tensorrt"
    assert "openvino" in found["disabled"].required
    # it was not probed because it is off, so its library says nothing
    assert "missing-library" not in found


def test_a_missing_library_is_passed_on_word_for_word() -> None:
    missing = Refusal("missing-library", "openvino", "libtbb.so.12: cannot open", "the library", "pip install openvino")
    other = Refusal("not-implemented", "backend tensorrt", "not in this version", "a version that has it")
    facts = machine(openvino=missing, tensorrt=other)

    assert reasons("openvino", call(), facts)["missing-library"] is missing
    assert reasons("tensorrt", call(), facts)["not-implemented"] is other
    assert "not probed" in reasons("directml", call(), facts)["missing-library"].text


@pytest.mark.parametrize("name", ["flux", "wan", "unknown", "UNET", ""])
@pytest.mark.parametrize("backend", [row.backend for row in CAPABILITIES])
def test_families_are_a_whitelist(backend: BackendId, name: str) -> None:
    found = reasons(backend, call(family=name), CPU_BOX)

    assert name in found["family"].actual
    if backend == "openvino":
        assert found["family"].required == "one of unet, mmdit"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int64"])
def test_dtypes_are_a_whitelist(dtype: str) -> None:
    found = [r for r in refusals("openvino", call(dtype=dtype), CPU_BOX, POLICY, READY) if r.code == "input-dtype"]

    assert [r.subject for r in found] == ["input x", "input context"]
    assert all(r.actual == dtype and "float32" in r.required for r in found)


@pytest.mark.parametrize(
    ("changes", "name", "actual"),
    [
        ({"x": (65, 4, 64, 64)}, "batch", 65),
        ({"x": (2, 4, 0, 64)}, "height", 0),
        ({"x": (2, 4, 64, 1025)}, "width", 1025),
        ({"tokens": 4097}, "tokens", 4097),
        ({"family": "mmdit", "x": (2, 16, 63, 64)}, "height", 63),
        ({"family": "mmdit", "x": (2, 16, 64, 1026)}, "width", 1026),
    ],
    ids=["batch", "unet-height", "unet-width", "tokens", "mmdit-odd-height", "mmdit-width"],
)
def test_limits_of_the_dimensions(changes: dict[str, Any], name: str, actual: int) -> None:
    row = family(changes.get("family", "unet"))
    limit = next(dim for want in row.inputs for dim in want.dims if dim is not None and dim.name == name)

    found = [r for r in refusals("openvino", call(**changes), CPU_BOX, POLICY, READY) if r.code == "dim-range"]

    assert found
    assert all(name in r.subject and r.actual == str(actual) for r in found)
    assert all(f"{limit.min} to {limit.max}" in r.text for r in found)
    assert all(("in steps of 2" in r.text) is (row.name == "mmdit") for r in found)


@pytest.mark.parametrize("x", [(1, 4, 5, 1024), (64, 9, 1024, 5), (3, 8, 7, 9)], ids=str)
def test_the_limits_themselves_and_odd_sizes_are_inside(x: tuple[int, ...]) -> None:
    assert refusals("openvino", call(x=x, tokens=4096), CPU_BOX, POLICY, READY) == ()


def test_a_needed_input_that_is_absent() -> None:
    plain = call()

    found = reasons("openvino", replace(plain, tensors=plain.tensors[:1]), CPU_BOX)

    assert set(found) == {"input-set"}
    assert found["input-set"].actual == "absent"


def test_the_same_limit_in_table_and_profile_is_told_once() -> None:
    row = family("unet")
    inputs = [i for i in row.inputs if not i.optional]
    profile = ShapeProfile(
        tuple(
            InputProfile(i.name, "float32", tuple(d or n for d, n in zip(i.dims, s.shape, strict=True)))
            for i, s in zip(inputs, call().tensors, strict=True)
        )
    )

    found = refusals("openvino", call(x=(2, 4, 64, 1025)), CPU_BOX, POLICY, replace(READY, profile=profile))

    assert [(r.code, r.subject) for r in found] == [("dim-range", "input x, width")]


def test_unknown_inputs_and_ranks() -> None:
    plain = call(x=(2, 16, 8, 64, 64))
    odd = replace(plain, tensors=(*plain.tensors, TensorSpec("clip_fea", (2, 257, 1280), "float32", "cpu")))

    found = reasons("openvino", odd, CPU_BOX)

    assert found["input-rank"].actual == "5 dimensions"
    assert found["input-rank"].required == "4"
    assert found["input-set"].subject == "input clip_fea"
    assert "x, timesteps, context, y" in found["input-set"].required
    assert "input-set" in reasons("openvino", replace(plain, tensors=()), CPU_BOX)


def test_equal_dimensions_must_be_equal() -> None:
    plain = call()
    stray = replace(plain, tensors=(*plain.tensors[:2], replace(plain.tensors[2], shape=(3, 77, 768))))

    found = reasons("openvino", stray, CPU_BOX)

    assert set(found) == {"dim-equal"}
    assert found["dim-equal"].actual == "x 2, timesteps 2, context 3"


def test_any_control_is_refused_with_its_count() -> None:
    specs = tuple(TensorSpec(f"output.{i}", (2, 320, 64, 64), "float32", "cpu") for i in range(12))

    found = reasons("openvino", call(control=specs), CPU_BOX)

    assert set(found) == {"control"}
    assert found["control"].actual == "12 (output.0, output.1, output.2, ...)"


@pytest.mark.parametrize("backend", [row.backend for row in CAPABILITIES])
def test_blockers_hold_for_every_engine_backend(backend: BackendId) -> None:
    blockers = (
        Refusal("attention-override", "transformer_options", "optimized_attention_override", "none"),
        Refusal("hooks", "hooks of the patcher", "1 group", "none"),
    )

    found = refusals(backend, call(blockers=blockers), CPU_BOX, POLICY, READY)

    assert all(blocker in found for blocker in blockers)


@pytest.mark.parametrize(
    ("wanted", "compute", "actual"),
    [
        ("fp16", "float32", "fp16 was asked for"),
        ("auto", "float64", "float64"),
        ("auto", "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_a_precision_the_device_lacks(wanted: Any, compute: str, actual: str) -> None:
    found = reasons("openvino", call(compute=compute), CPU_BOX, replace(POLICY, precision=wanted))

    assert found["precision"].actual == actual


def test_an_engine_measured_below_its_threshold_is_not_right() -> None:
    bad = replace(READY, measurements=(Measurement("fp32", "static", 59.9, 0.01, 0.04),))

    found = reasons("openvino", call(), CPU_BOX, POLICY, bad)

    assert set(found) == {"parity"}
    assert "59.9 dB" in found["parity"].text
    assert "60.0 dB" in found["parity"].text
    assert set(reasons("openvino", call(), CPU_BOX, replace(POLICY, thresholds_db=()), READY)) == {"parity"}
    one_is_right = replace(bad, measurements=(*bad.measurements, *READY.measurements))
    assert refusals("openvino", call(), CPU_BOX, POLICY, one_is_right) == ()


@pytest.mark.parametrize(
    ("engine", "code", "says"),
    [
        (None, "no-engine", "none for this model"),
        (EngineState("openvino", "absent", detail="weights_digest differs"), "no-engine", "weights_digest differs"),
        (EngineState("openvino", "building", detail="converting, 40 %"), "building", "converting, 40 %"),
        (EngineState("openvino", "failed", detail="child was killed by signal 9"), "build-failed", "signal 9"),
        (EngineState("openvino", "quarantined", detail="PSNR 12.1 dB"), "quarantined", "PSNR 12.1 dB"),
    ],
    ids=["unknown", "absent", "building", "failed", "quarantined"],
)
def test_states_of_an_engine(engine: EngineState | None, code: str, says: str) -> None:
    found = reasons("openvino", call(), CPU_BOX, POLICY, engine)

    assert set(found) == {code}
    assert says in found[code].text


@pytest.mark.parametrize("engine", [None, READY], ids=["absent", "ready"])
def test_without_a_digest_nothing_is_said_of_the_engine(engine: EngineState | None) -> None:
    plain = call()
    pending = replace(plain, model=replace(plain.model, weights_digest=""))

    assert set(reasons("openvino", pending, CPU_BOX, POLICY, engine)) == {"digest-pending"}


def test_outside_the_engines_own_profile() -> None:
    batch = DimRange("batch", 1, 2)
    size = DimRange("height", 8, 32)
    profile = ShapeProfile(
        (
            InputProfile("x", "float16", (batch, 9, size, DimRange("width", 8, 128))),
            InputProfile("timesteps", "float32", (batch,)),
            InputProfile("context", "float32", (batch, DimRange("tokens", 77, 154, 77), 768)),
            InputProfile("y", "float32", (batch, 2816)),
        )
    )

    found = refusals("openvino", call(tokens=80), CPU_BOX, POLICY, replace(READY, profile=profile))

    assert [(r.code, r.actual) for r in found] == [
        ("input-dtype", "float32"),
        ("dim-fixed", "4"),
        ("dim-range", "64"),
        ("dim-range", "80"),
        ("input-set", "absent"),
    ]
    assert found[3].required == "77 to 154 in steps of 77"


def test_all_reasons_are_given_not_only_the_first() -> None:
    asked = call(family="flux", device="cuda:0", dtype="float64", control=(TensorSpec("middle.0", (1,), "x", "cpu"),))
    policy = replace(POLICY, enabled=(), openvino_device="TPU", precision="fp16")

    found = reasons("openvino", asked, machine(system="beos", openvino=OPENVINO), policy, None)

    expected = ("disabled", "platform", "device", "family", "input-dtype", "control", "precision", "no-engine")
    assert tuple(found) == expected
