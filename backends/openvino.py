"""OpenVINO: one converted network per engine, compiled for each shape where that pays and once for all others.

An engine's folder holds `engine.xml` and `engine.bin` (OpenVINO's own format, weights as captured) and, in `blobs`,
what compiling made of them on this machine, without the weights: a second start loads that instead of compiling.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from ..capture.export import capture
from ..capture.measure import measure, specs
from ..capture.variants import HISTORY, Shapes, Stretch, choose_variant
from ..errors import BackendError, BuildError, EngineError
from .base import (
    PRECISIONS,
    BackendId,
    BuildOptions,
    BuildResult,
    DimRange,
    LibraryFacts,
    Precision,
    ProgressFn,
    Refusal,
    ShapeProfile,
    TensorSpec,
)

log = logging.getLogger("kitchen_accel.openvino")

XML_FILE, BIN_FILE, BLOBS_FOLDER = "engine.xml", "engine.bin", "blobs"

DEVICES = ("CPU", "GPU", "NPU")
"""OpenVINO's real devices. AUTO, HETERO, MULTI and BATCH choose one themselves, and it could not be told which."""

CAPABILITIES: dict[str, Precision] = {"FP32": "fp32", "BF16": "bf16", "FP16": "fp16"}
"""Words of OpenVINO's property OPTIMIZATION_CAPABILITIES."""

HINTS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""Words of OpenVINO's property INFERENCE_PRECISION_HINT. Its default on a CPU is silently bf16."""

BLOBS_KEPT = 32
"""Compiled networks kept on disk per engine, the newest; about 2 MB each for a network of SD1.5's depth."""


class RunOptions(BaseModel):
    """`BuildOptions.options` of this backend. None of them changes what `build` writes.

    shapes: `static` compiles for each shape, `dynamic` once for all, `auto` see `choose_variant`.
    max_compiled: static networks alive at a time. threads: CPU threads of one inference; 0 is OpenVINO's choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    shapes: Literal["auto", "static", "dynamic"] = "auto"
    max_compiled: int = Field(default=3, ge=1)
    threads: int = Field(default=0, ge=0)


class OpenVINOBackend:
    """Builds and loads engines that OpenVINO runs, on its CPU, GPU and NPU devices."""

    id: BackendId = "openvino"

    def probe(self) -> LibraryFacts | Refusal:
        """Version as loaded, devices whose drivers work, and per device the precisions it multiplies in."""
        try:
            ov = _library()
            core = ov.Core()
            devices = tuple(core.available_devices)
            precisions = tuple((device, _native(core, device)) for device in devices)
        except (ImportError, OSError, RuntimeError) as error:
            return Refusal(
                "missing-library",
                "the library OpenVINO",
                f"{type(error).__name__}: {error}",
                "openvino, importable in ComfyUI's Python",
                "pip install openvino",
            )
        return LibraryFacts("openvino", _version(ov), devices, precisions)

    def build(
        self,
        module: Any,
        example: Mapping[str, Any],
        profile: ShapeProfile,
        options: BuildOptions,
        folder: Path,
        progress: ProgressFn,
    ) -> BuildResult:
        """Capture, convert, save, then measure beside PyTorch at the example's shapes, in every native precision.

        Where the captured profile turns out not to cover the example, the nearest shapes are measured.
        """
        with _as(BuildError, "OpenVINO cannot be used"):
            ov = _library()
            device = _device(options.device)
            native = _native(ov.Core(), device)
        progress("capture", 0.0)
        began = time.perf_counter()
        captured = capture(module, example, profile)
        captured_at = time.perf_counter()
        progress("convert", 0.4)
        with _as(BuildError, "OpenVINO could not convert the captured network"):
            model = ov.convert_model(captured.program)
            _declare(ov, model, captured.input_names, captured.profile)
            converted_at = time.perf_counter()
            progress("save", 0.65)
            # fp16 weights would be a loss that no later precision setting could undo
            ov.save_model(model, folder / XML_FILE, compress_to_fp16=False)
        profile = captured.profile
        del model, captured  # both hold the weights once more
        notes = {
            "openvino": ov.get_version(),
            "capture_s": f"{captured_at - began:.1f}",
            "convert_s": f"{converted_at - captured_at:.1f}",
        }
        progress("measure", 0.7)
        measurements, more = measure(
            module,
            lambda precision, variant: self.load(
                folder, profile, precision, BuildOptions(device, (("shapes", variant),))
            ),
            tuple((precision, variant) for precision in native for variant in ("static", "dynamic")),
            example,
            profile,
            lambda done: progress("measure", 0.7 + 0.3 * done),
        )
        return BuildResult(profile, measurements, tuple(sorted((notes | more).items())))

    def load(self, folder: Path, profile: ShapeProfile, precision: Precision, options: BuildOptions) -> OpenVINOEngine:
        """Read the network; it is compiled by the first `prepare` or `run`."""
        return OpenVINOEngine(folder, profile, precision, options)


class OpenVINOEngine:
    """A network with its compiled variants: static ones, at most `max_compiled`, and one dynamic.

    precision, device: what was asked for until the first compilation; then what OpenVINO says.
    device_bytes: an estimate, the size of the weights on disk times the compiled variants: OpenVINO repacks the
        weights for each, and does not tell how much it holds.
    """

    def __init__(self, folder: Path, profile: ShapeProfile, precision: Precision, options: BuildOptions) -> None:
        with _as(EngineError, "OpenVINO cannot be used like this"):
            self._options = RunOptions.model_validate(dict(options.options))
            self._asked = _device(options.device)
            self._hint = HINTS[precision]
            self._ov = _library()
            self._core = self._ov.Core()
        with _as(EngineError, "the engine's files cannot be read", "delete the engine, it will be built again"):
            self._model = self._core.read_model(folder / XML_FILE)
            self._weights_bytes = (folder / BIN_FILE).stat().st_size
            self._names = tuple(i.name for i in profile.inputs)
            found = [_name(port, self._names) for port in self._model.inputs]
            if sorted(found) != sorted(self._names) or len(self._model.outputs) != 1:
                raise EngineError(
                    "the engine's file holds another network",
                    got=f"inputs {', '.join(found)}",
                    allowed=", ".join(self._names),
                    next_step="delete the engine, it will be built again",
                )
        self.device, self.precision = self._asked, precision
        self.calls = self.device_bytes = 0
        self._folder, self._profile = folder, profile
        self._static: OrderedDict[Shapes, _Compiled] = OrderedDict()
        self._dynamic: _Compiled | None = None
        self._history: list[Stretch] = []
        self._compiled: dict[Shapes, int] = {}
        self._checked: Shapes | None = None

    def prepare(self, tensors: tuple[TensorSpec, ...]) -> None:
        """Compile for exactly these shapes, or load what an earlier compilation left on disk."""
        self._open()
        self._check(tensors)
        given = {t.name: t.shape for t in tensors}
        shapes = tuple(given[name] for name in self._names)
        self._pick(shapes, [*self._history, Stretch(shapes, 1)])

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """One forward. Inputs of another dtype or device are converted; the output then is too."""
        self._open()
        shapes = tuple(tuple(inputs[name].shape) for name in self._names if name in inputs)
        if shapes != self._checked or len(inputs) != len(self._names):
            self._check(specs(inputs))
            self._checked = shapes
        if self._history and self._history[-1].shapes == shapes:
            self._history[-1] = Stretch(shapes, self._history[-1].calls + 1)
        else:
            self._history = [*self._history[1 - HISTORY :], Stretch(shapes, 1)]
        compiled = self._pick(shapes, self._history)
        with _as(EngineError, "OpenVINO failed while it ran the network", "the call runs in PyTorch instead"):
            out = compiled.infer(inputs)
        first = inputs[self._names[0]]
        if str(first.dtype) != f"torch.{self._profile.inputs[0].dtype}":
            out = out.to(first.dtype)
        self.calls += 1
        return out.to(first.device)

    def close(self) -> None:
        """Drop every compiled network and the mapping of the weights' file."""
        self._static.clear()
        self._dynamic = self._model = self._core = None
        self.device_bytes = 0

    def _open(self) -> None:
        if self._core is None:
            raise EngineError("this engine is closed", next_step="load it again")

    def _check(self, tensors: tuple[TensorSpec, ...]) -> None:
        # dtypes are converted at the boundary, so they are no reason to refuse
        found = [r.text for r in self._profile.refusals(tensors) if r.code != "input-dtype"]
        if not found:
            sizes: dict[str, set[int]] = {}
            given = {t.name: t.shape for t in tensors}
            for want in self._profile.inputs:
                for size, dim in zip(given[want.name], want.dims, strict=True):
                    if isinstance(dim, DimRange):
                        sizes.setdefault(dim.name, set()).add(size)
            # OpenVINO would stretch a size of 1 to fit, which the network does not do
            found = [f"{name} is {sorted(s)} in its inputs, needs one size" for name, s in sizes.items() if len(s) > 1]
        if found:
            raise EngineError(
                "the call is outside the shapes this engine accepts: " + "; ".join(found),
                next_step="the call runs in PyTorch instead",
            )

    def _pick(self, shapes: Shapes, history: Sequence[Stretch]) -> _Compiled:
        live = self._static.get(shapes)
        if live is not None:
            self._static.move_to_end(shapes)
            return live
        choice = choose_variant(
            self._options.shapes,
            shapes,
            history=history,
            live=tuple(self._static),
            compiled=self._compiled,
            slots=self._options.max_compiled,
        )
        if choice.variant == "dynamic":
            if self._dynamic is None:
                self._dynamic = self._compile(None)
                self._count()
            return self._dynamic
        if choice.evict is not None:
            del self._static[choice.evict]
        made = self._compile(shapes)
        self._static[shapes] = made
        self._compiled[shapes] = self._compiled.get(shapes, 0) + 1
        self._count()
        return made

    def _count(self) -> None:
        self.device_bytes = self._weights_bytes * (len(self._static) + (self._dynamic is not None))

    def _compile(self, shapes: Shapes | None) -> _Compiled:
        """Compile for `shapes`, or for all when None. Sets and verifies `precision` and `device`."""
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": self._hint,
            "PERFORMANCE_HINT": "LATENCY",
            # exported without its weights, which `engine.bin` has
            "CACHE_MODE": "OPTIMIZE_SIZE",
        }
        if self._options.threads and self._asked == "CPU":
            properties["INFERENCE_NUM_THREADS"] = self._options.threads
        with _as(EngineError, f"OpenVINO could not compile the network for {self._asked}"):
            blob = self._folder / BLOBS_FOLDER / f"{self._blob_name(shapes)}.blob"
            compiled = self._import(blob, properties)
            if compiled is None:
                model = self._model.clone()
                if shapes is not None:
                    model.reshape(dict(zip(self._names, map(list, shapes), strict=True)))
                compiled = self._core.compile_model(model, self._asked, properties)
                _write_blob(blob, compiled)
            self._verify(compiled)
            return _Compiled(self._ov, compiled, self._names)

    def _import(self, blob: Path, properties: Mapping[str, Any]) -> Any:
        """The compiled network in `blob`, or None when there is none or it is damaged."""
        content = _read_blob(blob)
        if content is None:
            return None
        weights = {"WEIGHTS_PATH": str(self._folder / BIN_FILE)}
        try:
            return self._core.import_model(content, self._asked, {**properties, **weights})
        except RuntimeError as error:
            log.debug("compiled network %s is not usable: %s", blob.name, error)
            return None

    def _blob_name(self, shapes: Shapes | None) -> str:
        """Names everything that a compiled network depends on besides the engine's own files."""
        chip = self._core.get_property(self._asked, "FULL_DEVICE_NAME")
        parts = (self._ov.get_version(), self._asked, chip, self.precision, repr(shapes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]

    def _verify(self, compiled: Any) -> None:
        """Take precision and device from the runtime; raise when they are not those asked for."""
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        devices = list(compiled.get_property("EXECUTION_DEVICES"))
        if hint != self._hint:
            raise EngineError(
                f"OpenVINO computes in {hint} on {self._asked}",
                got=hint,
                allowed=self._hint,
                next_step=f"set another precision than {self.precision} for this device",
            )
        if not devices or any(d != self._asked and d.split(".")[0] != self._asked for d in devices):
            raise EngineError(
                f"OpenVINO runs on {', '.join(devices) or 'no device'}", got=", ".join(devices), allowed=self._asked
            )
        self.device = ", ".join(devices)


class _Compiled:
    """One compiled network with its request."""

    def __init__(self, ov: Any, compiled: Any, names: tuple[str, ...]) -> None:
        self._ov = ov
        self._request = compiled.create_infer_request()
        self._inputs = tuple((_name(p, names), _torch_dtype(p.get_element_type())) for p in compiled.inputs)
        out = compiled.outputs[0]
        self._out_dtype = _torch_dtype(out.get_element_type())
        shape = out.get_partial_shape()
        self._out_shape = tuple(shape.to_shape()) if shape.is_static else None

    def infer(self, inputs: Mapping[str, Any]) -> Any:
        """Run on torch tensors, without copying those that are contiguous, on the CPU and of the network's dtype.

        Returns a torch tensor on the CPU of its own memory. Releases the GIL while it computes.
        """
        import torch

        # named, so that it lives until the end: OpenVINO reads this memory and does not own it
        tensors = [inputs[name].detach().to("cpu", dtype).contiguous() for name, dtype in self._inputs]
        for index, tensor in enumerate(tensors):
            self._request.set_input_tensor(index, _shared(self._ov, tensor))
        if self._out_shape is None:
            self._request.infer()
            # OpenVINO uses its own buffer again in the next call
            return _copied(self._request.get_output_tensor(0), self._out_dtype)
        out = torch.empty(self._out_shape, dtype=self._out_dtype)
        self._request.set_output_tensor(0, _shared(self._ov, out))
        self._request.infer()
        return out


def _name(port: Any, names: tuple[str, ...]) -> str:
    """Which of `names` a port has: OpenVINO's passes hand it further names, those of operations they removed."""
    own = port.get_names()
    return next((name for name in names if name in own), ", ".join(sorted(own)))


def _shared(ov: Any, tensor: Any) -> Any:
    """An OpenVINO tensor on the memory of a contiguous torch CPU tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        return ov.Tensor(tensor.view(torch.uint16).numpy(), ov.Shape(list(tensor.shape)), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _copied(tensor: Any, dtype: Any) -> Any:
    """A torch tensor with a copy of an OpenVINO tensor's values."""
    import torch

    if dtype == torch.bfloat16:  # OpenVINO shows its bf16 memory as numpy float16
        return torch.from_numpy(tensor.data.view("uint16").copy()).view(torch.bfloat16)
    return torch.from_numpy(tensor.data.copy())


def _torch_dtype(kind: Any) -> Any:
    import torch

    names = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
    name = kind.to_string()
    if name not in names:
        raise EngineError("the network has an input or output of an unknown type", got=name, allowed=", ".join(names))
    return names[name]


def _library() -> Any:
    """The module `openvino`.

    When nothing in this process imported it before, it comes without its usage statistics: it sends them to its
    vendor while it is imported and while it converts, unless the module that sends them is missing.
    """
    sender = "openvino_telemetry"
    modules = cast(dict[str, Any], sys.modules)
    untouched = sender not in modules and "openvino" not in modules
    if untouched:
        modules[sender] = None
    try:
        import openvino
    finally:
        if untouched:
            modules.pop(sender, None)
    return openvino


def _version(ov: Any) -> str:
    """`2026.4.1` of `2026.4.1-22982-e213a147257-releases/2026/4`."""
    return str(ov.get_version()).split("-")[0]


def _native(core: Any, device: str) -> tuple[Precision, ...]:
    """The precisions a device multiplies in, in the order of `PRECISIONS`."""
    words = core.get_property(device, "OPTIMIZATION_CAPABILITIES")
    return tuple(p for p in PRECISIONS if any(CAPABILITIES.get(word) == p for word in words))


def _device(name: str) -> str:
    """`name` when it is one real device, e.g. `"CPU"`, `"GPU.1"`. Raises EngineError."""
    base, _, number = name.partition(".")
    if base not in DEVICES or (number and not number.isdigit()):
        raise EngineError(
            "not one device of OpenVINO", got=name, allowed=", ".join(DEVICES) + ", or one with its number, GPU.1"
        )
    return name


@contextmanager
def _as(kind: type[BackendError], what: str, next_step: str | None = None) -> Iterator[None]:
    """Whatever OpenVINO raises becomes `kind`; errors of our own kind pass."""
    try:
        yield
    except kind:
        raise
    except Exception as error:  # OpenVINO raises RuntimeError, TypeError and classes of its converter's own
        if isinstance(error, BackendError):
            raise kind(str(error).rstrip("."), next_step=next_step) from error
        # its messages are stacks of places in its own source, with the reason between them
        lines = [line.strip() for line in str(error).splitlines()]
        reason = " ".join(line for line in lines if line and not line.startswith(("Exception from", "Check '")))
        raise kind(what, got=f"{type(error).__name__}: {reason or error}", next_step=next_step) from error


def _declare(ov: Any, model: Any, names: tuple[str, ...], profile: ShapeProfile) -> None:
    """Give the converted model its inputs' names and the profile's ranges: conversion keeps neither."""
    by_name = {i.name: i for i in profile.inputs}
    shapes = {}
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        dims = by_name[name].dims
        shapes[name] = ov.PartialShape([ov.Dimension(d.min, d.max) if isinstance(d, DimRange) else d for d in dims])
    model.outputs[0].get_tensor().set_names({"out"})
    model.reshape(shapes)


def _read_blob(path: Path) -> bytes | None:
    """What `_write_blob` wrote, or None when it is absent or damaged. Its sha256 stands before it."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        log.debug("compiled network %s is damaged and is made anew", path.name)
        return None
    return content[32:]


def _write_blob(path: Path, compiled: Any) -> None:
    """Keep a compiled network for the next start. A cache that cannot be written loses only that."""
    partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        content = compiled.export_model().getvalue()
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(hashlib.sha256(content).digest() + content)
        partial.replace(path)
        kept = sorted(path.parent.glob("*.blob"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-BLOBS_KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.debug("the compiled network is not kept: %s", error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
