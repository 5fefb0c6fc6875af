"""What an engine's bytes depend on, as one value with one digest.

Two calls may share an engine only when every field here is equal. Anything that changes the bytes of an engine, or
whether they are still right, belongs here; anything for people (file names, labels, sizes) does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

# pydantic before 2.10 looks up the names in a nested dataclass's annotations here, not where it was defined
from ..backends.base import (
    BACKEND_IDS,
    BackendId,
    BuildOptions,
    DimRange,  # noqa: F401
    InputProfile,
    ModelFacts,
    ShapeProfile,
)
from ..errors import CacheError

KEY_FORMAT: Final = 1
"""Raised whenever the meaning of a field changes, so that every older engine becomes a miss."""

FOLDER_DIGITS: Final = 20
"""Hex digits of the digest that name an entry's folder: 80 bits, short enough for Windows' path limit."""

Difference = tuple[str, "str | int | None", "str | int | None"]
"""`(field, value in a, value in b)`; None where one side has no such field."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The part of `ModelFacts` that decides what an engine computes; see there for the fields.

    Raises CacheError when `weights_digest` is empty: two models without a digest would share one engine.
    """

    class_name: str
    config_digest: str
    code_digest: str
    weights_digest: str
    patch_fingerprint: str
    weight_dtype: str
    compute_dtype: str

    def __post_init__(self) -> None:
        if not self.weights_digest:
            raise CacheError(
                f"the weights of {self.class_name} have no digest yet",
                got="an empty weights_digest",
                allowed="a sha256 of the weights",
                next_step="run this call on PyTorch and ask again when the digest is computed",
            )

    @classmethod
    def of(cls, facts: ModelFacts) -> ModelIdentity:
        """The identity of the model `facts` describes. Raises CacheError while its weights have no digest."""
        return cls(**{f.name: getattr(facts, f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Every field that changes an engine's bytes or their validity.

    backend: which backend built it.
    model: which network with which weights and patches.
    profile: the shapes *asked for*; what the engine really accepts is in the manifest.
    options: the backend's settings.
    versions: `(library, version as loaded in the process)` of torch, the backend's library and kitchen_accel.
    platform: `"linux"`, `"windows"` or `"darwin"`, with the machine type where it matters.
    hardware: what tells one device from another for this backend, e.g. GPU name, compute capability and driver,
        or the CPU's name and instruction sets.
    format_version: `KEY_FORMAT` of the code that made the key.

    Pairs are sorted on creation, so equal keys are equal however they were collected.
    Raises CacheError for an unknown backend, a name given twice, or a value that is neither text nor a whole number.
    """

    backend: BackendId
    model: ModelIdentity
    profile: ShapeProfile
    options: BuildOptions
    versions: tuple[tuple[str, str], ...]
    platform: str
    hardware: str
    format_version: int = KEY_FORMAT

    def __post_init__(self) -> None:
        if self.backend not in BACKEND_IDS:
            raise CacheError("backend of an engine key", got=self.backend, allowed=", ".join(BACKEND_IDS))
        options = BuildOptions(self.options.device, _sorted_pairs(self.options.options, "options"))
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "versions", _sorted_pairs(self.versions, "versions"))
        names = [wanted.name for wanted in self.profile.inputs]
        _refuse_twice(names, "profile.inputs")
        for path, value in _leaves(self, ()):
            _check_leaf(".".join(path), value)

    def canonical(self) -> str:
        """The one text of this key: JSON with sorted object keys, ASCII only, text and whole numbers only."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def digest(self) -> str:
        """sha256 of the canonical text, 64 hex digits."""
        return hashlib.sha256(self.canonical().encode("ascii")).hexdigest()

    @property
    def folder_name(self) -> str:
        """The first `FOLDER_DIGITS` of the digest."""
        return self.digest[:FOLDER_DIGITS]

    def to_json(self) -> dict[str, Any]:
        """The key as JSON values: objects, lists, text and whole numbers."""
        data: dict[str, Any] = json.loads(self.canonical())
        return data

    @staticmethod
    def from_json(data: object) -> EngineKey:
        """The key that `to_json` gave `data` for.

        Raises CacheError for a missing or unknown field, a wrong type, or pairs out of order: nothing is converted.
        """
        try:
            key = _ADAPTER.validate_json(json.dumps(data, allow_nan=False), strict=True)
        except (ValidationError, ValueError, TypeError, RecursionError) as error:
            raise CacheError(
                "an engine key cannot be read", got=_first_line(error), allowed="what EngineKey.to_json writes"
            ) from error
        if key.to_json() != data:
            raise CacheError(
                "an engine key holds more than an engine key does, or its pairs are not sorted",
                got=json.dumps(data)[:200],
                allowed="what EngineKey.to_json writes",
            )
        return key


_ADAPTER: Final = TypeAdapter(EngineKey)


def differences(a: EngineKey, b: EngineKey) -> tuple[Difference, ...]:
    """Every field in which `a` and `b` differ, by its dotted name; empty exactly when they are equal.

    Names: `backend`, `model.weights_digest`, `options.device`, `options.options.<name>`, `versions.<library>`,
    `profile.inputs.<input>.dtype`, `profile.inputs.<input>.dims.<axis>` (or `….<axis>.min` of a range), …
    """
    left, right = dict(_leaves(a, ())), dict(_leaves(b, ()))
    return tuple(
        (".".join(path), left.get(path), right.get(path))
        for path in [*left, *(path for path in right if path not in left)]
        if left.get(path) != right.get(path)
    )


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every text and number below `value` with its path. Paths are tuples: a name may itself hold a dot."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple) and value and all(isinstance(item, InputProfile) for item in value):
        # by name, so that one input more does not make all the others look different
        yield (*path, "order"), json.dumps([item.name for item in value])
        for item in value:
            yield from _leaves(item, (*path, item.name))
    elif isinstance(value, tuple) and value and all(_is_pair(item) for item in value):
        for name, text in value:
            yield (*path, name), text
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    else:
        yield path, value


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _sorted_pairs(pairs: tuple[tuple[str, str], ...], field: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(pairs, tuple) or not all(_is_pair(pair) for pair in pairs):
        raise CacheError(f"{field} of an engine key", got=repr(pairs), allowed="a tuple of (name, text) pairs")
    _refuse_twice([name for name, _ in pairs], field)
    return tuple(sorted(pairs))


def _refuse_twice(names: list[str], field: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CacheError(f"{field} of an engine key names {name} twice", allowed="every name once")


def _check_leaf(field: str, value: object) -> None:
    # bool is an int and numpy's whole numbers are not: either would make two texts of one key
    if type(value) is int:
        return
    if type(value) is not str:
        raise CacheError(
            f"{field} of an engine key",
            got=f"{value!r} of type {type(value).__name__}",
            allowed="text or a whole number",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CacheError(f"{field} of an engine key", got=ascii(value), allowed="text that UTF-8 can hold") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'key'}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
