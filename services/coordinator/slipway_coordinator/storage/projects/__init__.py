"""What projects have: artifacts, the bytes these take in the store, and the GPU seconds of their tasks."""
