"""This engine and its peers on the same work."""
