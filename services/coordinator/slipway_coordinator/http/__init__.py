"""The public API as JSON over HTTP: another transport of the same calls, transcoded as the protos say."""
