"""Registries of the Open Container Initiative as a destination: models as artifacts of CNCF ModelPack."""
