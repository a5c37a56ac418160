"""OpenVINO: the model as an IR that openvino and openvino-genai run, made from the ONNX export's own graph."""
