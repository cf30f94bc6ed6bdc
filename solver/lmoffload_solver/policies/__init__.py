"""Other systems' policies, each with its own system's model and rules."""
