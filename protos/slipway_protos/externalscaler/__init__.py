"""Messages and services of externalscaler. Generated; do not edit."""
