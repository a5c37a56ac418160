"""A quantized output that is slower than its original is a finding, with what helps; unstable figures say nothing."""

from __future__ import annotations

from slipway.stage import Context
from slipway.validation.speed import Ratio, Speed
from slipway_validate.speed import note_slower
from support.commands.report_parts import output, validation


def timed(decode: float, *, spread: float = 0.1) -> Speed:
    ratio = Ratio(median=decode, range=(decode * (1 - spread / 2), decode * (1 + spread / 2)), rounds=5)
    steady = Ratio(median=1.0, range=(0.98, 1.02), rounds=5)
    return Speed(
        threads=1,
        device="cpu",
        dtype="float32",
        prefill_tokens=8,
        prefill_ms=1.0,
        decode_speedup=ratio,
        prefill_speedup=steady,
    )


def notes(context: Context, quantized: Speed, original: Speed | None = None) -> tuple[str, ...]:
    outputs = (
        output("pytorch").model_copy(update={"speed": original or timed(1.0)}),
        output("pytorch-int4").model_copy(update={"speed": quantized}),
    )
    return note_slower(validation(*outputs), context).output("pytorch-int4").notes


def test_slower_than_the_original(context: Context) -> None:
    (note,) = notes(context, timed(0.5))
    assert note.startswith("it generates at 0.5 times the speed of pytorch: ")
    assert "vLLM" in note
    assert context.facts["warnings"] == [f"pytorch-int4: {note}"]


def test_as_fast_or_unknown(context: Context) -> None:
    assert notes(context, timed(0.95)) == ()
    assert notes(context, timed(0.5, spread=0.8)) == (), "unstable"
    assert notes(context, timed(0.5), timed(1.0, spread=0.8)) == ()
