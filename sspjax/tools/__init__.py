"""What agents can call: arguments in, observations out, always a batch at a time."""
