"""Rewrite graphs into the form that OpenVINO and its runtimes expect."""
