"""Engines: what runs tasks on clusters with a scheduler of their own, by :mod:`slipway.contracts.engine`."""
