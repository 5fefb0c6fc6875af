"""What each engine backend can do, as frozen data. `rules` holds a call against it.

Deny by default: a family, input, dtype, device or platform that a row does not list is refused.

Which inputs and ranges a family has is `capture.families`' affair, the one table for captures and decisions; a row here
names the families its backend was shown to run. tensorrt's compute capabilities are NVIDIA's support matrices of
TensorRT 11 and TensorRT-RTX 1.7 (8.0 from its enum and its page on CPU builds; there is no target for 9.0 in RTX).
tensorrt and directml list no family: this version has no backend file for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.base import BackendId, DimRange, Precision


@dataclass(frozen=True, slots=True)
class ComputeRule:
    """The compute capabilities one library takes.

    library: `LibraryFacts.name`. listed: exactly these; empty means everything from `minimum` up.
    lacks: pairs of a compute capability and a precision it does not multiply in.
    """

    library: str
    title: str
    minimum: tuple[int, int]
    listed: tuple[tuple[int, int], ...] = ()
    lacks: tuple[tuple[tuple[int, int], Precision], ...] = ()

    def accepts(self, capability: tuple[int, int]) -> bool:
        return capability in self.listed if self.listed else capability >= self.minimum

    @property
    def text(self) -> str:
        numbers = ", ".join(map(dotted, self.listed)) if self.listed else f"{dotted(self.minimum)} or newer"
        return f"{numbers} for {self.title}"


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of the table.

    call_devices: per device of the backend (`""` when it has no setting for it) the torch device types whose tensors
        it takes.
    dtypes: of the inputs. families: names in `capture.families`.
    attention: kinds of attention that the captured program computes; an override of it is a blocker.
    control: whether control residuals are inputs of its engines.
    compute: rules for NVIDIA GPUs; empty when it needs none.
    """

    backend: BackendId
    platforms: tuple[str, ...]
    call_devices: tuple[tuple[str, tuple[str, ...]], ...]
    precisions: tuple[Precision, ...]
    dtypes: tuple[str, ...]
    families: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("scaled dot product",)
    control: bool = False
    compute: tuple[ComputeRule, ...] = ()


_FLOATS = ("float32", "bfloat16", "float16")

CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "tensorrt",
        platforms=("linux", "windows"),
        call_devices=(("", ("cuda",)),),
        precisions=("fp32", "bf16", "fp16"),
        dtypes=_FLOATS,
        compute=(
            ComputeRule(
                "tensorrt_rtx",
                "TensorRT-RTX",
                minimum=(7, 5),
                listed=((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)),
                lacks=(((7, 5), "bf16"),),
            ),
            ComputeRule("tensorrt", "TensorRT", minimum=(7, 5), lacks=(((7, 5), "bf16"),)),
        ),
    ),
    Capability(
        "openvino",
        platforms=("linux", "windows", "darwin"),
        call_devices=(("CPU", ("cpu",)), ("GPU", ("cpu", "xpu")), ("NPU", ("cpu", "xpu"))),
        precisions=("fp32", "bf16", "fp16"),
        dtypes=_FLOATS,
        families=("unet", "mmdit"),
    ),
    Capability(
        "directml",
        platforms=("windows",),
        call_devices=(("", ("cpu", "privateuseone")),),
        precisions=("fp32", "fp16"),
        dtypes=("float32", "float16"),
    ),
)
"""One row for every engine backend. `cuda` has none: it never refuses."""


def capability(backend: BackendId) -> Capability:
    """The row of an engine backend. Raises KeyError for `cuda`, which has none."""
    for row in CAPABILITIES:
        if row.backend == backend:
            return row
    raise KeyError(backend)


def dotted(capability_: tuple[int, int]) -> str:
    return f"{capability_[0]}.{capability_[1]}"


def range_text(dim: DimRange) -> str:
    step = f" in steps of {dim.multiple}" if dim.multiple > 1 else ""
    return f"{dim.min} to {dim.max}{step}"
