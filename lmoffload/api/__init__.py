"""The three verbs: profile, plan, run."""
