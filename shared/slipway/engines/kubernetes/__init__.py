"""The engine of Kubernetes clusters: each submission is a Job.

Not run on a cluster so far: the tests talk to an API server of their own, and check manifests against Kubernetes' schemas.
"""
