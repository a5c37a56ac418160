"""What graphs of exported models share, whoever makes or runs them."""
