"""The dispatcher beside other packs' wrappers and beside torch.compile, on ComfyUI's real classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kitchen_accel.tests.contract import comfy_env
from kitchen_accel.tests.contract.comfy_env import Rig, sample

comfy_env.require_comfy()


class StepCache:
    """A step cache as EasyCache is one: every second step answers with the step before, made a little smaller."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: Any = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            self.last = executor(*args, **kwargs)
            return self.last
        return self.last * 0.99


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_step_cache_stays_outside_the_engine(rig: Rig, before: bool) -> None:
    caches: list[StepCache] = []

    def change(patcher: Any) -> None:
        caches.append(StepCache())
        patcher.add_wrapper_with_key("diffusion_model", "cache", caches[-1])

    rig.compare(change, before=before, steps=4)
    assert [cache.calls for cache in caches] == [4, 4]
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())


def late(executor: Any, x: Any, t: Any, c: Any, cross: Any, control: Any, options: Any, **kwargs: Any) -> Any:
    """An APPLY_MODEL wrapper that hangs a DIFFUSION_MODEL wrapper behind those it finds."""

    def scale(inner: Any, *args: Any, **more: Any) -> Any:
        return inner(*args, **more) * 1.01

    wrappers = dict(options.get("wrappers", {}))
    wrappers["diffusion_model"] = {**wrappers.get("diffusion_model", {}), "late": [scale]}
    return executor(x, t, c, cross, control, {**options, "wrappers": wrappers}, **kwargs)


def test_a_wrapper_inside_ours_is_pytorchs(rig: Rig) -> None:
    found = rig.compare(lambda patcher: patcher.add_wrapper_with_key("apply_model", "late", late))
    assert not torch.equal(found, sample(rig.base))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (0, 2, {"inner-wrapper"})


def test_the_same_wrapper_added_before_ours_stays_outside(rig: Rig) -> None:
    found = rig.compare(lambda patcher: patcher.add_wrapper_with_key("apply_model", "late", late), before=True)
    assert not torch.equal(found, sample(rig.base))
    assert (rig.engine.calls, rig.torch_calls, rig.codes) == (2, 0, set())


class Compiler:
    """A torch.compile backend that runs what it is given, and counts how often it was given something."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sdpa(original: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's attention: ComfyUI's own for the CPU asks for the free memory, which no tracer can follow."""
    q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def compiled(patcher: Any) -> Compiler:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiler = Compiler()
    set_torch_compile_wrapper(model=patcher, backend=compiler)
    return compiler


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("family", ["unet", "mmdit"])
def test_torch_compile_is_left_alone(family: str, order: str, one_thread: None, fresh_dynamo: None) -> None:
    """ComfyUI's own torch.compile node, added after or before ours: stock latents, and the very graphs of stock."""
    rig = Rig(comfy_env.make_sd15(levels=1) if family == "unet" else comfy_env.make_sd3(blocks=1))
    rig.base.model_options["transformer_options"]["optimized_attention_override"] = sdpa
    options: dict[str, Any] = {"shape": (1, 4, 8, 8) if family == "unet" else (1, 16, 8, 8), "cfg": 1.0}
    network = rig.base.model.diffusion_model
    expected = sample(rig.base, **options)
    stock = rig.base.clone()
    compiler = compiled(stock)
    assert torch.equal(sample(stock, **options), expected)
    graphs = compiler.graphs
    assert graphs > 0
    names = set(network.__dict__)  # torch leaves a mark of its own
    torch._dynamo.reset()

    if order == "after":
        ours = rig.model()
        compiler = compiled(ours)
    else:
        ours = rig.base.clone()
        compiler = compiled(ours)
        ours = rig.model(ours)
    for _ in range(2):
        assert torch.equal(sample(ours, **options), expected)
        assert compiler.graphs == graphs, "the dispatcher broke a graph, or made torch.compile trace anew"
    assert not rig.shelf.calls, "nothing is decided while torch.compile has the network"
    assert rig.base.model.diffusion_model is network
    assert set(network.__dict__) == names
    del rig.base.model_options["transformer_options"]["optimized_attention_override"]
    sample(rig.model(), **options)
    assert rig.engine.calls == 2
