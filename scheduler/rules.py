"""The rules that hold a call against the capability table, the machine, the policy and the engine.

A rule looks at one thing, finds *all* its reasons with value and limit, and can describe what a backend accepts
(README, doctor). All of it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..backends.base import (
    BackendId,
    Call,
    DeviceFacts,
    DimRange,
    EngineState,
    GpuFacts,
    LibraryFacts,
    Measurement,
    Precision,
    Refusal,
    TensorSpec,
)
from ..capture.families import Family, family
from .capability import Capability, ComputeRule, capability, dotted, range_text
from .policy import Policy
from .precision import choose_precision, passes

REFUSAL_CODES: tuple[tuple[str, str], ...] = (
    ("disabled", "not in the YAML's backend.enabled"),
    ("platform", "the operating system"),
    ("not-implemented", "this version has no such backend"),
    ("missing-library", "its library cannot be imported"),
    ("no-gpu", "no GPU of the kind it needs"),
    ("compute-capability", "the GPU's generation"),
    ("device", "the library does not offer the device in the settings"),
    ("call-device", "the tensors live elsewhere"),
    ("family", "the model's family has no capture"),
    ("input-set", "an input too many or too few"),
    ("input-dtype", "dtype of an input"),
    ("input-rank", "number of dimensions of an input"),
    ("dim-range", "a dimension outside its range"),
    ("dim-fixed", "a dimension the engine has fixed"),
    ("dim-equal", "dimensions that must be equal and differ"),
    ("control", "control residuals"),
    ("precision", "the device does not compute in it"),
    ("digest-pending", "the weights' digest is still being computed"),
    ("no-engine", "none is built yet"),
    ("building", "it is being built"),
    ("build-failed", "its build failed"),
    ("quarantined", "it once gave a wrong or no result"),
    ("parity", "its measured PSNR is under the threshold"),
    ("slower", "another one is faster"),
    ("not-measured", "an engine that was never timed goes first"),
    ("not-asked", "another backend was named"),
    ("fallback", "backend.fallback forbids it"),
)
"""Every code this package gives, with its meaning. `Call.blockers` bring codes of their own."""


@dataclass(frozen=True, slots=True)
class _Question:
    row: Capability
    call: Call
    facts: DeviceFacts
    policy: Policy
    engine: EngineState | None

    @property
    def library(self) -> LibraryFacts | Refusal:
        return self.facts.library(self.row.backend)

    @property
    def device(self) -> str:
        """The backend's own device in the settings; empty when it has no setting for it."""
        return self.policy.openvino_device.upper() if self.row.backend == "openvino" else ""

    @property
    def family(self) -> Family | None:
        """The family's inputs and ranges; None when this backend does not run it."""
        name = self.call.model.family
        return family(name) if name in self.row.families else None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return self.engine.measurements if self.engine is not None else ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is looked at. `describe`: what a row accepts. `find`: every reason against a call."""

    name: str
    describe: Callable[[Capability], str]
    find: Callable[[_Question], Iterator[Refusal]]


def refusals(
    backend: BackendId, call: Call, facts: DeviceFacts, policy: Policy, engine: EngineState | None
) -> tuple[Refusal, ...]:
    """Every reason why `backend` cannot serve `call`; empty when it can, and always for `cuda`.

    engine: the state of the engine that would serve the call; None counts as absent. Speed is `decide`'s affair.
    """
    if backend == "cuda":
        return ()
    question = _Question(capability(backend), call, facts, policy, engine)
    # a range of the table and of the engine's profile can give the same sentence
    return tuple(dict.fromkeys(reason for rule in RULES for reason in rule.find(question)))


def describe(backend: BackendId) -> tuple[tuple[str, str], ...]:
    """What an engine backend accepts, as pairs of a rule's name and one line for people."""
    row = capability(backend)
    return tuple((rule.name, rule.describe(row)) for rule in RULES)


def device_precisions(backend: BackendId, call: Call, facts: DeviceFacts, policy: Policy) -> tuple[Precision, ...]:
    """The precisions that both the backend and its device compute in natively, in the table's order.

    The device's are those the library reports; a library that reports none for any device leaves the table's. On an
    NVIDIA GPU those its generation lacks are taken away.
    """
    question = _Question(capability(backend), call, facts, policy, None)
    offered = question.row.precisions
    if isinstance(question.library, LibraryFacts) and question.library.precisions:
        native = {
            p for name, found in question.library.precisions if _same_device(question.device, name) for p in found
        }
        offered = tuple(p for p in offered if p in native)
    gpu = _gpu(question)
    if gpu is not None:
        lacking = {p for rule in _compute_rules(question) for cc, p in rule.lacks if cc == gpu.compute_capability}
        offered = tuple(p for p in offered if p not in lacking)
    return offered


def _enabled(q: _Question) -> Iterator[Refusal]:
    if q.row.backend not in q.policy.enabled:
        yield Refusal(
            "disabled",
            "backend.enabled",
            ", ".join(q.policy.enabled) or "empty",
            f"{q.row.backend} in the list",
            "add it in comfy_kitchen.yaml",
        )


def _platform(q: _Question) -> Iterator[Refusal]:
    if q.facts.platform not in q.row.platforms:
        yield Refusal("platform", "operating system", q.facts.platform, one_of(q.row.platforms))


def _library(q: _Question) -> Iterator[Refusal]:
    probed = any(name == q.row.backend for name, _ in q.facts.libraries)
    # a backend that is switched off is not probed, and then "not probed" tells nobody anything
    if isinstance(q.library, Refusal) and (probed or q.row.backend in q.policy.enabled):
        yield q.library


def _compute(q: _Question) -> Iterator[Refusal]:
    if not q.row.compute:
        return
    cards = [gpu for gpu in q.facts.gpus if gpu.kind == "nvidia"]
    rules = _compute_rules(q)
    required = "; ".join(rule.text for rule in rules) or one_of(tuple(rule.library for rule in q.row.compute))
    if not cards:
        seen = ", ".join(gpu.name for gpu in q.facts.gpus) or "none"
        yield Refusal("no-gpu", "NVIDIA GPU", seen, f"compute capability {required}")
        return
    gpu = _gpu(q)
    if gpu is None or any(rule.accepts(gpu.compute_capability) for rule in rules):
        return
    other = [rule for rule in q.row.compute if rule not in rules and rule.accepts(gpu.compute_capability)]
    yield Refusal(
        "compute-capability",
        f"compute capability of {gpu.name}",
        dotted(gpu.compute_capability),
        required,
        f"{other[0].title} takes it" if other else "",
    )


def _device(q: _Question) -> Iterator[Refusal]:
    if not q.device:
        return
    known = tuple(name for name, _ in q.row.call_devices)
    if q.device.partition(".")[0] not in known:
        yield Refusal("device", f"{q.row.backend}.device", q.device, one_of(known), "change it in comfy_kitchen.yaml")
    elif isinstance(q.library, LibraryFacts) and not any(_same_device(q.device, d) for d in q.library.devices):
        yield Refusal(
            "device",
            f"{q.row.backend}.device",
            q.device,
            f"one that {q.library.name} {q.library.version} finds here: {', '.join(q.library.devices) or 'none'}",
            "install the device's driver or change the setting in comfy_kitchen.yaml",
        )


def _call_device(q: _Question) -> Iterator[Refusal]:
    base = q.device.partition(".")[0]
    taken = next((types for name, types in q.row.call_devices if name == base), ())
    if not taken:
        return  # the setting itself is refused by the rule before
    for device in dict.fromkeys(t.device for t in (*q.call.tensors, *q.call.control)):
        if device.partition(":")[0] not in taken:
            target = f" with {q.row.backend}.device {q.device}" if q.device else ""
            yield Refusal("call-device", f"device of the call's tensors{target}", device or "unknown", one_of(taken))


def _family(q: _Question) -> Iterator[Refusal]:
    if q.family is None:
        yield Refusal(
            "family",
            "model family",
            f"{q.call.model.family} ({q.call.model.class_name})",
            one_of(q.row.families) if q.row.families else f"a capture for {q.row.backend}, and this version has none",
        )


def _dtypes(q: _Question) -> Iterator[Refusal]:
    for spec in q.call.tensors:
        if spec.dtype not in q.row.dtypes:
            yield Refusal("input-dtype", f"input {spec.name}", spec.dtype, one_of(q.row.dtypes))


def _dims(q: _Question) -> Iterator[Refusal]:
    if not q.call.tensors:
        yield Refusal("input-set", "inputs of the call", "none", "the latent x at least")
    if q.family is None:
        return
    given = {spec.name for spec in q.call.tensors}
    for want in q.family.inputs:
        if want.name not in given and not want.optional:
            yield Refusal("input-set", f"input {want.name}", "absent", f"present for the family {q.family.name}")
    sizes: dict[str, list[tuple[str, int]]] = {}
    for spec in q.call.tensors:
        row = q.family.input(spec.name)
        if row is None:
            names = ", ".join(want.name for want in q.family.inputs)
            yield Refusal("input-set", f"input {spec.name}", "present", f"only {names}")
        elif len(row.dims) != len(spec.shape):
            yield Refusal("input-rank", f"input {spec.name}", f"{len(spec.shape)} dimensions", str(len(row.dims)))
        else:
            yield from _ranges(spec, row.dims)
            for size, dim in zip(spec.shape, row.dims, strict=True):
                if dim is not None:
                    sizes.setdefault(dim.name, []).append((spec.name, size))
    for name, seen in sizes.items():
        if len({size for _, size in seen}) > 1:
            yield Refusal("dim-equal", name, ", ".join(f"{i} {size}" for i, size in seen), "the same size everywhere")


def _ranges(spec: TensorSpec, dims: tuple[DimRange | None, ...]) -> Iterator[Refusal]:
    for size, dim in zip(spec.shape, dims, strict=True):
        if dim is not None and not dim.accepts(size):
            yield Refusal("dim-range", f"input {spec.name}, {dim.name}", str(size), range_text(dim))


def _control(q: _Question) -> Iterator[Refusal]:
    if q.call.control and not q.row.control:
        names = ", ".join(spec.name for spec in q.call.control[:3])
        more = ", ..." if len(q.call.control) > 3 else ""
        yield Refusal("control", "control residuals", f"{len(q.call.control)} ({names}{more})", "none in this version")


def _inside(q: _Question) -> Iterator[Refusal]:
    yield from q.call.blockers


def _precision(q: _Question) -> Iterator[Refusal]:
    offered = device_precisions(q.row.backend, q.call, q.facts, q.policy)
    chosen = choose_precision(
        q.policy.precision, q.call.model.compute_dtype, offered, q.measurements, q.policy.thresholds_db
    )
    if isinstance(chosen, Refusal):
        yield chosen
        return
    tried = [m for m in q.measurements if m.precision == chosen[0]]
    if tried and not any(passes(m, q.policy.thresholds_db) for m in tried):
        needed = dict(q.policy.thresholds_db).get(chosen[0])
        best = max(m.psnr_db for m in tried)
        yield Refusal(
            "parity",
            f"PSNR of {chosen[0]} against PyTorch, measured at the build",
            f"{best:.1f} dB",
            f"a threshold for {chosen[0]} in the YAML's parity" if needed is None else f"at least {needed:.1f} dB",
        )


def _engine(q: _Question) -> Iterator[Refusal]:
    subject = f"{q.row.backend} engine"
    if not q.call.model.weights_digest:
        # without it the engine's key is unknown, so nothing else can be said of the engine
        yield Refusal("digest-pending", "weights of the model", "still being hashed", "their digest", "wait a moment")
        return
    status = "absent" if q.engine is None else q.engine.status
    detail = "" if q.engine is None or not q.engine.detail else f": {q.engine.detail}"
    if status == "absent":
        yield Refusal("no-engine", subject, f"none for this model and these settings{detail}", "one in the cache")
    elif status == "building":
        yield Refusal("building", subject, f"being built{detail}", "a finished build", "wait for it")
    elif status == "failed":
        yield Refusal("build-failed", subject, f"failed{detail}", "one that builds and runs", "see kitchen.log")
    elif status == "quarantined":
        yield Refusal("quarantined", subject, f"quarantined{detail}", "an engine that agrees with PyTorch")
    elif q.engine is not None and q.engine.profile is not None:
        given = (*q.call.tensors, *q.call.control) if q.row.control else q.call.tensors
        yield from q.engine.profile.refusals(given)


def _gpu(q: _Question) -> GpuFacts | None:
    """The NVIDIA GPU the call is on: torch's index counts those alone. None when the call is on no such GPU."""
    if not q.row.compute or not q.call.tensors:
        return None
    kind, _, index = q.call.device.partition(":")
    cards = [gpu for gpu in q.facts.gpus if gpu.kind == "nvidia"]
    place = int(index) if index.isdigit() else 0
    return cards[place] if kind == "cuda" and place < len(cards) else None


def _compute_rules(q: _Question) -> tuple[ComputeRule, ...]:
    """The rules of the library that is loaded; of all libraries the backend could use when none is."""
    if isinstance(q.library, Refusal):
        return q.row.compute
    return tuple(rule for rule in q.row.compute if rule.library == q.library.name)


def _same_device(wanted: str, reported: str) -> bool:
    """Whether a setting means a device the library reports: `GPU` is `GPU.0`, in OpenVINO's own words too."""
    if not wanted:
        return True
    one, two = (name.upper() if "." in name else f"{name.upper()}.0" for name in (wanted, reported))
    return one == two


def one_of(allowed: tuple[str, ...]) -> str:
    return allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"


def _families_text(row: Capability) -> str:
    return ", ".join(row.families) or "none in this version"


def _dims_text(row: Capability) -> str:
    lines = []
    for name in row.families:
        ranges = dict.fromkeys(dim for want in family(name).inputs for dim in want.dims if dim is not None)
        lines.append(f"{name}: " + ", ".join(f"{dim.name} {range_text(dim)}" for dim in ranges))
    return "; ".join(lines) or "none in this version"


def _call_devices_text(row: Capability) -> str:
    return "; ".join((f"{name}: " if name else "") + ", ".join(types) for name, types in row.call_devices)


RULES: tuple[Rule, ...] = (
    Rule("enabled", lambda row: f"{row.backend} in backend.enabled", _enabled),
    Rule("platform", lambda row: ", ".join(row.platforms), _platform),
    Rule("library", lambda row: ", ".join(rule.title for rule in row.compute) or row.backend, _library),
    Rule("compute capability", lambda row: "; ".join(rule.text for rule in row.compute) or "any", _compute),
    Rule(
        "device", lambda row: ", ".join(name for name, _ in row.call_devices if name) or "chosen by the call", _device
    ),
    Rule("device of the call", _call_devices_text, _call_device),
    Rule("family", _families_text, _family),
    Rule("input dtypes", lambda row: ", ".join(row.dtypes), _dtypes),
    Rule("dimensions", _dims_text, _dims),
    Rule("control residuals", lambda row: "as inputs" if row.control else "none in this version", _control),
    Rule("inside the network", lambda row: f"plain {', '.join(row.attention)} attention, no patches", _inside),
    Rule("precision", lambda row: ", ".join(row.precisions), _precision),
    Rule("engine", lambda row: "built, in the cache, right on the user's own inputs", _engine),
)
"""In the order reasons are given: what the user can change first, what only time changes last."""
