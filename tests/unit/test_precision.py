"""Which precision an engine computes in, and what `fast` would change."""

from __future__ import annotations

from typing import Any

import pytest
from kitchen_accel.backends.base import Measurement, Precision, Refusal
from kitchen_accel.scheduler.decide import choose_precision, fast_offer

THRESHOLDS: tuple[tuple[Precision, float], ...] = (("bf16", 30.0), ("fp16", 40.0), ("fp32", 60.0))


def measured(precision: Precision, step_ms: float, torch_ms: float, psnr: float = 110.0) -> Measurement:
    return Measurement(precision, "dynamic", psnr, step_ms / 1000, torch_ms / 1000)


@pytest.mark.parametrize(
    ("dtype", "native", "chosen"),
    [
        ("float32", ("fp32", "bf16"), "fp32"),
        ("float16", ("fp32", "fp16"), "fp16"),
        ("bfloat16", ("fp32", "bf16"), "bf16"),
        ("float16", ("fp32", "bf16"), "fp32"),
        ("bfloat16", ("fp32", "fp16"), "fp32"),
    ],
)
def test_auto_keeps_what_pytorch_computes_in(dtype: str, native: tuple[Precision, ...], chosen: str) -> None:
    quick = (measured("bf16", 1, 9, 99.0), measured("fp16", 1, 9, 99.0))

    got = choose_precision("auto", dtype, native, quick, THRESHOLDS)

    assert not isinstance(got, Refusal)
    assert got[0] == chosen
    assert chosen in got[1]


@pytest.mark.parametrize(
    ("wanted", "dtype", "native", "says"),
    [
        ("fp16", "float32", ("fp32", "bf16"), "fp32, bf16"),
        ("auto", "float32", ("fp16",), "fp16"),
        ("fast", "float32", ("fp16",), "fp16"),
        ("auto", "float32", (), "none"),
        ("auto", "float64", ("fp32",), "float64"),
    ],
)
def test_a_precision_that_is_not_offered_is_refused(wanted: Any, dtype: str, native: Any, says: str) -> None:
    got = choose_precision(wanted, dtype, native, (), THRESHOLDS)

    assert isinstance(got, Refusal)
    assert got.code == "precision"
    assert says in got.text


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_an_explicit_precision_is_taken_as_it_is(wanted: Any) -> None:
    got = choose_precision(wanted, "float16", ("fp32", "bf16"), (), THRESHOLDS)

    assert got == (wanted, f"{wanted} was asked for")


@pytest.mark.parametrize(
    ("measurements", "chosen", "says"),
    [
        ((measured("fp32", 40, 50), measured("bf16", 20, 50, 30.0)), "bf16", "20.00 ms a step, PSNR 30.0 dB"),
        ((measured("fp32", 40, 50), measured("bf16", 20, 50, 29.9)), "fp32", "quickest measured precision"),
        ((measured("fp32", 40, 50, 59.0), measured("bf16", 20, 50, 29.9)), "fp32", "no measured precision reaches"),
        ((measured("fp32", 40, 50), measured("fp16", 10, 50)), "fp32", "quickest measured precision"),
        ((measured("fp32", 40, 50), measured("bf16", 20, 50, float("nan"))), "fp32", "quickest measured precision"),
        ((), "fp32", "nothing is measured yet"),
    ],
    ids=["passes", "just-fails", "nothing-passes", "not-native", "nan", "unmeasured"],
)
def test_fast_is_the_quickest_that_is_right(measurements: tuple[Measurement, ...], chosen: str, says: str) -> None:
    got = choose_precision("fast", "float32", ("fp32", "bf16"), measurements, THRESHOLDS)

    assert not isinstance(got, Refusal)
    assert got[0] == chosen
    assert says in got[1]


@pytest.mark.parametrize(
    ("measurements", "says"),
    [
        (
            (measured("fp32", 40, 50, 110.5), measured("bf16", 20, 50, 46.2)),
            "in bf16, 2.00 times as fast (20.00 ms instead of 40.00 ms a step), at a PSNR of 46.2 dB instead of "
            "110.5 dB (threshold 30.0 dB)",
        ),
        (
            (measured("fp32", 40, 50), measured("bf16", 20, 50, 25.0)),
            "bf16 (2.00 times as fast) reaches 25.0 dB, needs 30.0 dB",
        ),
        ((measured("fp32", 40, 50), measured("bf16", 41, 50, 99.0)), "gain nothing, fp32 is the quickest"),
        ((measured("bf16", 41, 50, 99.0),), "fp32 is not measured yet"),
        ((), "fp32 is not measured yet"),
    ],
    ids=["gain", "not-right", "no-gain", "chosen-unmeasured", "unmeasured"],
)
def test_fast_offer(measurements: tuple[Measurement, ...], says: str) -> None:
    sentence = fast_offer(measurements, "fp32", THRESHOLDS)

    assert says in sentence
    assert sentence.startswith("precision: fast ")
    assert sentence.endswith(".")


def test_fast_offer_without_a_threshold_offers_nothing() -> None:
    both = (measured("fp32", 40, 50), measured("bf16", 20, 50, 99.0))

    assert "bf16 (2.00 times as fast) reaches 99.0 dB, has no threshold" in fast_offer(both, "fp32", ())
