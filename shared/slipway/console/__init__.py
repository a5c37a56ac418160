"""The console: web pages over the exports of this machine, or of a coordinator."""
