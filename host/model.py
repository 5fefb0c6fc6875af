"""What the pack knows of one loaded ComfyUI model, and the handle (ModelPort) the scheduler gets of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..backends.base import Call, ModelFacts, Refusal
from ..cache.digests import FileStamp
from ..capture.families import family_of
from ..errors import BuildError
from . import weights

WEIGHTS_FILE = "weights.safetensors"
EXAMPLE_FILE = "example.safetensors"


def runs_wrappers(network_class: type) -> bool:
    """Whether the class' `forward` executes ComfyUI's DIFFUSION_MODEL wrappers.

    Read from the compiled code's names, so that no version is compared and no source file is needed.
    """
    forward = inspect.unwrap(network_class.forward)  # type: ignore[attr-defined]
    code = getattr(forward, "__code__", None)
    return code is not None and "DIFFUSION_MODEL" in code.co_names


class PlainExecutor:
    """Stands in for ComfyUI's executor where a class has none: calling it runs the network's own forward."""

    __slots__ = ("class_obj", "idx", "original", "wrappers")

    def __init__(self, original: Callable[..., Any], network: Any) -> None:
        self.original = original
        self.class_obj = network
        self.wrappers = (None,)
        self.idx = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model came from.

    label: for people, e.g. the checkpoint's name in the loader.
    file: the checkpoint, when our own loader read it; its size and mtime then stand for its content.
    variant: what else decides the weights in memory, e.g. the loader's weight dtype.
    stamp: how the file was before it was read.
    """

    label: str
    file: Path | None = None
    variant: str = ""
    stamp: FileStamp | None = None


def encode_config(value: Any) -> Any:
    """A network configuration as JSON values; `torch.float32` becomes `{"$dtype": "float32"}`.

    Raises TypeError for anything that is not plain data.
    """
    import torch

    if isinstance(value, torch.dtype):
        return {"$dtype": weights.dtype_name(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode_config(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): encode_config(v) for k, v in value.items()}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def decode_config(value: Any) -> Any:
    """The inverse of `encode_config` (tuples come back as lists)."""
    import torch

    if isinstance(value, list):
        return [decode_config(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"$dtype"}:
            dtype = getattr(torch, str(value["$dtype"]), None)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"unknown dtype {value['$dtype']!r}")
            return dtype
        return {k: decode_config(v) for k, v in value.items()}
    return value


class ModelBinding:
    """Facts of one BaseModel that hold for every patcher of it. Holds the model weakly."""

    def __init__(
        self, patcher: Any, source: Source, digests: weights.DigestWorker, fingerprints: weights.Fingerprints,
        recall: Callable[[Source, str], str | None], remember: Callable[[Source, str, str], None],
    ) -> None:  # fmt: skip
        model = patcher.model
        network = model.diffusion_model
        cls = type(network)
        self.source = source
        self.network: Callable[[], Any] = weakref.ref(network)
        self.has_executor = runs_wrappers(cls)
        self.shim: Any = None
        self.argument_names = [
            p.name
            for p in inspect.signature(getattr(cls, "_forward", None) or cls.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ][1:]
        self._fingerprints = fingerprints
        self._digests = digests
        self._recall = recall
        self._remember = remember
        self._refusals: list[Refusal] = list(weights.storage_refusals(patcher))
        try:
            self.config = encode_config(dict(model.model_config.unet_config))
        except TypeError as odd:
            self.config = {}
            self._refusals.append(Refusal("config", "network configuration", str(odd), "plain data"))
        class_name = f"{cls.__module__}.{cls.__qualname__}"
        # another patcher of this model may have its own dtype in place just now
        compute = patcher.get_model_object("manual_cast_dtype") or network.dtype
        self._facts = ModelFacts(
            family=family_of(class_name),
            class_name=class_name,
            config_digest=hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest(),
            code_digest=weights.code_digest(network),
            weight_dtype=weights.dtype_name(network.dtype),
            compute_dtype=weights.dtype_name(compute),
            weights_digest="",
            patch_fingerprint="",
            weights_bytes=sum(t.numel() * t.element_size() for t in network.state_dict().values()),
            label=source.label,
        )
        self.class_name = class_name
        self.compute_dtype = self._facts.compute_dtype
        self._digest: Future[str] | None = None
        self.start_digest(patcher)

    def start_digest(self, patcher: Any) -> Future[str] | None:
        """Begin, or go on with, the digest of the weights; None when no engine could use it."""
        if self._refusals or self._facts.family == "unknown":
            return None
        if self._digest is None or (self._digest.done() and self._digest.exception()):
            what = f"{self._facts.class_name}|{self._facts.config_digest}|{self.source.variant}"
            self._digest = self._digests.start(
                patcher,
                recall=lambda: self._recall(self.source, what),
                remember=lambda digest: self._remember(self.source, what, digest),
            )
        return self._digest

    def facts(self, patcher: Any) -> ModelFacts:
        """The facts with this patcher's patches; `weights_digest` is empty while it is being computed."""
        fingerprint, _ = self._fingerprints.of(patcher)
        future = self._digest
        ready = future is not None and future.done() and future.exception() is None
        digest = future.result() if ready and future is not None else ""
        return replace(self._facts, weights_digest=digest, patch_fingerprint=fingerprint)

    def run_refusals(self, patcher: Any) -> tuple[Refusal, ...]:
        """What forbids an engine for a whole run of this patcher."""
        _, odd = self._fingerprints.of(patcher)
        return (*self._refusals, *odd, *weights.network_refusals(patcher))

    def port(self, patcher: Any) -> PatcherPort:
        return PatcherPort(self, patcher)

    @contextmanager
    def forward_shim(self, innermost: Callable[..., Any]) -> Iterator[None]:
        """Route the network's `forward` through `innermost` for the duration of one call, then put it back."""
        network = self.network()
        before = network.__dict__.get("forward")
        original = network.forward
        executor = PlainExecutor(original, network)

        def shim(*args: Any, **kwargs: Any) -> Any:
            return innermost(executor, *args, **kwargs)

        self.shim = network.__dict__["forward"] = shim
        try:
            yield
        finally:
            self.shim = None
            if before is None:
                network.__dict__.pop("forward", None)
            else:
                network.__dict__["forward"] = before


class PatcherPort:
    """The scheduler's view of one patcher (scheduler.shelf.ModelPort). Holds the patcher weakly."""

    def __init__(self, model: ModelBinding, patcher: Any) -> None:
        self._model = model
        self._ref = weakref.ref(patcher)
        self.label = model.source.label

    def refreshed(self, call: Call) -> Call:
        """`call` with the model's facts as they are now. Raises BuildError when the model was freed."""
        patcher = self._ref()
        if patcher is None:
            raise BuildError("the model was freed")
        return replace(call, model=self._model.facts(patcher))

    def digest(self) -> Future[str] | None:
        patcher = self._ref()
        return None if patcher is None else self._model.start_digest(patcher)

    def network_spec(self) -> dict[str, Any]:
        """What the build process needs to make the network again, as JSON values."""
        import comfy

        module, _, name = self._model.class_name.rpartition(".")
        return {
            "comfy_root": str(Path(next(iter(comfy.__path__))).parent),
            "module": module,
            "class": name,
            "config": self._model.config,
            "compute_dtype": self._model.compute_dtype,
            "weights": WEIGHTS_FILE,
            "example": EXAMPLE_FILE,
        }

    def prepare(self, inputs: Mapping[str, Any]) -> Callable[[Path, Callable[[], bool]], None]:
        """A function for the build's own thread that writes weights and example inputs into the job folder.

        inputs: the call's live tensors; copied here, since the sampler goes on using their memory.
        """
        import torch

        example = {name: torch.clone(t.detach().to("cpu")).contiguous() for name, t in inputs.items()}

        def write(folder: Path, cancelled: Callable[[], bool]) -> None:
            from safetensors.torch import save_file

            patcher = self._ref()
            if patcher is None:
                raise BuildError("the model was freed before its weights were copied")
            save_file(example, str(folder / EXAMPLE_FILE))
            weights.write_snapshot(patcher, folder / WEIGHTS_FILE, cancelled)

        return write

    @staticmethod
    def command() -> tuple[str, ...]:
        """argv of the build process, without the job folder."""
        return (sys.executable, "-s", str(Path(__file__).with_name("build_child.py")))
