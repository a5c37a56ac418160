"""The service of LiteRT: programs for the runtime that Android and small machines have."""
