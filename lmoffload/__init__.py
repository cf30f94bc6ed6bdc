"""Profile a machine once, solve for the best offload plan, run models larger than your memory with it."""
