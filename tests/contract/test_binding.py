"""The host binding on ComfyUI's real model, patcher and sampler: what reaches the engine, and what stays behind.

Only the shelf of engines is a fake (`FakeShelf`): its engine computes with the network's own class, so that a
latent that differs from stock ComfyUI's by one bit is a fault of the binding.
"""

from __future__ import annotations

import gc
import uuid
import weakref
from typing import Any

import pytest
import torch
from kitchen_accel.host.binding import KEY, ApplyModel, binding_of
from kitchen_accel.tests.contract import comfy_env
from kitchen_accel.tests.contract.comfy_env import Rig, add_lora, cond, lora_file, sample

comfy_env.require_comfy()

SD3_SHAPE = (1, 16, 8, 8)


def wrappers_of(patcher: Any) -> list[Any]:
    return list(patcher.get_all_wrappers("apply_model"))


# what reaches the engine


def test_every_step_of_a_plain_unet_run_reaches_the_engine(rig: Rig) -> None:
    rig.compare(steps=3)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (3, 0, set())
    for seen in rig.engine.seen:
        assert list(seen) == ["x", "timesteps", "context"]
        assert seen["x"].shape == (2, 4, 8, 8)
        assert seen["timesteps"].shape == (2,)
        assert seen["context"].shape == (2, 77, comfy_env.CONTEXT)
    (call,) = rig.shelf.calls
    assert [(t.name, t.shape, t.dtype, t.device) for t in call.tensors] == [
        ("x", (2, 4, 8, 8), "float32", "cpu"),
        ("timesteps", (2,), "float32", "cpu"),
        ("context", (2, 77, comfy_env.CONTEXT), "float32", "cpu"),
    ]
    assert call.control == ()
    facts = call.model
    assert facts.class_name == "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel"
    assert (facts.family, facts.weight_dtype, facts.compute_dtype) == ("unet", "float32", "float32")
    assert (facts.weights_digest, facts.patch_fingerprint) == (comfy_env.DIGEST, "")
    assert facts.weights_bytes == 4 * sum(p.numel() for p in rig.base.model.diffusion_model.parameters())


def test_every_step_of_a_plain_mmdit_run_reaches_the_engine(sd3: Rig) -> None:
    sd3.compare(shape=SD3_SHAPE, steps=3)
    assert (sd3.engine.calls, sd3.torch_calls, sd3.codes) == (3, 0, set())
    assert [list(seen) for seen in sd3.engine.seen] == [["x", "timesteps", "context", "y"]] * 3
    (call,) = sd3.shelf.calls
    assert call.tensors[3].shape == (2, 16)
    assert call.model.class_name == "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper"
    assert call.model.family == "mmdit"


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (2, 4, 8, 8), (3, 4, 8, 8), (1, 4, 7, 9)])
def test_batches_and_odd_sizes(rig: Rig, shape: tuple[int, ...]) -> None:
    rig.compare(shape=shape)
    assert (rig.engine.calls, rig.torch_calls) == (2, 0)
    assert rig.engine.seen[0]["x"].shape == (2 * shape[0], *shape[1:])


def test_an_odd_size_of_the_mmdit(sd3: Rig) -> None:
    sd3.compare(shape=(2, 16, 7, 9))
    assert (sd3.engine.calls, sd3.torch_calls) == (2, 0)


def test_without_guidance_the_network_sees_one_row(rig: Rig) -> None:
    rig.compare(cfg=1.0)
    assert (rig.engine.calls, rig.torch_calls) == (2, 0)
    assert rig.engine.seen[0]["x"].shape == (1, 4, 8, 8)


def test_a_long_prompt_is_one_more_signature_not_another_path(rig: Rig) -> None:
    rig.compare(positive=cond(10, tokens=154))
    assert rig.torch_calls == 0
    assert {tuple(seen["context"].shape[1:]) for seen in rig.engine.seen} == {(154, comfy_env.CONTEXT)}


def test_an_area_prompt_makes_two_signatures_in_one_run(rig: Rig) -> None:
    area = cond(12, area=(4, 6, 2, 1), strength=1.0, set_area_to_bounds=False)
    rig.compare(positive=cond(10) + area)
    assert rig.torch_calls == 0
    assert {tuple(seen["x"].shape[2:]) for seen in rig.engine.seen} == {(8, 8), (4, 6)}
    assert len(rig.shelf.calls) == 2


def test_a_lora_is_part_of_the_facts_and_the_engine_still_serves(rig: Rig) -> None:
    plain = sample(rig.base)
    found = rig.compare(lambda patcher: add_lora(patcher, lora_file(1), 0.8))
    assert not torch.equal(plain, found)
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())
    assert len(rig.shelf.calls[0].model.patch_fingerprint) == 64


# nothing stays behind


def test_the_original_patcher_never_meets_our_code(rig: Rig) -> None:
    ours = rig.model()
    assert wrappers_of(rig.base) == []
    assert rig.base.callbacks.get("on_cleanup", {}).get(KEY) is None
    sample(rig.base)
    assert not rig.shelf.calls
    sample(ours)
    assert rig.engine.calls == 2
    sample(rig.base)
    assert (rig.engine.calls, len(rig.shelf.calls)) == (2, 1)


def test_accelerating_twice_leaves_one_wrapper_with_the_later_choice(rig: Rig) -> None:
    first = rig.model()
    second = rig.model(first)
    assert len(wrappers_of(second)) == 1
    assert len(second.callbacks["on_cleanup"][KEY]) == 1
    assert binding_of(first) is not binding_of(second)
    assert wrappers_of(first) == [binding_of(first)]
    sample(second)
    assert (rig.engine.calls, len(rig.shelf.calls)) == (2, 1)


def test_clones_of_a_clone_share_the_binding_and_keep_their_own_runs(rig: Rig) -> None:
    ours = rig.model()
    clone = ours.clone().clone()
    assert binding_of(clone) is binding_of(ours)
    expected = sample(rig.base)
    assert torch.equal(sample(clone), expected)
    assert torch.equal(sample(ours), expected)
    assert (rig.engine.calls, len(rig.shelf.calls), rig.shelf.released) == (4, 2, 2)


@pytest.mark.parametrize("family", ["rig", "sd3"])
def test_state_dict_keys_stay_the_same(family: str, request: pytest.FixtureRequest) -> None:
    rig: Rig = request.getfixturevalue(family)
    before = list(rig.base.model.state_dict())
    during: list[list[str]] = []
    ours = rig.model()
    rig.engine.watch = lambda: during.append(list(rig.base.model.state_dict()))
    sample(ours, shape=SD3_SHAPE if family == "sd3" else (1, 4, 8, 8))
    assert during == [before, before]
    assert list(rig.base.model.state_dict()) == before


def test_the_mmdits_shim_is_there_only_inside_a_call(sd3: Rig) -> None:
    seen: list[tuple[bool, bool]] = []
    network = sd3.base.model.diffusion_model

    def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
        before = "forward" in network.__dict__
        output = executor(*args, **kwargs)
        seen.append((before, "forward" in network.__dict__))
        return output

    inside: list[bool] = []
    base = sd3.base.clone()
    base.add_wrapper_with_key("apply_model", "watch", outer)
    ours = sd3.model(base)
    sd3.engine.watch = lambda: inside.append("forward" in network.__dict__)
    sample(ours, shape=SD3_SHAPE)
    assert seen == [(False, False), (False, False)]
    assert inside == [True, True]


@pytest.mark.parametrize("family", ["rig", "sd3"])
def test_a_failing_engine_leaves_the_picture_and_the_network_alone(family: str, request: pytest.FixtureRequest) -> None:
    rig: Rig = request.getfixturevalue(family)
    rig.engine.error = RuntimeError("the device is gone")
    names = set(rig.base.model.diffusion_model.__dict__)
    rig.compare(shape=SD3_SHAPE if family == "sd3" else (1, 4, 8, 8))
    assert (len(rig.engine.seen), rig.engine.calls, rig.torch_calls) == (1, 0, 2)
    assert rig.shelf.suspended == ["the device is gone"]
    assert set(rig.base.model.diffusion_model.__dict__) == names


@pytest.mark.parametrize("family", ["rig", "sd3"])
def test_a_failing_network_leaves_nothing_behind(family: str, request: pytest.FixtureRequest) -> None:
    rig: Rig = request.getfixturevalue(family)
    network = rig.base.model.diffusion_model
    names = set(network.__dict__)
    shape = SD3_SHAPE if family == "sd3" else (1, 4, 8, 8)

    class Broken(Exception):
        pass

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise Broken

    ours = rig.model()
    ours.model_options["transformer_options"]["optimized_attention_override"] = broken
    for _ in range(2):
        with pytest.raises(Broken):
            sample(ours, shape=shape)
        assert set(network.__dict__) == names
    assert rig.base.model.current_patcher is None
    assert rig.shelf.calls
    del ours.model_options["transformer_options"]["optimized_attention_override"]
    assert torch.equal(sample(ours, shape=shape), sample(rig.base, shape=shape))
    assert rig.engine.calls == 2


# runs


def test_a_run_decides_once_and_the_next_run_again(rig: Rig) -> None:
    ours = rig.model()
    sample(ours, steps=3)
    assert (len(rig.shelf.calls), rig.shelf.released) == (1, 1)
    sample(ours, steps=3)
    assert (len(rig.shelf.calls), rig.shelf.released, rig.engine.calls) == (2, 2, 6)


def test_patches_that_change_within_a_run_are_decided_on_again(rig: Rig) -> None:
    def change(executor: Any, *args: Any, **kwargs: Any) -> Any:
        executor.class_obj.current_patcher.patches_uuid = uuid.uuid4()
        return executor(*args, **kwargs)

    base = rig.base.clone()
    base.add_wrapper_with_key("apply_model", "change", change)
    sample(rig.model(base), steps=3)
    assert (len(rig.shelf.calls), rig.engine.calls, rig.shelf.released) == (3, 3, 3)


def test_a_copy_of_the_sigmas_is_still_the_same_run(rig: Rig) -> None:
    """ComfyUI's multi-GPU sampling copies the sigmas to the other device at every step."""

    def copy(executor: Any, x: Any, t: Any, c: Any, cross: Any, control: Any, options: Any, **kwargs: Any) -> Any:
        options = {**options, "sample_sigmas": options["sample_sigmas"].clone()}
        return executor(x, t, c, cross, control, options, **kwargs)

    base = rig.base.clone()
    base.add_wrapper_with_key("apply_model", "copy", copy)
    sample(rig.model(base), steps=3)
    assert (len(rig.shelf.calls), rig.engine.calls) == (1, 3)


def options_of(patcher: Any, sigmas: torch.Tensor | None) -> dict[str, Any]:
    """`transformer_options` as the sampler makes them."""
    options: dict[str, Any] = {"wrappers": {k: dict(v) for k, v in patcher.wrappers.items()}}
    if sigmas is not None:
        options["sample_sigmas"] = sigmas
    return options


def direct(patcher: Any, sigmas: torch.Tensor | None, options: dict[str, Any] | None = None) -> torch.Tensor:
    """One call of the model as the sampler makes it, without the sampler."""
    options = options_of(patcher, sigmas) if options is None else options
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    context = torch.cat([cond(10)[0][0], cond(11)[0][0]])
    with torch.no_grad():
        output: torch.Tensor = patcher.model.apply_model(
            x, torch.tensor([1.0, 1.0]), c_crossattn=context, transformer_options=options
        )
    return output


def test_calls_without_sigmas_work_and_are_decided_each_time(rig: Rig) -> None:
    ours = rig.model()
    expected = direct(rig.base, None)
    ours.pre_run()
    assert torch.equal(direct(ours, None), expected)
    assert torch.equal(direct(ours, None), expected)
    assert (len(rig.shelf.calls), rig.engine.calls, rig.shelf.released) == (2, 2, 1)
    ours.cleanup()
    assert rig.shelf.released == 2


def test_outside_a_run_nothing_is_known_of_the_weights_so_pytorch_runs(rig: Rig) -> None:
    ours = rig.model()
    assert torch.equal(direct(ours, torch.ones(3)), direct(rig.base, torch.ones(3)))
    assert not rig.shelf.calls


def test_a_patcher_of_another_model_tells_nothing(rig: Rig) -> None:
    ours = rig.model()
    other = rig.model(comfy_env.make_sd15(seed=9))
    ours.model.current_patcher = other
    assert torch.equal(direct(ours, torch.ones(3)), direct(rig.base, torch.ones(3)))
    assert not rig.shelf.calls
    ours.model.current_patcher = None


def test_the_callers_options_are_not_written_to(rig: Rig) -> None:
    ours = rig.model()
    ours.pre_run()
    options = {**options_of(ours, torch.ones(3)), "wrappers": {"apply_model": {KEY: [binding_of(ours)]}}}
    inner = options["wrappers"]["diffusion_model"] = {"other": [lambda executor, *a, **k: executor(*a, **k)]}
    keys = set(options)
    direct(ours, None, options)
    assert rig.engine.calls == 1
    assert set(options) - keys <= {"original_shape", "transformer_index"}
    assert set(options["wrappers"]) == {"apply_model", "diffusion_model"}
    assert options["wrappers"]["diffusion_model"] is inner
    assert list(inner) == ["other"]
    ours.cleanup()


def test_two_patchers_of_one_model_keep_separate_runs(rig: Rig) -> None:
    first = rig.model()
    second = first.clone()
    sigmas = torch.linspace(14, 0, 4)
    expected = direct(rig.base, sigmas)
    for patcher in (first, second, first, second):
        patcher.pre_run()
        assert torch.equal(direct(patcher, sigmas), expected)
    assert (len(rig.shelf.calls), rig.engine.calls, rig.shelf.released) == (2, 4, 0)
    for patcher in (first, second):
        patcher.cleanup()
    assert rig.shelf.released == 2


def test_two_loras_on_one_model_in_turn(rig: Rig) -> None:
    first, second = rig.base.clone(), rig.base.clone()
    add_lora(first, lora_file(1), 1.0)
    add_lora(second, lora_file(2), 1.0)
    expected = [sample(first), sample(second)]
    assert not torch.equal(*expected)
    ours = [rig.model(first), rig.model(second)]
    for _ in range(2):
        for patcher, wanted in zip(ours, expected, strict=True):
            assert torch.equal(sample(patcher), wanted)
    assert len({call.model.patch_fingerprint for call in rig.shelf.calls}) == 2
    assert (rig.engine.calls, rig.torch_calls) == (8, 0)


def test_a_model_made_by_another_patcher_gets_facts_of_its_own(rig: Rig) -> None:
    ours = rig.model()
    sample(ours)
    other = comfy_env.make_sd15(seed=9)
    other.wrappers = ours.wrappers
    other.callbacks = ours.callbacks
    wrapper = binding_of(ours)
    assert isinstance(wrapper, ApplyModel)
    assert wrapper.model_of(other) is not wrapper.model_of(ours)
    assert wrapper.model_of(other).network() is other.model.diffusion_model


# lifetimes


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("make", [comfy_env.make_sd15, comfy_env.make_sd3])
def test_nothing_of_ours_keeps_a_model_alive(one_thread: None, make: Any, failing: bool) -> None:
    import comfy.model_management

    rig = Rig(make())
    ours = rig.model()
    port = binding_of(ours).model_of(ours).port(ours)  # type: ignore[union-attr]
    if failing:
        rig.engine.error = RuntimeError("the device is gone")
    sample(ours, shape=SD3_SHAPE if make is comfy_env.make_sd3 else (1, 4, 8, 8))
    sample(ours.clone(), shape=SD3_SHAPE if make is comfy_env.make_sd3 else (1, 4, 8, 8))
    model, network = weakref.ref(rig.base.model), weakref.ref(rig.base.model.diffusion_model)
    keep = (binding_of(ours), rig.dispatcher, rig.records, rig.shelf, rig.fingerprints, rig.digests, port)
    del ours, rig
    gc.collect()
    comfy.model_management.cleanup_models()
    gc.collect()
    assert model() is None
    assert network() is None, "the weights are in the network"
    assert len(keep) == 7


def test_a_run_that_never_ended_keeps_no_model_alive(one_thread: None) -> None:
    """ComfyUI calls ON_CLEANUP whatever happens; a pack that samples by itself may not."""
    rig = Rig(comfy_env.make_sd15(levels=1))
    ours = rig.model()
    ours.pre_run()
    direct(ours, torch.ones(3))
    assert rig.engine.calls == 1
    model, network = weakref.ref(rig.base.model), weakref.ref(rig.base.model.diffusion_model)
    keep = (binding_of(ours), rig.dispatcher)
    del ours, rig
    gc.collect()
    assert model() is None
    assert network() is None
    assert len(keep) == 2
