"""The engine of Ray clusters.

Ray's library ends its process when the cluster is lost, and takes over signals and logs, so it has a process of its own: the *driver*.
Each submission is one detached actor on a node, the *task host*, which runs one ``slipway worker --once``. It outlives the driver.
"""
