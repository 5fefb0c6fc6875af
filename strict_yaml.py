"""A YAML file as a frozen pydantic model, every fault in it as one ConfigError with its line.

Only YAML's safe subset is read: no tags, no aliases, no merge keys. The text is composed to nodes first and walked
beside the model, so that each fault knows its line and can say what was meant.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from .errors import ConfigError

MAX_BYTES = 1_000_000
"""A larger file is refused unread; the commented default has about 5 kB."""

_MAX_DEPTH = 6
"""Deepest nesting a valid file can have is four: root, section, list, item. Two more, for a better message."""

_MAX_NODES = 2_000
"""Keys and values together; keeps a hostile file under `MAX_BYTES` from taking seconds."""


class Section(BaseModel):
    """A mapping of the file: its fields are scalars, tuples of scalars, or (at the root) further sections.

    A field's `description` is the text of what it allows; a Literal needs none. A validator that wants its own words
    raises PydanticCustomError whose context holds `next_step`, and `index` when one item of a list is at fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=Section)
_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fault:
    """One thing wrong with the file; the fields are ConfigError's."""

    line: int | None
    what: str
    got: object = None
    allowed: str | None = None
    next_step: str | None = None


class _BoundedLoader(yaml.SafeLoader):
    """Composes nodes only, refusing what could make a small file expand: aliases, deep nesting, many nodes."""

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        self._nodes += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            what = f"deeper than {_MAX_DEPTH} levels" if self._depth > _MAX_DEPTH else f"over {_MAX_NODES} entries"
            raise yaml.MarkedYAMLError(problem=f"this is no configuration ({what})", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def load_yaml(path: Path, model: type[_Model]) -> _Model:
    """The YAML file `path` as `model`; an empty file, and an empty section, mean the defaults.

    Raises ConfigError: missing or unreadable file (its `__cause__` is then the OSError), bad YAML, unknown or
    duplicate key, bad value. Of several faults it tells the first by line, and the lines of the others.
    """
    node, faults = _compose(_read(path))
    values: dict[str, Any] = {}
    if node is not None:
        nodes: dict[_Path, yaml.Node] = {}
        values = _section(node, model, (), _Root(model, nodes, faults))
    try:
        loaded = model.model_validate(values)
    except ValidationError as error:
        faults.extend(_invalid(e, model, nodes) for e in error.errors(include_url=False))
    if not faults:
        return loaded
    faults.sort(key=lambda fault: fault.line or 0)
    first, others = faults[0], [str(fault.line) for fault in faults[1:]]
    what = first.what
    if others:
        lines = list(dict.fromkeys(others))
        shown = ", ".join(lines[:5]) + (", ..." if len(lines) > 5 else "")
        word, where = "faults" if len(others) > 1 else "fault", "lines" if len(lines) > 1 else "line"
        what += f" ({len(others)} more {word} in this file, {where} {shown})"
    raise ConfigError(
        what, file=str(path), line=first.line, got=first.got, allowed=first.allowed, next_step=first.next_step
    )


def _read(path: Path) -> str:
    file = str(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode) or not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ConfigError(
                f"the configuration cannot be read, it is {kind}",
                file=file,
                next_step="move it away; the commented default is written again",
            )
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the configuration cannot be read ({error.strerror or error})",
            file=file,
            next_step="make the file readable for the user who runs ComfyUI",
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(
            "the configuration is too large",
            file=file,
            got=f"more than {MAX_BYTES} bytes",
            allowed=f"up to {MAX_BYTES} bytes",
            next_step="check that this is the right file",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise ConfigError(
            "the configuration is not UTF-8 text",
            file=file,
            line=data.count(b"\n", 0, error.start) + 1,
            got="UTF-16 text" if utf16 else f"byte 0x{data[error.start]:02x}",
            allowed="UTF-8",
            next_step="save the file as UTF-8 in your editor",
        ) from error


def _compose(text: str) -> tuple[yaml.MappingNode | None, list[_Fault]]:
    """The root mapping, or None for an empty file; a fault when there is no such thing."""
    try:
        node = yaml.compose(text, Loader=_BoundedLoader)
    except yaml.YAMLError as error:
        return None, [_bad_yaml(error, text)]
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return None, []
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        what = "the file does not hold keys with values"
        return None, [_Fault(_line(node), what, _text(node), "`key: value` lines", "see the commented default file")]
    return node, []


def _bad_yaml(error: yaml.YAMLError, text: str) -> _Fault:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        return _Fault(line, "this character is not allowed in YAML", character, "text", "remove it")
    problem, mark = "bad YAML", None
    if isinstance(error, yaml.MarkedYAMLError):
        problem, mark = error.problem or problem, error.problem_mark or error.context_mark
        # an unclosed quote or bracket is noticed at the end of the file, but made where it was opened
        if "end of stream" in problem or "<stream end>" in problem:
            mark = error.context_mark or mark
    line = mark.line + 1 if mark is not None else 1
    lines = text.splitlines()
    source = lines[line - 1] if line <= len(lines) else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return _Fault(line, "a tab is used for indentation", _short(source.strip()), "spaces", "replace it with spaces")
    if "escape" in problem:
        step = "write Windows paths in 'single quotes' or with /"
    elif "alias" in problem:
        step = "write the value out"
    elif "another document" in problem:
        step = "keep one document: remove the --- in the middle"
    else:
        step = "check colons, quotes, brackets and the indentation here and just above"
    return _Fault(line, f"this is not valid YAML: {problem}", _short(source.strip()) or None, None, step)


@dataclass(frozen=True, slots=True)
class _Root:
    """What one walk shares: the root model, and what it collects."""

    model: type[Section]
    nodes: dict[_Path, yaml.Node]
    faults: list[_Fault]


def _section(node: yaml.MappingNode, model: type[Section], path: _Path, root: _Root) -> dict[str, Any]:
    """The values of a mapping as far as they can be read; fills `root`'s nodes and faults."""
    nodes, faults = root.nodes, root.faults
    values: dict[str, Any] = {}
    first_line: dict[str, int] = {}
    for key_node, node_ in node.value:
        key, line = _text(key_node), _line(key_node)
        name = ".".join((*path, key))
        if key in first_line:
            where = f"first on line {first_line[key]}"
            faults.append(_Fault(line, f"key {name!r} is given twice ({where})", next_step="remove one of the two"))
            continue
        first_line[key] = line
        field = model.model_fields.get(key)
        if field is None:
            keys = ", ".join(model.model_fields)
            inside = f" in section {path[-1]!r}" if path else ""
            faults.append(_Fault(line, f"unknown key{inside}", key, keys, _did_you_mean_key(key, path, root.model)))
            continue
        section = _model_of(field)
        if section is None:
            nodes[(*path, key)] = node_
            value = _value(node_, (*path, key), field, nodes, faults)
            if value is not _BAD:
                values[key] = value
        elif isinstance(node_, yaml.MappingNode) and node_.tag == "tag:yaml.org,2002:map":
            values[key] = _section(node_, section, (*path, key), root)
        elif node_.tag != "tag:yaml.org,2002:null":
            inner = next(iter(section.model_fields))
            step = f"write its keys indented below it, e.g. `{key}:` and on the next line `  {inner}: ...`"
            faults.append(
                _Fault(_line(node_), f"{name!r} is a section", _text(node_), ", ".join(section.model_fields), step)
            )
    return values


_BAD = object()
"""A value that has its fault already."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][-+]?[0-9]{1,4})?")


def _value(node: yaml.Node, path: _Path, field: FieldInfo, nodes: dict[_Path, yaml.Node], faults: list[_Fault]) -> Any:
    """A scalar, or a tuple of scalars, as Python value; `_BAD` when that is a fault by itself."""
    name, allowed = ".".join(path), _allowed(field)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        items = []
        for index, item in enumerate(node.value):
            nodes[(*path, str(index))] = item
            if not isinstance(item, yaml.ScalarNode):
                faults.append(_Fault(_line(item), f"{name!r} holds a list or mapping in its list", None, allowed))
                return _BAD
            items.append(_value(item, path, field, nodes, faults))
        return _BAD if any(item is _BAD for item in items) else tuple(items)
    if kind in ("str", "timestamp", "value", "merge"):
        return node.value
    if kind == "bool":
        return node.value.lower() in ("true", "yes", "on")
    if kind == "int" and _INT.fullmatch(node.value):
        return int(node.value)
    if kind == "float" and _FLOAT.fullmatch(node.value):
        return float(node.value)
    if kind == "null":
        step = "write none" if "none" in _options(field) else "write a value, or remove the line for the default"
        fault = _Fault(_line(node), f"{name!r} has no value", node.value or None, allowed, step)
    elif kind in ("int", "float"):
        step = "write a plain decimal number, without leading zeros, units, colons or underscores"
        fault = _Fault(_line(node), f"{name!r} is not a plain number", _text(node), allowed, step)
    elif isinstance(node, yaml.MappingNode) and kind == "map":
        fault = _Fault(_line(node), f"{name!r} takes a value, not keys of its own", _text(node), allowed)
    else:
        step = "remove the tag (the word after !)"
        tag = _short(node.tag.replace("tag:yaml.org,2002:", "!!"))
        fault = _Fault(_line(node), f"{name!r} has a YAML tag, and tags are refused", tag, allowed, step)
    faults.append(fault)
    return _BAD


def _invalid(error: Any, model: type[Section], nodes: dict[_Path, yaml.Node]) -> _Fault:
    """The fault of one of pydantic's error records."""
    path: _Path = tuple(str(part) for part in error["loc"])
    context = error.get("ctx") or {}
    if error["type"] == "duplicate":
        path = (*path, str(context["index"]))
    node = nodes[path]
    names = [part for part in path if not part.isdecimal()]
    field = _field(names, model)
    name = repr(".".join(names)) + "".join(f", item {int(part) + 1}," for part in path if part.isdecimal())
    got: object = _text(node)
    if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        got = error["input"] if error["type"] != "duplicate" else got
    own = "next_step" in context
    what = f"{name} {error['msg'] if own else 'has a value that is not allowed'}"
    return _Fault(_line(node), what, got, _allowed(field), context["next_step"] if own else _advice(node, field))


def _advice(node: yaml.Node, field: FieldInfo) -> str:
    """The next step for a value of the wrong kind or out of range."""
    options, text, kind = _options(field), _text(node), node.tag.rpartition(":")[2]
    if kind == "bool" and (options or field.annotation is str):
        none = node.value.lower() in ("false", "no", "off") and "none" in options
        quoted = "write one of the allowed words" if options else f'put it in quotes: "{text}"'
        asked = "write none" if none else quoted
        return f"YAML reads {text} without quotes as true or false; {asked}"
    if get_origin(field.annotation) is tuple and isinstance(node, yaml.ScalarNode) and text in options:
        return f"write it as a list: [{text}]"
    if close := difflib.get_close_matches(text.lower().strip(), options, 1):
        return f"write {close[0]} if that was meant"
    if field.annotation is str and kind in ("int", "float"):
        return f'YAML reads it as a number; put it in quotes: "{text}"'
    if field.annotation in (int, float) and kind in ("str", "bool"):
        return "write a plain decimal number, without quotes or unit"
    if field.annotation is int and kind == "float":
        return "write a whole number, without a point"
    return "write one of the allowed values"


def _did_you_mean_key(key: str, path: _Path, model: type[Section]) -> str:
    """The nearest known key to an unknown one, in its own section first."""
    known = {".".join(p): p for p in all_keys(model)}
    if "." in key and key in known:  # `backend.default: openvino` in one line
        return f"write `{known[key][0]}:` and on the next line `  {known[key][-1]}: ...`"
    here = {p[-1]: p for p in known.values() if p[:-1] == path} | {p[0]: p[:1] for p in known.values() if not path}
    if close := difflib.get_close_matches(key.lower(), list(here), 1):
        return f"write {close[0]} if that was meant"
    anywhere = {p[-1]: p for p in known.values()}
    if close := difflib.get_close_matches(key.lower(), list(anywhere), 1, 0.75):
        found = anywhere[close[0]]
        where = f"in section {found[0]!r}" if len(found) > 1 else "at the left margin"
        return f"write {found[-1]} {where} if that was meant"
    return "remove the line, or write one of the allowed keys"


def all_keys(model: type[Section]) -> tuple[_Path, ...]:
    """The path of every key that has a value, e.g. `("backend", "default")`, in the file's order."""
    keys: list[_Path] = []
    for name, field in model.model_fields.items():
        section = _model_of(field)
        keys.extend([(name,)] if section is None else [(name, inner) for inner in section.model_fields])
    return tuple(keys)


def _field(path: Sequence[str], model: type[Section]) -> FieldInfo:
    field = model.model_fields[path[0]]
    section = _model_of(field)
    return field if section is None else section.model_fields[path[1]]


def _model_of(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _options(field: FieldInfo) -> tuple[str, ...]:
    kind = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else field.annotation
    return get_args(kind) if get_origin(kind) is Literal else ()


def _allowed(field: FieldInfo) -> str:
    return field.description or ", ".join(_options(field))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _text(node: yaml.Node) -> str:
    """A node as it was written, shortened."""
    if isinstance(node, yaml.ScalarNode):
        return _short(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
