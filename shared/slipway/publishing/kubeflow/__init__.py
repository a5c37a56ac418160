"""The Kubeflow Model Registry as a destination: it registers what another destination holds."""
