"""Commands for artifacts and the cache they lie in."""
