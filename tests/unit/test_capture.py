"""Families as data, the attention that goes into a program, and the capture itself on a small network."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel.backends.base import DimRange, InputProfile, ShapeProfile
from kitchen_accel.capture.attention import sdpa_override
from kitchen_accel.capture.export import capture
from kitchen_accel.capture.families import FAMILIES, family, family_of, requested_profile
from kitchen_accel.capture.measure import nearest, psnr_db, specs
from kitchen_accel.capture.variants import LONG_CALLS, Choice, Shapes, Stretch, choose_variant
from kitchen_accel.errors import CaptureError
from kitchen_accel.tests.networks import ComfyNetworks, TinyUNet, filled, inputs_of, tiny

ROOT = Path(__file__).resolve().parents[2]

inputs = inputs_of()


def ranges(profile: ShapeProfile) -> dict[str, DimRange]:
    return {d.name: d for i in profile.inputs for d in i.dims if isinstance(d, DimRange)}


# -- families -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel", "unet"),
        ("ldm.modules.diffusionmodules.openaimodel.UNetModel", "unet"),
        ("comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper", "mmdit"),
        ("comfy.ldm.modules.diffusionmodules.mmdit.MMDiT", "unknown"),
        ("somebody.openaimodel.UNetModel", "unknown"),
        ("evilldm.modules.diffusionmodules.openaimodel.UNetModel", "unknown"),
        ("comfy.ldm.modules.diffusionmodules.openaimodel.UNetModelPatched", "unknown"),
        ("comfy.ldm.flux.model.Flux", "unknown"),
        ("", "unknown"),
    ],
)
def test_family_is_the_class_itself(name: str, expected: str) -> None:
    assert family_of(name) == expected


def test_one_profile_serves_every_size_of_a_network() -> None:
    profiles = {
        requested_profile("unet", specs(inputs(sizes)))
        for sizes in ((1, 64, 64, 77), (6, 13, 9, 231), (2, 8, 128, 154))
    }
    assert len(profiles) == 1
    (profile,) = profiles
    assert [i.name for i in profile.inputs] == ["x", "timesteps", "context"]
    assert profile.inputs[0].dims[1] == 4
    assert profile.inputs[2].dims[2] == 48
    assert profile.inputs[0].dims[0] == profile.inputs[1].dims[0] == DimRange("batch", 1, 64)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(1, 9, 16, 16)},
        {"context": torch.zeros(1, 77, 49)},
        {"x": torch.zeros(1, 4, 16, 16, dtype=torch.float16)},
        {"y": torch.zeros(1, 40)},
    ],
    ids=["channels", "embedding", "dtype", "input"],
)
def test_another_network_has_another_profile(change: dict[str, torch.Tensor]) -> None:
    call = inputs((1, 16, 16, 77))
    assert requested_profile("unet", specs(call)) != requested_profile("unet", specs(call | change))


def test_mmdit_is_asked_for_even_sizes_only() -> None:
    profile = requested_profile("mmdit", specs(inputs_of(16, y=True)((1, 16, 16, 77))))
    assert {ranges(profile)[name].multiple for name in ("height", "width")} == {2}
    assert not ranges(profile)["height"].accepts(13)


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("flux", {}, "flux"),
        ("unet", {"clip_fea": torch.zeros(1, 3)}, "clip_fea"),
        ("unet", {"x": torch.zeros(1, 4, 3, 16, 16)}, "input x"),
    ],
)
def test_a_call_no_family_has_is_refused(name: str, tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        requested_profile(name, specs(inputs((1, 16, 16, 77)) | tensors))


def test_a_call_without_a_needed_input_is_refused() -> None:
    call = inputs((1, 16, 16, 77))
    del call["context"]
    with pytest.raises(CaptureError, match="context"):
        requested_profile("unet", specs(call))


def test_each_family_is_found_by_its_name() -> None:
    assert [family(row.name) for row in FAMILIES] == list(FAMILIES)
    unet = family("unet")
    assert unet.input("y") is not None
    assert unet.input("control") is None


# -- attention ----------------------------------------------------------------------------------------------------


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """`(N, heads, T, D)` in double precision."""
    scores = q.double() @ k.double().transpose(2, 3) * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias.double()
    return scores.softmax(-1) @ v.double()


def heads_out(tensor: torch.Tensor) -> torch.Tensor:
    n, h, t, d = tensor.shape
    return tensor.transpose(1, 2).reshape(n, t, h * d)


MASKS = {
    "none": None,
    "2d": torch.linspace(-2, 2, 5 * 7).reshape(5, 7),
    "3d": torch.linspace(-2, 2, 2 * 5 * 7).reshape(2, 5, 7),
    "4d": torch.linspace(-2, 2, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7),
    "bool": torch.arange(35).reshape(5, 7) % 3 != 0,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_override_is_attention(
    mask: torch.Tensor | None, skip_reshape: bool, skip_output_reshape: bool, scale: float | None
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    bias = mask if mask is None or mask.ndim != 3 else mask[:, None]
    want = by_hand(q, k, v, bias, scale or 0.5)
    if not skip_reshape:
        q, k, v = heads_out(q), heads_out(k), heads_out(v)
    extra: dict[str, Any] = {"scale": scale} if scale else {}
    got = sdpa_override(
        None, q, k, v, 3, mask, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape,
        transformer_options={}, attn_precision=torch.float32, **extra,
    )  # fmt: skip
    assert torch.allclose(got.double(), want if skip_output_reshape else heads_out(want), atol=1e-6)


def test_override_takes_split_keys_as_sd3_hands_them_over() -> None:
    q, k, v = torch.randn(2, 5, 3, 4), torch.randn(2, 7, 3, 4), torch.randn(2, 7, 3, 4)
    want = by_hand(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, 0.5)
    got = sdpa_override(None, q.reshape(2, 5, 12), k, v, 3)
    assert torch.allclose(got.double(), heads_out(want), atol=1e-6)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_override_shares_keys_among_grouped_queries(skip_reshape: bool) -> None:
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 4)
    want = by_hand(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), None, 0.5)
    if not skip_reshape:
        q, k, v = heads_out(q), heads_out(k), heads_out(v)
    got = sdpa_override(None, q, k, v, 6, skip_reshape=skip_reshape, enable_gqa=True)
    assert torch.allclose(got.double(), heads_out(want), atol=1e-6)


# -- capture ------------------------------------------------------------------------------------------------------


def test_captured_at_one_size_exact_at_all_others() -> None:
    network = tiny()
    example = inputs((1, 64, 64, 77))
    captured = capture(network, example, requested_profile("unet", specs(example)))
    found = ranges(captured.profile)
    assert captured.input_names == ("x", "timesteps", "context")
    # two levels: the lower one must be two pixels wide at least
    assert found["height"] == DimRange("height", 3, 1024)
    assert found["width"] == DimRange("width", 3, 1024)
    assert found["batch"] == DimRange("batch", 1, 64)
    assert found["tokens"] == DimRange("tokens", 1, 4096)
    run = captured.program.module()
    for sizes in ((1, 13, 9, 77), (1, 3, 3, 1), (3, 20, 12, 154), (2, 64, 65, 5)):
        given = inputs(sizes)
        with torch.no_grad():
            assert psnr_db(run(given), network(**given)) > 110, sizes
    with pytest.raises(AssertionError, match=r"x.*>= 3"):
        run(inputs((1, 2, 9, 7)))


def test_sizes_end_where_the_network_ends() -> None:
    example = inputs((1, 16, 16, 7))
    profile = requested_profile("unet", specs(example))
    captured = capture(filled(TinyUNet(most=128)), example, profile)
    assert ranges(captured.profile)["height"].max == 128


class Specialised(TinyUNet):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x.reshape(-1, 4, x.shape[2], x.shape[3] * int(x.shape[0]) // 2), *args, **kwargs)


class Reads(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


class Data(TinyUNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Reads()  # type: ignore[assignment]


def test_failure_names_the_part() -> None:
    example = inputs((1, 16, 16, 7))
    with pytest.raises(CaptureError, match=r"in its part norm \(Reads\)") as caught:
        capture(filled(Data()), example, requested_profile("unet", specs(example)))
    assert caught.value.next_step


def test_a_network_fixed_to_one_batch_is_refused() -> None:
    example = inputs((2, 16, 16, 7))
    with pytest.raises(CaptureError):
        capture(filled(Specialised()), example, requested_profile("unet", specs(example)))


def test_training_mode_is_refused() -> None:
    example = inputs((1, 16, 16, 7))
    with pytest.raises(CaptureError, match="training"):
        capture(TinyUNet().train(), example, requested_profile("unet", specs(example)))


def test_an_example_with_other_inputs_is_refused() -> None:
    example = inputs((1, 16, 16, 7))
    profile = requested_profile("unet", specs(example))
    del example["context"]
    with pytest.raises(CaptureError, match="not the profile's inputs"):
        capture(tiny(), example, profile)


# -- comparing ----------------------------------------------------------------------------------------------------


def test_psnr() -> None:
    want = torch.tensor([0.0, 1.0, 2.0])
    assert psnr_db(want, want.clone()) == 999.0
    assert psnr_db(want + 0.2, want) == pytest.approx(20.0, abs=1e-4)
    assert psnr_db(torch.tensor([0.0, math.nan, 2.0]), want) == 0.0
    assert psnr_db(torch.tensor([0.0, math.inf, 2.0]), want) == 0.0
    assert psnr_db(want, want[:2]) == 0.0
    assert psnr_db(torch.ones(3), torch.zeros(3)) == 0.0


def test_nearest_shapes() -> None:
    profile = ShapeProfile((InputProfile("x", "float32", (DimRange("batch", 1, 4), 3, DimRange("height", 4, 32, 2))),))
    inside = {"x": torch.zeros(2, 3, 8)}
    assert nearest(inside, profile) is inside
    for given, shape in (
        ((9, 3, 8), (4, 3, 8)),
        ((1, 3, 2), (1, 3, 4)),
        ((1, 3, 9), (1, 3, 8)),
        ((1, 3, 99), (1, 3, 32)),
    ):
        made = nearest({"x": torch.zeros(given)}, profile)["x"]
        assert tuple(made.shape) == shape


# -- variants -----------------------------------------------------------------------------------------------------

A, B, C, D = (((1, 4, size, size), (1,), (1, 77, 48)) for size in (8, 9, 10, 11))


class Player:
    """Plays calls as an engine does, and counts the compilations."""

    def __init__(self, mode: str, slots: int) -> None:
        self.mode, self.slots = mode, slots
        self.history: list[Stretch] = []
        self.live: list[Shapes] = []
        self.compiled: dict[Shapes, int] = {}

    def call(self, shapes: Shapes) -> str:
        if self.history and self.history[-1].shapes == shapes:
            self.history[-1] = Stretch(shapes, self.history[-1].calls + 1)
        else:
            self.history.append(Stretch(shapes, 1))
        choice = choose_variant(
            self.mode, shapes, history=self.history, live=self.live, compiled=self.compiled, slots=self.slots
        )
        if choice.variant == "static":
            if choice.evict is not None:
                self.live.remove(choice.evict)
            if shapes in self.live:
                self.live.remove(shapes)
            else:
                self.compiled[shapes] = self.compiled.get(shapes, 0) + 1
            self.live.append(shapes)
            assert len(self.live) <= self.slots
        return choice.variant

    @property
    def compilations(self) -> int:
        return sum(self.compiled.values())


def test_auto_fills_the_free_slots() -> None:
    player = Player("auto", 2)
    assert [player.call(s) for s in (A, B, A, B, C)] == ["static"] * 4 + ["dynamic"]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_alternating_shapes_than_slots_settle_on_dynamic(slots: int) -> None:
    player = Player("auto", slots)
    for _ in range(300):
        for shapes in (A, B, C, D)[: slots + 1]:
            player.call(shapes)
    assert player.compilations == slots


@pytest.mark.parametrize("steps", [1, 4, 20, 50])
def test_prompts_of_more_shapes_than_slots_do_not_compile_each_time(steps: int) -> None:
    player = Player("auto", 1)
    for prompt in range(40):
        for _ in range(steps):
            player.call((A, B)[prompt % 2])
    assert player.compilations <= 2


def test_random_order_compiles_ever_more_rarely() -> None:
    draw = torch.Generator().manual_seed(0)
    player = Player("auto", 1)
    order = [(A, B, C)[i] for i in torch.randint(0, 3, (4000,), generator=draw).tolist()]
    for shapes in order[:2000]:
        player.call(shapes)
    half = player.compilations
    for shapes in order[2000:]:
        player.call(shapes)
    assert player.compilations < 40
    assert player.compilations - half < 8


def test_a_new_shape_takes_over_when_the_old_one_is_gone() -> None:
    player = Player("auto", 1)
    player.call(A)
    assert [player.call(B) for _ in range(LONG_CALLS)] == ["dynamic"] * (LONG_CALLS - 1) + ["static"]
    assert player.live == [B]


def test_two_new_shapes_that_alternate_take_over_at_their_return() -> None:
    player = Player("auto", 2)
    for shapes in (A, B):
        player.call(shapes)
    assert [player.call(s) for s in (C, D, C, D, C, D)] == ["dynamic"] * 2 + ["static"] * 4
    assert player.compilations == 4


def test_static_always_compiles_and_dynamic_never() -> None:
    static, dynamic = Player("static", 1), Player("dynamic", 3)
    assert {static.call(s) for s in (A, B, A, B)} == {"static"}
    assert static.compilations == 4
    assert {dynamic.call(s) for s in (A, B, A, B)} == {"dynamic"}


def test_the_shape_unused_for_longest_goes() -> None:
    choice = choose_variant("static", C, history=[], live=[B, A], compiled={}, slots=2)
    assert choice == Choice("static", evict=B)


# -- ComfyUI's own classes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comfy() -> ComfyNetworks:
    tree = os.environ.get("COMFYUI_PATH")
    if not tree:
        pytest.skip("COMFYUI_PATH names no ComfyUI whose classes could be captured")
    return ComfyNetworks(Path(tree))


@pytest.mark.parametrize("kind", ["unet", "sdxl", "mmdit"])
def test_comfyui_network_is_exact_at_other_sizes(comfy: ComfyNetworks, kind: str) -> None:
    network = getattr(comfy, kind)()
    make = inputs_of(16 if kind == "mmdit" else 4, y=kind != "unet")
    example = make((2, 64, 64, 77))
    found_family = family_of(f"{type(network).__module__}.{type(network).__qualname__}")
    captured = capture(network, example, requested_profile(found_family, specs(example)))
    least = {"unet": 3, "sdxl": 5, "mmdit": 4}[kind]
    found = ranges(captured.profile)
    assert (found["height"].min, found["width"].min, found["batch"].min, found["tokens"].min) == (least, least, 1, 1)
    assert found["height"].max == (128 if kind == "mmdit" else 1024)
    run = captured.program.module()
    odd = (1, 14, 10, 77) if kind == "mmdit" else (1, 13, 9, 77)
    for sizes in (odd, (3, 20, 12, 154), (1, least, least, 1)):
        given = make(sizes)
        with torch.no_grad():
            assert psnr_db(run(given), network(**given)) > 110, sizes


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_override_is_comfyuis_pytorch_attention(comfy: ComfyNetworks, mask: torch.Tensor | None) -> None:
    q, k, v = torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    assert torch.equal(sdpa_override(None, q, k, v, 3, mask), comfy.attention.attention_pytorch(q, k, v, 3, mask))


# -- import -------------------------------------------------------------------------------------------------------


def test_importing_the_room_imports_no_heavy_library() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import conftest;"
        "import kitchen_accel.capture.export, kitchen_accel.capture.families, kitchen_accel.backends.openvino;"
        "heavy = {'torch', 'numpy', 'openvino', 'comfy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
