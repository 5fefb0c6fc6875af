"""What a real server hands to ComfyUI's frontend: nodes, script, translations, help pages, examples, report."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kitchen_accel.nodes import NODE_CLASS_MAPPINGS
from kitchen_accel.tools.comfy_server import ComfyServer

ROOT = Path(__file__).resolve().parents[2]
SD15 = "tiny_sd15.ckpt"

FOLDER = "kitchen-accel"
"""aiohttp 3.10 and newer serves no file of a pack whose folder name has a space or a letter beyond ASCII."""

FRONTEND_ONLY = {"MarkdownNote"}
"""Node types the server does not know."""

EXAMPLES = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))


@pytest.fixture(scope="module")
def plain(make_server: Callable[..., ComfyServer]) -> ComfyServer:
    """A running server with the pack in a folder named as `git clone` and ComfyUI's registry name it."""
    server = make_server("frontend", pack_name=FOLDER)
    server.start()
    return server


def fetch(server: ComfyServer, path: str) -> bytes:
    """The file at `path`, whatever its type."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + urllib.parse.quote(path), timeout=60) as answer:
        content: bytes = answer.read()
        return content


def texts(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


def test_the_server_knows_the_nodes_as_they_are_written(plain: ComfyServer) -> None:
    known = plain.request("/object_info")
    english = texts("en")
    assert {name for name, node in known.items() if node["category"] == "kitchen"} == NODE_CLASS_MAPPINGS.keys()
    for name in NODE_CLASS_MAPPINGS:
        node = known[name]
        assert node["python_module"] == f"custom_nodes.{FOLDER}"
        assert node["display_name"] == english[name]["display_name"]
        assert node["description"] == english[name]["description"]
        given = {**node["input"]["required"], **node["input"].get("optional", {})}
        tooltips = {key: entry["tooltip"] for key, entry in english[name]["inputs"].items()}
        assert {key: spec[1]["tooltip"] for key, spec in given.items()} == tooltips
        assert node["output_name"] == [entry["name"] for entry in english[name]["outputs"].values()]
    assert SD15 in known["KitchenCheckpointLoader"]["input"]["required"]["ckpt_name"][0]
    assert known["KitchenReport"]["output_node"] is True


def test_the_weight_dtypes_are_those_of_comfyuis_own_loader(plain: ComfyServer) -> None:
    def choices(node: str) -> list[str]:
        kind, *options = plain.request(f"/object_info/{node}")[node]["input"]["required"]["weight_dtype"]
        # newer versions of ComfyUI write a choice as ("COMBO", {"options": [...]})
        found: list[str] = kind if isinstance(kind, list) else options[0]["options"]
        return found

    assert choices("KitchenDiffusionModelLoader") == choices("UNETLoader")


def test_the_script_is_listed_and_served(plain: ComfyServer) -> None:
    path = f"/extensions/{FOLDER}/kitchen.js"
    listed = [urllib.parse.unquote(name) for name in plain.request("/extensions")]
    assert [name for name in listed if FOLDER in name] == [path]
    assert fetch(plain, path) == (ROOT / "web" / "kitchen.js").read_bytes()


def test_translations_are_served_whole(plain: ComfyServer) -> None:
    for prefix in ("", "/api"):
        served = plain.request(f"{prefix}/i18n")
        for language in ("en", "zh"):
            assert {name: served[language]["nodeDefs"][name] for name in NODE_CLASS_MAPPINGS} == texts(language)
            assert served[language]["nodeCategories"]["kitchen"]


@pytest.mark.parametrize("node_id", list(NODE_CLASS_MAPPINGS))
def test_help_is_found_where_the_frontend_looks(plain: ComfyServer, node_id: str) -> None:
    docs = f"/extensions/{FOLDER}/docs/{node_id}"
    assert fetch(plain, f"{docs}/zh.md").startswith(b"# " + texts("zh")[node_id]["display_name"].encode())
    # a language without a page of its own falls back to the English one
    with pytest.raises(urllib.error.HTTPError, match="404") as absent:
        fetch(plain, f"{docs}/en.md")
    absent.value.close()
    assert fetch(plain, f"{docs}.md").startswith(f"# {texts('en')[node_id]['display_name']}".encode())


def test_examples_are_listed(plain: ComfyServer) -> None:
    assert sorted(plain.request("/workflow_templates")[FOLDER]) == EXAMPLES
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_opens_and_uses_only_nodes_this_comfyui_has(plain: ComfyServer, name: str) -> None:
    base = f"/api/workflow_templates/{FOLDER}/{name}"
    workflow = json.loads(fetch(plain, f"{base}.json"))
    assert fetch(plain, f"{base}.jpg").startswith(b"\xff\xd8\xff")
    known = plain.request("/object_info")
    for node in workflow["nodes"]:
        if node["type"] in FRONTEND_ONLY:
            continue
        spec = known[node["type"]]["input"]
        inputs = {**spec["required"], **spec.get("optional", {})}
        assert {socket["name"] for socket in node["inputs"]} <= inputs.keys(), node["type"]
        outputs = [socket["type"] for socket in node["outputs"]]
        # newer versions add outputs at the end
        assert outputs == known[node["type"]]["output"][: len(outputs)], node["type"]


def test_the_report_comes_in_the_form_the_script_reads(plain: ComfyServer) -> None:
    workflow = {
        "loader": {"class_type": "KitchenCheckpointLoader", "inputs": {"ckpt_name": SD15, "backend": "cuda"}},
        "report": {"class_type": "KitchenReport", "inputs": {"model": ["loader", 0]}},
    }
    output = plain.run(workflow)["outputs"]["report"]
    (text,), (report,) = output["text"], [json.loads(item) for item in output["kitchen"]]
    assert report["accelerated"] is True
    for key in ("config", "cache", "journal"):
        # the script shortens these in the saved workflow
        assert report[key] in text
        assert Path(report[key]).is_relative_to(plain.base)
