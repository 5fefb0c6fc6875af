"""The values that travel between the rooms, and the two protocols a backend fulfils.

Everything here is frozen and free of torch, ComfyUI and hardware, so that decisions are pure functions
that can be tested on facts of machines we do not have. Shapes are tuples of int in elements, dtypes are
torch's names without the prefix (`"float32"`), sizes are bytes, times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

BackendId = Literal["cuda", "tensorrt", "openvino", "directml"]
"""A backend's name as users write it in the YAML and pick it in a node."""

BACKEND_IDS: tuple[BackendId, ...] = ("cuda", "tensorrt", "openvino", "directml")
"""All of them, in the order reports list them."""

Precision = Literal["fp32", "bf16", "fp16"]
"""What an engine multiplies in. The accumulation is the device's own affair."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")

ProgressFn = Callable[[str, float], None]
"""`progress(phase, fraction)`: fraction in [0, 1] over the whole build, never falling."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a backend cannot serve a call. Text is rendered from the fields, never stored.

    code: stable, for machines and tests, e.g. `"missing-library"`, `"family"`, `"dim-range"`, `"no-engine"`.
    subject: what was looked at, e.g. `"input x, height"`.
    actual: what it is, with its unit.
    required: what would have been accepted.
    hint: the next step a user can take; empty when there is none.
    """

    code: str
    subject: str
    actual: str
    required: str
    hint: str = ""

    @property
    def text(self) -> str:
        """One sentence for people."""
        sentence = f"{self.subject}: {self.actual}, needs {self.required}"
        return f"{sentence} ({self.hint})" if self.hint else sentence


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape, dtype and device of one tensor that enters the network.

    device: torch's name with index, `"cpu"` or `"cuda:0"`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class DimRange:
    """A dimension an engine accepts between `min` and `max` (both included), in steps of `multiple`.

    name: the symbol shared by equal dimensions, e.g. `"batch"`, `"height"`.
    """

    name: str
    min: int
    max: int
    multiple: int = 1

    def accepts(self, value: int) -> bool:
        return self.min <= value <= self.max and value % self.multiple == 0


@dataclass(frozen=True, slots=True)
class InputProfile:
    """What an engine accepts as one input: its dtype, and per dimension a fixed size or a range."""

    name: str
    dtype: str
    dims: tuple[int | DimRange, ...]


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """What an engine accepts as a whole."""

    inputs: tuple[InputProfile, ...]

    def refusals(self, tensors: tuple[TensorSpec, ...]) -> tuple[Refusal, ...]:
        """Every way in which `tensors` lies outside this profile; empty when it is covered."""
        found: list[Refusal] = []
        given = {t.name: t for t in tensors}
        for unknown in sorted(given.keys() - {i.name for i in self.inputs}):
            found.append(Refusal("input-set", f"input {unknown}", "present", "an engine built with this input"))
        for want in self.inputs:
            spec = given.get(want.name)
            if spec is None:
                found.append(Refusal("input-set", f"input {want.name}", "absent", "this input, as the engine has it"))
                continue
            if spec.dtype != want.dtype:
                found.append(Refusal("input-dtype", f"input {want.name}", spec.dtype, want.dtype))
            if len(spec.shape) != len(want.dims):
                found.append(
                    Refusal("input-rank", f"input {want.name}", f"{len(spec.shape)} dimensions", str(len(want.dims)))
                )
                continue
            for axis, (size, dim) in enumerate(zip(spec.shape, want.dims, strict=True)):
                if isinstance(dim, int):
                    if size != dim:
                        found.append(Refusal("dim-fixed", f"input {want.name}, axis {axis}", str(size), str(dim)))
                elif not dim.accepts(size):
                    step = f" in steps of {dim.multiple}" if dim.multiple > 1 else ""
                    found.append(
                        Refusal(
                            "dim-range",
                            f"input {want.name}, {dim.name}",
                            str(size),
                            f"{dim.min} to {dim.max}{step}",
                        )
                    )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the diffusion model behind a call.

    family: the capture family, e.g. `"unet"`, `"mmdit"`; `"unknown"` when no family fits.
    class_name: the network's class, e.g. `"comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel"`.
    config_digest: sha256 of the canonical JSON of the detected network configuration.
    code_digest: sha256 of the source files the network's modules come from (a ComfyUI upgrade changes it).
    weight_dtype: dtype the weights are stored in.
    compute_dtype: dtype stock ComfyUI would compute in.
    weights_digest: sha256 of the unpatched weights; empty while it is still being computed.
    patch_fingerprint: sha256 of the weight patches (LoRA and the like) and their strengths; empty without patches.
    weights_bytes: size of the network's weights in memory.
    label: for people, e.g. the checkpoint's file name. Never part of a key.
    """

    family: str
    class_name: str
    config_digest: str
    code_digest: str
    weight_dtype: str
    compute_dtype: str
    weights_digest: str
    patch_fingerprint: str
    weights_bytes: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the network, as values.

    tensors: every tensor argument by name, batch first: x `(N, C, H, W)`, timesteps `(N,)`,
        context `(N, T, D)`, y `(N, A)`.
    control: specs of control residuals, named `output.0`, `middle.0`, ...; empty without control.
    blockers: one Refusal for everything that acts *inside* the network and that no engine honours
        (block patches, overrides, injections, hooks, unknown keys); empty on a plain call.
    """

    model: ModelFacts
    tensors: tuple[TensorSpec, ...]
    control: tuple[TensorSpec, ...] = ()
    blockers: tuple[Refusal, ...] = ()

    @property
    def device(self) -> str:
        """Device of the latent: where the caller wants the answer."""
        return self.tensors[0].device

    @property
    def shape_text(self) -> str:
        """`x 2x4x64x64, context 2x77x768`: for logs."""
        return ", ".join(f"{t.name} {'x'.join(map(str, t.shape))}" for t in self.tensors if len(t.shape) > 1)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as the driver tells it.

    kind: `"nvidia"`, `"intel"`, `"amd"` or `"other"`.
    compute_capability: CUDA's `(major, minor)`; `(0, 0)` on anything else.
    memory_bytes: total memory of the card.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """An optional library as it is *loaded* in this process, not as it is installed.

    devices: devices the library itself reports, e.g. OpenVINO's `("CPU", "GPU")`.
    precisions: per device, the precisions it computes in natively.
    """

    name: str
    version: str
    devices: tuple[str, ...] = ()
    precisions: tuple[tuple[str, tuple[Precision, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """This machine, probed once by `scheduler.facts`.

    platform: `"linux"`, `"windows"` or `"darwin"`.
    libraries: per backend, what is loaded, or the Refusal with the real import error.
    """

    platform: str
    python: str
    torch_version: str
    cpu_name: str
    memory_bytes: int
    physical_cores: int
    gpus: tuple[GpuFacts, ...] = ()
    libraries: tuple[tuple[BackendId, LibraryFacts | Refusal], ...] = ()

    def library(self, backend: BackendId) -> LibraryFacts | Refusal:
        for name, found in self.libraries:
            if name == backend:
                return found
        return Refusal("missing-library", f"the library of {backend}", "not probed", "a probe of this machine")


@dataclass(frozen=True, slots=True)
class Decision:
    """Which backend serves a call, and why every other one does not.

    engine_digest: digest of the engine's key; empty for `cuda`, which has none.
    precision: what the engine computes in; for `cuda` the model's own compute dtype applies and this is None.
    rejected: *every* other candidate with *all* its reasons, in the order of `BACKEND_IDS`.
    why: one sentence for people.
    wanted: the backend the user asked for, or `"auto"`.
    """

    backend: BackendId
    why: str
    wanted: str
    engine_digest: str = ""
    precision: Precision | None = None
    rejected: tuple[tuple[BackendId, tuple[Refusal, ...]], ...] = ()

    @property
    def text(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        for backend, reasons in self.rejected:
            lines.extend(f"  not {backend}: {reason.text}" for reason in reasons)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a backend needs to know to build and load, taken from the settings. Changes the engine's key.

    device: the backend's own device name, e.g. OpenVINO's `"CPU"`.
    options: further settings as sorted pairs of strings.
    """

    device: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way to run an engine, measured in the build process beside PyTorch on the same inputs.

    psnr_db: peak signal-to-noise ratio of the network's output against PyTorch's fp32 (or compute dtype) output,
        peak = the reference's range; infinite is stored as 999.0.
    step_s: median seconds of one call; torch_step_s: the same for PyTorch, measured alternately in the same process.
    """

    precision: Precision
    variant: str
    psnr_db: float
    step_s: float
    torch_step_s: float


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build leaves besides its files: goes into the manifest.

    profile: the shapes the engine really accepts (a capture may have to narrow the ranges asked for).
    """

    profile: ShapeProfile
    measurements: tuple[Measurement, ...]
    notes: tuple[tuple[str, str], ...] = ()


class Engine(Protocol):
    """A loaded engine. Not safe for concurrent `run` calls: the dispatcher holds one caller at a time."""

    device: str
    """Device the runtime says it executes on, read back after compiling."""
    precision: Precision
    """Precision the runtime says it computes in, read back after compiling."""
    calls: int
    """Completed `run` calls. Tests and reports read it to know that the engine really ran."""
    device_bytes: int
    """Memory the engine holds on its device, in bytes; an estimate where the runtime does not tell."""

    def prepare(self, tensors: tuple[TensorSpec, ...]) -> None:
        """Make the engine ready for exactly these shapes (compile, allocate).

        Raises EngineError.
        """

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """One forward. `inputs`: torch tensors by name, on the call's device, not modified.

        Returns a fresh torch tensor on the caller's device that a later call never changes.
        Raises EngineError.
        """

    def close(self) -> None:
        """Free everything. Later calls raise EngineError."""


class Backend(Protocol):
    """One backend: one file, one class. Its optional libraries are imported inside its methods only."""

    id: BackendId

    def probe(self) -> LibraryFacts | Refusal:
        """Import the library and ask it for its version and devices; the real error becomes the Refusal."""

    def build(
        self,
        module: Any,
        example: Mapping[str, Any],
        profile: ShapeProfile,
        options: BuildOptions,
        folder: Path,
        progress: ProgressFn,
    ) -> BuildResult:
        """Build an engine of `module` (a `torch.nn.Module` in eval mode, called with `example`'s names) into `folder`.

        Runs in the build process. Raises CaptureError or BuildError.
        """

    def load(self, folder: Path, profile: ShapeProfile, precision: Precision, options: BuildOptions) -> Engine:
        """Load what `build` left in `folder`. Raises EngineError."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Median seconds of one network call, per backend, for one model and one set of shapes.

    samples: how many calls the median is over; a decision needs at least three.
    """

    backend: BackendId
    precision: Precision | None
    median_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the cache and the build queue know of the engine that would serve a call.

    status: `"ready"` (in the cache), `"absent"`, `"building"`, `"failed"` or `"quarantined"`.
    digest: of the engine's key.
    detail: for people: progress, the first error, or the figure that led to the quarantine.
    measurements: from the manifest, when ready.
    profile: what it accepts, when ready.
    """

    backend: BackendId
    status: Literal["ready", "absent", "building", "failed", "quarantined"]
    digest: str = ""
    detail: str = ""
    measurements: tuple[Measurement, ...] = field(default=())
    profile: ShapeProfile | None = None
