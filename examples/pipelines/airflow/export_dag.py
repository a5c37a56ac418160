"""A DAG that exports a training run; in a DAG of your own the export follows the training."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from slipway_operator import SlipwayExportOperator

with DAG(
    "slipway_export",
    schedule=None,
    render_template_as_native_obj=True,  # formats stay an object
    params={
        "checkpoint": Param("s3://training/run-17", type="string", description="Training run"),
        "base_model": Param("hf://Qwen/Qwen3-0.6B", type="string", description="Base model"),
        "formats": Param({"onnx": {"quantization": {"levels": ["int8"]}}}, type="object", description="Their settings"),
    },
):
    SlipwayExportOperator(
        task_id="export",
        configuration={
            "checkpoint": {"path": "{{ params.checkpoint }}"},
            "baseModel": {"name": "{{ params.base_model }}"},
            "formats": "{{ params.formats }}",
        },
        retries=3,
        execution_timeout=timedelta(hours=8),
    )
