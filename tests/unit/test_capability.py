"""The capability table against machines we do not have: every rule, every limit, every code."""

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
    Precision,
    Refusal,
    ShapeProfile,
    TensorSpec,
)
from kitchen_accel.scheduler.capability import CAPABILITIES, capability
from kitchen_accel.scheduler.policy import Policy
from kitchen_accel.scheduler.rules import REFUSAL_CODES, RULES, describe, device_precisions, refusals

OPENVINO = LibraryFacts("openvino", "2026.4.1", ("CPU",), (("CPU", ("fp32", "bf16")),))
RTX = LibraryFacts("tensorrt_rtx", "1.7.1.116")
CLASSIC = LibraryFacts("tensorrt", "11.4.0")
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


def nvidia(major: int, minor: int) -> GpuFacts:
    return GpuFacts(f"sm_{major}{minor} card", "nvidia", (major, minor), 8 << 30)


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


def test_a_plain_call_on_a_ready_engine_is_not_refused() -> None:
    assert refusals("openvino", call(), CPU_BOX, POLICY, READY) == ()
    mmdit = call(family="mmdit", x=(1, 16, 64, 64), tokens=154)
    assert refusals("openvino", mmdit, CPU_BOX, POLICY, READY) == ()


def test_cuda_is_never_refused() -> None:
    worst = call(x=(0,), family="unknown", device="meta", blockers=(Refusal("hooks", "hooks", "on", "off"),))

    assert refusals("cuda", worst, machine(system="beos"), replace(POLICY, enabled=()), None) == ()


GENERATIONS = [
    # compute capability, TensorRT-RTX takes it, TensorRT takes it
    (nvidia(6, 1), False, False),
    (nvidia(7, 0), False, False),
    (nvidia(7, 5), True, True),
    (nvidia(8, 0), True, True),
    (nvidia(8, 6), True, True),
    (nvidia(8, 9), True, True),
    (nvidia(9, 0), False, True),
    (nvidia(10, 0), False, True),
    (nvidia(12, 0), True, True),
    (nvidia(12, 1), True, True),
]


@pytest.mark.parametrize(("gpu", "rtx", "classic"), GENERATIONS, ids=[gpu.name for gpu, *_ in GENERATIONS])
@pytest.mark.parametrize("library", [RTX, CLASSIC], ids=lambda lib: lib.name)
def test_compute_capability_per_tensorrt_flavour(
    library: LibraryFacts, gpu: GpuFacts, rtx: bool, classic: bool
) -> None:
    found = reasons("tensorrt", call(device="cuda:0"), machine(gpu, tensorrt=library))

    accepted = rtx if library is RTX else classic
    assert ("compute-capability" not in found) is accepted
    if not accepted:
        text = found["compute-capability"].text
        assert f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}" in text
        assert "7.5" in text
        if classic:
            assert "TensorRT takes it" in text


@pytest.mark.parametrize("capability_", [(7, 5), (8, 0), (8, 6), (8, 9), (12, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("library", [RTX, CLASSIC], ids=lambda lib: lib.name)
def test_only_turing_has_no_bf16(library: LibraryFacts, capability_: tuple[int, int]) -> None:
    facts = machine(nvidia(*capability_), tensorrt=library)
    asked = call(device="cuda:0")

    offered = device_precisions("tensorrt", asked, facts, POLICY)

    assert offered == (("fp32", "fp16") if capability_ == (7, 5) else ("fp32", "bf16", "fp16"))
    found = reasons("tensorrt", asked, facts, replace(POLICY, precision="bf16"))
    assert ("precision" in found) is (capability_ == (7, 5))


def test_the_gpu_is_the_one_the_call_is_on() -> None:
    # an Intel card listed between them does not count in torch's cuda index
    facts = machine(nvidia(8, 9), GpuFacts("Arc", "intel"), nvidia(9, 0), tensorrt=RTX)

    assert "compute-capability" not in reasons("tensorrt", call(device="cuda:0"), facts)
    assert "sm_90 card" in reasons("tensorrt", call(device="cuda:1"), facts)["compute-capability"].text


def test_without_the_library_both_flavours_decide_and_both_are_named() -> None:
    missing = Refusal("missing-library", "tensorrt", "ModuleNotFoundError: tensorrt", "it", "pip install it")
    hopper = reasons("tensorrt", call(device="cuda:0"), machine(nvidia(9, 0), tensorrt=missing))
    volta = reasons("tensorrt", call(device="cuda:0"), machine(nvidia(7, 0), tensorrt=missing))

    assert hopper["missing-library"] is missing
    assert "compute-capability" not in hopper
    assert "TensorRT-RTX" in volta["compute-capability"].text
    assert "7.5 or newer for TensorRT" in volta["compute-capability"].text


def test_a_library_without_a_rule_is_not_trusted_with_any_gpu() -> None:
    strange = LibraryFacts("tensorrt_next", "20.0")

    assert "compute-capability" in reasons("tensorrt", call(device="cuda:0"), machine(nvidia(8, 9), tensorrt=strange))


@pytest.mark.parametrize(
    "gpus", [(), (GpuFacts("Arc B580", "intel"),), (GpuFacts("RX 7900", "amd"),)], ids=["none", "intel", "amd"]
)
def test_tensorrt_needs_an_nvidia_gpu(gpus: tuple[GpuFacts, ...]) -> None:
    found = reasons("tensorrt", call(), machine(*gpus, tensorrt=RTX))

    assert (gpus[0].name if gpus else "none") in found["no-gpu"].text
    assert found["call-device"].actual == "cpu"
    assert found["call-device"].required == "cuda"


@pytest.mark.parametrize("system", ["linux", "windows", "darwin", "freebsd14"])
@pytest.mark.parametrize(
    ("backend", "taken"),
    [("tensorrt", ("linux", "windows")), ("openvino", ("linux", "windows", "darwin")), ("directml", ("windows",))],
)
def test_platforms(backend: BackendId, taken: tuple[str, ...], system: str) -> None:
    found = reasons(backend, call(), machine(system=system, openvino=OPENVINO))

    assert ("platform" not in found) is (system in taken)
    if system not in taken:
        assert system in found["platform"].text
        assert all(name in found["platform"].required for name in taken)


ALL_DEVICES = LibraryFacts(
    "openvino", "2026.4.1", ("CPU", "GPU.0", "GPU.1", "NPU"),
    (("CPU", ("fp32",)), ("GPU.0", ("fp32", "fp16")), ("GPU.1", ("fp32",)), ("NPU", ("fp16",))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "on", "accepted"),
    [
        ("CPU", "cpu", True),
        ("cpu", "cpu", True),
        ("CPU", "xpu:0", False),
        ("CPU", "cuda:0", False),
        ("CPU", "mps", False),
        ("GPU", "cpu", True),
        ("GPU.1", "xpu:1", True),
        ("GPU", "cuda:0", False),
        ("NPU", "cpu", True),
        ("NPU", "cuda:1", False),
    ],
)
def test_openvino_takes_tensors_from_where_its_device_is(device: str, on: str, accepted: bool) -> None:
    facts = machine(openvino=ALL_DEVICES)

    found = reasons("openvino", call(device=on), facts, replace(POLICY, openvino_device=device))

    assert "device" not in found
    assert ("call-device" not in found) is accepted
    if not accepted:
        assert on in found["call-device"].text
        assert "cpu" in found["call-device"].required
        assert device.upper() in found["call-device"].subject


def test_every_tensor_must_be_there_not_only_the_latent() -> None:
    plain = call()
    stray = replace(plain, tensors=(*plain.tensors[:2], replace(plain.tensors[2], device="cuda:0")))

    assert reasons("openvino", stray, CPU_BOX)["call-device"].actual == "cuda:0"


@pytest.mark.parametrize(
    ("device", "reported", "known"),
    [
        ("GPU", ("CPU",), False),
        ("GPU", ("CPU", "GPU"), True),
        ("GPU", ("CPU", "GPU.0", "GPU.1"), True),
        ("GPU.0", ("CPU", "GPU"), True),
        ("GPU.1", ("CPU", "GPU"), False),
        ("GPU.1", ("CPU", "GPU.0", "GPU.1"), True),
        ("NPU", (), False),
        ("AUTO", ("CPU", "GPU"), False),
        ("HETERO:GPU,CPU", ("CPU", "GPU"), False),
    ],
)
def test_the_openvino_device_must_be_found(device: str, reported: tuple[str, ...], known: bool) -> None:
    facts = machine(openvino=replace(OPENVINO, devices=reported, precisions=()))

    found = reasons("openvino", call(), facts, replace(POLICY, openvino_device=device))

    assert ("device" not in found) is known
    if not known:
        assert device in found["device"].text
        assert "call-device" not in found or device.startswith("NPU")


@pytest.mark.parametrize(
    ("device", "offered"),
    [("CPU", ("fp32",)), ("GPU", ("fp32", "fp16")), ("GPU.1", ("fp32",)), ("NPU", ("fp16",)), ("GPU.2", ())],
)
def test_precisions_are_those_of_the_device_in_the_settings(device: str, offered: tuple[Precision, ...]) -> None:
    policy = replace(POLICY, openvino_device=device)

    assert device_precisions("openvino", call(), machine(openvino=ALL_DEVICES), policy) == offered


def test_a_call_on_directml() -> None:
    library = LibraryFacts("onnxruntime-directml", "1.24.4")
    facts = machine(GpuFacts("RX 7900", "amd"), system="windows", directml=library)

    found = reasons("directml", call(device="privateuseone:0"), facts, POLICY, replace(READY, backend="directml"))

    assert set(found) == {"family"}
    assert "this version has none" in found["family"].text
    assert "call-device" in reasons("directml", call(device="cuda:0"), facts)
    assert "input-dtype" in reasons("directml", call(dtype="bfloat16"), facts)


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


@pytest.mark.parametrize("family", ["flux", "wan", "unknown", "UNET", ""])
@pytest.mark.parametrize("backend", [row.backend for row in CAPABILITIES])
def test_families_are_a_whitelist(backend: BackendId, family: str) -> None:
    found = reasons(backend, call(family=family), CPU_BOX)

    assert family in found["family"].actual
    if backend == "openvino":
        assert found["family"].required == "one of unet, mmdit"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float64", "int64"])
def test_dtypes_are_a_whitelist(dtype: str) -> None:
    found = [r for r in refusals("openvino", call(dtype=dtype), CPU_BOX, POLICY, READY) if r.code == "input-dtype"]

    assert [r.subject for r in found] == ["input x", "input context"]
    assert all(r.actual == dtype and "float32" in r.required for r in found)


@pytest.mark.parametrize(
    ("changes", "subject", "actual", "required"),
    [
        ({"x": (65, 4, 64, 64)}, "batch", "65", "1 to 64"),
        ({"x": (2, 4, 4, 64)}, "height", "4", "5 to 1024"),
        ({"x": (2, 4, 64, 1025)}, "width", "1025", "5 to 1024"),
        ({"tokens": 4097}, "tokens", "4097", "1 to 4096"),
        ({"family": "mmdit", "x": (2, 16, 63, 64)}, "height", "63", "4 to 1024 in steps of 2"),
        ({"family": "mmdit", "x": (2, 16, 64, 2)}, "width", "2", "4 to 1024 in steps of 2"),
    ],
    ids=["batch", "unet-height", "unet-width", "tokens", "mmdit-odd-height", "mmdit-width"],
)
def test_limits_of_the_dimensions(changes: dict[str, Any], subject: str, actual: str, required: str) -> None:
    found = [r for r in refusals("openvino", call(**changes), CPU_BOX, POLICY, READY) if r.code == "dim-range"]

    assert found
    assert all(subject in r.subject and r.actual == actual and r.required == required for r in found)
    assert all(actual in r.text and required in r.text for r in found)


@pytest.mark.parametrize("x", [(1, 4, 5, 1024), (64, 9, 1024, 5), (3, 8, 7, 9)], ids=str)
def test_the_limits_themselves_and_odd_sizes_are_inside(x: tuple[int, ...]) -> None:
    assert refusals("openvino", call(x=x, tokens=4096), CPU_BOX, POLICY, READY) == ()


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


def test_one_row_for_every_engine_backend_and_none_for_cuda() -> None:
    assert [row.backend for row in CAPABILITIES] == ["tensorrt", "openvino", "directml"]
    with pytest.raises(KeyError):
        capability("cuda")


@pytest.mark.parametrize("row", CAPABILITIES, ids=lambda row: row.backend)
def test_every_rule_describes_every_row(row: Any) -> None:
    lines = describe(row.backend)

    assert [name for name, _ in lines] == [rule.name for rule in RULES]
    assert all(text for _, text in lines)
    told = dict(lines)
    assert all(family.family in told["family"] for family in row.families)
    assert all(rule.text in told["compute capability"] for rule in row.compute)
    assert told["platform"] == ", ".join(row.platforms)


def test_the_codes_are_listed_once() -> None:
    codes = [code for code, _ in REFUSAL_CODES]

    assert len(set(codes)) == len(codes)
    assert all(meaning for _, meaning in REFUSAL_CODES)
