"""Everything that acts inside the network keeps the engine away, with its reason; everything outside does not.

Each case runs stock ComfyUI and the accelerated model with the same change; the latents are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from kitchen_accel.errors import HostError
from kitchen_accel.tests.contract import comfy_env
from kitchen_accel.tests.contract.comfy_env import Rig, at, cond, lora_file, sample

comfy_env.require_comfy()

Change = Callable[[Any], Any]


def option(name: str, value: Any) -> Change:
    def change(patcher: Any) -> None:
        patcher.model_options["transformer_options"][name] = value

    return change


def scaled(q: Any, k: Any, v: Any, extra: Any) -> Any:
    return q * 1.1, k, v


def middle(x: Any, options: Any) -> Any:
    return x * 1.1


def freeu(h: Any, skip: Any, options: Any) -> Any:
    return h * 1.1, skip * 0.9


def first_value(q: Any, k: Any, v: Any, extra: Any) -> Any:
    return v * 0.5


def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * 0.5


INSIDE: dict[str, tuple[Change, str]] = {
    "attn1_patch": (lambda p: p.set_model_attn1_patch(scaled), "block-patch"),
    "attn2_patch": (lambda p: p.set_model_attn2_patch(scaled), "block-patch"),
    "output_block_patch": (lambda p: p.set_model_output_block_patch(freeu), "block-patch"),
    "middle_patch": (lambda p: p.set_model_patch(middle, "middle_patch"), "block-patch"),
    "attn1_replace": (lambda p: p.set_model_attn1_replace(first_value, "middle", 0), "block-patch"),
    "override": (option("optimized_attention_override", attention), "option"),
    "unknown option": (option("a_pack", {"strength": 1}), "option"),
    "unknown option that is zero": (option("a_pack", 0.0), "option"),
    "a name that is no string": (option(("a_pack", 1), 1.0), "option"),  # type: ignore[arg-type]
    "compute dtype": (lambda p: p.set_model_compute_dtype(torch.bfloat16), "object-patch"),
    "module": (lambda p: p.add_object_patch("diffusion_model.out.1", torch.nn.ReLU()), "object-patch"),
}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", INSIDE)
def test_inside_the_network_is_pytorchs(rig: Rig, name: str, before: bool) -> None:
    change, code = INSIDE[name]
    found = rig.compare(change, before=before)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 2, {code})
    if code != "option" or name == "override":
        assert not torch.equal(found, sample(rig.base)), "the change did nothing, so the case shows nothing"


def cheap(apply_model: Any, arguments: dict[str, Any]) -> Any:
    return apply_model(arguments["input"], arguments["timestep"], **arguments["c"]) * 0.9


def v_prediction(patcher: Any) -> None:
    import comfy.model_sampling

    class Sampling(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.V_PREDICTION):  # type: ignore[misc]
        pass

    patcher.add_object_patch("model_sampling", Sampling(patcher.model.model_config))


OUTSIDE: dict[str, Change] = {
    "model_function_wrapper": lambda p: p.set_model_unet_function_wrapper(cheap),
    "cfg function": lambda p: p.set_model_sampler_cfg_function(lambda a: a["uncond"] + 3 * (a["cond"] - a["uncond"])),
    "post cfg function": lambda p: p.set_model_sampler_post_cfg_function(lambda a: a["denoised"] * 0.9),
    "model_sampling": v_prediction,
}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_the_network_is_no_hindrance(rig: Rig, name: str, before: bool) -> None:
    found = rig.compare(OUTSIDE[name], before=before)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())
    assert not torch.equal(found, sample(rig.base)), "the change did nothing, so the case shows nothing"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("easycache", object()), ("context_window", object()), ("block", ("input", 1)), ("block_index", 3),
        ("a_pack", None), ("a_pack", False), ("a_pack", {}), ("patches", {"attn1_patch": []}),
        ("patches_replace", {"attn1": {}}), ("prefetch_dynamic_vbars", True),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value,
)  # fmt: skip
def test_inert_options_are_no_hindrance(rig: Rig, name: str, value: Any) -> None:
    rig.compare(option(name, value))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())


def test_a_patch_for_one_call_of_a_step_blocks_that_call_only(rig: Rig) -> None:
    """Perturbed-attention guidance: a post-CFG function calls the model again with a replaced attention."""
    import comfy.model_patcher
    import comfy.samplers

    def perturbed(arguments: dict[str, Any]) -> Any:
        options = comfy.model_patcher.set_model_options_patch_replace(
            arguments["model_options"].copy(), first_value, "attn1", "middle", 0
        )
        (weak,) = comfy.samplers.calc_cond_batch(
            arguments["model"], [arguments["cond"]], arguments["input"], arguments["sigma"], options
        )
        return arguments["denoised"] + (arguments["cond_denoised"] - weak)

    rig.compare(lambda patcher: patcher.set_model_sampler_post_cfg_function(perturbed))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 2, {"block-patch"})


def test_a_hook_lora_blocks_the_calls_it_acts_on(rig: Rig) -> None:
    import comfy.hooks

    def hooked() -> Any:
        hooks = comfy.hooks.create_hook_lora(lora_file(1), strength_model=1.0, strength_clip=0.0)
        return comfy.hooks.set_hooks_for_conditioning(cond(10), hooks)

    stock = sample(rig.base.clone(), positive=hooked())
    assert not torch.equal(stock, sample(rig.base))
    found = sample(rig.model(), positive=hooked())
    assert torch.equal(found, stock)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 2, {"hooks"})
    assert {seen["x"].shape[0] for seen in rig.engine.seen} == {1}
    assert {call.model.patch_fingerprint for call in rig.shelf.calls} == {""}
    rig.engine.calls = 0
    assert torch.equal(sample(rig.model()), sample(rig.base))
    assert rig.engine.calls == 2


def controlnet(seed: int = 4) -> Any:
    """ComfyUI's real ControlNet for the small UNet, with a hint picture."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    network = comfy.cldm.cldm.ControlNet(
        image_size=32, in_channels=4, model_channels=32, hint_channels=3, num_res_blocks=[1, 1], channel_mult=[1, 2],
        transformer_depth=[1, 1], transformer_depth_middle=1, context_dim=comfy_env.CONTEXT, num_heads=4,
        use_spatial_transformer=True, dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    comfy_env._fill(network, seed)
    network.requires_grad_(False)
    cpu = torch.device("cpu")
    net = comfy.controlnet.ControlNet(network, load_device=cpu)
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    return net.set_cond_hint(hint, strength=0.8, timestep_percent_range=(0.0, 0.5))


def test_control_residuals_are_listed_and_left_to_pytorch(rig: Rig) -> None:
    net = controlnet()
    lengths: list[tuple[dict[str, int], dict[str, int]]] = []

    def watch(executor: Any, x: Any, t: Any, context: Any, y: Any, control: Any, options: Any, **kwargs: Any) -> Any:
        before = {k: len(v) for k, v in (control or {}).items()}
        output = executor(x, t, context, y, control, options, **kwargs)
        lengths.append((before, {k: len(v) for k, v in (control or {}).items()}))
        return output

    def change(patcher: Any) -> None:
        patcher.add_wrapper_with_key("diffusion_model", "watch", watch)

    found = rig.compare(
        change,
        steps=4,
        positive=cond(10, control=net.copy(), control_apply_to_uncond=True),
        negative=cond(11, control=net.copy(), control_apply_to_uncond=True),
    )
    assert not torch.equal(found, sample(rig.base, steps=4))
    half = len(lengths) // 2
    assert lengths[:half] == lengths[half:], "the network found other residuals than in the stock run"
    assert any(before for before, _ in lengths)
    assert {k: v for before, after in lengths for k, v in after.items() if v} == {}, "the network pops what it takes"
    controlled = [call for call in rig.shelf.calls if call.control]
    assert controlled
    names = [spec.name for spec in controlled[0].control]
    assert names == ["middle.0", "output.0", "output.1", "output.2", "output.3"]
    assert controlled[0].control[0].shape[1:] == (64, 4, 4)
    # the ControlNet acts in the first half of the run only; the rest of it is the engine's
    assert rig.engine.calls > 0
    assert rig.torch_calls > 0
    assert rig.codes == set()


def test_control_for_the_mmdit_is_pytorchs(sd3: Rig) -> None:
    import comfy.controlnet

    residual = torch.ones(1, 16, 64)

    class Fixed(comfy.controlnet.ControlBase):  # type: ignore[misc]
        """A control that adds the same residual to the first block."""

        def get_control(self, x: Any, *args: Any) -> Any:
            return {"output": [residual.repeat(x.shape[0], 1, 1), None]}

        def copy(self) -> Any:
            return self

        def get_models(self) -> list[Any]:
            return []

    net = Fixed()
    conds: dict[str, Any] = {
        "positive": cond(10, pooled=16, control=net, control_apply_to_uncond=True),
        "negative": cond(11, pooled=16, control=net, control_apply_to_uncond=True),
    }
    found = sd3.compare(shape=(1, 16, 8, 8), **conds)
    assert not torch.equal(found, sample(sd3.base, shape=(1, 16, 8, 8)))
    assert (sd3.engine.calls, sd3.torch_calls) == (0, 2)
    assert [spec.name for spec in sd3.shelf.calls[0].control] == ["output.0"]


# the network itself was changed


def patch_root(rig: Rig) -> Callable[[], None]:
    network = rig.base.model.diffusion_model
    cls = type(network)
    network.forward = lambda *args, **kwargs: cls.forward(network, *args, **kwargs) * 1.1
    return lambda: network.__dict__.pop("forward")


def patch_submodule(rig: Rig) -> Callable[[], None]:
    module = at(rig.base)
    cls = type(module)
    module.forward = lambda *args, **kwargs: cls.forward(module, *args, **kwargs) * 1.1
    return lambda: module.__dict__.pop("forward")


def patch_class(rig: Rig) -> Callable[[], None]:
    """A submodule that became an object of another pack's class."""
    module = at(rig.base)
    cls = type(module)

    class Foreign(cls):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.1

    module.__class__ = Foreign

    def undo() -> None:
        module.__class__ = cls

    return undo


def patch_class_forward(rig: Rig) -> Callable[[], None]:
    """A pack that replaces a method of ComfyUI's class itself, for every model."""
    cls = type(at(rig.base))
    theirs = cls.forward
    cls.forward = lambda self, *args, **kwargs: theirs(self, *args, **kwargs) * 1.1

    def undo() -> None:
        cls.forward = theirs

    return undo


def hook_submodule(rig: Rig) -> Callable[[], None]:
    handle = at(rig.base).register_forward_hook(lambda module, args, output: output * 1.1)
    return lambda: handle.remove()


def prehook_root(rig: Rig) -> Callable[[], None]:
    handle = rig.base.model.diffusion_model.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
    return lambda: handle.remove()


CHANGED: dict[str, tuple[Callable[[Rig], Callable[[], None]], set[str]]] = {
    "forward of the root": (patch_root, {"monkeypatch", "replaced"}),
    "forward of a submodule": (patch_submodule, {"monkeypatch"}),
    "another class": (patch_class, {"foreign-module"}),
    "a class's forward": (patch_class_forward, {"foreign-module"}),
    "forward hook": (hook_submodule, {"forward-hook"}),
    "forward pre-hook on the root": (prehook_root, {"forward-hook"}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_network_is_pytorchs_until_it_is_changed_back(rig: Rig, name: str) -> None:
    change, codes = CHANGED[name]
    ours = rig.model()  # accelerated before the change, as a pack may act later
    plain = sample(rig.base)
    undo = change(rig)
    try:
        expected = sample(rig.base)
        assert not torch.equal(expected, plain)
        assert torch.equal(sample(ours), expected)
        assert torch.equal(sample(rig.model()), expected)
    finally:
        undo()
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 4, codes)
    assert torch.equal(sample(ours), plain)
    assert rig.engine.calls == 2


def test_a_root_forward_of_the_mmdit_is_respected_and_put_back(sd3: Rig) -> None:
    undo = patch_root(sd3)
    shape = (1, 16, 8, 8)
    theirs = sd3.base.model.diffusion_model.__dict__["forward"]
    expected = sample(sd3.base, shape=shape)
    assert torch.equal(sample(sd3.model(), shape=shape), expected)
    assert sd3.base.model.diffusion_model.__dict__["forward"] is theirs
    undo()
    assert not torch.equal(sample(sd3.base, shape=shape), expected)
    assert (sd3.engine.calls, sd3.torch_calls) == (0, 2)
    assert "monkeypatch" in sd3.codes


def test_any_replaced_method_is_pytorchs(sd3: Rig) -> None:
    network = sd3.base.model.diffusion_model
    cls = type(network)
    network.unpatchify = lambda *args, **kwargs: cls.unpatchify(network, *args, **kwargs) * 1.1
    found = sd3.compare(shape=(1, 16, 8, 8))
    del network.unpatchify
    assert not torch.equal(found, sample(sd3.base, shape=(1, 16, 8, 8)))
    assert (sd3.engine.calls, sd3.torch_calls, sd3.codes) == (0, 2, {"monkeypatch"})


def test_a_model_that_cannot_be_looked_at_is_pytorchs(rig: Rig) -> None:
    """Packs put anything into a patcher; a surprise there must not lose the prompt."""

    class Odd(dict):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise RuntimeError("not for you")

    ours = rig.model()
    ours.object_patches = Odd()
    refusals = rig.bind(ours).run_refusals
    with pytest.raises(RuntimeError, match="not for you"):
        refusals(ours)
    ours.pre_run()
    options = {"sample_sigmas": torch.ones(2), "wrappers": {k: dict(v) for k, v in ours.wrappers.items()}}
    x, context = torch.randn(2, 4, 8, 8), torch.randn(2, 77, comfy_env.CONTEXT)
    with torch.no_grad():
        one = ours.model.apply_model(x, torch.ones(2), c_crossattn=context, transformer_options=options)
        other = ours.model.apply_model(x, torch.ones(2), c_crossattn=context, transformer_options={})
    assert torch.equal(one, other)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 1, {"error"})


def test_a_network_that_is_no_module_is_refused_in_words(rig: Rig) -> None:
    class Engine:
        dtype = torch.float16

    ours = rig.base.clone()
    real = ours.model
    ours.model = type("Model", (), {"diffusion_model": Engine()})()
    with pytest.raises(HostError, match="Engine'; allowed: a PyTorch network"):
        rig.model(ours)
    ours.model = real


def test_an_injection_is_pytorchs(rig: Rig) -> None:
    from comfy.patcher_extension import PatcherInjection

    undo: list[Callable[[], None]] = []

    def change(patcher: Any) -> None:
        patcher.set_injections(
            "pack",
            [PatcherInjection(inject=lambda p: undo.append(hook_submodule(rig)), eject=lambda p: undo.pop()())],
        )

    rig.compare(change)
    assert (rig.engine.calls, rig.torch_calls) == (0, 2)
    assert "injection" in rig.codes


def test_gradients_are_pytorchs(rig: Rig) -> None:
    def training(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return executor(*args, **kwargs).detach()

    def change(patcher: Any) -> None:
        patcher.add_wrapper_with_key("apply_model", "training", training)

    rig.compare(change, before=True)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 2, {"training"})


def test_an_argument_that_is_no_tensor_is_pytorchs(rig: Rig) -> None:
    def frames(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, num_video_frames=1, **kwargs)

    def change(patcher: Any) -> None:
        patcher.add_wrapper_with_key("diffusion_model", "frames", frames)

    rig.compare(change)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 2, {"argument"})


def test_more_arguments_than_the_network_names_are_never_dropped(rig: Rig) -> None:
    """A wrapper that passes one more value by position: the network refuses it, and so no engine may swallow it."""

    def more(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, torch.ones(1), **kwargs)

    ours = rig.model()
    ours.add_wrapper_with_key("diffusion_model", "more", more)
    with pytest.raises(TypeError):
        sample(ours)
    assert rig.engine.calls == 0
    assert rig.codes == {"argument"}


@pytest.mark.parametrize("control", [{"output": [object()]}, {"output": torch.ones(2, 1)}, [torch.ones(1)], object()])
def test_a_control_nobody_knows_is_still_control(rig: Rig, control: Any) -> None:
    """Only the engine is kept away; what the network makes of it is its own affair."""

    def odd(executor: Any, x: Any, t: Any, context: Any, y: Any, none: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(x, t, context, y, control, *args, **kwargs)

    ours = rig.model()
    ours.add_wrapper_with_key("diffusion_model", "odd", odd)
    # the network may raise on it, as it would in stock ComfyUI
    with suppress(TypeError, AttributeError, KeyError, RuntimeError):
        sample(ours)
    assert rig.engine.calls == 0
    assert rig.shelf.calls[0].control
