"""What a configuration needs, told before anything starts: memory, transfer, what to change."""
