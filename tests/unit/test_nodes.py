"""The nodes as users see them: inputs, titles, tooltips and help in both languages; and an import that does nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kitchen_accel
import pytest
from kitchen_accel.backends.base import BACKEND_IDS
from kitchen_accel.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

ROOT = Path(__file__).resolve().parents[2]
NODE_IDS = ("KitchenCheckpointLoader", "KitchenDiffusionModelLoader", "KitchenAccelerate", "KitchenReport")
MODEL_FILES = {"checkpoints": ["one.safetensors", "two.ckpt"], "diffusion_models": ["net.safetensors"]}
CJK = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(autouse=True)
def model_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's `folder_paths`, which is there only inside ComfyUI; the e2e tests use the real one."""
    module = ModuleType("folder_paths")
    module.get_filename_list = MODEL_FILES.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "folder_paths", module)


def inputs_of(node_id: str) -> dict[str, Any]:
    """Name -> input specification, required and optional."""
    types = NODE_CLASS_MAPPINGS[node_id].INPUT_TYPES()  # type: ignore[attr-defined]
    assert types.keys() <= {"required", "optional"}
    return {**types["required"], **types.get("optional", {})}


def outputs_of(node_id: str) -> list[tuple[str, str]]:
    """Name and tooltip of each output."""
    node: Any = NODE_CLASS_MAPPINGS[node_id]
    names = getattr(node, "RETURN_NAMES", node.RETURN_TYPES)
    return list(zip(names, node.OUTPUT_TOOLTIPS, strict=True))


def texts(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    return [value]


def test_the_pack_offers_the_four_nodes_and_its_web_folder() -> None:
    assert tuple(NODE_CLASS_MAPPINGS) == NODE_IDS
    assert NODE_DISPLAY_NAME_MAPPINGS.keys() == NODE_CLASS_MAPPINGS.keys()
    assert kitchen_accel.NODE_CLASS_MAPPINGS is NODE_CLASS_MAPPINGS
    assert (ROOT / kitchen_accel.WEB_DIRECTORY / "kitchen.js").is_file()


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_a_node_is_one_comfyui_can_call(node_id: str) -> None:
    node: Any = NODE_CLASS_MAPPINGS[node_id]
    assert node.CATEGORY == "kitchen"
    assert node.DESCRIPTION
    assert callable(getattr(node, node.FUNCTION))
    assert getattr(node, "OUTPUT_NODE", False) == (node_id == "KitchenReport")
    assert all(tooltip for _, tooltip in outputs_of(node_id))


@pytest.mark.parametrize("node_id", NODE_IDS)
def test_every_input_tells_its_default_and_its_unit(node_id: str) -> None:
    for name, (kind, options) in inputs_of(node_id).items():
        tooltip = options["tooltip"]
        assert re.search(r"\b(Default: |No default\b)", tooltip), (name, tooltip)
        assert re.search(r"\b(Unit: |[Nn]o unit\b)", tooltip), (name, tooltip)
        if "default" in options:
            assert f"Default: {options['default']}" in tooltip, (name, tooltip)
            assert options["default"] in kind


def test_the_backend_widget_lists_every_backend_and_auto() -> None:
    for node_id in NODE_IDS[:3]:
        values, options = inputs_of(node_id)["backend"]
        assert values == ["auto", *BACKEND_IDS]
        assert options["default"] == "auto"


def test_the_loaders_list_the_files_comfyui_finds() -> None:
    assert inputs_of("KitchenCheckpointLoader")["ckpt_name"][0] == MODEL_FILES["checkpoints"]
    assert inputs_of("KitchenDiffusionModelLoader")["unet_name"][0] == MODEL_FILES["diffusion_models"]


def test_english_texts_are_those_of_the_nodes() -> None:
    expected = {
        node_id: {
            "display_name": NODE_DISPLAY_NAME_MAPPINGS[node_id],
            "description": NODE_CLASS_MAPPINGS[node_id].DESCRIPTION,  # type: ignore[attr-defined]
            "inputs": {name: {"name": name, "tooltip": s[1]["tooltip"]} for name, s in inputs_of(node_id).items()},
            "outputs": {str(i): {"name": n, "tooltip": t} for i, (n, t) in enumerate(outputs_of(node_id))},
        }
        for node_id in NODE_IDS
    }
    assert texts("en") == expected


def test_chinese_texts_cover_the_same_inputs_and_outputs() -> None:
    english, chinese = texts("en"), texts("zh")
    assert chinese.keys() == english.keys()
    for node_id, node in chinese.items():
        assert node.keys() == english[node_id].keys()
        for part in ("inputs", "outputs"):
            assert node[part].keys() == english[node_id][part].keys(), (node_id, part)
            for entry in node[part].values():
                assert entry.keys() == {"name", "tooltip"}
                assert CJK.search(entry["tooltip"]) or entry["tooltip"].startswith("VAE"), entry
        assert CJK.search(node["display_name"])
        assert CJK.search(node["description"])
        for name, entry in node["inputs"].items():
            assert "默认" in entry["tooltip"], (node_id, name)
            assert "单位" in entry["tooltip"], (node_id, name)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_hold_nothing_that_the_frontends_message_format_interprets(language: str) -> None:
    for file in sorted((ROOT / "locales" / language).glob("*.json")):
        for text in strings(json.loads(file.read_text(encoding="utf-8"))):
            assert text
            assert not set(text) & set("{}@|%"), text


@pytest.mark.parametrize("node_id", NODE_IDS)
@pytest.mark.parametrize("page", ["{}.md", "{}/zh.md"])
def test_a_help_page_names_every_input_and_output(node_id: str, page: str) -> None:
    text = (ROOT / "web" / "docs" / page.format(node_id)).read_text(encoding="utf-8")
    language = "zh" if page.endswith("zh.md") else "en"
    assert text.startswith(f"# {texts(language)[node_id]['display_name']}\n")
    for name in [*inputs_of(node_id), *(name for name, _ in outputs_of(node_id))]:
        assert f"`{name}`" in text, name
    if "backend" in inputs_of(node_id):
        for value in ("auto", *BACKEND_IDS):
            assert f"| `{value}` |" in text, value


def test_there_is_no_help_page_without_a_node() -> None:
    pages = {path.relative_to(ROOT / "web" / "docs").as_posix() for path in (ROOT / "web" / "docs").rglob("*.md")}
    assert pages == {page.format(node_id) for node_id in NODE_IDS for page in ("{}.md", "{}/zh.md")}


def test_the_frontend_file_knows_the_nodes() -> None:
    script = (ROOT / "web" / "kitchen.js").read_text(encoding="utf-8")
    pattern = re.search(r"OUR_NODE = /(.+)/;", script)
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], node_id) for node_id in NODE_IDS)


def test_any_type_may_be_linked_to_after_but_only_a_model_to_model() -> None:
    validate = NODE_CLASS_MAPPINGS["KitchenReport"].VALIDATE_INPUTS  # type: ignore[attr-defined]
    assert validate({"model": "MODEL", "after": "LATENT"}) is True
    assert validate({"model": "LATENT"}) is not True


@pytest.mark.parametrize("file", sorted((ROOT / "example_workflows").glob("*.json")), ids=lambda file: file.stem)
def test_an_example_uses_inputs_and_values_the_nodes_have(file: Path) -> None:
    workflow = json.loads(file.read_text(encoding="utf-8"))
    assert file.with_suffix(".jpg").stat().st_size < 100_000
    links = {link[0]: link for link in workflow["links"]}
    ours = [node for node in workflow["nodes"] if node["type"].startswith("Kitchen")]
    assert {"KitchenReport"} < {node["type"] for node in ours} <= set(NODE_IDS)
    for node in ours:
        known = inputs_of(node["type"])
        # lists are widgets, everything else is a socket
        sockets = [name for name, spec in known.items() if isinstance(spec[0], str)]
        assert [socket["name"] for socket in node["inputs"]] == sockets
        assert all(socket["link"] in links for socket in node["inputs"])
        assert [output["name"] for output in node["outputs"]] == [name for name, _ in outputs_of(node["type"])]
        assert len(node["widgets_values"]) == len(known) - len(sockets)
        if "backend" in known:
            assert node["widgets_values"][-1] == "auto"
    report = next(node for node in ours if node["type"] == "KitchenReport")
    after = next(socket for socket in report["inputs"] if socket["name"] == "after")
    sampler = next(node for node in workflow["nodes"] if node["type"] == "KSampler")
    assert links[after["link"]][1] == sampler["id"]


IMPORT_ALONE = """
import sys

root, package = sys.argv[1:]
ABSENT = {"torch", "openvino", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "comfy", "comfy_execution",
          "folder_paths", "server", "execution"}
events = []


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ImportError(f"{name} is absent in this test")
        return None


def watch(event, args):
    if event == "open":
        name, mode, flags = args
        if isinstance(flags, int) and flags & (1 | 2 | 64 | 512):  # write, read and write, create, truncate
            events.append((event, str(name)))
    elif event.split(".")[0] in ("socket", "subprocess", "shutil", "sqlite3") or event in (
        "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.mkdir", "os.rename", "os.remove", "os.putenv",
        "ctypes.dlopen",
    ):
        events.append((event, str(args[0]) if args else ""))


import importlib.util
import json
import logging
import warnings

spec = importlib.util.spec_from_file_location(package, root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules[package] = module
sys.meta_path.insert(0, Absent())


def hooks():
    return (
        list(sys.meta_path), list(sys.path_hooks), list(sys.path), sys.excepthook, sys.displayhook, sys.stdout,
        sys.stderr, list(warnings.filters), warnings.showwarning, list(logging.root.handlers), logging.root.level,
        logging.getLoggerClass(), __import__, print, open,
    )


before = hooks()
sys.addaudithook(watch)
spec.loader.exec_module(module)
changed = [str(now) for now, was in zip(hooks(), before) if now != was]
heavy = sorted(name for name in sys.modules if name.split(".")[0] in ABSENT)
found = {"nodes": sorted(module.NODE_CLASS_MAPPINGS), "heavy": heavy, "changed": changed, "events": events}
print(json.dumps(found))
"""


# the second is what ComfyUI names the module of a pack in such a folder: its path, the dots replaced
@pytest.mark.parametrize("package", ["kitchen_accel", "/custom_nodes/Kitchen Accel-v1_x_0 ünïcode"])
def test_importing_needs_no_optional_library_and_does_nothing(package: str, tmp_path: Path) -> None:
    script = tmp_path / "import_alone.py"
    script.write_text(IMPORT_ALONE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-B", "-X", "utf8", "-W", "error", str(script), str(ROOT), package],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"nodes": sorted(NODE_IDS), "heavy": [], "changed": [], "events": []}
    assert done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["import_alone.py"]
