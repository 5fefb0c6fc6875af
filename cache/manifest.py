"""The two JSON files of an entry: `manifest.json` (what was built, never changed) and `state.json` (what was learnt).

Both may come from anywhere: an older version, another machine, a broken disk, someone's archive. Reading is strict and
raises CacheMiss with the field at fault; nothing is converted, completed or executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

# DimRange, InputProfile and the like: see key.py
from ..backends.base import (
    PRECISIONS,
    BackendId,
    BuildOptions,  # noqa: F401
    DimRange,  # noqa: F401
    InputProfile,  # noqa: F401
    Measurement,
    Precision,
    ShapeProfile,
    StepTimes,
)
from ..errors import CacheError, CacheMiss
from .files import clean_text, strict_json
from .key import EngineKey, ModelIdentity  # noqa: F401

MANIFEST_FORMAT: Final = 1
"""Raised whenever the manifest or the folder's layout changes; every other number is a miss."""

MANIFEST_LIMIT_BYTES: Final = 1_000_000
"""Largest manifest that is read or written. Also the limit of `state.json`."""

NAME_LIMIT: Final = 48
"""Longest payload name: `.staging/<pid>-<8 hex digits>/<name>` then stays under 80 characters, as does
`<20 hex digits>/<name>`, so that an engine below a deep Windows folder stays under its 260."""

BUILD_AGAIN: Final = "build it; until then the call runs on PyTorch"
"""The next step after every miss."""

MANIFEST_FILE: Final = "manifest.json"
STATE_FILE: Final = "state.json"
OWNER_FILE: Final = "owner.json"
BLOBS_FOLDER: Final = "blobs"
"""The runtime's own cache of compiled kernels below an entry: written later, so never hashed."""

PSNR_INFINITE_DB: Final = 999.0
PSNR_NONE_DB: Final = -999.0

_LABEL_LIMIT: Final = 200
_REASON_LIMIT: Final = 2000
_NOTE_LIMIT: Final = 4000
_SIGNATURES_LIMIT: Final = 200
_SIGNATURE_LIMIT: Final = 1000
_RESERVED: Final = frozenset({MANIFEST_FILE, STATE_FILE, OWNER_FILE})
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_WINDOWS_DEVICE: Final = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII | re.IGNORECASE)


def name_fault(name: str) -> str:
    """Why `name` is no payload file name, or an empty text when it is one.

    Allowed: parts of ASCII letters, digits, `_`, `-` and `.` joined by `/`, no part starting with a dot or dash or
    ending with a dot, none of Windows' device names, at most `NAME_LIMIT` characters.
    """
    if len(name) > NAME_LIMIT:
        return f"longer than {NAME_LIMIT} characters"
    parts = name.split("/")
    for part in parts:
        if not _PART.fullmatch(part) or part.endswith("."):
            return "not a plain relative name of letters, digits, '_', '-' and '.'"
        if _WINDOWS_DEVICE.fullmatch(part):
            return "a device name on Windows"
    if name.lower() in _RESERVED or parts[0].lower() == BLOBS_FOLDER:
        return "a name the cache itself uses"
    return ""


def names_fault(names: Iterable[str]) -> str:
    """Why `names` cannot lie in one folder on every system, or an empty text."""
    seen: set[str] = set()
    for name in names:
        if fault := name_fault(name):
            return f"file name {name!r} is {fault}"
        if name.lower() in seen:
            return f"file name {name!r} is there twice on a disk that ignores case"
        seen.add(name.lower())
    return "" if seen else "there are no files"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0)]


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


def now() -> str:
    """This moment as the files here write it: ISO 8601 in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class FileRecord(_Strict):
    """One payload file: its size in bytes and its sha256."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Reproduce(_Strict):
    """What to have and to ask for to get this engine again, for people."""

    text: str
    backend: BackendId
    device: str
    options: Mapping[str, str]
    versions: Mapping[str, str]
    platform: str
    hardware: str


class Manifest(_Strict):
    """Everything known of an engine when it was built.

    digest: sha256 of the key's canonical text; its first 20 digits name the folder.
    created: ISO 8601 with zone. build_seconds: of the build process.
    profile: the shapes the engine really accepts, which may be narrower than the key's.
    measurements: PSNR of -999.0 means that the variant gave numbers that are no numbers.
    files: payload by relative name with `/`.
    """

    format_version: int
    digest: Sha256
    key: EngineKey
    created: str
    build_seconds: Seconds
    label: str
    profile: ShapeProfile
    measurements: tuple[Measurement, ...]
    notes: tuple[tuple[str, str], ...]
    files: Mapping[str, FileRecord]
    reproduce: Reproduce

    _created = field_validator("created")(_moment)

    @field_validator("files")
    @classmethod
    def _names(cls, files: Mapping[str, FileRecord]) -> Mapping[str, FileRecord]:
        if fault := names_fault(files):
            raise ValueError(fault)
        return files

    def to_bytes(self) -> bytes:
        """The file's bytes. Raises CacheError when no reader would accept them."""
        data = (json.dumps(self.model_dump(mode="json"), indent=2) + "\n").encode("ascii")
        try:
            if len(data) > MANIFEST_LIMIT_BYTES:
                raise CacheMiss("it is too large", field="manifest", got=f"{len(data)} bytes")
            Manifest.from_bytes(data)
        except CacheMiss as miss:
            raise CacheError(
                "the manifest of a new engine would not be readable",
                got=str(miss),
                allowed=f"a manifest of at most {MANIFEST_LIMIT_BYTES} bytes with finite numbers",
                next_step="report this with the log: the build gave a value it should not give",
            ) from miss
        return data

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """The manifest in `data`.

        Raises CacheMiss, field `format_version` for another format and `manifest` for everything else.
        """
        try:
            raw = strict_json(data)
        except ValueError as error:
            raise CacheMiss(
                "the manifest is no valid JSON", field="manifest", got=_brief(error), next_step=BUILD_AGAIN
            ) from error
        found = raw.get("format_version") if isinstance(raw, dict) else None
        if type(found) is int and found != MANIFEST_FORMAT:
            raise CacheMiss(
                "the entry was written by another version of this pack",
                field="format_version",
                got=found,
                allowed=str(MANIFEST_FORMAT),
                next_step=BUILD_AGAIN,
            )
        try:
            manifest = Manifest.model_validate_json(data, strict=True)
            # pydantic passes over unknown fields of plain dataclasses; what comes out must be all that went in
            complete = manifest.model_dump(mode="json") == raw
        except (ValidationError, ValueError, CacheError) as error:
            raise CacheMiss(
                "the manifest does not follow its schema", field="manifest", got=_brief(error), next_step=BUILD_AGAIN
            ) from error
        if not complete:
            raise CacheMiss(
                "the manifest holds unknown fields",
                field="manifest",
                allowed=f"the fields of format {MANIFEST_FORMAT}",
                next_step=BUILD_AGAIN,
            )
        return manifest


def reproduce(key: EngineKey) -> Reproduce:
    """The recipe for the engine of `key`."""
    versions = ", ".join(f"{name} {version}" for name, version in key.versions)
    return Reproduce(
        text=f"Load {key.model.class_name} (weights {key.model.weights_digest[:12]}) with backend {key.backend} on "
        f"{key.options.device} of {key.hardware} under {key.platform}, with {versions}; the key above is complete.",
        backend=key.backend,
        device=key.options.device,
        options=dict(key.options.options),
        versions=dict(key.versions),
        platform=key.platform,
        hardware=key.hardware,
    )


def storable(measurement: Measurement) -> Measurement:
    """`measurement` with a PSNR that JSON can hold: 999.0 for infinite, -999.0 for no number at all."""
    return replace(measurement, psnr_db=_finite_psnr(measurement.psnr_db))


def _finite_psnr(psnr_db: float) -> float:
    if math.isnan(psnr_db):
        return PSNR_NONE_DB
    return float(min(max(psnr_db, PSNR_NONE_DB), PSNR_INFINITE_DB))


def clean_label(label: str) -> str:
    """A label as the manifest stores it."""
    return clean_text(label, _LABEL_LIMIT)


def clean_notes(notes: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Notes as the manifest stores them."""
    return tuple((clean_text(name, _LABEL_LIMIT), clean_text(text, _NOTE_LIMIT)) for name, text in notes)


class Proof(_Strict):
    """An engine's output agreed with PyTorch's on the user's own inputs, with this PSNR in dB, at this time."""

    psnr_db: float
    at: str

    _at = field_validator("at")(_moment)


class Quarantine(_Strict):
    """Why an engine must not run, and since when."""

    reason: str
    at: str

    _at = field_validator("at")(_moment)


class TimeRecord(_Strict):
    """Median seconds of one call and the number of samples; the fields of `StepTimes`, and when it was taken."""

    backend: BackendId
    precision: Precision | None
    median_s: Seconds
    samples: Annotated[int, Field(ge=1)]
    at: str

    _at = field_validator("at")(_moment)


class ProvenState(_Strict):
    """What was learnt of an engine since it was built. A new or unreadable state is empty: nothing is proven.

    proofs: by precision.
    quarantine: by precision, or `"*"` for the whole engine.
    times: by shape signature, then by `"<backend>/<precision>"`.
    """

    format_version: Literal[1] = 1
    # text keys with a check of our own: pydantic before 2.6 takes no Literal for a key of JSON
    proofs: Mapping[str, Proof] = {}
    quarantine: Mapping[str, Quarantine] = {}
    times: Mapping[str, Mapping[str, TimeRecord]] = {}

    @field_validator("proofs", "quarantine")
    @classmethod
    def _by_precision(cls, found: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        for name in found:
            if name not in PRECISIONS and (info.field_name, name) != ("quarantine", "*"):
                raise ValueError(f"{name!r} is no precision")
        return found

    def quarantined(self, precision: Precision) -> Quarantine | None:
        """Why the engine must not run in `precision`, or None."""
        return self.quarantine.get("*") or self.quarantine.get(precision)

    def step_times(self, signature: str) -> tuple[StepTimes, ...]:
        """Every time recorded for these shapes."""
        return tuple(
            StepTimes(record.backend, record.precision, record.median_s, record.samples)
            for record in self.times.get(signature, {}).values()
        )

    def with_proof(self, precision: Precision, psnr_db: float) -> ProvenState:
        """Also proven in `precision`. An infinite PSNR is stored as 999.0. Raises CacheError for NaN."""
        if math.isnan(psnr_db):
            raise CacheError(f"a proof of {precision}", got="a PSNR that is no number", allowed="a number of dB")
        proof = Proof(psnr_db=_finite_psnr(psnr_db), at=now())
        return self._with(proofs={**self.proofs, precision: proof})

    def with_quarantine(self, precision: Precision | Literal["*"], reason: str) -> ProvenState:
        """Not to be run in `precision` (`"*"`: at all). What was proven in it no longer counts."""
        held = Quarantine(reason=clean_text(reason, _REASON_LIMIT), at=now())
        proofs = {name: proof for name, proof in self.proofs.items() if precision not in ("*", name)}
        return self._with(proofs=proofs, quarantine={**self.quarantine, precision: held})

    def without_quarantine(self) -> ProvenState:
        """Free to be proven again."""
        return self._with(quarantine={})

    def with_times(self, signature: str, times: StepTimes) -> ProvenState:
        """Also measured. Keeps the 200 signatures measured last.

        Raises CacheError for a signature of more than 1000 characters, or a time that is none.
        """
        if not signature.isascii() or len(signature) > _SIGNATURE_LIMIT:
            raise CacheError(
                "a shape signature", got=signature[:100], allowed=f"at most {_SIGNATURE_LIMIT} ASCII characters"
            )
        if not (math.isfinite(times.median_s) and times.median_s >= 0 and times.samples >= 1):
            raise CacheError(
                f"the time of {times.backend}", got=times, allowed="a finite median of at least one sample"
            )
        name = f"{times.backend}/{times.precision or 'model'}"
        record = TimeRecord(
            backend=times.backend,
            precision=times.precision,
            median_s=times.median_s,
            samples=times.samples,
            at=now(),
        )
        others = {key: value for key, value in self.times.items() if key != signature}
        kept = dict(list(others.items())[-(_SIGNATURES_LIMIT - 1) :])
        return self._with(times={**kept, signature: {**self.times.get(signature, {}), name: record}})

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode("ascii")

    @staticmethod
    def from_bytes(data: bytes) -> ProvenState:
        """The state in `data`. Raises ValueError when it is not one."""
        strict_json(data)
        return ProvenState.model_validate_json(data, strict=True)

    def _with(self, **changed: Any) -> ProvenState:
        return ProvenState(**{**dict(self), **changed})


def _brief(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'manifest'}: {first['msg']}"[:300]
    return str(error).partition("\n")[0][:300]
