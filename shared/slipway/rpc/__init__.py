"""Common parts of all gRPC servers and clients, and the conversion of values to messages."""
