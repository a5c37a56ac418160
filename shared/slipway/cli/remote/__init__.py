"""Commands for the exports of a coordinator."""
