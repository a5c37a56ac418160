"""Print the page about sizes for docs/sizing.md, a component of k8s/ with the sizes for one model, or those of the Helm chart.

``python docs/generate_sizing.py > docs/sizing.md``
``python docs/generate_sizing.py 70b > k8s/components/sizes/70b/kustomization.yaml``
``python docs/generate_sizing.py chart > k8s/helm/slipway/files/sizes.yaml``
"""

from __future__ import annotations

import math
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from slipway.formats import PlannedTask
from slipway.levels import LEVELS
from slipway.planning.memory import memory_bytes
from slipway.planning.preflight import task_bytes
from slipway.sizes import FLOAT32_BYTES, ModelSize
from slipway.worker.machine import MEMORY_SHARE
from slipway_onnx_export.params import PARITY_OVERHEAD

FREE_SHARE = 0.1
"""Of a volume that nothing is planned for."""
COMPANION_BYTES = 20_000_000
LOGIT_BYTES = 2 << 30
_OF_GRAPHS = ("tensorrt_build", "openvino")
"""Services whose formats are made of ONNX graphs."""
GIB = 1 << 30

BASE = Path(__file__).parents[1] / "k8s" / "base"
MEMORY = "/spec/template/spec/containers/0/resources/limits/memory"
VOLUME = "/spec/template/spec/volumes/1/ephemeral/volumeClaimTemplate/spec/resources/requests/storage"


@dataclass(frozen=True)
class Model:
    """A decoder by the shapes in its config.json; its weights have 16 bits, its output layer is not its embedding."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head: int
    intermediate: int
    vocabulary: int
    experts: int = 0

    def size(self) -> ModelSize:
        """Count the weights: attention, feed-forward or experts with their router, and two tables of the vocabulary."""
        attention = self.hidden * self.head * 2 * (self.heads + self.key_value_heads)
        forward = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        largest = self.vocabulary * self.hidden
        weights = self.layers * (attention + forward) + 2 * largest
        return ModelSize(weights, 2 * weights, largest, 2 * largest, COMPANION_BYTES)


MODELS = {
    "8b": Model("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936),
    "30b": Model("Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 768, 151936, experts=128),
    "70b": Model("Llama-3.3-70B", 8192, 80, 64, 8, 128, 28672, 128256),
}


SMALL = Model("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936)
"""The model whose needs are reserved for workers before a component of a size is chosen."""


@dataclass(frozen=True)
class Need:
    """What a worker of a stage needs, in bytes."""

    reads: int
    writes: int
    task_memory: int

    @property
    def volume_gib(self) -> int:
        """Of the scratch volume, in steps of 16 GiB."""
        return 16 * math.ceil((self.reads + self.writes) / (1 - FREE_SHARE) / GIB / 16)

    @property
    def memory_gib(self) -> int:
        """Of the container, in steps of 4 GiB."""
        return 4 * math.ceil(self.task_memory / MEMORY_SHARE / GIB / 4)


def needs(size: ModelSize) -> dict[str, Need]:
    """Return the needs of each worker by the name of its Deployment."""
    stored, single = size.weight_bytes + size.companion_bytes, size.weights * FLOAT32_BYTES + size.companion_bytes
    integer = int(size.weights * LEVELS["int8"].bytes_per_weight)
    half = _task("quantize", "onnx-fp16")
    outputs = 2 * stored + single + 2 * integer + size.largest_bytes  # base, pytorch, onnx, and both as int8
    plan = {
        "merge": (stored, task_bytes(_task("merge"), size, {}), "merge"),
        "prepare": (stored, task_bytes(_task("prepare"), size, {}), "prepare"),
        "quantize": (single, task_bytes(half, size, {}), "quantize"),
        "onnx-export": (stored, task_bytes(_task("onnx_export"), size, {}), "onnx_export"),
        "tensorrt-build": (single, task_bytes(_task("tensorrt_build"), size, {}), "tensorrt_build"),
        **{name.replace("_", "-"): (stored, task_bytes(_task(name, name), size, {}), name) for name in _of_models()},
        "openvino": (single, task_bytes(_task("openvino", "openvino"), size, {}), "openvino"),
        "validate": (outputs, LOGIT_BYTES, "validate"),
    }
    return {
        name: Need(reads, writes, memory_bytes([_task(stage)], size)) for name, (reads, writes, stage) in plan.items()
    }


def by_layers(model: Model) -> Need:
    """Return the needs of a validation of PyTorch outputs alone that is computed layer by layer."""
    size = model.size()
    stored, integer = size.weight_bytes + size.companion_bytes, int(size.weights * LEVELS["int8"].bytes_per_weight)
    memory = memory_bytes([_task("validate")], size, least=True, layers_of_experts=model.layers if model.experts else 0)
    return Need(2 * stored + integer, LOGIT_BYTES, memory)


def _of_models() -> list[str]:
    """Return the formats that are made of the merged model, each by a worker of its own, unquantized."""
    rows = tomllib.loads((BASE.parents[1] / "services" / "services.toml").read_text())
    return [name for name, row in rows.items() if name in row.get("formats", {}) and name not in _OF_GRAPHS]


def _task(stage: str, delivers: str = "") -> PlannedTask:
    return PlannedTask(stage, stage, params={}, inputs={}, format=delivers)


def base_gib(stage: str, path: str) -> int:
    """Return what ``k8s/base`` gives the workers of a stage at a path of their Deployment, in GiB."""
    kustomization = yaml.safe_load((BASE / stage / "kustomization.yaml").read_text())
    changed = {
        one["path"]: one["value"] for patch in kustomization["patches"] for one in yaml.safe_load(patch["patch"])
    }
    return int(changed[path].removesuffix("Gi"))


def given_gib(model: Model) -> dict[str, tuple[int, int]]:
    """Return memory and volume of each worker for a model, in GiB: what it needs, and never less than it has without."""
    return {
        stage: (max(need.memory_gib, base_gib(stage, MEMORY)), max(need.volume_gib, base_gib(stage, VOLUME)))
        for stage, need in needs(model.size()).items()
    }


def component(name: str) -> str:
    """Write the component of one model."""
    model = MODELS[name]
    lines = [
        f"# Workers for models of the size of {model.name}; by docs/generate_sizing.py {name}, see docs/sizing.md.",
        "# The last one of an overlay's components.",
        "apiVersion: kustomize.config.k8s.io/v1alpha1",
        "kind: Component",
        "patches:",
    ]
    for stage, (memory, volume) in given_gib(model).items():
        values = {
            MEMORY.replace("limits", "requests"): f"{memory}Gi",
            MEMORY: f"{memory}Gi",
            "/spec/template/spec/containers/0/env/3/value": f"{volume // 2}GiB",
            VOLUME: f"{volume}Gi",
        }
        # A second pool of a stage has the stage's name with a suffix.
        lines += [f"  - target: {{kind: Deployment, name: 'slipway-{stage}(-.*)?'}}", "    patch: |"]
        lines += [f"      - {{op: replace, path: {path}, value: {value}}}" for path, value in values.items()]
    return "\n".join(lines) + "\n"


def chart() -> str:
    """Write what the Helm chart gives workers for each size."""
    lines = ["# Workers for models of a size; by docs/generate_sizing.py chart, see docs/sizing.md."]
    for name, model in MODELS.items():
        lines.append(f"{name}: # {model.name}")
        lines += [
            f"  {stage}: {{memory: {memory}Gi, volume: {volume}Gi}}"
            for stage, (memory, volume) in given_gib(model).items()
        ]
    return "\n".join(lines) + "\n"


HEAD = """# Sizes

What one task of a stage reads and writes on the scratch volume, and the memory it takes, for three models. **Computed**, not measured: from the
shapes in their `config.json`, by the estimate that `slipway export --plan` shows for a model of your own. They are upper bounds:

- *reads* and *writes* are weights in 16 bits, ONNX, OpenVINO, programs and engines in 32, int8 as 1.25 bytes a weight. `quantize` is shown for its
  largest case (ONNX to fp16), `validate` for the base, `pytorch`, `onnx` and both as int8, with 2 GiB of logits; each further format adds its own size.
  The last row is a validation of `pytorch` and its int8 alone, [layer by layer](verdicts.md#layer-by-layer): without generated text and speed. A mixture's
  experts are joined while their layer is computed.
- *volume* has room for both and a tenth more, in steps of 16 GiB. What a worker keeps of the bucket (`SLIPWAY_CACHE_SIZE`, half of the volume) gives way to the
  task that runs.
- *memory* is the container's limit, in steps of 4 GiB: a worker gives a task 80 % of it. Stages that stream hold libraries and four float32 copies of the largest
  tensor; `tensorrt_build`, `torchscript`, `executorch`, `litert` and `coreml` are whole in float32, and so is the graph that `validate` maps.

The components in `k8s/components/sizes` give each worker that much, or what `k8s/base` gives it where that is more.
"""

MEASURED = """
**Measured**, on a model of the shape of Qwen3-0.6B: `quantize` takes 0.24 to 0.31 GB of anonymous memory ([README](../services/quantize/README.md)),
`onnx_export` 0.37 GB, 1.7 GB with the check against PyTorch ([README](../services/onnx_export/README.md)). By the estimate above both would be
{estimate}: the memory of stages that stream has never come near it. Nothing larger than 8 GB of weights was measured; the peak of each
attempt is in `slipway get`, on the dashboard, and in `slipway_stage_peak_memory_bytes`.

- Layer by layer, the reference of a model of Llama-3.3-70B's shape, from files without blocks, took 0.54 GB of anonymous memory with two layers (7.6 GB of weights) and
  0.62 GB with four (11.0 GB), and 93 and 111 core seconds for two windows of 16 tokens and all shapes ([benchmark](../tests/benchmarks/README.md#a-proof-layer-by-layer)). **Extrapolated** to
  80 layers: 3.7 GB and 800 core seconds, beside the time in which the disk gives 141 GB eight times. More and longer windows take more of both.
- The same of Qwen3-30B-A3B's shape, with an adapter on attention, took 3.71 GB with two layers (3.7 GB of weights) and with four (6.2 GB), and 89 and 123 core seconds.
  **Extrapolated** to 48 layers: 3.7 GB and 870 core seconds. Before its experts were joined a layer at a time, they alone would have taken 60 GB.
- `onnx_export` compares with PyTorch only where {overhead} times the float32 weights fit: {parity} of memory. Otherwise it says so, and `validate`
  compares the outputs.
- An engine in 16 bits takes {engines} of GPU memory before any cache of keys and values: a 70B model needs int8 or int4 on one GPU of 80 GB.
- Without a component of `sizes`, {reserved} of memory are reserved for a worker: what the estimate above says for Qwen3-0.6B, so that the first workers fit on
  small nodes. A larger model may take more, up to the limit. If its node has no more, the pod is evicted, and its task begins again. The components of `sizes` reserve
  the whole limit.
- `base/` has {base} of memory for `validate` and {build} for `tensorrt_build`, for models of up to 3 and 2 billion weights. For larger ones, take the component of the next
  size; with the [Helm chart](kubernetes.md#helm), `--set size=70b`:

```yaml
# kustomization.yaml
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: slipway
resources:
  - slipway/k8s/overlays/production
components:
  - slipway/k8s/components/sizes/70b     # or 30b, 8b
```

Tasks of large models take hours rather than minutes. What is not finished in `--drain-seconds` (an hour) when a worker is replaced begins again on another one:
raise it together with `terminationGracePeriodSeconds` and `progressDeadlineSeconds`, or replace workers when none of these runs.

## At scale

Measured on two cores, each figure with how it was measured behind its link; *before* is the commit before these changes, where it could do the same:

| | now | before |
|---|---|---|
| two workers that divide a [merge of 4 GB](../tests/benchmarks/README.md#work-in-parts), by one that does it in one piece | 1.1 times as fast: efficiency 0.55 | not divided |
| the same with int4 | 1.2 times: 0.59 | not divided |
| [10,000 queued exports](../tests/benchmarks/README.md#many-queued-exports): memory of each | 3.7 kB | 66 kB (of 1,000) |
| a restart with them; a standby that takes over | 2.5 s; 0.7 s until it serves | not measured |
| their list, a page of 50; of 1,000 | 9.6 ms; 73 ms (of 3,000) | 77 ms; 497 ms |
| from a creation to a watcher of all projects | 19 ms | not measured |
| creating an export and carrying it out, processor time | 1.05 times | 1 |
| [bytes between workers and a bucket](../tests/benchmarks/README.md#bytes-between-workers-and-a-bucket), of an export with four outputs, by the bytes of its base | 7.4 to 8.3 | 8.1 to 11.5 |
| memory of a [proof of Llama-3.3-70B's shape](../tests/benchmarks/README.md#a-proof-layer-by-layer), four layers | 0.62 GB | all weights, 141 GB mapped and more |
| the same of Qwen3-30B-A3B's | 3.71 GB | more than 60 GB |

Two cores show no more than two workers, and those share them with the coordinator, the store and the disk.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, model in MODELS.items():
        size = model.size()
        parts.append(f"\n## {model.name}: {size.weights / 1e9:.2f} billion weights (`{name}`)\n\n")
        parts.append("| worker | reads | writes | volume | memory |\n|---|---|---|---|---|\n")
        for stage, need in needs(size).items():
            disk = f"{need.reads / 1e9:.0f} GB | {need.writes / 1e9:.0f} GB | {need.volume_gib} GiB"
            parts.append(f"| `{stage}` | {disk} | {need.memory_gib} GiB |\n")
        least = by_layers(model)
        disk = f"{least.reads / 1e9:.0f} GB | {least.writes / 1e9:.0f} GB | {least.volume_gib} GiB"
        parts.append(f"| `validate`, layer by layer | {disk} | {least.memory_gib} GiB |\n")
    weights = [model.size().weights for model in MODELS.values()]
    small = 4 * FLOAT32_BYTES * 151936 * 1024 + (700 << 20)
    parts.append("\n## What is measured, and what follows\n")
    parts.append(
        MEASURED.format(
            estimate=f"{small / 1e9:.1f} GB",
            overhead=PARITY_OVERHEAD,
            parity=_each(f"{PARITY_OVERHEAD * FLOAT32_BYTES * count / 1e9:.0f}" for count in weights),
            engines=_each(f"{2 * count / 1e9:.0f}" for count in weights),
            reserved=" or ".join(
                f"{gib} GiB" for gib in sorted({need.memory_gib for need in needs(SMALL.size()).values()})
            ),
            base=f"{base_gib('validate', MEMORY)} GiB",
            build=f"{base_gib('tensorrt-build', MEMORY)} GiB",
        )
    )
    return "".join(parts)


def _each(values: object) -> str:
    first, second, third = values  # type: ignore[misc] # of three models
    return f"{first}, {second} and {third} GB"


def _printed(words: list[str]) -> str:
    match words:
        case []:
            return page()
        case ["chart"]:
            return chart()
        case [name]:
            return component(name)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.stdout.write(_printed(sys.argv[1:]))
