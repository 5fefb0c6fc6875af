"""The engine backends, as one ordered tuple of lazy paths: nothing here imports a backend or its library.

`cuda` has no file: it is ComfyUI's own PyTorch path on whatever device ComfyUI uses. It needs no probe, builds no
engine, refuses nothing and is the parity reference, so the dispatcher simply calls the original forward. A class
would only wrap that call.

A backend whose file does not exist yet is known by its id all the same, and refuses with `not-implemented`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from ..errors import BackendError
from .base import Backend, BackendId, Refusal


@dataclass(frozen=True, slots=True)
class EnginePath:
    """Where an engine backend lives.

    module: relative to this package. class_name: the class in it that fulfils `base.Backend`.
    requirement: what pip needs to install its library; empty when there is no backend file to use it.
    """

    id: BackendId
    module: str
    class_name: str
    requirement: str = ""

    @property
    def hint(self) -> str:
        """The install line as a user types it; quoted, because `>` redirects in every shell."""
        return f'pip install "{self.requirement}"' if self.requirement else ""


ENGINE_PATHS: tuple[EnginePath, ...] = (
    EnginePath("tensorrt", ".tensorrt", "TensorRTBackend"),
    EnginePath("openvino", ".openvino", "OpenVINOBackend", "openvino>=2025.0"),
    EnginePath("directml", ".directml", "DirectMLBackend"),
)
"""Every backend that runs engines, in the order of `BACKEND_IDS`. To add one: its file, and its line here."""

ENGINE_IDS: tuple[BackendId, ...] = tuple(path.id for path in ENGINE_PATHS)


def engine_path(backend: BackendId) -> EnginePath:
    """The line of `ENGINE_PATHS` for `backend`. Raises BackendError for `cuda` and for unknown names."""
    for path in ENGINE_PATHS:
        if path.id == backend:
            return path
    raise BackendError(
        "no engine backend has this name",
        got=backend,
        allowed=", ".join(ENGINE_IDS),
        next_step="cuda is ComfyUI's own PyTorch path and has no engine" if backend == "cuda" else None,
    )


def implemented(backend: BackendId) -> bool:
    """Whether this version has the file of `backend`. Looks it up without importing it."""
    return find_spec(engine_path(backend).module, __package__) is not None


def not_implemented(backend: BackendId) -> Refusal:
    """Why a backend without a file cannot serve anything."""
    return Refusal(
        "not-implemented",
        f"backend {backend}",
        "not in this version",
        "a version that has it",
        "pick another backend or auto",
    )


def create(backend: BackendId) -> Backend:
    """A new instance of the backend `backend`. Its library is not imported by this.

    Raises BackendError when there is no such engine backend, or none in this version.
    """
    path = engine_path(backend)
    if not implemented(backend):
        refusal = not_implemented(backend)
        available = ", ".join(name for name in ENGINE_IDS if implemented(name)) or "none"
        raise BackendError(
            f"{refusal.subject} is {refusal.actual}", got=backend, allowed=available, next_step=refusal.hint
        )
    module = import_module(path.module, __package__)
    return cast(Backend, getattr(module, path.class_name)())
