"""The capability table against machines we do not have: every rule, every limit, every code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kitchen_accel.backends.base import (
    BackendId,
    Call,
    DeviceFacts,
    EngineState,
    GpuFacts,
    LibraryFacts,
    Measurement,
    ModelFacts,
    Precision,
    Refusal,
    TensorSpec,
)
from kitchen_accel.capture.families import family
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
    assert all(family(name).name in told["family"] for name in row.families)
    assert all(rule.text in told["compute capability"] for rule in row.compute)
    assert told["platform"] == ", ".join(row.platforms)


def test_the_codes_are_listed_once() -> None:
    codes = [code for code, _ in REFUSAL_CODES]

    assert len(set(codes)) == len(codes)
    assert all(meaning for _, meaning in REFUSAL_CODES)
