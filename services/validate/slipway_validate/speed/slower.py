"""Find quantized outputs that are slower than the unquantized output of their format, say what helps, and describe the machine."""

from __future__ import annotations

import platform

from slipway.machine.cgroup import ControlGroup, machine_memory, usable_cores
from slipway.machine.processor import processor_name
from slipway.stage import Context
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.speed import Machine, Ratio

LEAST = 0.9
"""Share of the original's speed below which a quantized output is slower: rounds of the same model differ by less."""
_REMEDIES = {
    "pytorch": "transformers unpacks integers before it multiplies: serve this folder with a runtime that multiplies them (vLLM), or use the "
    "ONNX level on CPUs",
    "onnx": "this processor has no fast kernel for these weights: use another level, or accuracy_level 4, and compare on the machine that serves",
}
_OTHERWISE = "use another level, and compare on the machine that serves"


def note_slower(report: ValidationReport, ctx: Context) -> ValidationReport:
    """Return the report with a note at each quantized output that is slower than its original; warn of it too.

    Both were timed in turn with the reference, so their speeds relative to it are compared, as far as both are stable.
    """
    originals = {output.format: output for output in report.outputs if output.level == "none"}
    outputs = []
    for output in report.outputs:
        original = originals.get(output.format)
        said = _finding(output, original) if original is not None and output.level != "none" else ""
        if said and said not in output.notes:
            ctx.warn(f"{output.name}: {said}")
            output = output.model_copy(update={"notes": (*output.notes, said)})  # noqa: PLW2901 - the same output, noted
        outputs.append(output)
    return report.model_copy(update={"outputs": tuple(outputs)})


def _finding(output: OutputValidation, original: OutputValidation) -> str:
    if output.speed is None or original.speed is None:
        return ""
    shares = {
        "generates": _share(output.speed.decode_speedup, original.speed.decode_speedup),
        "reads a prompt": _share(output.speed.prefill_speedup, original.speed.prefill_speedup),
    }
    slow = [f"{does} at {share:.2g} times" for does, share in shares.items() if share is not None and share < LEAST]
    if not slow:
        return ""
    return f"it {' and '.join(slow)} the speed of {original.name}: {_REMEDIES.get(output.format, _OTHERWISE)}"


def _share(own: Ratio | None, original: Ratio | None) -> float | None:
    known = own is not None and original is not None and own.stable and original.stable and original.median > 0
    return own.median / original.median if known and own is not None and original is not None else None


def this_machine() -> Machine:
    """Return what this process may use of the machine."""
    group = ControlGroup()
    limited, memory = group.memory(), machine_memory().total_bytes
    return Machine(
        processor=processor_name() or "unknown CPU",
        cores=usable_cores(group),
        memory_bytes=memory if limited is None else min(memory, limited.limit_bytes),
        platform=f"{platform.system()} {platform.machine()}",
    )
