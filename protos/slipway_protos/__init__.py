"""Generated from the .proto files; see `make protos`."""
