"""Small models and adapters, saved as training runs save them, for each stage."""
