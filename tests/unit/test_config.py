"""comfy_kitchen.yaml: every way to get it wrong has its line, its allowed values and its next step."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest
import yaml
from kitchen_accel import config, strict_yaml
from kitchen_accel.backends.base import BACKEND_IDS, PRECISIONS
from kitchen_accel.config import Settings, SettingsFile, load_settings, resolve_cache_folder, write_default
from kitchen_accel.errors import ConfigError

PACKAGED = Path(config.__file__).with_name(config.CONFIG_NAME)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "comfy_kitchen.yaml"


def load(file: Path, text: str | bytes) -> Settings:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_settings(file)


def fault(file: Path, text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file, text)
    assert str(caught.value).startswith(str(file))
    return caught.value


# --- the packaged file ------------------------------------------------------------------------------------------


def test_packaged_file_is_exactly_the_defaults() -> None:
    assert load_settings(PACKAGED) == Settings()


def test_packaged_file_holds_every_key_and_only_those() -> None:
    raw = yaml.safe_load(PACKAGED.read_text(encoding="utf-8"))
    written = [
        (name, inner) if isinstance(value, dict) else (name,)
        for name, value in raw.items()
        for inner in (value if isinstance(value, dict) else [None])
    ]
    assert written == list(strict_yaml.all_keys(Settings))
    assert ("backend", "default") in written


def test_every_key_of_the_packaged_file_is_explained() -> None:
    lines = PACKAGED.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if re.match(r" *\w+: *\S", line):  # a key with a value, not a section
            comments = itertools.takewhile(lambda text: text.lstrip().startswith("#"), reversed(lines[:number]))
            comment = " ".join(comments)
            assert "Allowed:" in comment, line
            assert "Default:" in comment, line


def test_every_option_is_named_in_the_packaged_comments() -> None:
    text = PACKAGED.read_text(encoding="utf-8")
    for path in strict_yaml.all_keys(Settings):
        for option in strict_yaml._options(strict_yaml._field(path, Settings)):
            assert re.search(rf"#.*\b{option}\b", text), (path, option)


def test_choices_follow_the_house_values() -> None:
    assert get_args(config.BackendChoice) == ("auto", *BACKEND_IDS)
    assert set(get_args(config.PrecisionChoice)) == {"auto", "fast", *PRECISIONS}
    for precision in PRECISIONS:
        assert Settings().parity.threshold(precision) == getattr(Settings().parity, precision)


def test_settings_are_frozen_and_hashable() -> None:
    settings = Settings()
    with pytest.raises(pydantic.ValidationError):
        settings.precision = "fp16"
    with pytest.raises(pydantic.ValidationError):
        settings.backend.default = "cuda"
    assert len({settings, Settings()}) == 1


# --- good files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# only a comment\n",
        "---\n",
        "null\n",
        "{}",
        "backend:\n",
        "backend: ~\nbuilds: null\ncache: {}\nparity:\n  # fp32: 1\nopenvino:\njournal:\n",
        "\ufeffprecision: auto\n",
        "precision: auto\r\nbackend:\r\n  default: auto\r\n",
    ],
)
def test_empty_files_and_sections_are_the_defaults(file: Path, text: str) -> None:
    assert load(file, text) == Settings()


OTHER_VALUES: dict[tuple[str, ...], tuple[str, object]] = {
    ("backend", "default"): ("openvino", "openvino"),
    ("backend", "fallback"): ("none", "none"),
    ("backend", "enabled"): ("[openvino, cuda]", ("cuda", "openvino")),
    ("precision",): ("fast", "fast"),
    ("runtime_cache",): ("'D:\\engines'", "D:\\engines"),
    ("build",): ("never", "never"),
    ("builds", "timeout_min"): ("0.5", 0.5),
    ("builds", "patched_after_runs"): ("0", 0),
    ("builds", "memory_ceiling_gb"): ("12", 12.0),
    ("cache", "max_gb"): ("7.5", 7.5),
    ("parity", "fp32"): ("70", 70.0),
    ("parity", "fp16"): ("41.5", 41.5),
    ("parity", "bf16"): ("+2.5e+1", 25.0),
    ("openvino", "device"): ("GPU.1", "GPU.1"),
    ("openvino", "shapes"): ("static", "static"),
    ("openvino", "max_compiled"): ("16", 16),
    ("openvino", "threads"): ("2", 2),
    ("journal", "level"): ("debug", "debug"),
    ("journal", "max_mb"): ("0.1", 0.1),
    ("journal", "keep"): ("0", 0),
}


def test_table_of_other_values_is_complete() -> None:
    assert set(OTHER_VALUES) == set(strict_yaml.all_keys(Settings))


@pytest.mark.parametrize("path", OTHER_VALUES, ids=".".join)
def test_each_key_changes_exactly_its_own_field(file: Path, path: tuple[str, ...]) -> None:
    text, expected = OTHER_VALUES[path]
    line = f"{path[-1]}: {text}\n"
    settings = load(file, line if len(path) == 1 else f"{path[0]}:\n  {line}")
    want: dict[str, Any] = Settings().model_dump()
    if len(path) == 1:
        want[path[0]] = expected
    else:
        want[path[0]][path[1]] = expected
    assert settings.model_dump() == want
    assert settings != Settings()


@pytest.mark.parametrize("names", [c for n in range(5) for c in itertools.combinations(BACKEND_IDS, n)])
def test_enabled_always_holds_cuda_in_one_order(file: Path, names: tuple[str, ...]) -> None:
    expected = tuple(name for name in BACKEND_IDS if name == "cuda" or name in names)
    assert load(file, f"backend: {{enabled: [{', '.join(reversed(names))}]}}").backend.enabled == expected


@pytest.mark.parametrize("device", ["CPU", "GPU", "GPU.0", "GPU.12", "NPU"])
def test_devices(file: Path, device: str) -> None:
    assert load(file, f"openvino: {{device: {device}}}").openvino.device == device


@pytest.mark.parametrize("value", ["models/engines", "2024-01-01", "D:/发动机 cache", "~/x", "a'b"])
def test_cache_paths_stay_text(file: Path, value: str) -> None:
    assert load(file, f"runtime_cache: {value}\n").runtime_cache == value


# --- bad files ---------------------------------------------------------------------------------------------------

BAD: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("unknown-key", "\n\npresicion: fp16", 3, ("unknown key", "'presicion'", "precision", "runtime_cache")),
    ("unknown-key-case", "Precision: fp16", 1, ("unknown key", "write precision")),
    ("unknown-inner", "backend:\n  defualt: cuda", 2, ("in section 'backend'", "'defualt'", "write default")),
    ("unknown-elsewhere", "device: GPU", 1, ("'device'", "write device in section 'openvino'")),
    ("unknown-inner-root", "backend:\n  precision: fp16", 2, ("write precision at the left margin",)),
    ("unknown-nothing-near", "zzz: 1", 1, ("'zzz'", "remove the line")),
    ("dotted", "backend.default: cuda", 1, ("`backend:` and on the next line `  default: ...`",)),
    ("merge-key", "precision: auto\n<<: {precision: fp16}", 2, ("unknown key", "'<<'")),
    ("number-key", "1: 2", 1, ("unknown key", "'1'")),
    ("list-key", "? [a]\n: b", 1, ("unknown key",)),
    ("literal", "backend:\n  default: openvion", 2, ("'openvion'", "auto, cuda, tensorrt, openvino, directml")),
    ("literal-near", "backend:\n  default: openvion", 2, ("write openvino",)),
    ("literal-case", "precision: FP16", 1, ("'FP16'", "write fp16")),
    ("bool-for-none", "backend:\n  fallback: no", 2, ("got 'no'", "true or false", "write none")),
    ("bool-off", "backend: {fallback: off}", 1, ("write none", "allowed: cuda, none")),
    ("bool-for-word", "build: yes", 1, ("got 'yes'", "true or false", "background, blocking, never")),
    ("bool-for-text", "runtime_cache: on", 1, ('put it in quotes: "on"',)),
    ("bool-for-number", "cache:\n  max_gb: yes", 2, ("'yes'", "plain decimal number")),
    ("bool-for-int", "journal: {keep: true}", 1, ("'true'", "plain decimal number")),
    ("null-leaf", "precision:\nbuild: never", 1, ("'precision' has no value", "fp32", "remove the line")),
    ("null-for-none", "backend:\n  fallback: ~", 2, ("'backend.fallback' has no value", "write none")),
    ("int-for-word", "build: 3", 1, ("got 3", "background, blocking, never")),
    ("int-for-text", "runtime_cache: 3", 1, ('quotes: "3"',)),
    ("float-for-int", "openvino:\n  threads: 2.5", 2, ("got 2.5", "whole number")),
    ("unit", "cache: {max_gb: 10GB}", 1, ("'10GB'", "a number of GB above 0", "without quotes or unit")),
    ("quoted-number", "cache: {max_gb: '10'}", 1, ("'10'", "without quotes")),
    ("yaml11-exponent", "cache: {max_gb: 1e3}", 1, ("'1e3'", "plain decimal number")),
    ("inf", "cache: {max_gb: .inf}", 1, ("'.inf'", "plain")),
    ("nan", "parity: {fp32: .nan}", 1, ("'.nan'",)),
    ("overflow", "cache: {max_gb: 1.0e+999}", 1, ("above 0",)),
    ("endless-number", "cache: {max_gb: " + "9" * 5000 + "}", 1, ("...'", "plain")),
    ("sexagesimal", "builds: {timeout_min: 1:30}", 1, ("'1:30'", "colons")),
    ("octal", "builds: {patched_after_runs: 010}", 1, ("'010'", "leading zeros")),
    ("zero", "cache:\n\n  max_gb: 0", 3, ("got 0", "above 0")),
    ("negative", "builds: {timeout_min: -1}", 1, ("got -1", "minutes above 0")),
    ("negative-int", "openvino: {threads: -1}", 1, ("got -1", "0 or more")),
    ("too-many", "openvino: {max_compiled: 17}", 1, ("got 17", "from 1 to 16")),
    ("parity-zero", "parity: {bf16: 0.0}", 1, ("got 0.0", "dB above 0")),
    ("keep", "journal: {keep: 101}", 1, ("got 101", "0 to 100")),
    ("list-for-word", "build: [never]", 1, ("'a list'", "background, blocking, never")),
    ("map-for-word", "build:\n  never: 1", 2, ("'build' takes a value", "background, blocking, never")),
    ("word-for-section", "backend: openvino", 1, ("'backend' is a section", "'openvino'", "indented below")),
    ("list-for-section", "backend:\n- cuda", 2, ("'backend' is a section", "default, fallback, enabled")),
    ("word-for-list", "backend: {enabled: openvino}", 1, ("write it as a list: [openvino]",)),
    ("list-item", "backend:\n  enabled:\n  - cuda\n  - opencl", 4, ("item 2", "'opencl'", "directml")),
    ("list-item-null", "backend:\n  enabled:\n  - cuda\n  -\n", 4, ("'backend.enabled' has no value",)),
    ("list-item-list", "backend:\n  enabled:\n  - [cuda]", 3, ("list or mapping in its list",)),
    ("list-twice", "backend:\n  enabled:\n  - cuda\n  - cuda", 4, ("item 2", "listed twice", "at most once")),
    ("device-auto", "openvino:\n  device: AUTO", 2, ("virtual device", "must be known", "CPU, GPU, GPU.0")),
    ("device-auto-list", "openvino: {device: 'AUTO:GPU,CPU'}", 1, ("virtual device",)),
    ("device-hetero", "openvino: {device: 'HETERO:GPU,CPU'}", 1, ("virtual device",)),
    ("device-multi", "openvino: {device: 'multi:GPU'}", 1, ("virtual device",)),
    ("device-batch", "openvino: {device: 'BATCH:GPU(4)'}", 1, ("virtual device",)),
    ("device-case", "openvino: {device: gpu.1}", 1, ("'gpu.1'", "write GPU.1")),
    ("device-other", "openvino: {device: cuda}", 1, ("is not a device of OpenVINO",)),
    ("device-empty", "openvino: {device: ''}", 1, ("is not a device of OpenVINO",)),
    ("cache-case", "runtime_cache: Auto", 1, ("write auto",)),
    ("cache-empty", "runtime_cache: ''", 1, ("''", "auto, or the path")),
    ("cache-blank", "runtime_cache: '  '", 1, ("is empty", "write auto")),
    ("windows-tab", 'runtime_cache: "C:\\temp"', 1, ("control character", "single quotes")),
    ("windows-escape", '#\nruntime_cache: "C:\\models"', 2, ("not valid YAML", "escape", "single quotes")),
    ("duplicate", "precision: fp16\nbuild: never\nprecision: fp32", 3, ("'precision' is given twice", "line 1")),
    ("duplicate-inner", "cache:\n  max_gb: 1\n  max_gb: 2", 3, ("'cache.max_gb' is given twice", "first on line 2")),
    ("duplicate-section", "cache:\n  max_gb: 1\ncache:\n", 3, ("'cache' is given twice",)),
    ("duplicate-quoted", "build: never\n\"build\": never", 2, ("'build' is given twice",)),
    ("tab", "cache:\n\tmax_gb: 3", 2, ("a tab", "spaces")),
    ("tab-mixed", "cache:\n  max_gb: 3\n \tmax: 3", 3, ("a tab",)),
    ("unclosed-quote", "build: 'never\ncache:\n", 1, ("not valid YAML", "end of stream", "quotes")),
    ("unclosed-list", "cache:\nbackend: {enabled: [cuda\n\n", 2, ("not valid YAML",)),
    ("colon", "build: never: x", 1, ("not valid YAML", "mapping values")),
    ("indent", "backend:\n    default: auto\n  fallback: cuda", 3, ("not valid YAML",)),
    ("reserved", "build: @never", 1, ("not valid YAML", "'@'")),
    ("two-documents", "build: never\n---\nbuild: never", 2, ("another document", "remove the ---")),
    ("control", "a: 1\nb: \x07", 2, ("U+0007", "not allowed")),
    ("nul", "\n\n\0", 3, ("U+0000",)),
    ("root-list", "# x\n- build", 2, ("does not hold keys", "a list")),
    ("root-text", "hello", 1, ("does not hold keys", "'hello'")),
    ("alias", "cache: &a {max_gb: 1}\nparity: *a", 2, ("aliases", "write the value out")),
    ("python-tag", "build: !!python/object/apply:os.system [never]", 1, ("tag", "!!python", "refused")),
    ("python-name", "build: !!python/name:os.system", 1, ("tag", "refused")),
    ("own-tag", "build: !never never", 1, ("'!never'", "refused")),
    ("binary-tag", "build: !!binary bmV2ZXI=", 1, ("'!!binary'", "refused")),
    ("tagged-root", "!!python/dict {build: never}", 1, ("does not hold keys",)),
    ("tagged-section", "cache: !!omap {max_gb: 1}", 1, ("'cache' is a section",)),
    ("false-tag", "cache: {max_gb: !!int abc}", 1, ("'abc'", "plain")),
    ("deep", "build:\n " + "[" * 500_000, 2, ("deeper than 6 levels",)),
    ("wide", "".join(f"k{n}: 1\n" for n in range(3000)), 1000, ("over 2000 entries",)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_file(file: Path, text: str, line: int, words: tuple[str, ...]) -> None:
    error = fault(file, text)
    assert error.line == line
    assert f", line {line}: " in str(error)
    for word in words:
        assert word in str(error), str(error)
    assert len(str(error)) < 700
    assert "\n" not in str(error)


@pytest.mark.parametrize("level", range(1, 9))
def test_alias_bomb_is_refused_at_its_first_alias(file: Path, level: int) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}x]\n" for n in range(1, level + 1))
    assert fault(file, bomb).line == 2


def test_first_fault_by_line_and_the_others_counted(file: Path) -> None:
    error = fault(file, "build: x\nfoo: 1\nbackend:\n  fallback: no\n  enabled: [cuda, cuda]\ncache: 3\n")
    assert error.line == 1
    assert "(4 more faults in this file, lines 2, 4, 5, 6)" in str(error)
    error = fault(file, "openvino:\n  threads: -1\nunknown: 1\n")
    assert error.line == 2
    assert "(1 more fault in this file, line 3)" in str(error)
    error = fault(file, "a: 1\n" * 1 + "".join(f"b{n}: 1\n" for n in range(9)))
    assert "(9 more faults in this file, lines 2, 3, 4, 5, 6, ...)" in str(error)


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"build: never\n# caf\xe9\n", 2, ("not UTF-8", "byte 0xe9")),
        ("build: never\n".encode("utf-16"), 1, ("UTF-16 text", "save the file as UTF-8")),
        (b"\x80", 1, ("not UTF-8", "0x80")),
    ],
)
def test_wrong_encoding(file: Path, data: bytes, line: int, words: tuple[str, ...]) -> None:
    error = fault(file, data)
    assert error.line == line
    for word in words:
        assert word in str(error)


def test_huge_file_is_refused(file: Path) -> None:
    assert load(file, b"#" * strict_yaml.MAX_BYTES) == Settings()
    error = fault(file, b"#" * (strict_yaml.MAX_BYTES + 1))
    assert "too large" in str(error)
    assert error.line is None


def test_folder_in_place_of_the_file(file: Path) -> None:
    file.mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        load_settings(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_does_not_hang(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_settings(file)


def test_missing_file(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_settings(file)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def forbid(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    original = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == file:
            raise PermissionError(13, "Permission denied")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)


def test_forbidden_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("build: never\n")
    forbid(monkeypatch, file)
    with pytest.raises(ConfigError, match=r"Permission denied.*next step"):
        load_settings(file)


# --- writing the default -----------------------------------------------------------------------------------------


def test_write_default(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "comfy_kitchen.yaml"
    assert write_default(target) is True
    assert target.read_bytes() == PACKAGED.read_bytes()
    assert load_settings(target) == Settings()
    target.write_text("build: never\n")
    assert write_default(target) is False
    assert target.read_text() == "build: never\n"
    assert [p.name for p in target.parent.iterdir()] == ["comfy_kitchen.yaml"]


def test_write_default_keeps_a_file_that_appears_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.link

    def late(source: Any, target: Any) -> None:
        file.write_text("build: never\n")
        original(source, target)

    monkeypatch.setattr(os, "link", late)
    assert write_default(file) is False
    assert file.read_text() == "build: never\n"
    assert list(file.parent.iterdir()) == [file]


def test_write_default_without_hard_links(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(source: Any, target: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    assert write_default(file) is True
    assert list(file.parent.iterdir()) == [file]
    assert load_settings(file) == Settings()


def test_write_default_reports_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError, match="taken"):
        write_default(tmp_path / "taken" / "comfy_kitchen.yaml")


# --- reload ------------------------------------------------------------------------------------------------------


def edit(file: Path, text: str) -> None:
    """Save as an editor does, with a modification time that surely differs."""
    stamp = file.stat().st_mtime_ns + 10_000_000 if file.exists() else None
    file.write_text(text, encoding="utf-8")
    if stamp is not None:
        os.utime(file, ns=(stamp, stamp))


def test_reload_without_restart(file: Path) -> None:
    settings = SettingsFile(file)
    assert settings.current() == Settings()
    assert (settings.problem, settings.generation) == (None, 0)
    edit(file, "precision: fp16\n")
    assert settings.current().precision == "fp16"
    assert settings.generation == 1
    edit(file, "precision: bf16\n")  # same size
    assert settings.current().precision == "bf16"
    assert settings.generation == 2
    edit(file, "# comment\nprecision: bf16\n")
    assert settings.current().precision == "bf16"
    assert settings.generation == 2, "a comment is no change"


def test_faulty_edit_keeps_the_last_good_settings(file: Path) -> None:
    settings = SettingsFile(file)
    edit(file, "precision: fp16\n")
    good = settings.current()
    edit(file, "\nprecision: fp8\n")
    assert settings.current() is good
    assert settings.problem is not None
    assert settings.problem.line == 2
    assert settings.generation == 1
    edit(file, "precision: fp32\n")
    assert settings.current().precision == "fp32"
    assert settings.problem is None
    assert settings.generation == 2


def test_faulty_first_file_means_defaults(file: Path) -> None:
    edit(file, "nonsense: 1\n")
    settings = SettingsFile(file)
    assert settings.current() == Settings()
    assert settings.problem is not None
    assert settings.generation == 0


def test_deleted_file_means_defaults(file: Path) -> None:
    edit(file, "precision: fp16\n")
    settings = SettingsFile(file)
    assert settings.current().precision == "fp16"
    file.unlink()
    assert settings.current() == Settings()
    assert settings.problem is None
    assert settings.generation == 2


def test_unchanged_file_is_not_opened_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("precision: fp16\n", "nonsense: 1\n"):
        edit(file, text)
        settings = SettingsFile(file)
        first, problem = settings.current(), settings.problem
        with monkeypatch.context() as patch:
            patch.setattr(config, "load_settings", lambda path: pytest.fail("read again"))
            assert settings.current() is first
            assert settings.problem is problem


def test_a_locked_file_is_tried_again_although_it_did_not_change(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(file, "precision: fp16\n")
    settings = SettingsFile(file)
    with monkeypatch.context() as patch:
        forbid(patch, file)
        assert settings.current() == Settings()
        assert settings.problem is not None
    assert settings.current().precision == "fp16"
    assert settings.problem is None


def test_folder_that_cannot_be_entered(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    settings = SettingsFile(tmp_path / "taken" / "comfy_kitchen.yaml")
    assert settings.current() == Settings()
    assert settings.problem is not None


def test_threads_see_whole_settings(file: Path) -> None:
    edit(file, "parity: {fp32: 1, fp16: 1, bf16: 1}\n")
    settings = SettingsFile(file)
    stop, torn = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            parity = settings.current().parity
            if len({parity.fp32, parity.fp16, parity.bf16}) != 1:
                torn.append(parity)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(2, 22):
        spare = file.with_suffix(".new")
        spare.write_text(f"parity: {{fp32: {n}, fp16: {n}, bf16: {n}}}\n")
        spare.replace(file)
        assert settings.current().parity.fp32 == n
    stop.set()
    for thread in threads:
        thread.join()
    assert not torn
    assert settings.problem is None
    assert settings.generation == 21


# --- the cache folder --------------------------------------------------------------------------------------------


def with_cache(value: str) -> Settings:
    return Settings(runtime_cache=value)


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, auto = tmp_path / "ComfyUI", tmp_path / "ComfyUI" / "models" / "kitchen"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    assert resolve_cache_folder(with_cache("auto"), base, auto) == auto
    assert resolve_cache_folder(with_cache("models/x"), base, auto) == base / "models" / "x"
    assert resolve_cache_folder(with_cache("../x"), base, auto) == tmp_path / "x"
    assert resolve_cache_folder(with_cache("~/x"), base, auto) == tmp_path / "home" / "x"
    assert resolve_cache_folder(with_cache(str(tmp_path / "y")), base, auto) == tmp_path / "y"
    assert not base.exists(), "nothing is created"


@pytest.mark.skipif(os.name == "nt", reason="Windows takes any user name for a folder beside one's own")
def test_cache_folder_of_a_user_who_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no home folder"):
        resolve_cache_folder(with_cache("~nobody-by-this-name/x"), tmp_path, tmp_path)


ROOT = Path(config.__file__).resolve().parent


@pytest.mark.parametrize("tail", ["", "cache", "cache/engines", "not/yet/there", "backends/.."])
def test_cache_folder_never_inside_the_package(tmp_path: Path, tail: str) -> None:
    with pytest.raises(ConfigError, match="inside the accelerator's own folder") as caught:
        resolve_cache_folder(with_cache(str(ROOT / tail)), tmp_path, tmp_path, file="my.yaml")
    assert str(caught.value).startswith("my.yaml")
    with pytest.raises(ConfigError, match="own folder"):
        resolve_cache_folder(with_cache(os.path.relpath(ROOT / tail, ROOT.parent)), ROOT.parent, tmp_path)


def test_auto_is_comfyuis_models_folder_wherever_it_lies(tmp_path: Path) -> None:
    """A ComfyUI inside this folder, as `dev.py demo` makes one, is no reason to warn of its own default."""
    inside = ROOT / ".demo" / "base" / "models" / "kitchen_engines"
    assert resolve_cache_folder(with_cache("auto"), tmp_path, inside) == inside


def test_cache_folder_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    try:
        link.symlink_to(ROOT, target_is_directory=True)
    except OSError:
        pytest.skip("links are not allowed for this user")
    with pytest.raises(ConfigError, match="own folder"):
        resolve_cache_folder(with_cache("link/engines"), tmp_path, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    kept = resolve_cache_folder(with_cache("other/engines"), tmp_path, tmp_path)
    assert kept == tmp_path / "other" / "engines", "a link of the user's stays as it was written"


def test_cache_folder_beside_the_package_is_fine(tmp_path: Path) -> None:
    beside = ROOT.parent / f"{ROOT.name}-engines"
    assert resolve_cache_folder(with_cache(str(beside)), tmp_path, tmp_path) == beside
