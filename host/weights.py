"""What a model's weights are: digest, patch fingerprint, what forbids an engine, and a safe copy for a build.

ComfyUI bakes LoRA and other patches into the live parameters when it loads a model and keeps the originals
in `patcher.backup`; hook LoRA is swapped in during sampling and keeps its originals in `hook_backup`.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..backends.base import Refusal
from ..errors import BuildError

NETWORK_PREFIX = "diffusion_model."
_KNOWN_CODE = frozenset({"comfy", "torch"})
"""Top-level packages whose code a network may run: what `code_digest` and the library versions in a key cover."""

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Storage dtypes a build can take over, with their names in the safetensors format."""
_KEPT_FINGERPRINTS = 64


class _Unhashable(Exception):
    """A patch holds something whose identity cannot be established."""


def dtype_name(dtype: Any) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Any) -> memoryview:
    """The tensor's raw bytes, on the CPU; a view where the tensor is already contiguous there."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _feed(digest: Any, value: Any) -> None:
    """Feed a patch value to `digest` so that equal values give equal digests in every process."""
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"T{dtype_name(value.dtype)}{tuple(value.shape)}".encode())
        digest.update(_bytes_of(value))
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, types.BuiltinFunctionType):
        digest.update(f"F{value.__module__}.{value.__qualname__};".encode())
    elif isinstance(value, types.FunctionType):
        # a closure can hold anything; defaults and code are read, since lambdas of one function share their name
        if value.__closure__:
            raise _Unhashable(f"function {value.__qualname__} with captured variables")
        digest.update(f"F{value.__module__}.{value.__qualname__};".encode())
        _feed(digest, [value.__defaults__, value.__kwdefaults__, value.__code__])
    elif isinstance(value, types.CodeType):
        digest.update(b"C" + value.co_code + repr(value.co_names).encode())
        _feed(digest, value.co_consts)
    elif isinstance(value, frozenset):  # this and the next: what else a function's constants can be
        _feed(digest, sorted(map(repr, value)))
    elif isinstance(value, (bytes, complex)) or value is Ellipsis:
        digest.update(f"{type(value).__name__}:{value!r};".encode())
    elif hasattr(value, "weights") and hasattr(value, "calculate_weight"):
        digest.update(f"A{type(value).__module__}.{type(value).__qualname__};".encode())
        _feed(digest, value.weights)
    else:
        raise _Unhashable(f"{type(value).__module__}.{type(value).__qualname__}")


class Fingerprints:
    """Fingerprints of weight patches, remembered by ComfyUI's `patches_uuid` (new with every change)."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, tuple[str, tuple[Refusal, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, patcher: Any) -> tuple[str, tuple[Refusal, ...]]:
        """(sha256 of the patches on the network, or empty without any; reasons why it cannot be told)."""
        if not patcher.patches:
            return "", ()
        with self._lock:
            found = self._known.get(patcher.patches_uuid)
            if found is None:
                found = self._compute(patcher.patches)
                self._known[patcher.patches_uuid] = found
                while len(self._known) > _KEPT_FINGERPRINTS:
                    self._known.popitem(last=False)
            return found

    @staticmethod
    def _compute(patches: dict[str, list[Any]]) -> tuple[str, tuple[Refusal, ...]]:
        digest = hashlib.sha256()
        count = 0
        for key in sorted(k for k in patches if isinstance(k, str) and k.startswith(NETWORK_PREFIX)):
            digest.update(key.encode())
            count += 1
            try:
                _feed(digest, [tuple(entry) for entry in patches[key]])
            except Exception as odd:  # packs put anything into a patch
                refusal = Refusal(
                    "patch-kind", f"weight patch on {key}", str(odd), "a LoRA or difference of plain tensors"
                )
                return "", (refusal,)
        return (digest.hexdigest() if count else ""), ()


def base_weights(patcher: Any) -> Iterator[tuple[str, Any]]:
    """(name without prefix, unpatched tensor) of every weight of the network, sorted by name.

    Safe beside a thread that loads or unloads the model: parameters are replaced, not written, and the
    originals are looked up both before and after the live ones are listed.
    """
    before, hooked = dict(patcher.backup), dict(patcher.hook_backup)
    live = sorted(patcher.model.diffusion_model.state_dict().items())
    originals = {**before, **patcher.backup}
    for name, tensor in live:
        key = NETWORK_PREFIX + name
        if key in originals:
            yield name, originals[key].weight
        elif key in hooked:
            yield name, hooked[key][0]
        else:
            yield name, tensor


def weights_digest(patcher: Any, threads: int) -> str:
    """sha256 over the names and sha256s of the unpatched weights. Reads all of them: seconds per GiB.

    Raises BuildError when hook patches, which are written into the live parameters, were active meanwhile.
    """

    def one(item: tuple[str, Any]) -> str:
        name, tensor = item
        inner = hashlib.sha256(_bytes_of(tensor)).hexdigest()
        return f"{name}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|{inner}\n"

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        lines = list(pool.map(one, base_weights(patcher)))
    if patcher.hook_backup:
        raise BuildError("hook patches changed the weights while they were read")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class DigestWorker:
    """Digests of models in memory, computed once per model on a background thread."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: weakref.WeakKeyDictionary[Any, Future[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, patcher: Any, recall: Callable[[], str | None], remember: Callable[[str], None]) -> Future[str]:
        """The digest of `patcher`'s model as a future; `recall` may know it from an earlier process."""
        with self._lock:
            future = self._known.get(patcher.model)
            if future is not None and not (future.done() and future.exception()):
                return future
            known = recall()
            if known is not None:
                future = Future()
                future.set_result(known)
            else:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kitchen_accel-digest")
                future = self._pool.submit(self._compute, weakref.ref(patcher), remember)
            self._known[patcher.model] = future
            return future

    def _compute(self, ref: weakref.ref[Any], remember: Callable[[str], None]) -> str:
        patcher = ref()
        if patcher is None:
            raise BuildError("the model was freed before its weights were read")
        try:
            digest = weights_digest(patcher, self._threads)
        except Exception as error:
            # the future keeps the error, and the error's frames would keep the model
            patcher = None
            raise error.with_traceback(None) from None
        remember(digest)
        return digest


def storage_refusals(patcher: Any) -> tuple[Refusal, ...]:
    """Weights that are not plain tensors of a known dtype (GGUF, quantised layouts) cannot enter a build."""
    import torch

    for name, tensor in patcher.model.diffusion_model.state_dict().items():
        data = getattr(tensor, "data", tensor)
        if type(data) is not torch.Tensor and type(data) is not torch.nn.Parameter:
            return (Refusal("weights-format", f"weight {name}", type(data).__name__, "a plain tensor"),)
        if data.is_floating_point() and dtype_name(data.dtype) not in _DTYPES:
            return (Refusal("weights-format", f"weight {name}", dtype_name(data.dtype), " or ".join(sorted(_DTYPES))),)
        if not data.is_floating_point():
            return (Refusal("weights-format", f"weight {name}", dtype_name(data.dtype), "floating point weights"),)
    return ()


def network_refusals(patcher: Any) -> tuple[Refusal, ...]:
    """Everything that changes what the network computes for a whole run and that no engine honours."""
    found: list[Refusal] = []
    if patcher.injections:
        names = ", ".join(sorted(map(str, patcher.injections)))
        found.append(Refusal("injection", "injections into the network", names, "none"))
    if getattr(patcher, "weight_wrapper_patches", None):
        found.append(Refusal("weight-wrapper", "weight wrapper patches", "present", "none"))
    for key in sorted(map(str, patcher.object_patches)):
        if key.startswith("diffusion_model") or key == "manual_cast_dtype":
            found.append(Refusal("object-patch", f"object patch {key}", "present", "none inside the network"))
    network, foreign = patcher.model.diffusion_model, ""
    for name, module in network.named_modules():
        where = name or "the network"
        own, cls = module.__dict__, type(module)
        replaced = [k for k, v in own.items() if callable(v) and callable(getattr(cls, k, None))]
        if replaced:
            found.append(Refusal("monkeypatch", f"{where}.{min(replaced)}", "replaced", "ComfyUI's own method"))
        foreign = foreign or _foreign_code(cls)
        if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
            found.append(Refusal("forward-hook", f"forward hooks on {where}", "present", "none"))
        if len(found) > 8:
            break
    if foreign:
        found.append(Refusal("foreign-module", "code of the network", foreign, "ComfyUI's and PyTorch's own"))
    return tuple(found)


def _foreign_code(cls: type) -> str:
    """The name of `cls`, or of the `forward` somebody gave it, when it is code that no engine's key covers."""
    for code in (cls, getattr(cls, "forward", cls)):
        module = getattr(code, "__module__", None) or ""
        if module.partition(".")[0] not in _KNOWN_CODE:
            return f"{module}.{getattr(code, '__qualname__', type(code).__name__)}"
    return ""


def is_resident(patcher: Any) -> bool:
    """True when the live parameters are exactly this patcher's patched weights, all of them."""
    model = patcher.model
    return (
        getattr(model, "current_weight_patches_uuid", None) == patcher.patches_uuid
        and not getattr(model, "lowvram_patch_counter", 0)
        and patcher.current_hooks is None
    )


def write_snapshot(patcher: Any, path: Path, cancelled: Callable[[], bool]) -> None:
    """Write the network's effective weights to `path` in the safetensors format, one tensor at a time.

    The library's own writer takes every tensor as bytes at once, which would double the model in memory.
    Without patches the originals are written whatever is loaded; with patches they must be live.

    Raises BuildError when the weights are not there, change meanwhile, or the build is cancelled;
    OSError when the file cannot be written.
    """
    patched = any(isinstance(k, str) and k.startswith(NETWORK_PREFIX) for k in patcher.patches)
    if patched and not is_resident(patcher):
        raise BuildError("the patched weights are no longer loaded", next_step="run the prompt again")
    live = patcher.model.diffusion_model.state_dict()
    items = sorted(live.items()) if patched else list(base_weights(patcher))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in items:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for _, tensor in items:
            if cancelled():
                raise BuildError("cancelled while the weights were copied")
            out.write(_bytes_of(tensor))
    if patched and not is_resident(patcher):
        raise BuildError("the weights changed while they were copied", next_step="run the prompt again")


def code_digest(network: Any) -> str:
    """sha256 of the ComfyUI source the network runs: its modules' files and the functions they share."""
    names = {type(m).__module__ for m in network.modules() if type(m).__module__.split(".")[0] == "comfy"}
    names |= {"comfy.ldm.modules.attention", "comfy.ldm.modules.diffusionmodules.util", "comfy.ops"}
    digest = hashlib.sha256()
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            digest.update(name.encode())
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()
