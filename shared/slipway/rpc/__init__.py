"""What every gRPC server and client has in common, and how values become messages."""
