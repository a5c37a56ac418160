"""Signatures in the format of OpenSSF Model Signing: by a key, by a certificate, or by an identity of Sigstore."""
