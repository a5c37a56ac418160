"""Read the texts that a user gives for calibration and as held-out text, and compare them."""
