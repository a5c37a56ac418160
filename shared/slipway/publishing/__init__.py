"""Publishing of delivered folders: the statement, the bill of materials, the signature, and the places they are sent to."""
