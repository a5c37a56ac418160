"""Files of the graphs that are read, and of the models that are written; the latter are those that OpenVINO's own tools know."""

GRAPH, ENCODER_GRAPH, DECODER_GRAPH = "model.onnx", "encoder_model.onnx", "decoder_model.onnx"
MODEL = "openvino_model.xml"
ENCODER_MODEL, DECODER_MODEL = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
