"""One copy of the package, under its pip name, whatever the checkout's folder is called."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _load_package() -> None:
    if "kitchen_accel" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "kitchen_accel", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load the package from {ROOT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kitchen_accel"] = module
    spec.loader.exec_module(module)
    # pytest would import the root __init__.py a second time under the folder's name
    sys.modules.setdefault(ROOT.name, module)


_load_package()
