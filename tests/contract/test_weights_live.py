"""Digests, fingerprints and snapshots of real ComfyUI models, while ComfyUI loads, patches and unpatches them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel.errors import BuildError
from kitchen_accel.host import weights
from kitchen_accel.host.model import decode_config, encode_config
from kitchen_accel.host.weights import DigestWorker, Fingerprints, storage_refusals, weights_digest, write_snapshot
from kitchen_accel.tests.contract import comfy_env
from kitchen_accel.tests.contract.comfy_env import LORA_KEY, OTHER_KEY, Rig, add_lora, cond, lora_file, sample

comfy_env.require_comfy()

State = dict[str, torch.Tensor]


def never() -> bool:
    return False


def load(patcher: Any) -> None:
    """What ComfyUI does with a patcher before it samples."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])


def state_of(patcher: Any) -> State:
    """A copy of the weights as they are in the network now."""
    return {k: v.clone() for k, v in patcher.model.diffusion_model.state_dict().items()}


def same(one: State, other: State) -> bool:
    """Equal names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        v.dtype == other[k].dtype
        and torch.equal(v.reshape(-1).view(torch.uint8), other[k].reshape(-1).view(torch.uint8))
        for k, v in one.items()
    )


def snapshot(patcher: Any, folder: Path) -> State:
    from safetensors.torch import load_file

    write_snapshot(patcher, folder / "weights.safetensors", never)
    found: State = load_file(folder / "weights.safetensors")
    return found


def with_lora(base: Any, *loras: tuple[int, float]) -> Any:
    patcher = base.clone()
    for seed, strength in loras:
        add_lora(patcher, lora_file(seed), strength)
    return patcher


@pytest.fixture
def base(one_thread: None) -> Any:
    return comfy_env.make_sd15()


# the digest of the base weights


def test_the_digest_does_not_depend_on_what_is_loaded(base: Any) -> None:
    before = weights_digest(base, 2)
    state = state_of(base)
    patched = with_lora(base, (1, 0.8))
    load(patched)
    assert not same(state_of(base), state), "the LoRA is in the live weights"
    assert weights_digest(base, 2) == weights_digest(patched, 1) == before
    load(base)
    assert same(state_of(base), state)
    assert weights_digest(base, 2) == before


def test_one_element_changes_the_digest(base: Any) -> None:
    before = weights_digest(base, 2)
    weight = base.model.diffusion_model.out[2].weight
    weight.data.view(-1)[17] += 1e-3
    assert weights_digest(base, 2) != before


def test_another_dtype_or_name_changes_the_digest(base: Any) -> None:
    before = weights_digest(base, 2)
    out = base.model.diffusion_model.out
    weight = out[2].bias
    out[2].bias = torch.nn.Parameter(weight.data.half().float().half(), requires_grad=False)
    assert weights_digest(base, 2) != before
    out[2].bias = weight
    assert weights_digest(base, 2) == before
    out[2].register_parameter("bias2", out[2].bias)
    del out[2].bias
    assert weights_digest(base, 2) != before


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest  # the package under its pip name
from kitchen_accel.tests.contract import comfy_env
comfy_env.require_comfy()
from kitchen_accel.host.weights import Fingerprints, weights_digest
base = comfy_env.make_sd15()
patcher = base.clone()
comfy_env.add_lora(patcher, comfy_env.lora_file(1), 0.8)
patcher.add_patches({comfy_env.OTHER_KEY + ".weight": ("diff", (comfy_env.torch.ones(64, comfy_env.CONTEXT),))})
print(weights_digest(base, 2), *Fingerprints().of(patcher))
"""


def test_another_process_finds_the_same(base: Any) -> None:
    patched = with_lora(base, (1, 0.8))
    patched.add_patches({f"{OTHER_KEY}.weight": ("diff", (torch.ones(64, comfy_env.CONTEXT),))})
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parents[1])],
        env={**os.environ, "PYTHONHASHSEED": "77"}, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [weights_digest(base, 2), Fingerprints().of(patched)[0], "()"]


def test_hook_weights_are_told_from_the_base(rig: Rig) -> None:
    """While a hook LoRA is swapped in (on top of a baked one) the base weights are found, and no digest is trusted."""
    import comfy.hooks

    state = state_of(rig.base)
    patcher = with_lora(rig.base, (2, 1.0))
    seen: list[tuple[bool, bool]] = []

    def watch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        current = executor.class_obj.current_patcher
        if current.current_hooks is not None:
            live = state_of(current)
            seen.append((same(live, state), same(dict(weights.base_weights(current)), state)))
            with pytest.raises(BuildError, match="hook patches"):
                weights_digest(current, 1)
            assert not weights.is_resident(current)
        return executor(*args, **kwargs)

    patcher.add_wrapper_with_key("apply_model", "watch", watch)
    hooks = comfy.hooks.create_hook_lora(lora_file(1, OTHER_KEY), strength_model=1.0, strength_clip=0.0)
    sample(patcher, positive=comfy.hooks.set_hooks_for_conditioning(cond(10), hooks))
    assert seen == [(False, True)] * 2


def test_a_digest_that_failed_is_tried_again_and_keeps_no_model_alive(base: Any) -> None:
    worker = DigestWorker(1)
    remembered: list[str] = []
    base.hook_backup["diffusion_model.out.2.bias"] = (base.model.diffusion_model.out[2].bias, torch.device("cpu"))
    failed = worker.start(base, lambda: None, remembered.append)
    assert isinstance(failed.exception(timeout=60), BuildError)
    base.hook_backup.clear()
    done = worker.start(base, lambda: None, remembered.append)
    assert done is not failed
    assert done.result(timeout=60) == weights_digest(base, 1)
    assert remembered == [done.result()]
    assert worker.start(base, lambda: None, remembered.append) is done


def test_a_failed_digest_keeps_no_model_alive(one_thread: None) -> None:
    worker = DigestWorker(1)
    base = comfy_env.make_sd15(levels=1)
    base.hook_backup["diffusion_model.out.2.bias"] = (base.model.diffusion_model.out[2].bias, torch.device("cpu"))
    future = worker.start(base, lambda: None, lambda digest: None)
    assert isinstance(future.exception(timeout=60), BuildError)
    alive = weakref.ref(base.model)
    del base
    gc.collect()
    assert alive() is None
    assert future.done()


def test_a_remembered_digest_is_not_computed(base: Any) -> None:
    future = DigestWorker(1).start(base, lambda: "known", lambda digest: pytest.fail("nothing was computed"))
    assert future.done()
    assert future.result() == "known"


# the fingerprint of weight patches


def fingerprint(patcher: Any) -> str:
    found, refusals = Fingerprints().of(patcher)
    assert refusals == ()
    return found


def test_fingerprints_tell_patches_apart(base: Any) -> None:
    cases: dict[str, Any] = {
        "none": base,
        "lora": with_lora(base, (1, 0.8)),
        "other strength": with_lora(base, (1, 0.7)),
        "other content": with_lora(base, (2, 0.8)),
        "two": with_lora(base, (1, 0.8), (2, 0.8)),
        "two, other order": with_lora(base, (2, 0.8), (1, 0.8)),
        "twice": with_lora(base, (1, 0.8), (1, 0.8)),
    }
    one_bit = lora_file(1)
    one_bit[f"{LORA_KEY}.lora_up.weight"][0, 0] = torch.nextafter(
        one_bit[f"{LORA_KEY}.lora_up.weight"][0, 0], torch.tensor(9.0)
    )
    cases["one bit"] = base.clone()
    add_lora(cases["one bit"], one_bit, 0.8)
    tensor = torch.ones(64, 64)
    key = f"{LORA_KEY}.weight"
    for name, patch, options in (
        ("diff", ("diff", (tensor,)), (1.0, 1.0)),
        ("diff of another dtype", ("diff", (tensor.half(),)), (1.0, 1.0)),
        ("diff of another shape", ("diff", (tensor.reshape(-1),)), (1.0, 1.0)),
        ("set", ("set", (tensor,)), (1.0, 1.0)),
        ("other model strength", ("diff", (tensor,)), (1.0, 0.5)),
    ):
        cases[name] = base.clone()
        assert cases[name].add_patches({key: patch}, *options) == [key]
    cases["another weight"] = base.clone()
    cases["another weight"].add_patches({key.replace("to_q", "to_k"): ("diff", (tensor,))})
    cases["a part"] = base.clone()
    cases["a part"].add_patches({(key, (0, 0, 32)): ("diff", (torch.ones(32, 64),))})
    cases["another part"] = base.clone()
    cases["another part"].add_patches({(key, (0, 32, 32)): ("diff", (torch.ones(32, 64),))})
    found = {name: fingerprint(patcher) for name, patcher in cases.items()}
    assert found.pop("none") == ""
    assert len(set(found.values())) == len(found), found
    assert all(len(value) == 64 for value in found.values())


def test_equal_patches_have_equal_fingerprints_whatever_their_uuid(base: Any) -> None:
    one, other = with_lora(base, (1, 0.8), (2, 0.5)), with_lora(base, (1, 0.8), (2, 0.5))
    assert one.patches_uuid != other.patches_uuid
    assert fingerprint(one) == fingerprint(other) == fingerprint(one.clone())


def test_functions_of_one_name_are_told_apart(base: Any) -> None:
    def patched(function: Callable[..., Any]) -> Any:
        patcher = base.clone()
        patcher.add_patches({(f"{LORA_KEY}.weight", (0, 0, 64), function): ("diff", (torch.ones(64, 64),))})
        return patcher

    found = [
        fingerprint(patched(f))
        for f in (
            lambda t: t * 2,
            lambda t: t * 3,
            lambda t, by=2: t * by,
            lambda t, by=3: t * by,
            lambda t: t + 2,
            lambda t: t * (2 if t.ndim in {1, 2, 3} else 5),
        )
    ]
    assert len(set(found)) == 6
    factor = 2.0
    _, refusals = Fingerprints().of(patched(lambda t: t * factor))
    assert [r.code for r in refusals] == ["patch-kind"]
    assert "captured variables" in refusals[0].text


def test_a_patch_nobody_knows_is_pytorchs(rig: Rig) -> None:
    factor = 0.5

    def change(patcher: Any) -> None:
        key = (f"{LORA_KEY}.weight", (0, 0, 64), lambda t: t * factor)
        patcher.add_patches({key: ("diff", (torch.ones(64, 64),))})

    found = rig.compare(change)
    assert not torch.equal(found, sample(rig.base))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 2, {"patch-kind"})


def test_a_patch_that_cannot_be_read_is_a_refusal(base: Any) -> None:
    patcher = base.clone()
    patcher.add_patches({f"{LORA_KEY}.weight": ("diff", (torch.ones(64, 64, device="meta"),))})
    _, refusals = Fingerprints().of(patcher)
    assert [r.code for r in refusals] == ["patch-kind"]


def test_a_merge_of_two_models_is_a_patch_too(rig: Rig) -> None:
    """What ModelMergeSimple does."""
    other = comfy_env.make_sd15(seed=5)

    def change(patcher: Any) -> None:
        patches = other.get_key_patches("diffusion_model.middle_block.")
        for key, value in patches.items():
            patcher.add_patches({key: value}, 0.3, 0.7)

    found = rig.compare(change)
    assert not torch.equal(found, sample(rig.base))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())
    assert len(rig.shelf.calls[0].model.patch_fingerprint) == 64


def test_patches_outside_the_network_do_not_count(base: Any) -> None:
    patcher = base.clone()
    patcher.patches = {"model_sampling.sigmas": [(1.0, ("diff", (torch.ones(1000),)), 1.0, None, None)]}
    assert fingerprint(patcher) == ""


# snapshots


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_snapshot_holds_the_weights_bit_for_bit(one_thread: None, tmp_path: Path, dtype: str) -> None:
    base = comfy_env.make_sd15(dtype=getattr(torch, dtype))
    found = snapshot(base, tmp_path)
    assert {str(v.dtype) for v in found.values()} == {f"torch.{dtype}"}
    assert same(found, state_of(base))
    assert storage_refusals(base) == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_in_half_runs_as_stock_and_says_so(one_thread: None, dtype: str) -> None:
    rig = Rig(comfy_env.make_sd15(dtype=getattr(torch, dtype)))
    rig.compare()
    facts = rig.shelf.calls[0].model
    assert (facts.weight_dtype, facts.compute_dtype) == (dtype, "float32")
    assert (rig.engine.calls, rig.codes) == (2, set())
    assert rig.shelf.calls[0].tensors[0].dtype == "float32"


def test_another_patchers_compute_dtype_is_not_taken_for_the_models(base: Any) -> None:
    other = base.clone()
    other.set_model_compute_dtype(torch.bfloat16)
    load(other)
    assert base.model.manual_cast_dtype == torch.bfloat16
    rig = Rig(base)
    sample(rig.model())
    assert rig.shelf.calls[0].model.compute_dtype == "float32"
    assert rig.engine.calls == 2


def test_a_patched_snapshot_holds_the_live_weights(base: Any, tmp_path: Path) -> None:
    state = state_of(base)
    patched = with_lora(base, (1, 0.8))
    with pytest.raises(BuildError, match="no longer loaded"):
        write_snapshot(patched, tmp_path / "x", never)
    load(patched)
    found = snapshot(patched, tmp_path)
    assert same(found, state_of(patched))
    assert [k for k in state if not torch.equal(state[k], found[k])] == [
        f"{LORA_KEY}.weight".removeprefix("diffusion_model.")
    ]
    load(with_lora(base, (2, 0.8)))
    with pytest.raises(BuildError, match="no longer loaded"):
        write_snapshot(patched, tmp_path / "x", never)


def test_an_unpatched_snapshot_holds_the_base_weights_whatever_is_loaded(base: Any, tmp_path: Path) -> None:
    state = state_of(base)
    load(with_lora(base, (1, 0.8)))
    assert not same(state_of(base), state)
    assert same(snapshot(base, tmp_path), state)


def test_weights_that_change_while_they_are_copied_are_noticed(base: Any, tmp_path: Path) -> None:
    patched = with_lora(base, (1, 0.8))
    load(patched)
    calls = 0

    def meanwhile() -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            load(base)
        return False

    with pytest.raises(BuildError, match="changed while they were copied"):
        write_snapshot(patched, tmp_path / "x", meanwhile)


def test_a_cancelled_copy_stops_at_the_next_weight(base: Any, tmp_path: Path) -> None:
    asked: list[int] = []

    def third() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(BuildError, match="cancelled"):
        write_snapshot(base, tmp_path / "x", third)
    assert len(asked) == 3


class Packed(torch.Tensor):
    """A tensor subclass as quantised layouts are."""


def test_weights_in_another_layout_are_refused(rig: Rig) -> None:
    out = rig.base.model.diffusion_model.out
    plain = out[2].bias
    cases = [
        (torch.nn.Parameter(plain.data.as_subclass(Packed), requires_grad=False), "Packed"),
        (torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False), "int8"),
        (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False), "float64"),
    ]
    for weight, kind in cases:
        out[2].bias = weight
        (refusal,) = storage_refusals(rig.base)
        assert (refusal.code, refusal.subject, refusal.actual) == ("weights-format", "weight out.2.bias", kind)
        ours = rig.model()
        rig.shelf.calls.clear()
        if kind == "Packed":
            assert torch.equal(sample(ours), sample(rig.base))
            assert {r.code for r in rig.shelf.calls[0].blockers} == {"weights-format"}
    assert rig.engine.calls == 0
    out[2].bias = plain
    assert storage_refusals(rig.base) == ()


# the configuration


@pytest.mark.parametrize("make", [comfy_env.make_sd15, comfy_env.make_sd3])
def test_a_real_configuration_survives_json(make: Callable[[], Any]) -> None:
    config = make().model.model_config.unet_config
    found = decode_config(json.loads(json.dumps(encode_config(config))))
    assert found == config
    assert found["dtype"] is torch.float32
