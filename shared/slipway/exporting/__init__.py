"""Exports from a program: what the command ``slipway export`` does, without the command. Nothing here prints or ends the process."""
