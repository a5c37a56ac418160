"""Round weights so that the model's results on text change least: second moments, error feedback, and gradients."""
