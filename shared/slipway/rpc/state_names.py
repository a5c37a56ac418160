"""Name the states of exports and tasks as people and JSON see them."""

from slipway_protos.v1 import export_pb2 as pb

TASK_STATES = {number: name.removeprefix("TASK_STATE_").lower() for name, number in pb.TaskState.items()}
EXPORT_STATES = {number: name.removeprefix("EXPORT_STATE_").lower() for name, number in pb.ExportState.items()}
