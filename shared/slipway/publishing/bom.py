"""The bill of materials: a CycloneDX ML-BOM of the model, its base, adapter and data, with the figures of every output.

The document is written here, because the library of CycloneDX for Python has no model cards; the tests validate it with its schema.
"""

from __future__ import annotations

import uuid
from typing import Any

from slipway.configuration.values import LICENCE
from slipway.errors import ConfigurationError
from slipway.files.json_documents import parse_json
from slipway.publishing.publication import BOM, LARGEST_DOCUMENT, Publication, PublishedOutput
from slipway.publishing.statement import first_difference, mismatch_error, to_json

SPEC_VERSION = "1.6"
MEDIA_TYPE = "application/vnd.cyclonedx+json"
_DATA = ("calibration", "own_text", "heldout", "test_inputs")
"""Sources that are text; the others are models."""
_MODEL = "model"


def check_licence(expression: str) -> str:
    """Return an SPDX licence expression.

    Raises:
        ConfigurationError: It is none.
    """
    if LICENCE.fullmatch(expression) is None:
        raise ConfigurationError(
            f"--license {expression[:100]!r} is not an SPDX licence expression",
            remedy="write one such as Apache-2.0, or 'MIT OR Apache-2.0'",
            about={"key": "--license"},
        )
    return expression


def make_bom(publication: Publication, *, licence: str = "") -> bytes:
    """Return the bill of materials as JSON; the same folder and licence always give the same bytes.

    Args:
        publication: The folder's documents.
        licence: SPDX expression of the model's licence; empty if it is not said.
    """
    return to_json(_bom(publication, licence))


def check_bom(data: bytes, publication: Publication, *, where: str) -> str:
    """Compare a bill of materials with the one that follows from the folder's documents and the licence it names.

    Returns:
        The licence; empty if it names none.

    Raises:
        ValidationError: ``STATEMENT_MISMATCH`` with the first place that differs.
    """
    try:
        stated = parse_json(data, most_values=LARGEST_DOCUMENT // 16)
    except ValueError as error:
        raise mismatch_error(where, BOM, str(error)) from error
    try:
        licence = check_licence(stated["metadata"]["component"]["licenses"][0]["expression"])
    except (LookupError, TypeError, ConfigurationError):
        licence = ""
    expected = parse_json(make_bom(publication, licence=licence), most_values=LARGEST_DOCUMENT // 16)
    difference = first_difference(expected, stated)
    if difference:
        raise mismatch_error(where, BOM, difference)
    return licence


def _bom(publication: Publication, licence: str) -> dict[str, Any]:
    content = "\n".join(f"{digest} {name}" for name, digest in sorted(publication.checksums.items()))
    sources = [_source(name, digest, publication) for name, digest in sorted(publication.sources.items())]
    outputs = [_output(output) for output in publication.outputs]
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "timestamp": publication.created,
            "tools": {"components": _tools(publication)},
            "component": _model(publication, licence),
        },
        "components": [*sources, *outputs],
        "dependencies": [
            {"ref": _MODEL, "dependsOn": [source["bom-ref"] for source in sources]},
            *({"ref": output["bom-ref"], "dependsOn": [_MODEL]} for output in outputs),
        ],
    }


def _model(publication: Publication, licence: str) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": _MODEL,
        "name": publication.name,
        "version": publication.export_id,
        **({"licenses": [{"expression": licence}]} if licence else {}),
        "modelCard": _model_card(publication),
        "properties": _properties(
            {"verdict": publication.outcome.value, **{f"label:{k}": v for k, v in publication.labels.items()}}
        ),
    }


def _model_card(publication: Publication) -> dict[str, Any]:
    reference = publication.validation.reference if publication.validation else None
    parameters: dict[str, Any] = {
        **({"modelArchitecture": reference.architecture} if reference and reference.architecture else {}),
        "datasets": [{"ref": _ref(name)} for name in sorted(publication.sources) if name in _DATA],
    }
    metrics = [metric for output in publication.outputs for metric in _metrics(output)]
    limitations = [
        f"{output.name} was not judged: {output.status}"
        for output in publication.outputs
        if output.status not in ("passed", "failed")
    ]
    limitations += [f"{name} was not made: {reason}" for name, reason in sorted(publication.not_made.items())]
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        **({"considerations": {"technicalLimitations": limitations}} if limitations else {}),
    }


def _metrics(output: PublishedOutput) -> list[dict[str, str]]:
    found = output.validation
    figures = found.to_reference if found else None
    values = {
        "mean KL divergence from the fine-tuned model (nats per token)": figures.mean_kl if figures else None,
        "share of positions with the same first token": figures.top1_agreement if figures else None,
        "share of the fine-tune that is kept": found.kept if found else None,
        "perplexity": found.perplexity if found else None,
    }
    return [
        {"type": kind, "value": repr(value), "slice": output.name}
        for kind, value in values.items()
        if value is not None
    ]


def _output(output: PublishedOutput) -> dict[str, Any]:
    found = output.validation
    facts = {
        "artifact": output.digest,
        "size_bytes": str(output.size_bytes),
        "status": output.status,
        "level": found.level if found else "",
        "faithful": found.faithful.answer.value if found else "",
        "fit": found.fit.answer.value if found else "",
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": _ref(output.name, kind="output"),
        "name": output.name,
        "properties": _properties(facts),
        "components": [
            {"type": "file", "name": path, "hashes": _hashes(digest)} for path, digest in sorted(output.files.items())
        ],
    }


def _source(name: str, digest: str, publication: Publication) -> dict[str, Any]:
    """Describe a source; its digest is that of the list of its files, as the artifact store names it."""
    data = name in _DATA
    title = publication.labels.get("base_model") if name == "base" else ""
    return {
        "type": "data" if data else "machine-learning-model",
        "bom-ref": _ref(name),
        "name": title or name,
        "hashes": _hashes(digest.removeprefix("sha256:")),
        **({"data": [{"type": "dataset", "name": name}]} if data else {}),
    }


def _tools(publication: Publication) -> list[dict[str, Any]]:
    versions = {
        name: version
        for libraries in publication.tools.values()
        if isinstance(libraries, dict)
        for name, version in libraries.items()
        if name != "version" and isinstance(version, str) and version
    }
    own = {name: version for name, version in publication.tools.items() if isinstance(version, str) and version}
    return [
        {"type": "application" if name in own else "library", "name": name, "version": version}
        for name, version in sorted((versions | own).items())
    ]


def _properties(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": f"slipway:{name}", "value": value} for name, value in sorted(values.items()) if value]


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def _ref(name: str, *, kind: str = "source") -> str:
    return f"{kind}:{name}"
