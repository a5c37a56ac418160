"""The Hugging Face hub as a destination: its addresses, what is sent there, and commits."""
