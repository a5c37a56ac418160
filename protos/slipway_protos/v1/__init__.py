"""Messages and services of slipway.v1. Generated; do not edit."""
