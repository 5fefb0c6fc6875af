"""The engine key: complete, canonical, strict, and able to say how two of them differ."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from kitchen_accel.backends.base import BuildOptions, DimRange, InputProfile, ModelFacts, ShapeProfile
from kitchen_accel.cache.key import EngineKey, ModelIdentity, differences
from kitchen_accel.errors import CacheError

PROFILE = ShapeProfile(
    (
        InputProfile("x", "float32", (DimRange("batch", 1, 8), 4, DimRange("height", 8, 128, 8), 64)),
        InputProfile("timesteps", "float32", (DimRange("batch", 1, 8),)),
    )
)
KEY = EngineKey(
    backend="openvino",
    model=ModelIdentity("UNetModel", "c0", "d0", "e0", "f0", "float16", "float32"),
    profile=PROFILE,
    options=BuildOptions("CPU", (("precision", "auto"), ("shapes.static", "yes"))),
    versions=(("kitchen_accel", "0.1.0"), ("openvino", "2026.4.1"), ("torch", "2.14.1")),
    platform="linux",
    hardware="AMD EPYC 9R14, avx512_bf16",
)


def changes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every way to change one thing below `value`, with the name a difference should have. By reflection."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for name, changed in changes(getattr(value, field.name), f"{path}.{field.name}".lstrip(".")):
                yield name, replace(value, **{field.name: changed})
    elif path == "backend":
        yield path, "tensorrt"
    elif isinstance(value, str):
        yield path, value + "x"
        if path != "model.weights_digest":  # may not be empty
            yield path, ""
    elif isinstance(value, int):
        yield path, value + 1
    elif isinstance(value, tuple):
        pairs = isinstance(value[0], tuple)
        named = isinstance(value[0], InputProfile)
        for index, item in enumerate(value):
            rest = (*value[:index], *value[index + 1 :])
            name = item[0] if pairs else item.name if named else str(index)
            inner = changes(item[1], f"{path}.{name}") if pairs else changes(item, f"{path}.{name}")
            for where, changed in inner:
                yield where, (*value[:index], (name, changed) if pairs else changed, *value[index + 1 :])
            yield f"{path}.{name}" if pairs else path, rest
        if pairs:
            yield f"{path}.new", (*value, ("new", ""))
        elif named:
            yield f"{path}.new.dtype", (*value, InputProfile("new", "float32", (1,)))
            yield f"{path}.order", value[::-1]
        else:
            yield f"{path}.{len(value)}", (*value, 7)
            yield f"{path}.0", (DimRange("other", 1, 2), *value[1:])
    else:
        raise AssertionError(f"{path}: this test knows no other value of type {type(value)}")


CHANGES = list(changes(KEY, ""))


@pytest.mark.parametrize(("name", "changed"), CHANGES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CHANGES)])
def test_each_change_gives_another_digest_and_is_named(name: str, changed: EngineKey) -> None:
    assert changed.digest != KEY.digest
    assert changed.folder_name != KEY.folder_name
    found = differences(KEY, changed)
    assert any(field == name or field.startswith(f"{name}.") for field, _, _ in found), found
    assert all(a != b for _, a, b in found)
    assert [(field, b, a) for field, a, b in found] == [
        difference for field, _, _ in found for difference in differences(changed, KEY) if difference[0] == field
    ]
    assert EngineKey.from_json(json.loads(json.dumps(changed.to_json()))) == changed


def test_the_changes_reach_every_field() -> None:
    reached = {name.split(".")[0] for name, _ in CHANGES}
    assert reached == {field.name for field in fields(EngineKey)}
    assert {f"model.{field.name}" for field in fields(ModelIdentity)} <= {name for name, _ in CHANGES}
    digests = [changed.digest for _, changed in CHANGES]
    by_value = {changed for _, changed in CHANGES}
    assert len(set(digests)) == len(by_value)


def test_every_model_fact_is_in_the_key_or_left_out_on_purpose() -> None:
    # family follows from the class and this pack's version; bytes and label are for people
    left_out = {"family", "weights_bytes", "label"}
    assert {f.name for f in fields(ModelFacts)} - {f.name for f in fields(ModelIdentity)} == left_out
    facts = ModelFacts("unet", "UNetModel", "c0", "d0", "float16", "float32", "e0", "f0", 123, "a.safetensors")
    assert ModelIdentity.of(facts) == KEY.model
    assert ModelIdentity.of(replace(facts, label="b", weights_bytes=4)) == KEY.model


def test_a_model_without_a_digest_has_no_key() -> None:
    facts = ModelFacts("unet", "UNetModel", "c0", "d0", "float16", "float32", "", "f0", 123)
    with pytest.raises(CacheError, match=r"no digest yet.*next step: run this call on PyTorch"):
        ModelIdentity.of(facts)


def test_the_order_of_pairs_does_not_matter() -> None:
    shuffled = replace(
        KEY,
        versions=KEY.versions[::-1],
        options=BuildOptions("CPU", KEY.options.options[::-1]),
    )
    assert shuffled == KEY
    assert shuffled.digest == KEY.digest
    assert differences(shuffled, KEY) == ()


def test_the_canonical_text_is_fixed() -> None:
    """A change of this text makes every engine of every user a miss: raise KEY_FORMAT when it is meant."""
    small = replace(KEY, profile=ShapeProfile((InputProfile("x", "float32", (DimRange("batch", 1, 8), 4)),)))
    assert small.canonical() == (
        '{"backend":"openvino","format_version":1,"hardware":"AMD EPYC 9R14, avx512_bf16",'
        '"model":{"class_name":"UNetModel","code_digest":"d0","compute_dtype":"float32","config_digest":"c0",'
        '"patch_fingerprint":"f0","weight_dtype":"float16","weights_digest":"e0"},'
        '"options":{"device":"CPU","options":[["precision","auto"],["shapes.static","yes"]]},"platform":"linux",'
        '"profile":{"inputs":[{"dims":[{"max":8,"min":1,"multiple":1,"name":"batch"},4],"dtype":"float32",'
        '"name":"x"}]},"versions":[["kitchen_accel","0.1.0"],["openvino","2026.4.1"],["torch","2.14.1"]]}'
    )
    assert len(KEY.digest) == 64
    assert KEY.folder_name == KEY.digest[:20]


def test_the_digest_is_the_same_in_another_process() -> None:
    script = "import hashlib,sys; print(hashlib.sha256(sys.stdin.read().encode('ascii')).hexdigest())"
    other = subprocess.run(
        [sys.executable, "-c", script], input=KEY.canonical(), capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == KEY.digest


def test_names_with_dots_do_not_hide_a_difference() -> None:
    a = replace(KEY, options=BuildOptions("CPU", (("a.b", "1"),)))
    b = replace(KEY, options=BuildOptions("CPU", (("a", "1"),)))
    assert differences(a, b) == (("options.options.a.b", "1", None), ("options.options.a", None, "1"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"backend": "vulkan"}, "backend.*got 'vulkan'.*allowed: cuda, tensorrt, openvino, directml"),
        ({"platform": 1.5}, "platform.*1.5 of type float"),
        ({"hardware": None}, "hardware.*None of type NoneType"),
        ({"hardware": "\udcff"}, r"hardware.*\\\\udcff.*UTF-8"),
        ({"format_version": True}, "format_version.*True of type bool"),
        ({"versions": (("torch", "2"), ("torch", "3"))}, "versions.*torch twice"),
        ({"versions": (("torch", 2.1),)}, "versions.torch.*2.1 of type float"),
        ({"versions": [("torch", "2")]}, "versions.*tuple"),
        ({"versions": ("torch",)}, "versions.*tuple"),
        ({"options": BuildOptions("CPU", (("a", "1"), ("a", "2")))}, "options.*a twice"),
        ({"profile": ShapeProfile((*PROFILE.inputs, PROFILE.inputs[0]))}, "profile.inputs.*x twice"),
        ({"profile": ShapeProfile((InputProfile("x", "float32", (2.0,)),))}, "profile.inputs.x.dims.0.*2.0"),  # type: ignore[arg-type]
    ],
)
def test_values_that_would_not_be_canonical_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CacheError, match=said):
        replace(KEY, **change)


def edited(*path: str | int, to: Any = None, drop: bool = False) -> Any:
    data: Any = copy.deepcopy(KEY.to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return data


@pytest.mark.parametrize(
    "data",
    [
        edited("extra", to=1),
        edited("model", "label", to="x"),
        edited("profile", "inputs", 0, "dims", 0, "step", to=1),
        edited("hardware", drop=True),
        edited("format_version", drop=True),
        edited("profile", "inputs", 0, "dims", 0, "multiple", drop=True),
        edited("format_version", to="1"),
        edited("format_version", to=1.0),
        edited("format_version", to=True),
        edited("platform", to=None),
        edited("backend", to="vulkan"),
        edited("model", "weights_digest", to=""),
        edited("profile", "inputs", 0, "dims", 1, to="4"),
        edited("profile", "inputs", 0, "dims", 1, to=float("nan")),
        edited("versions", to={"torch": "2"}),
        edited("versions", to=[["torch", "2", "3"]]),
        edited("versions", to=[["torch", "2"], ["openvino", "1"]]),
        edited("versions", to=[["torch", "2"], ["torch", "2"]]),
        None,
        [],
        "key",
        {},
        {"versions": object()},
    ],
)
def test_foreign_json_is_refused(data: Any) -> None:
    with pytest.raises(CacheError):
        EngineKey.from_json(data)
