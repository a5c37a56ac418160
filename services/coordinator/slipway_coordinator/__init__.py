"""The coordinator: one durable workflow per export, a broker of leases for workers, and the public API over both."""
