"""The door between ComfyUI's sampling and the dispatcher: one APPLY_MODEL wrapper on a clone of the model.

Per call the wrapper appends our dispatcher as the *last* DIFFUSION_MODEL wrapper, hence the innermost:
everything outside the network (CFG, masks, regions, context windows, step caches) stays ComfyUI's. Classes
whose `forward` runs no such wrappers (SD3) get an instance `forward` for the duration of the call.
Nothing shared is changed, so an unaccelerated clone of the same weights is not affected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..backends.base import Call, Refusal, TensorSpec
from ..errors import HostError
from .model import ModelBinding
from .weights import dtype_name

if TYPE_CHECKING:
    from ..scheduler.dispatch import Dispatcher

KEY = "kitchen_accel"
"""Key of our wrappers and callbacks in ComfyUI's dictionaries."""

_OUTSIDE = frozenset(
    {
        # what ComfyUI's sampler always puts there (comfy/samplers.py, _calc_cond_batch)
        "wrappers", "callbacks", "sample_sigmas", "cond_or_uncond", "uuids", "sigmas",
        # what the networks write into it while they run (openaimodel.py, attention.py, flux/model.py)
        "original_shape", "transformer_index", "block", "block_index", "block_type", "total_blocks",
        "activations_shape",
        # act outside the network: on the frames that are fed to it, or on whether it runs at all
        "context_window", "easycache",
        # where and when weights are streamed, not what is computed (ComfyUI 0.33)
        "prefetch_dynamic_vbars", "multigpu_thread_device",
    }
)  # fmt: skip
"""Keys of `transformer_options` that change nothing inside the network. Everything else denies the engine."""


def _present(value: Any) -> bool:
    """False for None, False and containers without a truthy member at any depth."""
    if value is None or value is False:
        return False
    if isinstance(value, Mapping):
        return any(_present(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    return True


def option_blockers(options: Mapping[str, Any]) -> tuple[Refusal, ...]:
    """A Refusal for every entry of `transformer_options` that acts, or may act, inside the network."""
    found: list[Refusal] = []
    for key, value in sorted(((k, v) for k, v in options.items() if k not in _OUTSIDE), key=lambda item: str(item[0])):
        if not _present(value):
            continue
        if key in ("patches", "patches_replace") and isinstance(value, Mapping):
            kinds = ", ".join(sorted(str(k) for k, v in value.items() if _present(v)))
            found.append(Refusal("block-patch", key, kinds, "no patches inside the network"))
        else:
            found.append(Refusal("option", f"transformer_options[{key!r}]", type(value).__name__, "absent"))
    return tuple(found)


class Run:
    """One sampling run of one model: what was found about it at its first step, and its session.

    sigmas: the run's own sigma tensor. ComfyUI makes a new one per run, so identity tells runs apart; its multi-GPU
        sampling copies it to the other devices at every step, so an equal one is the same run too.
    """

    __slots__ = (
        "_compiling", "_grad", "blockers", "model", "names", "patcher", "session", "sigmas", "uuid",
    )  # fmt: skip

    def __init__(self, model: ModelBinding, patcher: Any, dispatcher: Dispatcher, wanted: str, sigmas: Any) -> None:
        import torch

        self.model = model
        self.patcher = weakref.proxy(patcher)
        self.sigmas = sigmas
        self.uuid = patcher.patches_uuid
        try:
            self.blockers = model.run_refusals(patcher)
        except Exception as error:
            # packs put anything into a patcher; what cannot be understood is no reason to lose the prompt
            self.blockers = (Refusal("error", "looking at the model", f"{type(error).__name__}: {error}", "no error"),)
        self.session = dispatcher.session(model.port(patcher), wanted)
        self.names = model.argument_names
        self._compiling = torch.compiler.is_compiling
        self._grad = torch.is_grad_enabled

    def goes_on(self, patcher: Any, sigmas: Any) -> bool:
        """Whether a call of `patcher` with `sigmas` belongs to this run."""
        mine = self.sigmas
        if sigmas is None or mine is None or self.uuid != patcher.patches_uuid:
            return False
        return sigmas is mine or (sigmas.device == mine.device and bool(sigmas.equal(mine)))

    def innermost(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The innermost DIFFUSION_MODEL wrapper: the dispatch entry."""
        if self._compiling():
            return executor(*args, **kwargs)
        values = dict(zip(self.names, args, strict=False))
        values.update(kwargs)
        options = values.pop("transformer_options", None) or {}
        control = values.pop("control", None)
        inputs: dict[str, Any] = {}
        odd: list[tuple[str, str]] = []
        signature: list[Any] = []
        for index, value in enumerate(args[len(self.names) :]):
            odd.append((f"number {len(self.names) + index + 1}", type(value).__name__))
        for name, value in values.items():
            if value is None:
                continue
            shape = getattr(value, "shape", None)
            if shape is not None and hasattr(value, "data_ptr"):
                inputs[name] = value
                signature.append((name, shape, value.dtype, value.device))
            else:
                odd.append((name, type(value).__name__))
        flags: list[Any] = []
        unknown = options.keys() - _OUTSIDE
        if unknown:
            flags.extend(r for r in option_blockers(options))
        if control is not None and _present(control):
            flags.append(("control", tuple(sorted(map(str, control))) if isinstance(control, Mapping) else ()))
        if self.patcher.current_hooks is not None:
            flags.append("hooks")
        if executor.idx + 1 < len(executor.wrappers):
            flags.append("inner-wrapper")
        forward = executor.class_obj.__dict__.get("forward")
        if executor.class_obj is not self.model.network() or (forward is not None and forward is not self.model.shim):
            # torch.compile's node swaps the network for the call; whatever else it is, it is not ours to bypass
            flags.append("replaced")
        if self._grad():
            flags.append("grad")
        key = (tuple(signature), tuple(odd), tuple(flags))

        def eager() -> Any:
            return executor(*args, **kwargs)

        def describe() -> Call:
            return self._describe(inputs, odd, flags, control)

        return self.session.call(key, inputs, eager, describe)

    def _describe(self, inputs: Mapping[str, Any], odd: list[tuple[str, str]], flags: list[Any], control: Any) -> Call:
        tensors = tuple(
            TensorSpec(name, tuple(t.shape), dtype_name(t.dtype), str(t.device)) for name, t in inputs.items()
        )
        blockers = list(self.blockers)
        for name, kind in odd:
            blockers.append(Refusal("argument", f"argument {name}", kind, "only tensors"))
        for flag in flags:
            if isinstance(flag, Refusal):
                blockers.append(flag)
            elif flag == "hooks":
                blockers.append(Refusal("hooks", "hook patches on this call", "active", "none"))
            elif flag == "inner-wrapper":
                blockers.append(Refusal("inner-wrapper", "a wrapper inside the dispatcher", "present", "none"))
            elif flag == "replaced":
                blockers.append(Refusal("replaced", "the network or its forward", "replaced", "ComfyUI's own"))
            elif flag == "grad":
                blockers.append(Refusal("training", "gradients", "enabled", "inference"))
        return Call(self.model.facts(self.patcher), tensors, _control_specs(control), tuple(blockers))


def _control_specs(control: Any) -> tuple[TensorSpec, ...]:
    """Specs of the residuals in `{"output": [tensor | None, ...], "middle": [...], "input": [...]}`."""
    if control is None:
        return ()
    groups = control if isinstance(control, Mapping) else {"control": [control]}
    specs: list[TensorSpec] = []
    for group in sorted(groups, key=str):
        found = groups[group]
        for index, tensor in enumerate(found if isinstance(found, (list, tuple)) else [found]):
            if tensor is None:
                continue
            # packs may put anything here: listed, so that the call is not taken for one without control
            shape, dtype, device = (getattr(tensor, name, None) for name in ("shape", "dtype", "device"))
            specs.append(TensorSpec(f"{group}.{index}", tuple(shape or ()), dtype_name(dtype), str(device)))
    return tuple(specs)


class ApplyModel:
    """The APPLY_MODEL wrapper. Shared by all clones of an accelerated model; keeps a Run per patcher.

    It must have no attribute `to`: ComfyUI moves wrappers that have one (comfy/samplers.py, cast_to_load_options).
    """

    def __init__(self, bind: Callable[[Any], ModelBinding], dispatcher: Dispatcher, wanted: str) -> None:
        self.wanted = wanted
        self._bind = bind
        self._dispatcher = dispatcher
        self._models: weakref.WeakKeyDictionary[Any, ModelBinding] = weakref.WeakKeyDictionary()
        self._runs: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: Any) -> ApplyModel:
        # some hosts deep-copy whole option dictionaries; a wrapper has no state that a copy should part from
        return self

    def __call__(
        self,
        executor: Any,
        x: Any,
        t: Any,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        options = dict(transformer_options or {})
        patcher = getattr(executor.class_obj, "current_patcher", None)
        if patcher is None or patcher.model is not executor.class_obj:
            # called outside a sampling run: nothing is known of the weights, so nothing is accelerated
            return executor(x, t, c_concat, c_crossattn, control, options, *args, **kwargs)
        run = self._run(patcher, options.get("sample_sigmas"))
        if not run.model.has_executor:
            with run.model.forward_shim(run.innermost):
                return executor(x, t, c_concat, c_crossattn, control, options, *args, **kwargs)
        wrappers = dict(options.get("wrappers") or {})
        inner = dict(wrappers.get("diffusion_model") or {})
        inner.pop(KEY, None)
        inner[KEY] = [run.innermost]  # last in the dictionary, hence innermost
        wrappers["diffusion_model"] = inner
        options["wrappers"] = wrappers
        return executor(x, t, c_concat, c_crossattn, control, options, *args, **kwargs)

    def model_of(self, patcher: Any) -> ModelBinding:
        """What is known of the patcher's model; a multi-GPU or non-dynamic clone brings a model of its own."""
        model = self._models.get(patcher.model)
        if model is None:
            model = self._models[patcher.model] = self._bind(patcher)
        return model

    def _run(self, patcher: Any, sigmas: Any) -> Run:
        run = self._runs.get(patcher)
        if run is None or not run.goes_on(patcher, sigmas):
            if run is not None:
                run.session.finish()
            run = Run(self.model_of(patcher), patcher, self._dispatcher, self.wanted, sigmas)
            self._runs[patcher] = run
        return run

    def finish(self, patcher: Any) -> None:
        """ON_CLEANUP: the run is over, flush its figures."""
        run = self._runs.pop(patcher, None)
        if run is not None:
            run.session.finish()


def accelerate(patcher: Any, bind: Callable[[Any], ModelBinding], dispatcher: Dispatcher, wanted: str) -> Any:
    """A clone of `patcher` whose network forward goes through `dispatcher`.

    wanted: a backend id or `"auto"`. Accelerating an accelerated model replaces the earlier choice.
    Raises HostError when the model's network is no PyTorch module.
    """
    import torch
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    network = getattr(patcher.model, "diffusion_model", None)
    if not isinstance(network, torch.nn.Module):
        raise HostError(
            "this model cannot be accelerated", got=type(network).__qualname__, allowed="a PyTorch network",
            next_step="connect the model of a checkpoint or diffusion model loader",
        )  # fmt: skip
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    wrapper = ApplyModel(bind, dispatcher, wanted)
    wrapper.model_of(clone)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, wrapper.finish)
    return clone


def binding_of(patcher: Any) -> ApplyModel | None:
    """Our wrapper on `patcher`, or None when the model is not accelerated."""
    from comfy.patcher_extension import WrappersMP

    found = patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    return found[0] if found and isinstance(found[0], ApplyModel) else None
