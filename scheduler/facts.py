"""The only hardware and library probe. Everything else takes its result as a value.

`probe` never raises: what cannot be found out is empty, zero or a Refusal, and the reason goes to the debug log.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import backends
from ..backends.base import BackendId, DeviceFacts, GpuFacts, LibraryFacts, Refusal

_log = logging.getLogger("kitchen_accel.facts")


def probe(enabled: tuple[BackendId, ...]) -> DeviceFacts:
    """Look at this machine and at the libraries of the `enabled` engine backends.

    Imports torch and those libraries, so call it once and not at import. It starts the CUDA driver only when torch
    was built for a GPU. `cuda` in `enabled` is skipped: PyTorch's path has no library of its own.
    """
    torch = _import_torch()
    return DeviceFacts(
        platform=_platform(),
        python=platform.python_version(),
        torch_version="" if torch is None else str(torch.__version__),
        cpu_name=_cpu_name(),
        memory_bytes=_memory_bytes(),
        physical_cores=_physical_cores(),
        gpus=() if torch is None else (*_cuda_gpus(torch), *_xpu_gpus(torch)),
        libraries=tuple((name, _library(name)) for name in backends.ENGINE_IDS if name in enabled),
    )


def _platform() -> str:
    """`"linux"`, `"windows"`, `"darwin"`; any other system by Python's own name, which no backend lists."""
    return {"win32": "windows", "cygwin": "windows"}.get(sys.platform, sys.platform)


def _import_torch() -> Any:
    try:
        import torch
    except Exception as error:  # a broken install raises OSError or worse, not only ImportError
        _log.debug("torch cannot be imported: %s", error)
        return None
    return torch


def cpu_name_of_cpuinfo(text: str) -> str:
    """The CPU's name in the text of Linux's `/proc/cpuinfo`; empty when it has none (most ARM kernels)."""
    for line in text.splitlines():
        field, _, value = line.partition(":")
        # "Model" is the board on ARM, "cpu model" MIPS, "cpu" POWER
        if field.strip() in ("model name", "cpu model", "cpu") and value.strip():
            return value.strip()
    return ""


def _cpu_name() -> str:
    name = ""
    try:
        if sys.platform == "win32":
            import winreg

            # platform.processor() tells family and stepping on Windows, not the name people know
            key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, key) as opened:
                name = str(winreg.QueryValueEx(opened, "ProcessorNameString")[0]).strip()
        elif sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        else:
            name = cpu_name_of_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("the CPU's name cannot be read: %s", error)
    return name or platform.processor() or platform.machine() or "unknown"


def _memory_bytes() -> int:
    try:
        import psutil

        return int(psutil.virtual_memory().total)
    except Exception as error:
        _log.debug("the size of the memory cannot be read: %s", error)
        return 0


def _physical_cores() -> int:
    try:
        import psutil

        cores = psutil.cpu_count(logical=False)
    except Exception as error:
        _log.debug("the physical cores cannot be counted: %s", error)
        cores = None
    # psutil returns None in containers that hide the topology; logical cores are then the best figure there is
    return cores or os.cpu_count() or 1


def _cuda_gpus(torch: Any) -> tuple[GpuFacts, ...]:
    """GPUs of `torch.cuda`, position = torch's index; a card that cannot be asked keeps its place."""
    if torch.version.cuda is None and torch.version.hip is None:
        return ()
    kind = "nvidia" if torch.version.cuda is not None else "amd"
    try:
        count = int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception as error:
        _log.debug("torch.cuda cannot be asked: %s", error)
        return ()
    found: list[GpuFacts] = []
    for index in range(count):
        try:
            card = torch.cuda.get_device_properties(index)
            # ROCm fills major and minor with gfx numbers, which are not compute capabilities
            capability = (int(card.major), int(card.minor)) if kind == "nvidia" else (0, 0)
            found.append(GpuFacts(str(card.name), kind, capability, int(card.total_memory)))
        except Exception as error:
            _log.debug("cuda:%d cannot be asked: %s", index, error)
            found.append(GpuFacts(f"cuda:{index} (cannot be read: {error})", kind))
    return tuple(found)


def _xpu_gpus(torch: Any) -> tuple[GpuFacts, ...]:
    """Intel GPUs of `torch.xpu`; empty on a torch without it."""
    try:
        if not hasattr(torch, "xpu") or not torch.xpu.is_available():
            return ()
        cards = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
        return tuple(GpuFacts(str(c.name), "intel", memory_bytes=int(c.total_memory)) for c in cards)
    except Exception as error:
        _log.debug("torch.xpu cannot be asked: %s", error)
        return ()


def _library(backend: BackendId) -> LibraryFacts | Refusal:
    if not backends.implemented(backend):
        return backends.not_implemented(backend)
    try:
        return backends.create(backend).probe()
    except Exception as error:  # a library that breaks in its own way must not stop the prompt
        _log.debug("the library of %s cannot be probed", backend, exc_info=True)
        hint = backends.engine_path(backend).hint
        return Refusal(
            "missing-library",
            f"the library of {backend}",
            f"{type(error).__name__}: {error}",
            "a library that can be imported",
            hint,
        )
