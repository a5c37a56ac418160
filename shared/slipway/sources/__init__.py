"""Sources of models and checkpoints: folders, buckets, artifacts, and the Hugging Face hub."""

from slipway.sources.folders import SourceFolders

__all__ = ["SourceFolders"]
