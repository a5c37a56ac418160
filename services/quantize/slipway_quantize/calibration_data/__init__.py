"""The stage that chooses the text for calibration."""
