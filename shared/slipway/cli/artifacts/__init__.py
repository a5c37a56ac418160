"""Commands for artifacts and the artifact store."""
